#include <cmath>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "bind.h"
#include "kernels.h"

namespace nb = nanobind;

namespace wb {

namespace {

// Any array; what it must be is checked here, with messages that name the argument.
using In = nb::ndarray<nb::ro, nb::device::cpu>;
using Out = nb::ndarray<nb::device::cpu>;
using FloatArray = nb::ndarray<nb::numpy, float>;

std::string shape_of(const nb::ndarray<nb::ro>& array) {
  std::string text = "[";
  for (size_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + "]";
}

[[noreturn]] void reject(const char* name, const std::string& why) {
  throw nb::value_error((std::string(name) + ": " + why).c_str());
}

// -1 in `shape` stands for any size.
template <class Array>
void check(const char* name, const Array& array, nb::dlpack::dtype_code code, int bits,
           std::initializer_list<int64_t> shape) {
  if (array.dtype().lanes != 1 || array.dtype().code != static_cast<uint8_t>(code) || array.dtype().bits != bits) {
    const char* family = code == nb::dlpack::dtype_code::Float ? "float"
                         : code == nb::dlpack::dtype_code::Int ? "int"
                                                               : "uint";
    reject(name, "must be " + std::string(family) + std::to_string(bits));
  }
  bool fits = array.ndim() == shape.size();
  size_t axis = 0;
  std::string wanted = "[";
  for (const int64_t size : shape) {
    if (fits && size >= 0 && static_cast<int64_t>(array.shape(axis)) != size) fits = false;
    wanted += (axis++ ? ", " : "") + (size < 0 ? std::string("any") : std::to_string(size));
  }
  if (!fits) reject(name, "has shape " + shape_of(nb::ndarray<nb::ro>(array)) + ", not " + wanted + "]");
  int64_t stride = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    if (array.size() && array.shape(i) > 1 && array.stride(i) != stride) reject(name, "is not C-contiguous");
    stride *= static_cast<int64_t>(array.shape(i));
  }
}

constexpr auto kFloat = nb::dlpack::dtype_code::Float;
constexpr auto kInt = nb::dlpack::dtype_code::Int;
constexpr auto kUInt = nb::dlpack::dtype_code::UInt;

DType parse_dtype(const char* dtype, const char* names = "float32, float16 or bfloat16") {
  if (!std::strcmp(dtype, "float32")) return DType::float32;
  if (!std::strcmp(dtype, "float16")) return DType::float16;
  if (!std::strcmp(dtype, "bfloat16")) return DType::bfloat16;
  reject("dtype", std::string("must be ") + names);
}

// 16-bit weights come as uint16 views, float16 also as itself.
void check_weight(const char* name, const In& weight, DType dtype, std::initializer_list<int64_t> shape) {
  if (dtype == DType::float32) return check(name, weight, kFloat, 32, shape);
  const bool half = dtype == DType::float16 && weight.dtype().code == static_cast<uint8_t>(kFloat);
  check(name, weight, half ? kFloat : kUInt, 16, shape);
}

int check_threads(int threads) {
  if (threads < 0 || threads > 1024) reject("threads", "must be 0 (one for each core) to 1024");
  return threads;
}

template <class T>
const T* data(const In& array) {
  return static_cast<const T*>(array.data());
}

int64_t size(const In& array, size_t axis) { return static_cast<int64_t>(array.shape(axis)); }

bool parse_squared(const char* activation) {
  if (!std::strcmp(activation, "relu")) return false;
  if (!std::strcmp(activation, "relu2")) return true;
  reject("activation", "must be relu or relu2");
}

// What the FFN's kernels take beside the rows and where the result goes; checked. x: [.., d]; rows: slots.
Ffn check_ffn(const In& x, int64_t d, const In& matrix, int64_t slot_bytes, const In& rows, const In& bias,
              const char* dtype_name, int threads, bool gated, const char* activation, float threshold,
              const std::optional<In>& up_bias) {
  const DType dtype = parse_dtype(dtype_name);
  const int64_t item = dtype == DType::float32 ? 4 : 2;
  check("matrix", matrix, kUInt, 8, {-1});
  check("rows", rows, kInt, 32, {-1});
  check("bias", bias, kFloat, 32, {-1});
  check_threads(threads);
  if (slot_bytes < (gated ? 3 : 2) * d * item || slot_bytes % item) {
    reject("slot_bytes", std::string("is too small for ") + (gated ? "three" : "two") + " rows of x's length");
  }
  if (reinterpret_cast<uintptr_t>(matrix.data()) % static_cast<uintptr_t>(item)) reject("matrix", "is misaligned");
  const int64_t capacity = size(bias, 0);
  if (size(matrix, 0) < capacity * slot_bytes) reject("matrix", "has fewer slots than bias has entries");
  const bool squared = parse_squared(activation);
  if (!std::isfinite(threshold)) reject("threshold", "must be finite");
  if (up_bias && !gated) reject("up_bias", "is for a gated FFN; the bias of an ungated one's up rows is `bias`");
  if (up_bias) check("up_bias", *up_bias, kFloat, 32, {capacity});
  const int32_t* row = data<int32_t>(rows);
  int32_t low = 0, high = -1;
  for (int64_t i = 0; i < size(rows, 0); ++i) {
    low = row[i] < low ? row[i] : low;
    high = row[i] > high ? row[i] : high;
  }
  if (low < 0 || high >= capacity) reject("rows", "names a slot outside [0, " + std::to_string(capacity) + ")");
  return {dtype, data<float>(x), d, data<uint8_t>(matrix), slot_bytes, data<float>(bias),
          up_bias ? data<float>(*up_bias) : nullptr, threshold, gated, squared};
}

int64_t bind_sparse_ffn(const In& x, const In& matrix, int64_t slot_bytes, const In& rows, const In& bias,
                        const char* dtype_name, const Out& out, int threads, bool gated, const char* activation,
                        float threshold, std::optional<In> up_bias) {
  parse_dtype(dtype_name);
  check("x", x, kFloat, 32, {-1});
  check("out", out, kFloat, 32, {size(x, 0)});
  const Ffn layer = check_ffn(x, size(x, 0), matrix, slot_bytes, rows, bias, dtype_name, threads, gated, activation,
                              threshold, up_bias);
  nb::gil_scoped_release released;
  return sparse_ffn(layer, data<int32_t>(rows), size(rows, 0), static_cast<float*>(out.data()), threads);
}

int64_t bind_sparse_ffn_tokens(const In& x, const In& matrix, int64_t slot_bytes, const In& ids, const In& rows,
                               const In& starts, const In& bias, const char* dtype_name, const Out& out, int threads,
                               bool gated, const char* activation, float threshold, std::optional<In> up_bias) {
  parse_dtype(dtype_name);
  check("x", x, kFloat, 32, {-1, -1});
  check("out", out, kFloat, 32, {size(x, 0), size(x, 1)});
  const Ffn layer = check_ffn(x, size(x, 1), matrix, slot_bytes, rows, bias, dtype_name, threads, gated, activation,
                              threshold, up_bias);
  check("ids", ids, kInt, 32, {size(rows, 0)});
  check("starts", starts, kInt, 64, {size(x, 0) + 1});
  const TokenRows tokens = {data<int32_t>(ids), data<int32_t>(rows), data<int64_t>(starts), size(x, 0)};
  const int64_t* const start = tokens.starts;
  if (start[0] != 0 || start[tokens.t] != size(rows, 0)) reject("starts", "must go from 0 to the number of rows");
  for (int64_t k = 0; k < tokens.t; ++k) {
    if (start[k + 1] < start[k] || start[k + 1] > size(rows, 0)) reject("starts", "must not fall");
    for (int64_t i = start[k] + 1; i < start[k + 1]; ++i) {
      if (tokens.ids[i] <= tokens.ids[i - 1]) reject("ids", "of a token must be sorted and unique");
    }
  }
  nb::gil_scoped_release released;
  return sparse_ffn_tokens(layer, tokens, static_cast<float*>(out.data()), threads);
}

FloatArray bind_linear(const In& x, const In& weight, std::optional<In> bias, const char* dtype_name, int threads) {
  const DType dtype = parse_dtype(dtype_name);
  check("x", x, kFloat, 32, {-1, -1});
  check_weight("weight", weight, dtype, {-1, size(x, 1)});
  if (bias) check("bias", *bias, kFloat, 32, {size(weight, 0)});
  check_threads(threads);
  FloatArray out = new_array<float>({x.shape(0), weight.shape(0)});
  {
    nb::gil_scoped_release released;
    linear(dtype, data<float>(x), size(x, 0), size(x, 1), data<uint8_t>(weight), size(weight, 0),
           bias ? data<float>(*bias) : nullptr, out.data(), threads);
  }
  return out;
}

// The factors' scales: both for int8 factors, none for others.
using Scales = const std::optional<In>&;

LowRank check_low_rank(const In& x, const In& a, const In& b, const In& bias, const char* dtype_name, int threads,
                       Scales a_scale, Scales b_scale) {
  const bool int8 = !std::strcmp(dtype_name, "int8");
  const DType dtype = int8 ? DType::float32 : parse_dtype(dtype_name, "float32, float16, bfloat16 or int8");
  check("x", x, kFloat, 32, {-1});
  if (int8) {
    check("a", a, kInt, 8, {-1, size(x, 0)});
    check("b", b, kInt, 8, {-1, size(a, 0)});
    if (!a_scale) reject("a_scale", "is missing: int8 factors need one a row");
    if (!b_scale) reject("b_scale", "is missing: int8 factors need one a row");
    check("a_scale", *a_scale, kFloat, 32, {size(a, 0)});
    check("b_scale", *b_scale, kFloat, 32, {size(b, 0)});
  } else {
    check_weight("a", a, dtype, {-1, size(x, 0)});
    check_weight("b", b, dtype, {-1, size(a, 0)});
    if (a_scale) reject("a_scale", "is for int8 factors only");
    if (b_scale) reject("b_scale", "is for int8 factors only");
  }
  check("bias", bias, kFloat, 32, {size(b, 0)});
  check_threads(threads);
  return {dtype, size(x, 0), size(a, 0), size(b, 0), data<uint8_t>(a), data<uint8_t>(b),
          int8 ? data<float>(*a_scale) : nullptr, int8 ? data<float>(*b_scale) : nullptr, data<float>(bias)};
}

FloatArray bind_scores(const In& x, const In& a, const In& b, const In& bias, const char* dtype_name, int threads,
                       std::optional<In> a_scale, std::optional<In> b_scale) {
  const LowRank factors = check_low_rank(x, a, b, bias, dtype_name, threads, a_scale, b_scale);
  FloatArray out = new_array<float>({b.shape(0)});
  {
    nb::gil_scoped_release released;
    low_rank(factors, data<float>(x), out.data(), threads);
  }
  return out;
}

nb::ndarray<nb::numpy, int32_t> bind_predict(const In& x, const In& a, const In& b, const In& bias, float threshold,
                                             const char* dtype_name, int threads, std::optional<In> a_scale,
                                             std::optional<In> b_scale) {
  const LowRank factors = check_low_rank(x, a, b, bias, dtype_name, threads, a_scale, b_scale);
  thread_local std::vector<float> scores;
  thread_local std::vector<int32_t> ids;
  {
    nb::gil_scoped_release released;
    scores.resize(b.shape(0));
    low_rank(factors, data<float>(x), scores.data(), threads);
    above(scores.data(), size(b, 0), threshold, ids);
  }
  return copy_ids(ids);
}

uint64_t bind_read_sum(const In& buffer, int threads) {
  check("buffer", buffer, kUInt, 8, {-1});
  check_threads(threads);
  nb::gil_scoped_release released;
  return read_sum(data<uint8_t>(buffer), size(buffer, 0), threads);
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("sparse_ffn", &bind_sparse_ffn, nb::arg("x").noconvert(), nb::arg("matrix").noconvert(), nb::arg("slot_bytes"),
        nb::arg("rows").noconvert(), nb::arg("bias").noconvert(), nb::arg("dtype"), nb::arg("out").noconvert(),
        nb::arg("threads"), nb::arg("gated"), nb::arg("activation"), nb::arg("threshold"),
        nb::arg("up_bias").noconvert().none());
  m.def("sparse_ffn_tokens", &bind_sparse_ffn_tokens, nb::arg("x").noconvert(), nb::arg("matrix").noconvert(),
        nb::arg("slot_bytes"), nb::arg("ids").noconvert(), nb::arg("rows").noconvert(), nb::arg("starts").noconvert(),
        nb::arg("bias").noconvert(), nb::arg("dtype"), nb::arg("out").noconvert(), nb::arg("threads"), nb::arg("gated"),
        nb::arg("activation"), nb::arg("threshold"), nb::arg("up_bias").noconvert().none());
  m.def("linear", &bind_linear, nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
        nb::arg("bias").noconvert().none(), nb::arg("dtype"), nb::arg("threads"));
  m.def("scores", &bind_scores, nb::arg("x").noconvert(), nb::arg("a").noconvert(), nb::arg("b").noconvert(),
        nb::arg("bias").noconvert(), nb::arg("dtype"), nb::arg("threads"), nb::arg("a_scale").noconvert().none(),
        nb::arg("b_scale").noconvert().none());
  m.def("predict", &bind_predict, nb::arg("x").noconvert(), nb::arg("a").noconvert(), nb::arg("b").noconvert(),
        nb::arg("bias").noconvert(), nb::arg("threshold"), nb::arg("dtype"), nb::arg("threads"),
        nb::arg("a_scale").noconvert().none(), nb::arg("b_scale").noconvert().none());
  m.def("read_sum", &bind_read_sum, nb::arg("buffer").noconvert(), nb::arg("threads"));
  m.def("instruction_set", [] { return simd_best().name; });
}

}  // namespace wb
