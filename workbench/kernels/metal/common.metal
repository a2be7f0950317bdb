// Helpers that the bodies share. Written so that Metal, CUDA and the emulator read them alike: no pointer to
// threadgroup memory, no vector arithmetic, arrays of fewer than 8 elements are only indexed (MLX passes them in the
// constant address space).

// How many rows a threadgroup takes at once: `n` rows spread over `groups` in as few rounds as blocks of `most` allow,
// each round as even as it can be.
METAL_FUNC uint block_rows(uint n, uint groups, uint most) {
    const uint rounds = (n + groups * most - 1) / (groups * most);
    return rounds == 0 ? 1 : (n + groups * rounds - 1) / (groups * rounds);
}

// Whether a neuron fires: z > limit, or z is not a number. By its bits, so that no fast-math mode can drop the second.
METAL_FUNC bool fires(float z, float limit) {
    return z > limit || (as_type<uint>(z) & 0x7fffffffu) > 0x7f800000u;
}

// `Row<T, D, BITS, VEC>`: how a row of D weights is read. load(row, c) fetches chunk c, WIDTH elements, as it is
// stored; widen turns it into floats in registers.
template <typename T>
struct Words;  // 32-bit words as elements of T
template <>
struct Words<float> {
    static constant constexpr const int N = 1;
    static METAL_FUNC void widen(uint word, thread float* to) { to[0] = as_type<float>(word); }
};
template <>
struct Words<half> {
    static constant constexpr const int N = 2;
    static METAL_FUNC void widen(uint word, thread float* to) {
        to[0] = float(as_type<half>(ushort(word & 0xffffu)));
        to[1] = float(as_type<half>(ushort(word >> 16)));
    }
};
template <>
struct Words<bfloat> {
    static constant constexpr const int N = 2;
    static METAL_FUNC void widen(uint word, thread float* to) {
        to[0] = as_type<float>(word << 16);
        to[1] = as_type<float>(word & 0xffff0000u);
    }
};
template <>
struct Words<int8_t> {
    static constant constexpr const int N = 4;
    static METAL_FUNC void widen(uint word, thread float* to) {
        to[0] = float(int(word << 24) >> 24);
        to[1] = float(int(word << 16) >> 24);
        to[2] = float(int(word << 8) >> 24);
        to[3] = float(int(word) >> 24);
    }
};

template <typename T, int D, int BITS, bool VEC>
struct Row;

template <typename T, int D>
struct Row<T, D, 0, true> {  // plain, 16 bytes at a time; rows start at multiples of 16
    typedef uint4 Raw;
    static constant constexpr const int WIDTH = 4 * Words<T>::N;
    static constant constexpr const int BYTES = D * int(sizeof(T));
    static METAL_FUNC Raw none() { return Raw{0u, 0u, 0u, 0u}; }
    static METAL_FUNC Raw load(const device uchar* row, uint c) { return ((const device uint4*)row)[c]; }
    static METAL_FUNC void widen(Raw raw, thread float* to) {
        Words<T>::widen(raw.x, to);
        Words<T>::widen(raw.y, to + Words<T>::N);
        Words<T>::widen(raw.z, to + 2 * Words<T>::N);
        Words<T>::widen(raw.w, to + 3 * Words<T>::N);
    }
};

template <typename T, int D>
struct Row<T, D, 0, false> {  // plain, one element at a time
    typedef float Raw;
    static constant constexpr const int WIDTH = 1;
    static constant constexpr const int BYTES = D * int(sizeof(T));
    static METAL_FUNC Raw none() { return 0.0f; }
    static METAL_FUNC Raw load(const device uchar* row, uint c) { return float(((const device T*)row)[c]); }
    static METAL_FUNC void widen(Raw raw, thread float* to) { to[0] = raw; }
};

