#include "coactivation.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "thread_pool.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define WB_COUNT_AVX2
#endif

namespace wb {

namespace {

constexpr int64_t kWordsPerVector = 4;  // bit rows are padded to whole vectors
// Rows that share a pass over the bits of all neurons. Their own bits stay in the first-level cache.
constexpr int kGroup = 8;
// Ids counted up in the time that one word of two bit rows is ANDed and counted: measured between 0.3 and 1 on AMD and
// Intel. At 16,384 neurons, 3% active and 10,000 tokens, bits alone take ten times as long, counting up alone as long as
// both; at 12% active both together are a quarter faster than either.
constexpr double kIdsPerWord = 0.6;
// Fewer tokens than this are counted in 16 bits, so that a row of counts fits the first-level cache.
constexpr int64_t kNarrowTokens = 1 << 16;

uint32_t common_plain(const uint64_t* a, const uint64_t* b, int64_t words) {
  uint64_t count = 0;
  for (int64_t w = 0; w < words; ++w) count += static_cast<uint64_t>(__builtin_popcountll(a[w] & b[w]));
  return static_cast<uint32_t>(count);
}

#ifdef WB_COUNT_AVX2
// Bits of each half byte from a table. A byte of `sums` takes at most 8 from each vector, so up to 31 of them fit.
__attribute__((target("avx2"))) uint32_t common_avx2(const uint64_t* a, const uint64_t* b, int64_t words) {
  const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2,
                                         2, 3, 2, 3, 3, 4);
  const __m256i low = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
  __m256i total = zero;
  for (int64_t w = 0; w < words;) {
    const int64_t last = std::min(words, w + 31 * kWordsPerVector);
    __m256i sums = zero;
    for (; w < last; w += kWordsPerVector) {
      const __m256i both = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + w)),
                                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + w)));
      const __m256i lower = _mm256_shuffle_epi8(table, _mm256_and_si256(both, low));
      const __m256i upper = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
      sums = _mm256_add_epi8(sums, _mm256_add_epi8(lower, upper));
    }
    total = _mm256_add_epi64(total, _mm256_sad_epu8(sums, zero));
  }
  uint64_t parts[4];
  std::memcpy(parts, &total, sizeof parts);
  return static_cast<uint32_t>(parts[0] + parts[1] + parts[2] + parts[3]);
}
#endif

using Common = uint32_t (*)(const uint64_t*, const uint64_t*, int64_t);
Common best_common() {
#ifdef WB_COUNT_AVX2
  if (__builtin_cpu_supports("avx2")) return common_avx2;
#endif
  return common_plain;
}

int bin_of(uint32_t count) { return count ? 32 - __builtin_clz(count) : 0; }

struct Work {
  std::vector<uint32_t> histogram;
  std::vector<uint64_t> pairs;
  std::vector<uint32_t> counts;
  std::vector<uint16_t> narrow;
};

// One row into its summary. counts[row] is the neuron's own and is left out.
void summarise_row(int64_t row, int64_t at, const uint32_t* counts, int64_t d_ff, const Coactivation::Summary& out,
                   Work& work) {
  const uint32_t own = counts[row];  // no pair has more
  auto& histogram = work.histogram;
  if (histogram.size() < static_cast<size_t>(own) + 1) histogram.resize(static_cast<size_t>(own) + 1);
  std::fill_n(histogram.begin(), static_cast<size_t>(own) + 1, 0u);
  uint64_t total = 0;
  for (int64_t j = 0; j < d_ff; ++j) {
    ++histogram[counts[j]];
    total += counts[j];
  }
  --histogram[own];
  out.totals[at] = total - own;

  // From the highest count down: `above` friends have more than `value`.
  const int64_t wanted = std::min(out.friends, d_ff - 1);
  uint32_t least = 0;  // the count of the last friend that is kept
  int64_t above_least = 0, above = 0, next = 0;
  bool found = wanted == 0;
  for (int64_t value = own; value >= 0; --value) {
    const int64_t here = histogram[static_cast<size_t>(value)];
    if (!here) continue;
    work.pairs[static_cast<size_t>(bin_of(static_cast<uint32_t>(value)))] += static_cast<uint64_t>(here);
    if (!found && above + here >= wanted) {
      found = true;
      least = static_cast<uint32_t>(value);
      above_least = above;
    }
    above += here;
    for (; next < out.rank_count && out.ranks[next] <= above; ++next) {
      out.rank_values[at * out.rank_count + next] = static_cast<uint32_t>(value);
    }
  }

  int32_t* ids = out.friend_ids + at * out.friends;
  uint32_t* kept = out.friend_counts + at * out.friends;
  int64_t more = 0, equal = above_least;
  for (int64_t j = 0; j < d_ff && (more < above_least || equal < wanted); ++j) {
    const uint32_t count = counts[j];
    if (count < least || !count || j == row) continue;
    int64_t place = -1;
    if (count > least) {  // into its place among those before it; equal counts stay in order of ids
      place = more++;
      for (; place > 0 && kept[place - 1] < count; --place) {
        kept[place] = kept[place - 1];
        ids[place] = ids[place - 1];
      }
    } else if (equal < wanted) {
      place = equal++;
    }
    if (place < 0) continue;
    kept[place] = count;
    ids[place] = static_cast<int32_t>(j);
  }
}

}  // namespace

