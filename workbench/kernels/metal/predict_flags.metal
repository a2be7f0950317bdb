    // A SIMD group scores 8 neurons and writes a byte: bit i for the i-th of them, set where it is predicted.
    typedef Row<T, RANK, 0, VEC> R;
    constexpr int P = 8;
    const uint lane = thread_index_in_simdgroup;
    const uint byte = threadgroup_position_in_grid.x * uint(THREADS / 32) + simdgroup_index_in_threadgroup;
    if (byte < uint((NEURONS + 7) / 8)) {
        ulong at[P];
        bool live[P];
        float score[P];
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const uint neuron = byte * 8u + uint(p);
            live[p] = neuron < uint(NEURONS);
            at[p] = ulong(neuron) * ulong(R::BYTES);
            score[p] = 0.0f;
        }
        dot_rows<R, RANK, 1, P, UNROLL>((const device uchar*)w, at, live, hidden, lane, 32u, score);
        uint word = 0;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            float z = simd_sum(score[p]);
            if (live[p]) {
                if (SCALED) z *= scale[byte * 8u + uint(p)];
                z += bias[byte * 8u + uint(p)];
                if (fires(z, threshold[0])) word |= 1u << uint(p);
            }
        }
        if (lane == 0) flags[byte] = uchar(word);
    }
