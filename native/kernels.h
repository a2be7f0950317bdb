// Multi-threaded kernels over the inner loops of simd_kernels.h. float32 arithmetic, whatever the storage.
#pragma once

#include <cstdint>
#include <vector>

#include "simd_kernels.h"

namespace wb {

// threads = 0: one for each core. Small work runs on fewer threads than asked for; how many depends on its size alone.
int plan_threads(int threads, int64_t bytes);

int64_t sparse_ffn(DType dtype, const float* x, int64_t d, const uint8_t* matrix, int64_t slot_bytes,
                   const int32_t* rows, int64_t count, const float* bias, float* out, int threads);
void linear(DType dtype, const float* x, int64_t t, int64_t in, const uint8_t* weight, int64_t out_features,
            const float* bias, float* out, int threads);
// scores = b @ (a @ x) + bias
void low_rank(DType dtype, const float* x, int64_t d, const uint8_t* a, int64_t rank, const uint8_t* b, int64_t d_ff,
              const float* bias, float* scores, int threads);
// Ids of scores above the threshold, sorted; a NaN counts as above, so that it is not lost.
void above(const float* scores, int64_t count, float threshold, std::vector<int32_t>& ids);
uint64_t read_sum(const uint8_t* data, int64_t bytes, int threads);

}  // namespace wb
