#include "plan.h"

#include <algorithm>

namespace wb {

namespace {

bool before(const Piece& a, const Piece& b) {
  if (a.offset != b.offset) return a.offset < b.offset;
  if (a.length != b.length) return a.length < b.length;
  return a.destination < b.destination;
}

}  // namespace

void Plan::make(const int64_t* offsets, const int64_t* lengths, const int64_t* destinations, int64_t count,
                int64_t gap_bytes, int64_t chunk_bytes) {
  pieces_.clear();
  reads_.clear();
  bytes_ = 0;
  cut(offsets, lengths, destinations, count, chunk_bytes);
  if (gap_bytes >= 0 && !std::is_sorted(pieces_.begin(), pieces_.end(), before)) {
    std::sort(pieces_.begin(), pieces_.end(), before);
  }
  merge(gap_bytes, chunk_bytes);
  for (PlannedRead& read : reads_) {
    read.in_place = lands_in_place(read);
    bytes_ += read.length;
  }
}

// Cut along the aligned cover, so that every piece's own cover is at most chunk_bytes long.
void Plan::cut(const int64_t* offsets, const int64_t* lengths, const int64_t* destinations, int64_t count,
               int64_t chunk_bytes) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t end = offsets[i] + lengths[i];
    int64_t at = offsets[i];
    int64_t limit = align_down(at) + chunk_bytes;
    while (at < end) {
      const int64_t stop = std::min(end, limit);
      pieces_.push_back({at, stop - at, destinations[i] + (at - offsets[i])});
      at = stop;
      limit += chunk_bytes;
    }
  }
}

void Plan::merge(int64_t gap_bytes, int64_t chunk_bytes) {
  for (int64_t i = 0; i < static_cast<int64_t>(pieces_.size()); ++i) {
    const Piece& piece = pieces_[i];
    const int64_t start = align_down(piece.offset);
    const int64_t end = align_up(piece.offset + piece.length);
    if (gap_bytes >= 0 && !reads_.empty()) {
      PlannedRead& last = reads_.back();
      const int64_t merged_end = std::max(last.offset + last.length, end);
      if (start - (last.offset + last.length) <= gap_bytes && merged_end - last.offset <= chunk_bytes) {
        last.length = merged_end - last.offset;
        last.need = std::max(last.need, piece.offset + piece.length - last.offset);
        ++last.count;
        continue;
      }
    }
    reads_.push_back({start, end - start, piece.offset + piece.length - start, i, 1, false});
  }
}

bool Plan::lands_in_place(const PlannedRead& read) const {
  int64_t at = read.offset;
  int64_t vectors = 0;
  for (const Piece *piece = pieces(read), *end = piece + read.count; piece != end; ++piece) {
    if ((piece->offset | piece->length | piece->destination) & (kUnit - 1)) return false;
    if (piece->offset < at) return false;  // two pieces want the same bytes
    vectors += piece->offset > at ? 2 : 1;
    at = piece->offset + piece->length;
  }
  return vectors <= kMaxIov;
}

}  // namespace wb
