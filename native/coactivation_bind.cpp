#include <memory>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "bind.h"
#include "coactivation.h"

namespace nb = nanobind;

namespace wb {

namespace {

using Ids16 = nb::ndarray<const uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids32 = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
constexpr int64_t kMost = int64_t{1} << 24;

[[noreturn]] void refuse(const char* why) { throw nb::value_error((std::string("coactivation: ") + why).c_str()); }

// Every access of the counting rests on this.
template <class Id>
void check(const Id* ids, int64_t count, const Longs& offsets, int64_t d_ff) {
  if (d_ff < 1 || d_ff > kMost) refuse("d_ff must be 1 to 2^24");
  const int64_t tokens = static_cast<int64_t>(offsets.shape(0)) - 1;
  if (tokens < 0 || tokens > kMost * 64) refuse("offsets must have one entry more than there are tokens");
  const int64_t* at = offsets.data();
  if (at[0] != 0 || at[tokens] != count) refuse("offsets must go from 0 to the number of ids");
  for (int64_t t = 0; t < tokens; ++t) {
    if (at[t] > at[t + 1] || at[t + 1] > count) refuse("offsets must not fall");
    for (int64_t i = at[t]; i < at[t + 1]; ++i) {
      if (static_cast<int64_t>(ids[i]) >= d_ff) refuse("an id is not below d_ff");
      if (i > at[t] && ids[i] <= ids[i - 1]) refuse("the ids of a token must be sorted, each once");
    }
  }
}

struct Bound {
  std::unique_ptr<Coactivation> layer;

  template <class Ids>
  Bound(const Ids& from, const Longs& at, int64_t d_ff) {
    if (at.shape(0) < 1) refuse("offsets must have one entry more than there are tokens");
    const int64_t tokens = static_cast<int64_t>(at.shape(0)) - 1;
    nb::gil_scoped_release released;
    check(from.data(), static_cast<int64_t>(from.shape(0)), at, d_ff);
    layer = std::make_unique<Coactivation>(from.data(), sizeof(*from.data()) == 4, at.data(), tokens, d_ff);
  }

  void check_rows(int64_t begin, int64_t end, int threads) const {
    if (begin < 0 || begin > end || end > layer->d_ff()) refuse("rows must lie in 0..d_ff");
    if (threads < 0 || threads > 1024) refuse("threads must be 0 (one for each core) to 1024");
  }
};

nb::object rows(Bound& bound, int64_t begin, int64_t end, int threads) {
  bound.check_rows(begin, end, threads);
  auto out = new_array<uint32_t>({static_cast<size_t>(end - begin), static_cast<size_t>(bound.layer->d_ff())});
  {
    nb::gil_scoped_release released;
    bound.layer->rows(begin, end, out.data(), threads);
  }
  return nb::cast(out);
}

nb::tuple summarise(Bound& bound, int64_t begin, int64_t end, int64_t friends, const Longs& ranks, int threads) {
  bound.check_rows(begin, end, threads);
  const int64_t d_ff = bound.layer->d_ff();
  if (friends < 1 || friends > d_ff) refuse("friends must be 1 to d_ff");
  const int64_t rank_count = static_cast<int64_t>(ranks.shape(0));
  for (int64_t i = 0; i < rank_count; ++i) {
    const int64_t rank = ranks.data()[i];
    if (rank < 1 || rank >= d_ff || (i && rank <= ranks.data()[i - 1])) refuse("ranks must rise from 1 to d_ff - 1");
  }
  const size_t count = static_cast<size_t>(end - begin);
  auto ids = new_array<int32_t>({count, static_cast<size_t>(friends)});
  auto counts = new_array<uint32_t>({count, static_cast<size_t>(friends)});
  auto values = new_array<uint32_t>({count, static_cast<size_t>(rank_count)});
  auto totals = new_array<uint64_t>({count});
  auto pairs = new_array<uint64_t>({33});
  for (size_t bin = 0; bin < 33; ++bin) pairs.data()[bin] = 0;
  const Coactivation::Summary out{friends,    ids.data(),    counts.data(), ranks.data(),
                                  rank_count, values.data(), totals.data(), pairs.data()};
  {
    nb::gil_scoped_release released;
    bound.layer->summarise(begin, end, out, threads);
  }
  return nb::make_tuple(nb::cast(ids), nb::cast(counts), nb::cast(values), nb::cast(totals), nb::cast(pairs));
}

}  // namespace

void bind_coactivation(nb::module_& m) {
  nb::class_<Bound>(m, "Coactivation")
      .def(nb::init<const Ids16&, const Longs&, int64_t>(), nb::arg("ids").noconvert(), nb::arg("offsets").noconvert(),
           nb::arg("d_ff"))
      .def(nb::init<const Ids32&, const Longs&, int64_t>(), nb::arg("ids").noconvert(), nb::arg("offsets").noconvert(),
           nb::arg("d_ff"))
      .def("rows", &rows, nb::arg("begin"), nb::arg("end"), nb::arg("threads") = 0)
      .def("summarise", &summarise, nb::arg("begin"), nb::arg("end"), nb::arg("friends"),
           nb::arg("ranks").noconvert(), nb::arg("threads") = 0);
}

}  // namespace wb
