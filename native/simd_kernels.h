// Single-threaded inner loops, one table of them for each instruction set.
#pragma once

#include <cstdint>

namespace wb {

enum class DType { float32, float16, bfloat16 };

// Columns of a linear layer that are handled together when there are several rows of x. These rows are packed block by
// block: rows a power of two apart would share the few places of one cache set.
constexpr int64_t kColumns = 512;

// An FFN over slots [up row | down row] of d values, or [up row | gate row | down row] when gated. A neuron's
// pre-activation z = activated row . x + bias, the activated row being the gate row when gated, else the up row. It is
// active unless z <= threshold, so that a NaN is. Its value, z or z * z when squared, multiplies its down row, and
// when gated (up . x + up_bias) too.
struct Ffn {
  DType dtype;
  const float* x;
  int64_t d;
  const uint8_t* matrix;
  int64_t slot_bytes;
  const float* bias;     // by slot
  const float* up_bias;  // by slot; null for none
  float threshold;
  bool gated, squared;
};

// With bfloat16 storage, x and acc are in the order of pair_up: see load_pair.
struct SimdKernels {
  const char* name;

  // acc += the down rows, each times its factor, of the active ones among slots rows[begin] to rows[end - 1]. Returns
  // how many these are. Of the other slots, only the activated row is touched.
  int64_t (*ffn)(const Ffn& layer, const int32_t* rows, int64_t begin, int64_t end, float* acc);

  // out[k * out_stride + row] = weight[row] . x[k] (+ bias[row]) for rows [begin, end) and k in [0, t).
  // x: for each block of kColumns columns (the last may be narrower), its part of each of the t rows.
  void (*linear)(DType dtype, const float* x, int64_t t, int64_t in, const uint8_t* weight, int64_t begin, int64_t end,
                 const float* bias, float* out, int64_t out_stride);

  // out[row] = scale[row] * (weight[row] . x) + (bias ? bias[row] : 0) for rows [begin, end).
  void (*linear_int8)(const float* x, int64_t in, const int8_t* weight, const float* scale, int64_t begin, int64_t end,
                      const float* bias, float* out);

  // float32 values into the order that bfloat16 kernels work in, and back. Not in place.
  void (*pair_up)(const float* values, int64_t count, float* paired);
  void (*pair_down)(const float* paired, int64_t count, float* values);

  // Sum of the 64-bit words; the plainest reading of memory there is.
  uint64_t (*sum)(const uint8_t* data, int64_t bytes);
};

const SimdKernels& simd_baseline();
const SimdKernels& simd_avx2();
const SimdKernels& simd_best();

}  // namespace wb
