#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace wb {

// A new numpy array; its memory is freed with it.
template <class T>
nanobind::ndarray<nanobind::numpy, T> new_array(std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (const size_t length : shape) count *= length;
  T* values = new T[count ? count : 1];
  nanobind::capsule owner(values, [](void* pointer) noexcept { delete[] static_cast<T*>(pointer); });
  return nanobind::ndarray<nanobind::numpy, T>(values, shape, owner);
}

inline nanobind::ndarray<nanobind::numpy, int32_t> copy_ids(const std::vector<int32_t>& ids) {
  auto array = new_array<int32_t>({ids.size()});
  if (!ids.empty()) std::memcpy(array.data(), ids.data(), ids.size() * sizeof(int32_t));
  return array;
}

void bind_reader(nanobind::module_& m);
void bind_slots(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_coactivation(nanobind::module_& m);

}  // namespace wb
