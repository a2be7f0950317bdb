    // Slot source[i] of `slots` to slot target[i], in place. No target is a source. A threadgroup copies one record at
    // a time.
    typedef typename Unit<UNIT>::Type U;
    const uint n = count[0];
    for (uint i = threadgroup_position_in_grid.x; i < n; i += threadgroups_per_grid.x) {
        const device U* from = (const device U*)(slots + ulong(source[i]) * ulong(STRIDE));
        device U* to = (device U*)(slots + ulong(target[i]) * ulong(STRIDE));
        for (uint first = thread_index_in_threadgroup; first < uint(STRIDE / UNIT); first += uint(4 * THREADS)) {
            U held[4];  // in flight together: the compiler cannot know that no target is a source
#pragma unroll
            for (uint k = 0; k < 4u; ++k) {
                if (first + k * uint(THREADS) < uint(STRIDE / UNIT)) held[k] = from[first + k * uint(THREADS)];
            }
#pragma unroll
            for (uint k = 0; k < 4u; ++k) {
                if (first + k * uint(THREADS) < uint(STRIDE / UNIT)) to[first + k * uint(THREADS)] = held[k];
            }
        }
    }
    if (threadgroup_position_in_grid.x == 0 && thread_index_in_threadgroup == 0) done[0] = n;
