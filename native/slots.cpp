#include "slots.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace wb {

namespace {

// The stamp of neurons that only forgotten tokens predicted: older than any window reaches.
constexpr int64_t kNever = INT64_MIN / 2;

}  // namespace

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
  const int64_t oldest = window < 0 ? kNever + 1 : clock_ - window;
  while (!tokens_.empty() && tokens_.front().stamp < oldest) drop_oldest(INT64_MAX);
  for (int64_t i = 0; i < count; ++i) {
    last_used_[predicted[i]] = clock_;
    if (slot_of_[predicted[i]] < 0) change_.load_ids.push_back(predicted[i]);
  }
  // Every resident neuron is in the list of the token that predicted it last, so this ends with room enough.
  const int64_t wanted = used_ + static_cast<int64_t>(change_.load_ids.size());
  while (wanted - static_cast<int64_t>(holes_.size()) > capacity_) {
    const int64_t evicted = change_.evicted;
    drop_oldest(wanted - static_cast<int64_t>(holes_.size()) - capacity_);
    change_.trimmed += change_.evicted > evicted;
  }
  place();
  if (count) remember(predicted, count);
  change_.rows.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) change_.rows[i] = slot_of_[predicted[i]];
  return change_;
}

std::vector<int32_t> SlotTable::missing(const int32_t* ids, int64_t count, int64_t window) const {
  std::vector<int32_t> found;
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= d_ff_) throw std::invalid_argument("neurons are not in [0, d_ff)");
    if (slot_of_[ids[i]] < 0 || (window >= 0 && last_used_[ids[i]] <= clock_ - window)) found.push_back(ids[i]);
  }
  return found;
}

void SlotTable::rewind(int64_t count) {
  const int64_t kept = clock_ - count;
  std::vector<int32_t> left;
  while (!tokens_.empty() && tokens_.back().stamp > kept) {
    left.insert(left.end(), tokens_.back().ids.begin(), tokens_.back().ids.end());
    spare_.push_back(std::move(tokens_.back().ids));
    tokens_.pop_back();
  }
  clock_ = kept;
  for (const int32_t id : left) last_used_[id] = kNever;
  for (const TokenList& token : tokens_) {
    for (const int32_t id : token.ids) last_used_[id] = token.stamp;
  }
  if (!tokens_.empty() && tokens_.front().stamp == kNever) {
    left.insert(left.end(), tokens_.front().ids.begin(), tokens_.front().ids.end());
    spare_.push_back(std::move(tokens_.front().ids));
    tokens_.pop_front();
  }
  std::sort(left.begin(), left.end());
  left.erase(std::unique(left.begin(), left.end()), left.end());
  const auto kept_by_another = [&](int32_t id) { return last_used_[id] != kNever; };
  left.erase(std::remove_if(left.begin(), left.end(), kept_by_another), left.end());
  if (left.empty()) return;
  tokens_.push_front({kNever, std::move(left)});
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

// At most `most` neurons of the oldest token leave. Those that a later token predicted too stay: they are in its list.
void SlotTable::drop_oldest(int64_t most) {
  TokenList& oldest = tokens_.front();
  size_t at = 0;
  for (; at < oldest.ids.size() && most > 0; ++at) {
    const int32_t id = oldest.ids[at];
    if (last_used_[id] != oldest.stamp) continue;
    const int32_t slot = slot_of_[id];
    slot_of_[id] = -1;
    arrays_.pointer[slot] = -1;
    holes_.push_back(slot);
    ++change_.evicted;
    --most;
  }
  if (at < oldest.ids.size()) {
    oldest.ids.erase(oldest.ids.begin(), oldest.ids.begin() + static_cast<ptrdiff_t>(at));
    return;
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
