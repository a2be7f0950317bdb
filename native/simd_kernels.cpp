// Compiled once for each instruction set (WB_ISA). No standard library templates here: see CMakeLists.txt.
#include "simd_kernels.h"

#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

#define WB_JOIN_(a, b) a##b
#define WB_JOIN(a, b) WB_JOIN_(a, b)
#define WB_INLINE static inline __attribute__((always_inline))

namespace wb {

namespace {

typedef float Vec __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef int32_t VecI4 __attribute__((vector_size(16)));
typedef uint32_t VecU32 __attribute__((vector_size(32)));
typedef int32_t VecI32 __attribute__((vector_size(32)));
typedef uint16_t VecU16 __attribute__((vector_size(16)));
typedef int8_t VecI8 __attribute__((vector_size(8)));
typedef uint64_t VecU64 __attribute__((vector_size(32)));
constexpr int kWidth = 8;

struct F32 {
  typedef float Storage;
};
struct F16 {
  typedef uint16_t Storage;
};
struct BF16 {
  typedef uint16_t Storage;
};
struct I8 {
  typedef int8_t Storage;
};

WB_INLINE VecU32 load_u16(const uint16_t* p) {
  VecU16 v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, VecU32);
}

WB_INLINE Vec load(F32, const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

WB_INLINE Vec load(BF16, const uint16_t* p) { return (Vec)(load_u16(p) << 16); }

WB_INLINE Vec load(F16, const uint16_t* p) {
#if defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  const float32x4_t low = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
  const float32x4_t high = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4)));
  Vec v;
  memcpy(&v, &low, sizeof low);
  memcpy((char*)&v + sizeof low, &high, sizeof high);
  return v;
#else
  // Exact: the magnitude's bits read as a float are 2^-112 of its value, subnormals included.
  const VecU32 h = load_u16(p);
  const VecU32 magnitude = (h & 0x7fffu) << 13;
  const Vec scaled = (Vec)magnitude * 0x1p112f;
  const VecU32 special = (VecU32)(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
  return (Vec)((VecU32)scaled | special | ((h & 0x8000u) << 16));
#endif
}

WB_INLINE Vec load(I8, const int8_t* p) {
#if defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  VecI8 v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, VecI32), Vec);
#endif
}

// Sixteen elements as two vectors. For bfloat16 these are the even and the odd ones, which takes half the instructions
// that keeping their order does; the float32 side of the arithmetic is brought into the same order once (`pair_up`).
template <class D>
WB_INLINE void load_pair(D, const typename D::Storage* p, Vec* first, Vec* second) {
  *first = load(D(), p);
  *second = load(D(), p + kWidth);
}

WB_INLINE void load_pair(BF16, const uint16_t* p, Vec* even, Vec* odd) {
  VecU32 words;
  memcpy(&words, p, sizeof words);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  *even = (Vec)(words << 16);
  *odd = (Vec)(words & 0xffff0000u);
#else
#error "bfloat16 pairs are loaded as little-endian words"
#endif
}

// The last n < 8 elements, with zeros behind them.
template <class D>
WB_INLINE Vec load_tail(D, const typename D::Storage* p, int64_t n) {
  typename D::Storage padded[kWidth] = {};
  memcpy(padded, p, (size_t)n * sizeof padded[0]);
  return load(D(), padded);
}

