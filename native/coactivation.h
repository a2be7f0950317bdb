// Exact co-activation of a layer: how many tokens each pair of neurons is active in together.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace wb {

// The active neurons of each token, as they were captured, and the same by neuron.
//
// A row of the pair counts is made on its own, so that the whole matrix never has to exist, in one of two ways. A
// neuron that is active in few tokens walks their active neurons and counts them up. One that is active in many has its
// tokens as bits, which are ANDed with each other neuron's and counted; several such rows share a pass over the bits.
class Coactivation {
 public:
  // ids of token t, sorted and each once: ids[offsets[t] .. offsets[t + 1]). Both are copied.
  Coactivation(const void* ids, bool wide, const int64_t* offsets, int64_t tokens, int64_t d_ff);

  int64_t tokens() const { return tokens_; }
  int64_t d_ff() const { return d_ff_; }

  // out[(row - begin) * d_ff + j]: tokens in which neurons `row` and j are both active; j = row gives its own count.
  void rows(int64_t begin, int64_t end, uint32_t* out, int threads);

  // What is kept of rows [begin, end), the neuron itself left out of each row.
  struct Summary {
    int64_t friends;            // how many of each neuron's closest friends to keep
    int32_t* friend_ids;        // [rows, friends], by count and then by id; -1 where no other is ever active with it
    uint32_t* friend_counts;    // [rows, friends]
    const int64_t* ranks;       // ascending, each 1 .. d_ff - 1
    int64_t rank_count;
    uint32_t* rank_values;      // [rows, rank_count]: the count of the friend of that rank
    uint64_t* totals;           // [rows]: sum of the row
    uint64_t* pairs_by_count;   // [33], added to: pairs with count 0, then 1, 2..3, 4..7 and so on
  };
  void summarise(int64_t begin, int64_t end, const Summary& out, int threads);

 private:
  template <class Visit>
  void for_rows(int64_t begin, int64_t end, int threads, const Visit& visit);
  template <class Id, class Count>
  void count_up(int64_t row, Count* counts) const;
  void make_bits();
  bool by_bits(int64_t row) const;

  std::vector<uint8_t> ids_;  // uint32 when wide, else uint16
  bool wide_;
  std::vector<int64_t> offsets_;
  int64_t tokens_, d_ff_, words_;  // words_: 64-bit words of a neuron's bits
  std::vector<int64_t> starts_;      // [d_ff + 1], into when_
  std::vector<uint32_t> when_;       // the tokens of each neuron
  std::vector<int64_t> steps_;       // [d_ff]: ids that counting up a row visits
  std::unique_ptr<uint64_t[]> bits_;  // [d_ff, words_], made when a row first needs them
};

}  // namespace wb
