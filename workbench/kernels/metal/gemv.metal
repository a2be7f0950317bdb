    // y = w x + bias. SPLIT SIMD groups share a row; each takes P rows at once.
    typedef Row<T, IN, 0, VEC> R;
    constexpr int SIMDS = THREADS / 32;
    constexpr int TEAMS = SIMDS / SPLIT;
    constexpr int SUMS = P * TOKENS;
    threadgroup float part[SIMDS * SUMS];
    const uint lane = thread_index_in_simdgroup;
    const uint simd = simdgroup_index_in_threadgroup;
    const uint first_of_group = threadgroup_position_in_grid.x * uint(TEAMS * P);
    const uint first = first_of_group + simd / uint(SPLIT) * uint(P);
    const uint member = simd % uint(SPLIT);

    ulong at[P];
    bool live[P];
    float sums[SUMS];
#pragma unroll
    for (int p = 0; p < P; ++p) {
        live[p] = first + uint(p) < uint(OUT);
        at[p] = ulong(first + uint(p)) * ulong(R::BYTES);
    }
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
    const device uchar* weights = (const device uchar*)w;
    dot_rows<R, IN, TOKENS, P, UNROLL>(weights, at, live, x, member * 32u + lane, uint(32 * SPLIT), sums);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        sums[i] = simd_sum(sums[i]);
        if (lane == 0) part[simd * uint(SUMS) + uint(i)] = sums[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = thread_index_in_threadgroup; j < uint(TEAMS * SUMS); j += uint(THREADS)) {
        const uint team = j / uint(SUMS);
        const uint i = j % uint(SUMS);
        const uint row = first_of_group + team * uint(P) + i / uint(TOKENS);
        if (row < uint(OUT)) {
            float sum = 0.0f;
            for (int s = 0; s < SPLIT; ++s) sum += part[(team * uint(SPLIT) + uint(s)) * uint(SUMS) + i];
            if (SCALED) sum *= scale[row];
            if (BIAS) sum += float(bias[row]);
            y[i % uint(TOKENS) * uint(OUT) + row] = sum;
        }
    }