// Quantized rows: D values of BITS bits, then D/64 scales, then D/64 biases, both of T, then zeros up to a multiple of
// 16 bytes. A weight is its group's scale * value + bias.
struct Packed {
    uint4 words;
    float scale, bias;
};
template <typename T, int D>
struct Row<T, D, 8, true> {
    typedef Packed Raw;
    static constant constexpr const int WIDTH = 16;
    static constant constexpr const int BYTES = (D + 2 * (D / 64) * int(sizeof(T)) + 15) / 16 * 16;
    static METAL_FUNC Raw none() { return Raw{uint4{0u, 0u, 0u, 0u}, 0.0f, 0.0f}; }
    static METAL_FUNC Raw load(const device uchar* row, uint c) {
        const device T* scales = (const device T*)(row + D);
        return Raw{((const device uint4*)row)[c], float(scales[c / 4]), float(scales[D / 64 + c / 4])};
    }
    static METAL_FUNC void four(uint word, float scale, float bias, thread float* to) {
        to[0] = scale * float(word & 0xffu) + bias;
        to[1] = scale * float((word >> 8) & 0xffu) + bias;
        to[2] = scale * float((word >> 16) & 0xffu) + bias;
        to[3] = scale * float(word >> 24) + bias;
    }
    static METAL_FUNC void widen(Raw raw, thread float* to) {
        four(raw.words.x, raw.scale, raw.bias, to);
        four(raw.words.y, raw.scale, raw.bias, to + 4);
        four(raw.words.z, raw.scale, raw.bias, to + 8);
        four(raw.words.w, raw.scale, raw.bias, to + 12);
    }
};
template <typename T, int D>
struct Row<T, D, 4, true> {
    typedef Packed Raw;
    static constant constexpr const int WIDTH = 16;
    static constant constexpr const int BYTES = (D / 2 + 2 * (D / 64) * int(sizeof(T)) + 15) / 16 * 16;
    static METAL_FUNC Raw none() { return Raw{uint4{0u, 0u, 0u, 0u}, 0.0f, 0.0f}; }
    static METAL_FUNC Raw load(const device uchar* row, uint c) {
        const device T* scales = (const device T*)(row + D / 2);
        const uint2 pair = ((const device uint2*)row)[c];
        return Raw{uint4{pair.x, pair.y, 0u, 0u}, float(scales[c / 4]), float(scales[D / 64 + c / 4])};
    }
    static METAL_FUNC void eight(uint word, float scale, float bias, thread float* to) {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = scale * float((word >> (4 * i)) & 0xfu) + bias;
    }
    static METAL_FUNC void widen(Raw raw, thread float* to) {
        eight(raw.words.x, raw.scale, raw.bias, to);
        eight(raw.words.y, raw.scale, raw.bias, to + 8);
    }
};

// WIDTH values of x from chunk c.
template <int WIDTH>
struct Input {
    static METAL_FUNC void load(const device float* x, uint c, thread float* to) {
        const device float4* at = (const device float4*)x + c * (WIDTH / 4);
#pragma unroll
        for (int i = 0; i < WIDTH / 4; ++i) {
            const float4 v = at[i];
            to[4 * i] = v.x;
            to[4 * i + 1] = v.y;
            to[4 * i + 2] = v.z;
            to[4 * i + 3] = v.w;
        }
    }
};
template <>
struct Input<1> {
    static METAL_FUNC void load(const device float* x, uint c, thread float* to) { to[0] = x[c]; }
};

// WIDTH values to chunk c of y.
template <int WIDTH>
struct Output {
    static METAL_FUNC void store(device float* y, uint c, thread const float* from) {
        device float4* at = (device float4*)y + c * (WIDTH / 4);
#pragma unroll
        for (int i = 0; i < WIDTH / 4; ++i)
            at[i] = float4{from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]};
    }
};
template <>
struct Output<1> {
    static METAL_FUNC void store(device float* y, uint c, thread const float* from) { y[c] = from[0]; }
};

// What is copied at a time: UNIT bytes.
template <int UNIT>
struct Unit;
template <>
struct Unit<16> {
    typedef uint4 Type;
};
template <>
struct Unit<4> {
    typedef uint Type;
};
template <>
struct Unit<1> {
    typedef uchar Type;
};

// sums[p * TOKENS + t] += this lane's share of (row p) . (x of token t), for P rows that start at `at[p]` bytes of
// `weights`. Rows that are not live are not read; all lanes of a SIMD group have the same. `step` lanes share a row,
// this one is number `lane`. UNROLL chunks of each row are in flight. x: [TOKENS, D].
template <typename R, int D, int TOKENS, int P, int UNROLL>
METAL_FUNC void dot_rows(const device uchar* weights, thread const ulong* at, thread const bool* live,
                         const device float* x, uint lane, uint step, thread float* sums) {
    const uint chunks = uint(D / R::WIDTH);
    bool any = false;
#pragma unroll
    for (int p = 0; p < P; ++p) any = any || live[p];
    if (!any) return;
    for (uint round = 0; round < chunks; round += step * UNROLL) {
        const uint first = round + lane;
        typename R::Raw raw[UNROLL * P];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const uint c = first + uint(u) * step;
#pragma unroll
            for (int p = 0; p < P; ++p)
                raw[u * P + p] = live[p] && c < chunks ? R::load(weights + at[p], c) : R::none();
        }
        simdgroup_barrier(mem_flags::mem_none);  // compilers would sink loads towards their use, one by one
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const uint c = first + uint(u) * step;
            if (c < chunks) {
                float v[R::WIDTH], w[R::WIDTH];
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) {
                    Input<R::WIDTH>::load(x + t * D, c, v);
#pragma unroll
                    for (int p = 0; p < P; ++p) {
                        R::widen(raw[u * P + p], w);
#pragma unroll
                        for (int i = 0; i < R::WIDTH; ++i) sums[p * TOKENS + t] += w[i] * v[i];
                    }
                }
            }
        }
    }
}
