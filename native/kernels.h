// Multi-threaded kernels over the inner loops of simd_kernels.h. float32 arithmetic, whatever the storage.
#pragma once

#include <cstdint>
#include <vector>

#include "simd_kernels.h"

namespace wb {

// threads = 0: one for each core. Small work runs on fewer threads than asked for; how many depends on its size alone.
int plan_threads(int threads, int64_t bytes);

// out += the FFN over `count` slots; returns how many of them were active.
int64_t sparse_ffn(Ffn layer, const int32_t* rows, int64_t count, float* out, int threads);

// Of `t` tokens, the neurons of token k: ids, sorted, and the slots that they are in, in [starts[k], starts[k + 1]).
struct TokenRows {
  const int32_t *ids, *rows;
  const int64_t* starts;
  int64_t t;
};

// The same for several tokens, layer.x and out being [t, d]: every token's result is to the bit what sparse_ffn gives
// it alone, and a neuron that several of them use is fetched about once.
int64_t sparse_ffn_tokens(Ffn layer, const TokenRows& tokens, float* out, int threads);
void linear(DType dtype, const float* x, int64_t t, int64_t in, const uint8_t* weight, int64_t out_features,
            const float* bias, float* out, int threads);

// Factors a [rank, d] and b [d_ff, rank]. With scales, one a row, they are int8, and a row's value is scale * element;
// else they are of `dtype`.
struct LowRank {
  DType dtype;
  int64_t d, rank, d_ff;
  const uint8_t *a, *b;
  const float *a_scale, *b_scale;  // both or neither
  const float* bias;
};

// scores = b @ (a @ x) + bias
void low_rank(const LowRank& factors, const float* x, float* scores, int threads);

// Ids of scores above the threshold, sorted; a NaN counts as above, so that it is not lost.
void above(const float* scores, int64_t count, float threshold, std::vector<int32_t>& ids);
uint64_t read_sum(const uint8_t* data, int64_t bytes, int threads);

}  // namespace wb
