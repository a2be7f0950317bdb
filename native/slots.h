// The paper's DRAM structure (section 3.3): which neuron sits in which slot, kept contiguous and in O(changed).
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

namespace wb {

// Arrays that belong to the caller: `capacity` slots of slot_bytes, their neuron ids and biases; biases of all neurons.
// `matrix` is null where the slots are in memory that is not ours: the caller then makes the moves.
struct SlotArrays {
  uint8_t* matrix;
  int32_t* pointer;
  float* slot_bias;
  const float* bias;
};

struct SlotChange {
  std::vector<int32_t> rows, load_ids, load_slots;
  std::vector<int32_t> moves;  // from, to, from, to ...
  int64_t evicted = 0, trimmed = 0;
};

class SlotTable {
 public:
  SlotTable(int32_t d_ff, int32_t capacity, int64_t slot_bytes, SlotArrays arrays);

  // One token. `predicted` is sorted and unique. Neurons last predicted more than `window` tokens ago leave; when there
  // is no room the oldest tokens' neurons leave first, no more of them than have to. window < 0: nothing leaves for its
  // age. The result is valid until the next call. std::invalid_argument, with nothing changed, for bad input.
  const SlotChange& update(const int32_t* predicted, int64_t count, int64_t window);
  // Those of `ids` that the next token's update would have to load. Changes nothing.
  std::vector<int32_t> missing(const int32_t* ids, int64_t count, int64_t window) const;
  // As if the newest `count` tokens had not been: the tokens before them keep their age, and neurons that no kept token
  // predicted are the first to leave, at the next update.
  void rewind(int64_t count);
  void clear();
  int32_t used() const { return used_; }
  int64_t clock() const { return clock_; }  // tokens so far
  int32_t capacity() const { return capacity_; }

 private:
  struct TokenList {
    int64_t stamp;
    std::vector<int32_t> ids;
  };

  void check(const int32_t* predicted, int64_t count) const;
  void remember(const int32_t* predicted, int64_t count);
  void drop_oldest(int64_t most);
  void place();
  void put(int32_t slot, int32_t id);

  const int32_t d_ff_, capacity_;
  const int64_t slot_bytes_;
  const SlotArrays arrays_;
  int32_t used_ = 0;
  int64_t clock_ = 0;
  std::vector<int32_t> slot_of_;    // by neuron: its slot, or -1
  std::vector<int64_t> last_used_;  // by neuron: the token that predicted it last
  std::deque<TokenList> tokens_;    // oldest first; the paper's last_k_active
  std::vector<std::vector<int32_t>> spare_;
  std::vector<int32_t> holes_;
  SlotChange change_;
};

}  // namespace wb
