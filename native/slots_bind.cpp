#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "bind.h"
#include "slots.h"

namespace nb = nanobind;

namespace wb {

namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdsOut = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Keeps the arrays alive that the table writes to.
struct BoundTable {
  BytesOut matrix;
  IdsOut pointer;
  FloatsOut slot_bias;
  Floats bias;
  SlotTable table;

  BoundTable(int64_t d_ff, int64_t capacity, int64_t slot_bytes, BytesOut matrix_in, IdsOut pointer_in,
             FloatsOut slot_bias_in, Floats bias_in)
      : matrix(std::move(matrix_in)),
        pointer(std::move(pointer_in)),
        slot_bias(std::move(slot_bias_in)),
        bias(std::move(bias_in)),
        table((check(d_ff, capacity, slot_bytes), static_cast<int32_t>(d_ff)), static_cast<int32_t>(capacity),
              slot_bytes, {matrix.shape(0) ? matrix.data() : nullptr, pointer.data(), slot_bias.data(), bias.data()}) {}

  void check(int64_t d_ff, int64_t capacity, int64_t slot_bytes) const {
    constexpr int64_t limit = int64_t{1} << 30;
    if (d_ff < 1 || d_ff > limit || capacity < 1 || capacity > limit || slot_bytes < 1 || slot_bytes > limit) {
      throw nb::value_error("d_ff, capacity and slot_bytes must be at least 1");
    }
    if (matrix.shape(0) && static_cast<int64_t>(matrix.shape(0)) != capacity * slot_bytes) {
      throw nb::value_error("matrix does not have capacity * slot_bytes bytes");
    }
    if (static_cast<int64_t>(pointer.shape(0)) != capacity || static_cast<int64_t>(slot_bias.shape(0)) != capacity) {
      throw nb::value_error("pointer and slot_bias do not have an entry for each slot");
    }
    if (static_cast<int64_t>(bias.shape(0)) != d_ff) throw nb::value_error("bias does not have d_ff entries");
  }
};

nb::tuple update(BoundTable& bound, const Ids& predicted, int64_t window) {
  const SlotChange* change;
  {
    nb::gil_scoped_release released;
    change = &bound.table.update(predicted.data(), static_cast<int64_t>(predicted.shape(0)), window);
  }
  auto moves = new_array<int32_t>({change->moves.size() / 2, 2});
  if (!change->moves.empty()) {
    std::memcpy(moves.data(), change->moves.data(), change->moves.size() * sizeof(int32_t));
  }
  return nb::make_tuple(copy_ids(change->rows), copy_ids(change->load_ids), copy_ids(change->load_slots),
                        change->evicted, moves, change->trimmed);
}

}  // namespace

void bind_slots(nb::module_& m) {
  nb::class_<BoundTable>(m, "SlotTable")
      .def(nb::init<int64_t, int64_t, int64_t, BytesOut, IdsOut, FloatsOut, Floats>(), nb::arg("d_ff"),
           nb::arg("capacity"), nb::arg("slot_bytes"), nb::arg("matrix").noconvert(), nb::arg("pointer").noconvert(),
           nb::arg("slot_bias").noconvert(), nb::arg("bias").noconvert())
      .def("update", &update, nb::arg("predicted").noconvert(), nb::arg("window"))
      .def(
          "missing",
          [](const BoundTable& bound, const Ids& ids, int64_t window) {
            return copy_ids(bound.table.missing(ids.data(), static_cast<int64_t>(ids.shape(0)), window));
          },
          nb::arg("ids").noconvert(), nb::arg("window"))
      .def(
          "rewind",
          [](BoundTable& bound, int64_t count) {
            if (count < 0 || count > bound.table.clock()) throw nb::value_error("count: there were not so many tokens");
            bound.table.rewind(count);
          },
          nb::arg("count"))
      .def("clear", [](BoundTable& bound) { bound.table.clear(); })
      .def_prop_ro("num_used", [](const BoundTable& bound) { return bound.table.used(); });
}

}  // namespace wb
