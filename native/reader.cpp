#include "reader.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>

#include <fcntl.h>
#include <unistd.h>

#include "aligned_buffer.h"

namespace wb {

int Lane::prepare(const PlannedRead& read, const Piece* pieces, uint8_t* buffer) {
  if (!read.in_place) {
    vectors_[0] = {bounce_, static_cast<size_t>(read.length)};
    return count_ = 1;
  }
  count_ = 0;
  int64_t at = read.offset;
  for (int64_t i = 0; i < read.count; ++i) {
    const Piece& piece = pieces[i];
    if (piece.offset > at) vectors_[count_++] = {bounce_, static_cast<size_t>(piece.offset - at)};
    vectors_[count_++] = {buffer + piece.destination, static_cast<size_t>(piece.length)};
    at = piece.offset + piece.length;
  }
  return count_;
}

// One system call for the bytes after the first `skip`. Clobbers the vectors it has passed.
ssize_t Lane::read_from(int fd, int64_t offset, int64_t skip) {
  int first = 0;
  while (skip > 0 && skip >= static_cast<int64_t>(vectors_[first].iov_len)) {
    skip -= static_cast<int64_t>(vectors_[first++].iov_len);
  }
  if (skip > 0) {
    vectors_[first].iov_base = static_cast<uint8_t*>(vectors_[first].iov_base) + skip;
    vectors_[first].iov_len -= static_cast<size_t>(skip);
  }
  if (count_ - first == 1) return pread(fd, vectors_[first].iov_base, vectors_[first].iov_len, offset);
  return preadv(fd, vectors_ + first, count_ - first, offset);
}

bool Lane::finish(const OpenFile& file, const PlannedRead& read, const Piece* pieces, uint8_t* buffer, int64_t got,
                  ReadFailure& failure) {
  while (got < read.need) {
    // Direct reads go on at an aligned place; the last part of a unit is read again.
    const int64_t from = align_down(got);
    prepare(read, pieces, buffer);
    const ssize_t more = read_from(file.fd, read.offset + from, from);
    if (more < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      describe_error(failure, file, read, errno);
      return false;
    }
    if (from + more <= got) {
      failure.kind = "short";
      failure.path = file.path;
      failure.offset = read.offset;
      failure.wanted = read.need;
      failure.got = got;
      return false;
    }
    got = from + more;
  }
  if (!read.in_place) {
    for (int64_t i = 0; i < read.count; ++i) {
      std::memcpy(buffer + pieces[i].destination, bounce_ + (pieces[i].offset - read.offset),
                  static_cast<size_t>(pieces[i].length));
    }
  }
  return true;
}

bool Lane::run(const OpenFile& file, const PlannedRead& read, const Piece* pieces, uint8_t* buffer,
               ReadFailure& failure) {
  return finish(file, read, pieces, buffer, 0, failure);
}

Lanes::Lanes(int count, int64_t chunk_bytes) : lanes_(static_cast<size_t>(count)) {
  const size_t each = static_cast<size_t>(std::min<int64_t>(kMaxIov, 2 * chunk_bytes / kUnit + 1));
  vectors_.resize(each * lanes_.size());
  bounce_bytes_ = lanes_.size() * static_cast<size_t>(chunk_bytes);
  bounce_ = static_cast<uint8_t*>(map_pages(bounce_bytes_));
  if (!bounce_) throw std::bad_alloc();
  for (size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i].bounce_ = bounce_ + i * static_cast<size_t>(chunk_bytes);
    lanes_[i].vectors_ = vectors_.data() + i * each;
  }
}

Lanes::~Lanes() { unmap_pages(bounce_, bounce_bytes_); }

void describe_error(ReadFailure& failure, const OpenFile& file, const PlannedRead& read, int error) {
  failure.kind = file.direct && error == EINVAL ? "direct" : "read";
  failure.path = file.path;
  failure.offset = read.offset;
  failure.wanted = read.length;
  failure.got = 0;
  failure.error = error;
}

Reader::Reader(const std::string& engine, int depth, int64_t chunk_bytes)
    : chunk_bytes_(chunk_bytes), owner_(getpid()) {
  if (depth < 1 || depth > 4096) throw std::invalid_argument("depth must be between 1 and 4096");
  if (chunk_bytes < kUnit || chunk_bytes % kUnit || chunk_bytes > (int64_t{1} << 30)) {
    throw std::invalid_argument("chunk_bytes must be a multiple of 4096, at most 1 GiB");
  }
  if (engine == "threads") {
    engine_ = make_threads_engine(depth, chunk_bytes);
  } else if (engine == "io_uring") {
    engine_ = make_uring_engine(depth, chunk_bytes);
  } else {
    throw std::invalid_argument("engine must be threads or io_uring");
  }
}

Reader::~Reader() {
  // A forked child has none of the threads; joining them would hang.
  if (getpid() != owner_) {
    (void)engine_.release();
  }
  for (OpenFile& file : files_) {
    if (file.fd >= 0) ::close(file.fd);
  }
}

void Reader::check_process() const {
  if (getpid() == owner_) return;
  ReadFailure failure;
  failure.kind = "fork";
  throw failure;
}

int Reader::open(const std::string& path, bool direct) {
  std::lock_guard<std::mutex> lock(mutex_);
  ReadFailure failure;
  failure.path = path;
  if (!engine_) {
    failure.kind = "closed";
    throw failure;
  }
  int flags = O_RDONLY | O_CLOEXEC;
#ifdef O_DIRECT
  if (direct) flags |= O_DIRECT;
#endif
  int fd;
  do {
    fd = ::open(path.c_str(), flags);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) {
    failure.error = errno;
    failure.kind = direct && errno == EINVAL ? "direct" : "open";
    throw failure;
  }
#ifdef F_NOCACHE
  if (direct && fcntl(fd, F_NOCACHE, 1) < 0) {
    failure.error = errno;
    failure.kind = "direct";
    ::close(fd);
    throw failure;
  }
#endif
  for (size_t i = 0; i < files_.size(); ++i) {
    if (files_[i].fd < 0) {
      files_[i] = {fd, direct, path};
      return static_cast<int>(i);
    }
  }
  files_.push_back({fd, direct, path});
  return static_cast<int>(files_.size()) - 1;
}

void Reader::close_file(int handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (handle < 0 || handle >= static_cast<int>(files_.size()) || files_[handle].fd < 0) {
    throw std::invalid_argument("no open file has this handle");
  }
  ::close(files_[handle].fd);
  files_[handle].fd = -1;
}

void Reader::close() {
  check_process();
  std::lock_guard<std::mutex> lock(mutex_);
  engine_.reset();
  for (OpenFile& file : files_) {
    if (file.fd >= 0) ::close(file.fd);
  }
  files_.clear();
}

ReadTotals Reader::read(int handle, const int64_t* offsets, const int64_t* lengths, const int64_t* destinations,
                        int64_t count, uint8_t* buffer, int64_t gap_bytes) {
  check_process();
  std::lock_guard<std::mutex> lock(mutex_);
  const auto start = std::chrono::steady_clock::now();
  if (!engine_ || handle < 0 || handle >= static_cast<int>(files_.size()) || files_[handle].fd < 0) {
    ReadFailure failure;
    failure.kind = "closed";
    throw failure;
  }
  plan_.make(offsets, lengths, destinations, count, gap_bytes, chunk_bytes_);
  ReadFailure failure;
  if (!plan_.reads().empty()) engine_->run(files_[handle], plan_, buffer, failure);
  if (failure.kind) throw failure;
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return {plan_.bytes(), static_cast<int64_t>(plan_.reads().size()), elapsed.count()};
}

}  // namespace wb
