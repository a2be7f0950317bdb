    // y = the sum of the partial results of those threadgroups that had rows; active = the sum of all counts. A
    // threadgroup has 32 columns; its SIMD groups share the rows of `partial`.
    constexpr int SIMDS = THREADS / 32;
    threadgroup float part[THREADS];
    threadgroup uint tally[SIMDS];
    const uint lane = thread_index_in_simdgroup;
    const uint simd = simdgroup_index_in_threadgroup;
    const uint column = threadgroup_position_in_grid.x * 32u + lane;
    const uint per_block = block_rows(num_rows[0], GROUPS, ROWS);
    const uint blocks = (num_rows[0] + per_block - 1) / per_block;
    const uint used = blocks < uint(GROUPS) ? blocks : uint(GROUPS);

    float sum = 0.0f;
    for (uint first = simd; first < used; first += uint(8 * SIMDS)) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // in flight together, also where fewer than 8 are left
            const uint g = first + uint(i * SIMDS);
            v[i] = g < used && column < uint(D) ? partial[g * uint(D) + column] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += v[i];
    }
    part[simd * 32u + lane] = sum;
    if (threadgroup_position_in_grid.x == 0) {
        uint count = 0;
        for (uint g = thread_index_in_threadgroup; g < uint(GROUPS); g += uint(THREADS)) count += counts[g];
        count = simd_sum(count);
        if (lane == 0) tally[simd] = count;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd == 0) {
        for (int s = 1; s < SIMDS; ++s) sum += part[uint(s) * 32u + lane];
        if (column < uint(D)) y[column] = sum;
    }
    if (threadgroup_position_in_grid.x == 0 && thread_index_in_threadgroup == 0) {
        uint total = 0;
        for (int s = 0; s < SIMDS; ++s) total += tally[s];
        active[0] = total;
    }
