#include <algorithm>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "aligned_buffer.h"
#include "bind.h"
#include "reader.h"

namespace nb = nanobind;

namespace wb {

namespace {

using Int64s = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

PyObject* failure_type = nullptr;

void check_ranges(const Int64s& offsets, const Int64s& lengths) {
  if (offsets.shape(0) != lengths.shape(0)) throw nb::value_error("offsets and lengths differ in number");
  constexpr int64_t limit = int64_t{1} << 61;
  int64_t low = 0, high = 0;
  for (size_t i = 0; i < offsets.shape(0); ++i) {
    low = std::min({low, offsets.data()[i], lengths.data()[i]});
    high = std::max({high, offsets.data()[i], lengths.data()[i]});
  }
  if (low < 0 || high > limit) throw nb::value_error("an offset or length is negative or beyond any file");
}

void check_gap(int64_t gap_bytes) {
  if (gap_bytes < -1) throw nb::value_error("gap_bytes must be -1 (never merge) or more");
}

nb::tuple read(Reader& reader, int file, const Int64s& offsets, const Int64s& lengths, const Bytes& buffer,
               const Int64s& destinations, int64_t gap_bytes) {
  check_ranges(offsets, lengths);
  check_gap(gap_bytes);
  if (destinations.shape(0) != offsets.shape(0)) throw nb::value_error("offsets and destinations differ in number");
  if (reinterpret_cast<uintptr_t>(buffer.data()) % kUnit) {
    throw nb::value_error("the buffer does not begin on a 4096-byte boundary; make it with aligned_buffer");
  }
  const int64_t size = static_cast<int64_t>(buffer.shape(0));
  for (size_t i = 0; i < destinations.shape(0); ++i) {
    const int64_t at = destinations.data()[i];
    if (at < 0 || at > size || lengths.data()[i] > size - at) {
      throw nb::value_error("a destination lies outside the buffer");
    }
  }
  ReadTotals totals;
  {
    nb::gil_scoped_release released;
    totals = reader.read(file, offsets.data(), lengths.data(), destinations.data(),
                         static_cast<int64_t>(offsets.shape(0)), buffer.data(), gap_bytes);
  }
  return nb::make_tuple(totals.bytes, totals.reads, totals.seconds);
}

std::vector<std::pair<int64_t, int64_t>> plan(const Int64s& offsets, const Int64s& lengths, int64_t gap_bytes,
                                              int64_t chunk_bytes) {
  check_ranges(offsets, lengths);
  check_gap(gap_bytes);
  if (chunk_bytes < kUnit || chunk_bytes % kUnit) throw nb::value_error("chunk_bytes must be a multiple of 4096");
  const std::vector<int64_t> destinations(offsets.shape(0), 0);
  Plan made;
  made.make(offsets.data(), lengths.data(), destinations.data(), static_cast<int64_t>(offsets.shape(0)), gap_bytes,
            chunk_bytes);
  std::vector<std::pair<int64_t, int64_t>> out;
  for (const PlannedRead& read : made.reads()) out.emplace_back(read.offset, read.length);
  return out;
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> aligned_buffer(int64_t nbytes) {
  if (nbytes < 0) throw nb::value_error("nbytes is negative");
  const size_t size = static_cast<size_t>(nbytes);
  const size_t mapped = static_cast<size_t>(align_up(std::max<int64_t>(nbytes, 1)));
  void* memory = map_pages(mapped);
  if (!memory) {
    PyErr_NoMemory();
    throw nb::python_error();
  }
  struct Mapping {
    void* memory;
    size_t bytes;
  };
  nb::capsule owner(new Mapping{memory, mapped}, [](void* pointer) noexcept {
    const Mapping* mapping = static_cast<Mapping*>(pointer);
    unmap_pages(mapping->memory, mapping->bytes);
    delete mapping;
  });
  return {memory, {size}, owner};
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const ReadFailure& e) {
    PyObject* args = Py_BuildValue("(sNLLLi)", e.kind, PyUnicode_DecodeFSDefault(e.path.c_str()),
                                   static_cast<long long>(e.offset), static_cast<long long>(e.wanted),
                                   static_cast<long long>(e.got), e.error);
    if (args) {
      PyErr_SetObject(failure_type, args);
      Py_DECREF(args);
    }
  }
}

}  // namespace

void bind_reader(nb::module_& m) {
  failure_type = PyErr_NewExceptionWithDoc("workbench._native.ReadFailure", "(kind, path, offset, wanted, got, errno)",
                                           nullptr, nullptr);
  m.attr("ReadFailure") = nb::borrow(failure_type);
  nb::register_exception_translator(translate);
  nb::class_<Reader>(m, "Reader")
      .def(nb::init<const std::string&, int, int64_t>(), nb::arg("engine"), nb::arg("depth"), nb::arg("chunk_bytes"))
      .def("open", &Reader::open, nb::arg("path"), nb::arg("direct"), nb::call_guard<nb::gil_scoped_release>())
      .def("close_file", &Reader::close_file, nb::arg("handle"), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Reader::close, nb::call_guard<nb::gil_scoped_release>())
      .def("read", &read, nb::arg("file"), nb::arg("offsets").noconvert(), nb::arg("lengths").noconvert(),
           nb::arg("buffer").noconvert(), nb::arg("destinations").noconvert(), nb::arg("gap_bytes"));
  m.def("plan_reads", &plan, nb::arg("offsets").noconvert(), nb::arg("lengths").noconvert(), nb::arg("gap_bytes"),
        nb::arg("chunk_bytes"));
  m.def("aligned_buffer", &aligned_buffer, nb::arg("nbytes"));
}

}  // namespace wb