Coactivation::Coactivation(const void* ids, bool wide, const int64_t* offsets, int64_t tokens, int64_t d_ff)
    : ids_(static_cast<const uint8_t*>(ids), static_cast<const uint8_t*>(ids) + offsets[tokens] * (wide ? 4 : 2)),
      wide_(wide),
      offsets_(offsets, offsets + tokens + 1),
      tokens_(tokens),
      d_ff_(d_ff),
      words_((tokens + 64 * kWordsPerVector - 1) / (64 * kWordsPerVector) * kWordsPerVector),
      starts_(static_cast<size_t>(d_ff) + 1, 0),
      when_(static_cast<size_t>(offsets[tokens])),
      steps_(static_cast<size_t>(d_ff), 0) {
  const auto id = [&](int64_t i) -> size_t {
    return wide_ ? reinterpret_cast<const uint32_t*>(ids_.data())[i] : reinterpret_cast<const uint16_t*>(ids_.data())[i];
  };
  for (int64_t i = 0; i < offsets[tokens]; ++i) ++starts_[id(i) + 1];
  for (size_t n = 0; n < static_cast<size_t>(d_ff); ++n) starts_[n + 1] += starts_[n];
  std::vector<int64_t> at(starts_.begin(), starts_.end() - 1);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = offsets[t]; i < offsets[t + 1]; ++i) {
      when_[static_cast<size_t>(at[id(i)]++)] = static_cast<uint32_t>(t);
      steps_[id(i)] += offsets[t + 1] - offsets[t];
    }
  }
}

bool Coactivation::by_bits(int64_t row) const {
  return static_cast<double>(steps_[static_cast<size_t>(row)]) >
         kIdsPerWord * static_cast<double>(d_ff_) * static_cast<double>(words_);
}

void Coactivation::make_bits() {
  const size_t words = static_cast<size_t>(words_);
  bits_.reset(new uint64_t[static_cast<size_t>(d_ff_) * words]());
  for (size_t n = 0; n < static_cast<size_t>(d_ff_); ++n) {
    for (int64_t i = starts_[n]; i < starts_[n + 1]; ++i) {
      const uint32_t t = when_[static_cast<size_t>(i)];
      bits_[n * words + t / 64] |= uint64_t{1} << (t % 64);
    }
  }
}

template <class Id, class Count>
void Coactivation::count_up(int64_t row, Count* counts) const {
  const Id* ids = reinterpret_cast<const Id*>(ids_.data());
  std::memset(counts, 0, static_cast<size_t>(d_ff_) * sizeof(Count));
  const size_t n = static_cast<size_t>(row);
  for (int64_t i = starts_[n]; i < starts_[n + 1]; ++i) {
    const uint32_t t = when_[static_cast<size_t>(i)];
    const Id* p = ids + offsets_[t];
    const Id* const end = ids + offsets_[static_cast<size_t>(t) + 1];
    for (; p + 4 <= end; p += 4) {  // ids of a token differ, so that these do not wait for each other
      ++counts[p[0]];
      ++counts[p[1]];
      ++counts[p[2]];
      ++counts[p[3]];
    }
    for (; p < end; ++p) ++counts[*p];
  }
}

