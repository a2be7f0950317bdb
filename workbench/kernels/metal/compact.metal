    // One threadgroup turns flags into the sorted list of the neurons whose bit is set. Each thread has 32 neurons;
    // sums over the SIMD group, then over the SIMD groups before it, tell where its part of the list begins.
    constexpr int BYTES = (NEURONS + 7) / 8;
    constexpr int SIMDS = THREADS / 32;
    threadgroup uint totals[SIMDS];
    const uint lane = thread_index_in_simdgroup;
    const uint simd = simdgroup_index_in_threadgroup;
    uint listed = 0;
    for (uint first = 0; first < uint(BYTES); first += uint(THREADS * 4)) {
        const uint byte = first + thread_index_in_threadgroup * 4u;
        uint word = 0;
#pragma unroll
        for (uint k = 0; k < 4u; ++k) {
            if (byte + k < uint(BYTES)) word |= uint(flags[byte + k]) << (8u * k);
        }
        const uint mine = popcount(word);
        const uint before = simd_prefix_exclusive_sum(mine);
        if (lane == 31u) totals[simd] = before + mine;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint at = listed + before;
        uint all = 0;
        for (int s = 0; s < SIMDS; ++s) {
            const uint total = totals[s];
            if (uint(s) < simd) at += total;
            all += total;
        }
        for (uint rest = word; rest != 0u; rest &= rest - 1u) {
            indices[at] = byte * 8u + popcount(~rest & (rest - 1u));
            ++at;
        }
        listed += all;
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (thread_index_in_threadgroup == 0) count[0] = listed;
