    // One block of rows at a time: first each SIMD group finds the values of P rows, then each thread adds the down
    // rows of the block into the columns that it owns. docs/kernels.md has the layout of a record.
    typedef Row<T, D, BITS, VEC> R;
    constexpr int CHUNKS = D / R::WIDTH;
    constexpr int OWNED = (CHUNKS + THREADS - 1) / THREADS;
    constexpr int SIMDS = THREADS / 32;
    threadgroup float value[ROWS];
    threadgroup uint place[ROWS];
    threadgroup uint fired[SIMDS];

    const uint thread_index = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint simd = simdgroup_index_in_threadgroup;
    const uint group = threadgroup_position_in_grid.x;
    const uint groups = threadgroups_per_grid.x;
    const uint n = num_rows[0];
    const uint per_block = block_rows(n, groups, ROWS);
    const float limit = threshold[0];

    float sum[OWNED * R::WIDTH];
    for (int i = 0; i < OWNED * R::WIDTH; ++i) sum[i] = 0.0f;
    uint active = 0;

    for (uint base = group * per_block; base < n; base += groups * per_block) {
        for (uint first = simd; first < uint(ROWS); first += uint(SIMDS * P)) {
            ulong at[P];
            uint slot[P];
            bool live[P];
            float z[P];
#pragma unroll
            for (int p = 0; p < P; ++p) {
                const uint r = first + uint(p * SIMDS);
                live[p] = r < per_block && base + r < n;
                slot[p] = live[p] ? rows[base + r] : 0u;
                at[p] = ulong(slot[p]) * ulong(STRIDE) + ulong(GATED ? R::BYTES : 0);
                z[p] = 0.0f;
            }
            dot_rows<R, D, 1, P, UNROLL>(slots, at, live, x, lane, 32u, z);
#pragma unroll
            for (int p = 0; p < P; ++p) {
                z[p] = simd_sum(z[p]);
                if (live[p]) {
                    z[p] += bias[slot[p]];
                    live[p] = fires(z[p], limit);
                    active += live[p] ? 1u : 0u;
                }
                at[p] = ulong(slot[p]) * ulong(STRIDE);
            }
            float up[P];
            if (GATED) {
#pragma unroll
                for (int p = 0; p < P; ++p) up[p] = 0.0f;
                dot_rows<R, D, 1, P, UNROLL>(slots, at, live, x, lane, 32u, up);
#pragma unroll
                for (int p = 0; p < P; ++p) up[p] = simd_sum(up[p]);
            }
#pragma unroll
            for (int p = 0; p < P; ++p) {
                const uint r = first + uint(p * SIMDS);
                if (lane == 0 && r < uint(ROWS)) {
                    float h = live[p] ? (SQUARED ? z[p] * z[p] : z[p]) : 0.0f;
                    if (GATED && live[p]) h *= up[p] + (UP_BIAS ? up_bias[slot[p]] : 0.0f);
                    value[r] = h;
                    place[r] = slot[p];
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint r = 0; r < per_block; r += uint(BATCH)) {
            float h[BATCH];
            typename R::Raw raw[BATCH * OWNED];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                h[b] = r + uint(b) < uint(ROWS) ? float(value[r + uint(b)]) : 0.0f;
                const ulong row = h[b] != 0.0f ? ulong(place[r + uint(b)]) * ulong(STRIDE) : 0;
#pragma unroll
                for (int k = 0; k < OWNED; ++k) {
                    const uint c = thread_index + uint(k * THREADS);
                    raw[b * OWNED + k] = h[b] != 0.0f && c < uint(CHUNKS)
                        ? R::load(slots + row + (GATED ? 2 : 1) * R::BYTES, c) : R::none();
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (h[b] != 0.0f) {
#pragma unroll
                    for (int k = 0; k < OWNED; ++k) {
                        float w[R::WIDTH];
                        R::widen(raw[b * OWNED + k], w);
#pragma unroll
                        for (int i = 0; i < R::WIDTH; ++i) sum[k * R::WIDTH + i] += h[b] * w[i];
                    }
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    if (lane == 0) fired[simd] = active;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index == 0) {
        uint total = 0;
        for (int s = 0; s < SIMDS; ++s) total += fired[s];
        counts[group] = total;
    }
    if (group * per_block < n) {
        for (int k = 0; k < OWNED; ++k) {
            const uint c = thread_index + uint(k * THREADS);
            if (c < uint(CHUNKS)) Output<R::WIDTH>::store(partial + group * uint(D), c, sum + k * R::WIDTH);
        }
    }
