// Which reads serve a batch of requests. workbench/flash/reader.py has the same rules in Python.
#pragma once

#include <cstdint>
#include <vector>

namespace wb {

constexpr int64_t kUnit = 4096;    // alignment of direct reads: offset, length and address
constexpr int64_t kMaxIov = 1024;  // IOV_MAX of Linux and macOS

constexpr int64_t align_down(int64_t value) { return value & ~(kUnit - 1); }
constexpr int64_t align_up(int64_t value) { return align_down(value + kUnit - 1); }

// Bytes somebody asked for; a request longer than chunk_bytes becomes several.
struct Piece {
  int64_t offset;
  int64_t length;
  int64_t destination;
};

// One read of the kernel. It serves pieces [first, first + count), in order of offset.
struct PlannedRead {
  int64_t offset;
  int64_t length;
  int64_t need;  // bytes from `offset` that some piece wants; the rest is alignment and may lie past the end of file
  int64_t first;
  int64_t count;
  bool in_place;  // lands in the caller's buffer; otherwise goes through a bounce buffer
};

// Vectors are kept from batch to batch, so that a steady state allocates nothing.
class Plan {
 public:
  // gap_bytes < 0: a read for each piece, in the order given. Otherwise pieces are sorted by offset and merged while
  // at most gap_bytes lie between their covers and the merged read is no longer than chunk_bytes.
  void make(const int64_t* offsets, const int64_t* lengths, const int64_t* destinations, int64_t count,
            int64_t gap_bytes, int64_t chunk_bytes);

  int64_t bytes() const { return bytes_; }
  const std::vector<PlannedRead>& reads() const { return reads_; }
  const Piece* pieces(const PlannedRead& read) const { return pieces_.data() + read.first; }

 private:
  void cut(const int64_t* offsets, const int64_t* lengths, const int64_t* destinations, int64_t count,
           int64_t chunk_bytes);
  void merge(int64_t gap_bytes, int64_t chunk_bytes);
  bool lands_in_place(const PlannedRead& read) const;

  std::vector<Piece> pieces_;
  std::vector<PlannedRead> reads_;
  int64_t bytes_ = 0;
};

}  // namespace wb
