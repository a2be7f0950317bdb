// Single-threaded inner loops, one table of them for each instruction set.
#pragma once

#include <cstdint>

namespace wb {

enum class DType { float32, float16, bfloat16 };

// Columns of a linear layer that are handled together when there are several rows of x. These rows are packed block by
// block: rows a power of two apart would share the few places of one cache set.
constexpr int64_t kColumns = 512;

// With bfloat16 storage, x and acc are in the order of pair_up: see load_pair.
struct SimdKernels {
  const char* name;

  // For rows [begin, end) of `rows`, each a slot [up row | down row] of `matrix`: acc += relu(up.x + bias) * down.
  // Returns how many were active. Down rows of others are never touched.
  int64_t (*ffn)(DType dtype, const float* x, const uint8_t* matrix, int64_t slot_bytes, const int32_t* rows,
                 int64_t begin, int64_t end, const float* bias, int64_t d, float* acc);

  // out[k * out_stride + row] = weight[row] . x[k] (+ bias[row]) for rows [begin, end) and k in [0, t).
  // x: for each block of kColumns columns (the last may be narrower), its part of each of the t rows.
  void (*linear)(DType dtype, const float* x, int64_t t, int64_t in, const uint8_t* weight, int64_t begin, int64_t end,
                 const float* bias, float* out, int64_t out_stride);

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
