#include "slots.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace wb {

SlotTable::SlotTable(int32_t d_ff, int32_t capacity, int64_t slot_bytes, SlotArrays arrays)
    : d_ff_(d_ff),
      capacity_(capacity),
      slot_bytes_(slot_bytes),
      arrays_(arrays),
      slot_of_(static_cast<size_t>(d_ff), -1),
      last_used_(static_cast<size_t>(d_ff), 0) {
  std::fill_n(arrays_.pointer, capacity_, -1);
  std::fill_n(arrays_.slot_bias, capacity_, 0.0f);
}

void SlotTable::check(const int32_t* predicted, int64_t count) const {
  if (count > capacity_) {
    throw std::invalid_argument("more neurons are predicted for one token than there are slots");
  }
  int32_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (predicted[i] <= last || predicted[i] >= d_ff_) {
      throw std::invalid_argument("predicted neurons are not sorted, unique and in [0, d_ff)");
    }
    last = predicted[i];
  }
}

const SlotChange& SlotTable::update(const int32_t* predicted, int64_t count, int64_t window) {
  check(predicted, count);
  change_.load_ids.clear();
  change_.moves.clear();
  change_.evicted = change_.trimmed = 0;
  holes_.clear();
  ++clock_;
  // Before anything is looked up: the window is the k tokens before this one, not one more.
  if (window >= 0) {
    while (!tokens_.empty() && tokens_.front().stamp < clock_ - window) drop_oldest();
  }
  for (int64_t i = 0; i < count; ++i) {
    last_used_[predicted[i]] = clock_;
    if (slot_of_[predicted[i]] < 0) change_.load_ids.push_back(predicted[i]);
  }
  // Every resident neuron is in the list of the token that predicted it last, so this ends with room enough.
  while (used_ - static_cast<int64_t>(holes_.size()) + static_cast<int64_t>(change_.load_ids.size()) > capacity_) {
    const int64_t evicted = change_.evicted;
    drop_oldest();
    change_.trimmed += change_.evicted > evicted;
  }
  place();
  if (count) remember(predicted, count);
  change_.rows.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) change_.rows[i] = slot_of_[predicted[i]];
  return change_;
}

void SlotTable::remember(const int32_t* predicted, int64_t count) {
  std::vector<int32_t> ids;
  if (!spare_.empty()) {
    ids = std::move(spare_.back());
    spare_.pop_back();
  }
  ids.assign(predicted, predicted + count);
  tokens_.push_back({clock_, std::move(ids)});
}

// Neurons that a later token predicted too stay; they are in that token's list.
void SlotTable::drop_oldest() {
  TokenList& oldest = tokens_.front();
  for (const int32_t id : oldest.ids) {
    if (last_used_[id] != oldest.stamp) continue;
    const int32_t slot = slot_of_[id];
    slot_of_[id] = -1;
    arrays_.pointer[slot] = -1;
    holes_.push_back(slot);
    ++change_.evicted;
  }
  spare_.push_back(std::move(oldest.ids));
  tokens_.pop_front();
}

// New neurons go into the holes, then to the end; holes that remain are filled from the end, so that no hole is left.
void SlotTable::place() {
  std::sort(holes_.begin(), holes_.end());
  const std::vector<int32_t>& load = change_.load_ids;
  const int32_t was_used = used_;
  used_ = was_used - static_cast<int32_t>(holes_.size()) + static_cast<int32_t>(load.size());
  change_.load_slots.clear();
  size_t hole = 0;
  int32_t end = was_used;
  for (const int32_t id : load) {
    const int32_t slot = hole < holes_.size() ? holes_[hole++] : end++;
    put(slot, id);
    change_.load_slots.push_back(slot);
  }
  int32_t source = std::min(used_, was_used);
  for (; hole < holes_.size() && holes_[hole] < used_; ++hole) {
    while (arrays_.pointer[source] < 0) ++source;
    if (arrays_.matrix) {
      std::memcpy(arrays_.matrix + holes_[hole] * slot_bytes_, arrays_.matrix + source * slot_bytes_,
                  static_cast<size_t>(slot_bytes_));
    }
    change_.moves.push_back(source);
    change_.moves.push_back(holes_[hole]);
    put(holes_[hole], arrays_.pointer[source]);
    arrays_.pointer[source++] = -1;
  }
}

void SlotTable::put(int32_t slot, int32_t id) {
  arrays_.pointer[slot] = id;
  arrays_.slot_bias[slot] = arrays_.bias[id];
  slot_of_[id] = slot;
}

void SlotTable::clear() {
  std::fill_n(arrays_.pointer, used_, -1);
  for (TokenList& token : tokens_) {
    for (const int32_t id : token.ids) slot_of_[id] = -1;
    spare_.push_back(std::move(token.ids));
  }
  tokens_.clear();
  used_ = 0;
}

}  // namespace wb