// visit(row, counts, work) for each row, from several threads, each with a `work` of its own.
template <class Visit>
void Coactivation::for_rows(int64_t begin, int64_t end, int threads, const Visit& visit) {
  std::vector<int64_t> few, many;
  for (int64_t row = begin; row < end; ++row) (by_bits(row) ? many : few).push_back(row);
  if (!many.empty() && !bits_) make_bits();
  const int64_t groups = (static_cast<int64_t>(many.size()) + kGroup - 1) / kGroup;
  const int64_t jobs = groups + static_cast<int64_t>(few.size());
  const Common common = best_common();
  std::atomic<int64_t> next{0};
  const size_t d_ff = static_cast<size_t>(d_ff_);
  threads = static_cast<int>(std::min<int64_t>(threads ? threads : available_cores(), std::max<int64_t>(jobs, 1)));
  // Memory is taken before the threads begin: an exception must not leave one of them.
  std::vector<Work> works(static_cast<size_t>(threads));
  uint32_t most = 0;
  for (int64_t row = begin; row < end; ++row) {
    const size_t n = static_cast<size_t>(row);
    most = std::max(most, static_cast<uint32_t>(starts_[n + 1] - starts_[n]));
  }
  for (auto& work : works) {
    work.counts.resize(d_ff * (groups ? kGroup : 1));
    if (tokens_ < kNarrowTokens) work.narrow.resize(d_ff);
    work.histogram.resize(static_cast<size_t>(most) + 1);
    work.pairs.assign(33, 0);
  }
  parallel(threads, [&](int index, int) {
    Work& work = works[static_cast<size_t>(index)];
    for (int64_t job; (job = next.fetch_add(1, std::memory_order_relaxed)) < jobs;) {
      if (job < groups) {
        const size_t first = static_cast<size_t>(job) * kGroup, last = std::min(many.size(), first + kGroup);
        for (size_t j = 0; j < d_ff; ++j) {
          const uint64_t* other = bits_.get() + j * static_cast<size_t>(words_);
          for (size_t g = first; g < last; ++g) {
            work.counts[(g - first) * d_ff + j] =
                common(bits_.get() + static_cast<size_t>(many[g]) * static_cast<size_t>(words_), other, words_);
          }
        }
        for (size_t g = first; g < last; ++g) visit(many[g], work.counts.data() + (g - first) * d_ff, work);
        continue;
      }
      const int64_t row = few[static_cast<size_t>(job - groups)];
      if (tokens_ < kNarrowTokens) {
        wide_ ? count_up<uint32_t>(row, work.narrow.data()) : count_up<uint16_t>(row, work.narrow.data());
        std::copy(work.narrow.begin(), work.narrow.end(), work.counts.begin());
      } else {
        wide_ ? count_up<uint32_t>(row, work.counts.data()) : count_up<uint16_t>(row, work.counts.data());
      }
      visit(row, work.counts.data(), work);
    }
  });
  for (const auto& work : works) visit.finish(work);
}

void Coactivation::rows(int64_t begin, int64_t end, uint32_t* out, int threads) {
  struct Copy {
    int64_t begin, d_ff;
    uint32_t* out;
    void operator()(int64_t row, const uint32_t* counts, Work&) const {
      std::memcpy(out + (row - begin) * d_ff, counts, static_cast<size_t>(d_ff) * sizeof *counts);
    }
    void finish(const Work&) const {}
  };
  for_rows(begin, end, threads, Copy{begin, d_ff_, out});
}

void Coactivation::summarise(int64_t begin, int64_t end, const Summary& out, int threads) {
  struct Reduce {
    int64_t begin, d_ff;
    const Summary& out;
    void operator()(int64_t row, const uint32_t* counts, Work& work) const {
      summarise_row(row, row - begin, counts, d_ff, out, work);
    }
    void finish(const Work& work) const {
      for (size_t bin = 0; bin < work.pairs.size(); ++bin) out.pairs_by_count[bin] += work.pairs[bin];
    }
  };
  std::fill_n(out.friend_ids, (end - begin) * out.friends, -1);
  std::fill_n(out.friend_counts, (end - begin) * out.friends, 0u);
  for_rows(begin, end, threads, Reduce{begin, d_ff_, out});
}

}  // namespace wb
