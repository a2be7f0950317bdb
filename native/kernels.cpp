#include "kernels.h"

#include <algorithm>

#include "thread_pool.h"

namespace wb {

namespace {

// Below this, waking another thread costs more than it saves.
constexpr int64_t kBytesPerThread = 128 << 10;

// Neurons that all tokens are taken over before the next ones are: they stay in a core's own cache meanwhile.
constexpr int64_t kBlockBytes = 256 << 10, kLeastBlock = 16;

int64_t itemsize(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

// x in the order that kernels of this dtype want it; in `scratch` where that is another order.
const float* ordered(const SimdKernels& simd, DType dtype, const float* x, int64_t d, std::vector<float>& scratch) {
  if (dtype != DType::bfloat16) return x;
  scratch.resize(static_cast<size_t>(d));
  simd.pair_up(x, d, scratch.data());
  return scratch.data();
}

// The same for t rows, packed as SimdKernels::linear wants them.
const float* packed(const SimdKernels& simd, DType dtype, const float* x, int64_t t, int64_t in,
                    std::vector<float>& scratch) {
  if (t == 1) return ordered(simd, dtype, x, in, scratch);
  scratch.resize(static_cast<size_t>(t * in));
  float* to = scratch.data();
  for (int64_t from = 0; from < in; from += kColumns) {
    const int64_t columns = std::min(kColumns, in - from);
    for (int64_t k = 0; k < t; ++k, to += columns) {
      if (dtype == DType::bfloat16) {
        simd.pair_up(x + k * in + from, columns, to);
      } else {
        std::copy_n(x + k * in + from, columns, to);
      }
    }
  }
  return scratch.data();
}

}  // namespace

const SimdKernels& simd_best() {
#if WB_HAVE_AVX2
  static const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2) return simd_avx2();
#endif
  return simd_baseline();
}

int plan_threads(int threads, int64_t bytes) {
  if (threads == 0) threads = available_cores();
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, bytes / kBytesPerThread)));
}

int64_t sparse_ffn(Ffn layer, const int32_t* rows, int64_t count, float* out, int threads) {
  const SimdKernels& simd = simd_best();
  const int64_t d = layer.d;
  threads = plan_threads(threads, (layer.gated ? 3 : 2) * count * d * itemsize(layer.dtype));
  // A thread's own sums, apart by whole cache lines; kept from call to call.
  const int64_t stride = (d + 31) / 16 * 16;
  thread_local std::vector<float> sums, paired;
  thread_local std::vector<int64_t> active;
  layer.x = ordered(simd, layer.dtype, layer.x, d, paired);
  sums.assign(static_cast<size_t>(stride * threads), 0.0f);
  active.assign(static_cast<size_t>(threads), 0);
  float* const sums_data = sums.data();
  int64_t* const active_data = active.data();
  parallel(threads, [&, sums_data, active_data](int index, int of) {
    const Range range = share(count, index, of);
    active_data[index] = simd.ffn(layer, rows, range.begin, range.end, sums_data + index * stride);
  });
  for (int i = 1; i < threads; ++i) {
    for (int64_t j = 0; j < d; ++j) sums_data[j] += sums_data[i * stride + j];
    active_data[0] += active_data[i];
  }
  const float* result = sums_data;
  if (layer.dtype == DType::bfloat16) {
    paired.resize(static_cast<size_t>(d));
    simd.pair_down(sums_data, d, paired.data());
    result = paired.data();
  }
  for (int64_t j = 0; j < d; ++j) out[j] += result[j];
  return active_data[0];
}

