// Batches of byte ranges of a file, read into a caller's buffer with many reads in flight.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <sys/types.h>
#include <sys/uio.h>

#include "plan.h"

namespace wb {

// kind: "open", "direct" (direct I/O refused), "read", "short", "io_uring", "closed", "fork".
struct ReadFailure : std::exception {
  const char* kind = nullptr;  // nullptr: no failure
  std::string path;
  int64_t offset = 0, wanted = 0, got = 0;
  int error = 0;

  const char* what() const noexcept override { return kind ? kind : "no failure"; }
};

struct OpenFile {
  int fd = -1;
  bool direct = false;
  std::string path;
};

// What one read in flight needs besides the caller's buffer; allocated once.
class Lane {
 public:
  // Where `read` puts its bytes; gaps go to the bounce buffer, which nobody looks at then.
  int prepare(const PlannedRead& read, const Piece* pieces, uint8_t* buffer);
  const iovec* vectors() const { return vectors_; }

  // After `got` bytes have come: read what is still missing, copy out of the bounce buffer. False: `failure` is set.
  bool finish(const OpenFile& file, const PlannedRead& read, const Piece* pieces, uint8_t* buffer, int64_t got,
              ReadFailure& failure);
  bool run(const OpenFile& file, const PlannedRead& read, const Piece* pieces, uint8_t* buffer, ReadFailure& failure);

 private:
  friend class Lanes;
  ssize_t read_from(int fd, int64_t offset, int64_t skip);

  uint8_t* bounce_ = nullptr;
  iovec* vectors_ = nullptr;
  int count_ = 0;
};

class Lanes {
 public:
  Lanes(int count, int64_t chunk_bytes);
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;
  Lane& operator[](size_t i) { return lanes_[i]; }

 private:
  std::vector<Lane> lanes_;
  std::vector<iovec> vectors_;
  uint8_t* bounce_ = nullptr;
  size_t bounce_bytes_ = 0;
};

void describe_error(ReadFailure& failure, const OpenFile& file, const PlannedRead& read, int error);

class Engine {
 public:
  virtual ~Engine() = default;
  // Returns when no read is in flight any more, whatever happened.
  virtual void run(const OpenFile& file, const Plan& plan, uint8_t* buffer, ReadFailure& failure) = 0;
};

std::unique_ptr<Engine> make_threads_engine(int depth, int64_t chunk_bytes);
std::unique_ptr<Engine> make_uring_engine(int depth, int64_t chunk_bytes);  // throws ReadFailure "io_uring"

struct ReadTotals {
  int64_t bytes = 0, reads = 0;
  double seconds = 0;
};

// Calls from several threads are served one after the other.
class Reader {
 public:
  Reader(const std::string& engine, int depth, int64_t chunk_bytes);
  ~Reader();
  int open(const std::string& path, bool direct);
  void close_file(int handle);
  void close();
  ReadTotals read(int handle, const int64_t* offsets, const int64_t* lengths, const int64_t* destinations,
                  int64_t count, uint8_t* buffer, int64_t gap_bytes);

 private:
  void check_process() const;

  std::mutex mutex_;
  std::unique_ptr<Engine> engine_;
  std::vector<OpenFile> files_;
  Plan plan_;
  int64_t chunk_bytes_;
  pid_t owner_;
};

}  // namespace wb