// In one fixed order, so that a result does not depend on how rows were grouped.
WB_INLINE float sum(Vec v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

#ifdef __clang__
#define WB_PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define WB_PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, VecI4{i, j, k, l})
#endif

// Four of them, each in that order: one by one they took a quarter of the time of rows of 64.
WB_INLINE void sum(const Vec (&v)[4], float* sums) {
  Vec4 half[4];
  for (int r = 0; r < 4; ++r) {
    half[r] = Vec4{v[r][0], v[r][1], v[r][2], v[r][3]} + Vec4{v[r][4], v[r][5], v[r][6], v[r][7]};
  }
  const Vec4 first = WB_PICK(half[0], half[1], 0, 1, 4, 5) + WB_PICK(half[0], half[1], 2, 3, 6, 7);
  const Vec4 last = WB_PICK(half[2], half[3], 0, 1, 4, 5) + WB_PICK(half[2], half[3], 2, 3, 6, 7);
  const Vec4 all = WB_PICK(first, last, 0, 2, 4, 6) + WB_PICK(first, last, 1, 3, 5, 7);
  memcpy(sums, &all, sizeof all);
}

WB_INLINE void sum(const Vec (&v)[1], float* sums) { sums[0] = sum(v[0]); }

constexpr int kRows = 4;  // rows that are handled together: as many streams from memory, one pass over x

// Rows that come next. Their first lines are fetched ahead, to start the processor's own prefetching early; fetching
// more than that in software was measured to be slower.
struct Ahead {
  const uint8_t* rows[kRows];
};

// One block of 16 columns at j of the sums below.
template <class D, int R>
WB_INLINE void dot_block(const float* x, const typename D::Storage* const* w, int64_t j, Vec (*acc)[2]) {
  const Vec x0 = load(F32(), x + j), x1 = load(F32(), x + j + kWidth);
  for (int r = 0; r < R; ++r) {
    Vec w0, w1;
    load_pair(D(), w[r] + j, &w0, &w1);
    acc[r][0] += w0 * x0;
    acc[r][1] += w1 * x1;
  }
}

template <class D, int R>
WB_INLINE void add_block(const typename D::Storage* const* w, const float* h, int64_t j, float* acc) {
  Vec out0 = load(F32(), acc + j), out1 = load(F32(), acc + j + kWidth);
  for (int r = 0; r < R; ++r) {
    Vec w0, w1;
    load_pair(D(), w[r] + j, &w0, &w1);
    out0 += w0 * h[r];
    out1 += w1 * h[r];
  }
  memcpy(acc + j, &out0, sizeof out0);
  memcpy(acc + j + kWidth, &out1, sizeof out1);
}

WB_INLINE void prefetch(const Ahead& ahead) {
  for (int r = 0; r < kRows; ++r) {
    for (int byte = 0; byte < 256; byte += 64) __builtin_prefetch(ahead.rows[r] + byte, 0, 2);
  }
}

// The sums, with the columns from j on, fewer than a block. These have a vector of their own: loops over them would
// keep acc in memory for all.
template <class D, int R>
WB_INLINE void finish_dots(const float* x, const typename D::Storage* const* w, int64_t j, int64_t d,
                           const Vec (*acc)[2], float* dots) {
  Vec total[R];
  for (int r = 0; r < R; ++r) total[r] = acc[r][0] + acc[r][1];
  if (j < d) {
    Vec rest[R] = {};
    for (; j < d; j += kWidth) {
      const int64_t n = d - j < kWidth ? d - j : kWidth;
      const Vec xv = load_tail(F32(), x + j, n);
      for (int r = 0; r < R; ++r) rest[r] += load_tail(D(), w[r] + j, n) * xv;
    }
    for (int r = 0; r < R; ++r) total[r] += rest[r];
  }
  sum(total, dots);
}

// dots[r] = w[r] . x
template <class D, int R>
WB_INLINE void dot_rows(const float* x, const typename D::Storage* const* w, int64_t d, const Ahead& ahead,
                        float* dots) {
  prefetch(ahead);
  Vec acc[R][2] = {};
  int64_t j = 0;
  for (; j + 2 * kWidth <= d; j += 2 * kWidth) dot_block<D, R>(x, w, j, acc);
  finish_dots<D, R>(x, w, j, d, acc, dots);
}

// acc += sum over r of h[r] * w[r], added in the order of r
template <class D, int R>
WB_INLINE void add_rows(const typename D::Storage* const* w, const float* h, int64_t d, const Ahead& ahead,
                        float* acc) {
  prefetch(ahead);
  int64_t j = 0;
  for (; j + 2 * kWidth <= d; j += 2 * kWidth) add_block<D, R>(w, h, j, acc);
  for (; j < d; j += kWidth) {
    const int64_t n = d - j < kWidth ? d - j : kWidth;
    Vec out = load_tail(F32(), acc + j, n);
    for (int r = 0; r < R; ++r) out += load_tail(D(), w[r] + j, n) * h[r];
    memcpy(acc + j, &out, (size_t)n * sizeof(float));
  }
}

// Adds R active neurons: their values, once multiplied by up . x + up_bias in a gated FFN, times their down rows.
// `row`: of each the up row when gated, else the down row.
template <class D, bool gated, int R>
WB_INLINE void add_active(const Ffn& layer, const typename D::Storage* const* row, const float* value,
                          const float* up_bias, const Ahead& ahead, float* acc) {
  const int64_t d = layer.d;
  if (!gated) return add_rows<D, R>(row, value, d, ahead, acc);
  const typename D::Storage* down[R];
  float factor[R];
  Ahead down_ahead;
  for (int r = 0; r < R; ++r) down[r] = row[r] + 2 * d;
  for (int r = 0; r < kRows; ++r) down_ahead.rows[r] = (const uint8_t*)down[r < R ? r : 0];
  dot_rows<D, R>(layer.x, row, d, down_ahead, factor);
  for (int r = 0; r < R; ++r) factor[r] = value[r] * (factor[r] + up_bias[r]);
  add_rows<D, R>(down, factor, d, ahead, acc);
}

// A pipeline over groups of four rows: while the activated rows of one group are multiplied, the next rows of neurons
// that groups before it activated are on their way; while those are added, the next group's activated rows are. So
// memory does not wait for a decision, and of an inactive neuron only the row that decided is fetched.
template <class D, bool gated>
int64_t ffn(const Ffn& layer, const int32_t* rows, int64_t begin, int64_t end, float* acc) {
  typedef typename D::Storage T;
  const T* pending[2 * kRows];  // of active neurons still to be added, the up row when gated, else the down row
  float value[2 * kRows], up_bias[2 * kRows];
  int count = 0;
  int64_t active = 0;
  const int64_t d = layer.d;
  const uint8_t* idle = (const uint8_t*)layer.x;  // in cache anyway
  const uint8_t* first = layer.matrix + (gated ? d * (int64_t)sizeof(T) : 0);
  const int64_t slot_bytes = layer.slot_bytes;
  const auto activated_row = [=](int64_t i) { return i < end ? first + (int64_t)rows[i] * slot_bytes : idle; };

  for (int64_t at = begin; at < end;) {
    const int group = end - at >= kRows ? kRows : 1;
    const T* activated[kRows];
    float dots[kRows];
    Ahead ahead;
    for (int r = 0; r < kRows; ++r) {
      activated[r] = (const T*)activated_row(at + (r < group ? r : 0));
      ahead.rows[r] = r < count ? (const uint8_t*)pending[r] : activated_row(at + group + r);
    }
    if (group == kRows) {
      dot_rows<D, kRows>(layer.x, activated, d, ahead, dots);
    } else {
      dot_rows<D, 1>(layer.x, activated, d, ahead, dots);
    }
    if (count >= kRows) {
      for (int r = 0; r < kRows; ++r) ahead.rows[r] = activated_row(at + group + r);
      add_active<D, gated, kRows>(layer, pending, value, up_bias, ahead, acc);
      count -= kRows;
      for (int r = 0; r < count; ++r) {
        pending[r] = pending[r + kRows];
        value[r] = value[r + kRows];
        up_bias[r] = up_bias[r + kRows];
      }
    }
    for (int r = 0; r < group; ++r) {
      const int32_t slot = rows[at + r];
      const float z = dots[r] + layer.bias[slot];
      if (z <= layer.threshold) continue;  // NaN is not: it has to show
      pending[count] = gated ? activated[r] - d : activated[r] + d;
      up_bias[count] = gated && layer.up_bias ? layer.up_bias[slot] : 0.0f;
      value[count++] = layer.squared ? z * z : z;
      ++active;
    }
    at += group;
  }

  const Ahead none = {{idle, idle, idle, idle}};
  int done = 0;
  for (; done + kRows <= count; done += kRows) {
    add_active<D, gated, kRows>(layer, pending + done, value + done, up_bias + done, none, acc);
  }
  for (; done < count; ++done) {
    add_active<D, gated, 1>(layer, pending + done, value + done, up_bias + done, none, acc);
  }
  return active;
}

// R rows of the weight against T rows of x, in a block of columns; added to sums[k][r], which go on block by block.
template <class D, int R, int T>
WB_INLINE void linear_block(const float* x, int64_t columns, const typename D::Storage* w, int64_t in, Vec (*sums)[R]) {
  Vec acc[R][T];
  for (int r = 0; r < R; ++r) {
    for (int k = 0; k < T; ++k) acc[r][k] = sums[k][r];
  }
  int64_t j = 0;
  for (; j + 2 * kWidth <= columns; j += 2 * kWidth) {
    Vec w0[R], w1[R];
    for (int r = 0; r < R; ++r) load_pair(D(), w + r * in + j, &w0[r], &w1[r]);
    for (int k = 0; k < T; ++k) {
      const Vec x0 = load(F32(), x + k * columns + j), x1 = load(F32(), x + k * columns + j + kWidth);
      for (int r = 0; r < R; ++r) {
        acc[r][k] += w0[r] * x0;
        acc[r][k] += w1[r] * x1;
      }
    }
  }
  for (; j < columns; j += kWidth) {
    const int64_t n = columns - j < kWidth ? columns - j : kWidth;
    for (int k = 0; k < T; ++k) {
      const Vec xv = load_tail(F32(), x + k * columns + j, n);
      for (int r = 0; r < R; ++r) acc[r][k] += load_tail(D(), w + r * in + j, n) * xv;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int k = 0; k < T; ++k) sums[k][r] = acc[r][k];
  }
}

constexpr int kTokens = 16;  // rows of x in one pass over the weight

// In one order of additions whatever t is, so that a token's result does not depend on how many come with it.
template <class D, int R>
WB_INLINE void linear_rows(const float* x, int64_t t, int64_t in, const typename D::Storage* w, const float* bias,
                           float* out, int64_t out_stride) {
  const int64_t step = t == 1 ? in : kColumns;
  for (int64_t first = 0; first < t; first += kTokens) {
    const int64_t tokens = t - first < kTokens ? t - first : kTokens;
    Vec sums[kTokens][R];
    for (int64_t k = 0; k < tokens; ++k) {
      for (int r = 0; r < R; ++r) sums[k][r] = Vec{};
    }
    for (int64_t from = 0; from < in; from += step) {
      const int64_t n = from + step < in ? step : in - from;
      const float* block = x + from * t + first * n;
      int64_t k = 0;
      for (; k + 4 <= tokens; k += 4) linear_block<D, R, 4>(block + k * n, n, w + from, in, sums + k);
      for (; k + 2 <= tokens; k += 2) linear_block<D, R, 2>(block + k * n, n, w + from, in, sums + k);
      for (; k < tokens; ++k) linear_block<D, R, 1>(block + k * n, n, w + from, in, sums + k);
    }
    for (int64_t k = 0; k < tokens; ++k) {
      for (int r = 0; r < R; ++r) out[(first + k) * out_stride + r] = (bias ? bias[r] : 0.0f) + sum(sums[k][r]);
    }
  }
}

template <class D>
void linear(const float* x, int64_t t, int64_t in, const typename D::Storage* weight, int64_t begin, int64_t end,
            const float* bias, float* out, int64_t out_stride) {
  int64_t row = begin;
  if (t == 1) {
    for (; row + 4 <= end; row += 4) {
      linear_rows<D, 4>(x, 1, in, weight + row * in, bias ? bias + row : nullptr, out + row, out_stride);
    }
  }
  for (; row + 2 <= end; row += 2) {
    linear_rows<D, 2>(x, t, in, weight + row * in, bias ? bias + row : nullptr, out + row, out_stride);
  }
  for (; row < end; ++row) {
    linear_rows<D, 1>(x, t, in, weight + row * in, bias ? bias + row : nullptr, out + row, out_stride);
  }
}

template <class D>
int64_t ffn_either(const Ffn& layer, const int32_t* rows, int64_t begin, int64_t end, float* acc) {
  return layer.gated ? ffn<D, true>(layer, rows, begin, end, acc) : ffn<D, false>(layer, rows, begin, end, acc);
}

// Rows lie one behind the other: with each block of the R rows being multiplied, a line is fetched, in the order of
// memory, from what follows this far beyond them. int8 rows are too short for the processor's own prefetching to get
// going: without this, they took up to twice as long.
constexpr int64_t kInt8Lead = 1024;

template <int R>
WB_INLINE void linear_int8_rows(const float* x, int64_t in, const int8_t* weight, const float* scale, const float* bias,
                                float* out) {
  const int8_t* w[R];
  float dots[R];
  Vec acc[R][2] = {};
  int64_t j = 0;
  for (int r = 0; r < R; ++r) w[r] = weight + r * in;
  for (; j + 2 * kWidth <= in; j += 2 * kWidth) {
    __builtin_prefetch((const void*)((uintptr_t)weight + (uintptr_t)(R * (in + j) + kInt8Lead)));
    dot_block<I8, R>(x, w, j, acc);
  }
  finish_dots<I8, R>(x, w, j, in, acc, dots);
  for (int r = 0; r < R; ++r) out[r] = scale[r] * dots[r] + (bias ? bias[r] : 0.0f);
}

void linear_int8(const float* x, int64_t in, const int8_t* weight, const float* scale, int64_t begin, int64_t end,
                 const float* bias, float* out) {
  int64_t row = begin;
  for (; row + kRows <= end; row += kRows) {
    linear_int8_rows<kRows>(x, in, weight + row * in, scale + row, bias ? bias + row : nullptr, out + row);
  }
  for (; row < end; ++row) {
    linear_int8_rows<1>(x, in, weight + row * in, scale + row, bias ? bias + row : nullptr, out + row);
  }
}

int64_t ffn_any(const Ffn& layer, const int32_t* rows, int64_t begin, int64_t end, float* acc) {
  switch (layer.dtype) {
    case DType::float32:
      return ffn_either<F32>(layer, rows, begin, end, acc);
    case DType::float16:
      return ffn_either<F16>(layer, rows, begin, end, acc);
    case DType::bfloat16:
      return ffn_either<BF16>(layer, rows, begin, end, acc);
  }
  return 0;
}

void linear_any(DType dtype, const float* x, int64_t t, int64_t in, const uint8_t* weight, int64_t begin, int64_t end,
                const float* bias, float* out, int64_t out_stride) {
  switch (dtype) {
    case DType::float32:
      return linear<F32>(x, t, in, (const float*)weight, begin, end, bias, out, out_stride);
    case DType::float16:
      return linear<F16>(x, t, in, (const uint16_t*)weight, begin, end, bias, out, out_stride);
    case DType::bfloat16:
      return linear<BF16>(x, t, in, (const uint16_t*)weight, begin, end, bias, out, out_stride);
  }
}

// Sixteen at a time: the even ones, then the odd ones, as load_pair has them.
void pair_up(const float* values, int64_t count, float* paired) {
  int64_t j = 0;
  for (; j + 16 <= count; j += 16) {
    for (int k = 0; k < 8; ++k) {
      paired[j + k] = values[j + 2 * k];
      paired[j + 8 + k] = values[j + 2 * k + 1];
    }
  }
  for (; j < count; ++j) paired[j] = values[j];
}

void pair_down(const float* paired, int64_t count, float* values) {
  int64_t j = 0;
  for (; j + 16 <= count; j += 16) {
    for (int k = 0; k < 8; ++k) {
      values[j + 2 * k] = paired[j + k];
      values[j + 2 * k + 1] = paired[j + 8 + k];
    }
  }
  for (; j < count; ++j) values[j] = paired[j];
}

uint64_t sum_words(const uint8_t* data, int64_t bytes) {
  VecU64 acc[8] = {};
  int64_t j = 0;
  constexpr int64_t step = 8 * (int64_t)sizeof(VecU64);
  for (; j + step <= bytes; j += step) {
    for (int k = 0; k < 8; ++k) {
      VecU64 v;
      memcpy(&v, data + j + k * (int64_t)sizeof v, sizeof v);
      acc[k] += v;
    }
  }
  uint64_t total = 0;
  for (int k = 0; k < 8; ++k) total += acc[k][0] + acc[k][1] + acc[k][2] + acc[k][3];
  for (; j < bytes; j += 8) {
    uint64_t word = 0;
    memcpy(&word, data + j, (size_t)(bytes - j < 8 ? bytes - j : 8));
    total += word;
  }
  return total;
}

#define WB_STRING_(a) #a
#define WB_STRING(a) WB_STRING_(a)
const SimdKernels table = {WB_STRING(WB_ISA), ffn_any, linear_any, linear_int8, pair_up, pair_down, sum_words};

}  // namespace

const SimdKernels& WB_JOIN(simd_, WB_ISA)() { return table; }

}  // namespace wb