int64_t sparse_ffn_tokens(Ffn layer, const TokenRows& tokens, float* out, int threads) {
  const SimdKernels& simd = simd_best();
  const int64_t d = layer.d, t = tokens.t, stride = (d + 31) / 16 * 16;
  const int64_t neuron = (layer.gated ? 3 : 2) * d * itemsize(layer.dtype);
  const auto count = [&](int64_t k) { return tokens.starts[k + 1] - tokens.starts[k]; };
  int64_t longest = 0;
  std::vector<int> shares(static_cast<size_t>(t));  // threads of each token, as many as it has alone
  int most = 1;
  for (int64_t k = 0; k < t; ++k) {
    shares[static_cast<size_t>(k)] = plan_threads(threads, count(k) * neuron);
    most = std::max(most, shares[static_cast<size_t>(k)]);
    if (count(k) > count(longest)) longest = k;
  }
  thread_local std::vector<float> sums, paired;
  sums.assign(static_cast<size_t>(t * most * stride), 0.0f);
  std::vector<int64_t> active(static_cast<size_t>(most), 0);
  const float* x = layer.x;
  if (layer.dtype == DType::bfloat16) {
    paired.resize(static_cast<size_t>(t * d));
    for (int64_t k = 0; k < t; ++k) simd.pair_up(x + k * d, d, paired.data() + k * d);
    x = paired.data();
  }
  const int64_t block = std::max<int64_t>(kLeastBlock, kBlockBytes / neuron);
  float* const sums_data = sums.data();
  std::vector<Range> ranges(static_cast<size_t>(most * t));  // of each thread, what is left of each token's rows
  parallel(most, [&, x, sums_data](int index, int) {
    Range* const left = ranges.data() + index * t;
    for (int64_t k = 0; k < t; ++k) {
      const int own = shares[static_cast<size_t>(k)];
      left[k] = index < own ? share(count(k), index, own) : Range{0, 0};
    }
    const int32_t* steps = tokens.ids + tokens.starts[longest];
    int64_t found = 0, at = left[longest].begin;
    const int64_t end_of_steps = left[longest].end;
    for (bool last = false; !last; at += block) {
      last = at + block >= end_of_steps;
      for (int64_t k = 0; k < t; ++k) {
        const int32_t* ids = tokens.ids + tokens.starts[k];
        Range& range = left[k];
        const int64_t end =
            last ? range.end : std::lower_bound(ids + range.begin, ids + range.end, steps[at + block]) - ids;
        Ffn one = layer;
        one.x = x + k * d;
        float* const own = sums_data + (k * most + index) * stride;
        found += simd.ffn(one, tokens.rows + tokens.starts[k], range.begin, end, own);
        range.begin = end;
      }
    }
    active[static_cast<size_t>(index)] = found;
  });
  std::vector<float> plain(static_cast<size_t>(layer.dtype == DType::bfloat16 ? d : 0));
  for (int64_t k = 0; k < t; ++k) {
    float* const own = sums_data + k * most * stride;
    for (int i = 1; i < shares[static_cast<size_t>(k)]; ++i) {
      for (int64_t j = 0; j < d; ++j) own[j] += own[i * stride + j];
    }
    const float* result = own;
    if (layer.dtype == DType::bfloat16) {
      simd.pair_down(own, d, plain.data());
      result = plain.data();
    }
    for (int64_t j = 0; j < d; ++j) out[k * d + j] += result[j];
  }
  for (int i = 1; i < most; ++i) active[0] += active[static_cast<size_t>(i)];
  return active[0];
}

void linear(DType dtype, const float* x, int64_t t, int64_t in, const uint8_t* weight, int64_t out_features,
            const float* bias, float* out, int threads) {
  const SimdKernels& simd = simd_best();
  threads = plan_threads(threads, out_features * in * itemsize(dtype));
  thread_local std::vector<float> scratch;
  x = packed(simd, dtype, x, t, in, scratch);
  parallel(threads, [&](int index, int of) {
    const Range range = share(out_features, index, of);
    simd.linear(dtype, x, t, in, weight, range.begin, range.end, bias, out, out_features);
  });
}

void linear_int8(const float* x, int64_t in, const int8_t* weight, const float* scale, int64_t out_features,
                 const float* bias, float* out, int threads) {
  const SimdKernels& simd = simd_best();
  threads = plan_threads(threads, out_features * in);
  parallel(threads, [&](int index, int of) {
    const Range range = share(out_features, index, of);
    simd.linear_int8(x, in, weight, scale, range.begin, range.end, bias, out);
  });
}

void low_rank(const LowRank& factors, const float* x, float* scores, int threads) {
  const auto& [dtype, d, rank, d_ff, a, b, a_scale, b_scale, bias] = factors;
  thread_local std::vector<float> hidden;
  hidden.resize(static_cast<size_t>(rank));
  if (a_scale) {
    linear_int8(x, d, reinterpret_cast<const int8_t*>(a), a_scale, rank, nullptr, hidden.data(), threads);
    linear_int8(hidden.data(), rank, reinterpret_cast<const int8_t*>(b), b_scale, d_ff, bias, scores, threads);
  } else {
    linear(dtype, x, 1, d, a, rank, nullptr, hidden.data(), threads);
    linear(dtype, hidden.data(), 1, rank, b, d_ff, bias, scores, threads);
  }
}

void above(const float* scores, int64_t count, float threshold, std::vector<int32_t>& ids) {
  // Branch-free: always write, step on only when it counts.
  ids.resize(static_cast<size_t>(count) + 1);
  int32_t* end = ids.data();
  for (int64_t i = 0; i < count; ++i) {
    *end = static_cast<int32_t>(i);
    end += !(scores[i] <= threshold);
  }
  ids.resize(static_cast<size_t>(end - ids.data()));
}

uint64_t read_sum(const uint8_t* data, int64_t bytes, int threads) {
  const SimdKernels& simd = simd_best();
  threads = plan_threads(threads, bytes);
  std::vector<uint64_t> sums(static_cast<size_t>(threads) * 8, 0);
  parallel(threads, [&](int index, int of) {
    const Range lines = share((bytes + 63) / 64, index, of);
    const int64_t begin = lines.begin * 64, end = std::min(lines.end * 64, bytes);
    sums[static_cast<size_t>(index) * 8] = simd.sum(data + begin, end - begin);
  });
  uint64_t total = 0;
  for (int i = 0; i < threads; ++i) total += sums[static_cast<size_t>(i) * 8];
  return total;
}

}  // namespace wb
