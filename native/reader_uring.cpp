// io_uring: `depth` reads in flight from the calling thread, through the raw system calls.
#include "reader.h"

#include <cerrno>

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#define WB_HAVE_URING 1
#endif
#endif

#ifdef WB_HAVE_URING

#include <algorithm>
#include <cstring>

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

// Absent from the headers of older distributions; the kernel refuses what it does not know.
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#endif

namespace wb {

namespace {

// The submission and completion queues that are shared with the kernel.
class Ring {
 public:
  explicit Ring(unsigned entries) {
    io_uring_params params;
    // Completions need no interrupt of this thread: it is about to ask for them.
    for (const unsigned flags : {IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN, 0U}) {
      std::memset(&params, 0, sizeof params);
      params.flags = flags;
      fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
      if (fd_ >= 0 || errno != EINVAL) break;
    }
    if (fd_ < 0) fail(errno);
    sq_bytes_ = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    cq_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    sqe_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    sq_ = map(sq_bytes_, IORING_OFF_SQ_RING);
    cq_ = map(cq_bytes_, IORING_OFF_CQ_RING);
    sqes_ = reinterpret_cast<io_uring_sqe*>(map(sqe_bytes_, IORING_OFF_SQES));
    sq_tail_ = at<unsigned>(sq_, params.sq_off.tail);
    sq_mask_ = *at<unsigned>(sq_, params.sq_off.ring_mask);
    sq_array_ = at<unsigned>(sq_, params.sq_off.array);
    cq_head_ = at<unsigned>(cq_, params.cq_off.head);
    cq_tail_ = at<unsigned>(cq_, params.cq_off.tail);
    cq_mask_ = *at<unsigned>(cq_, params.cq_off.ring_mask);
    cqes_ = at<io_uring_cqe>(cq_, params.cq_off.cqes);
  }

  ~Ring() { release(); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // The next submission entry, cleared. Never more than `depth` are outstanding, so there is always one.
  io_uring_sqe* next() {
    const unsigned index = (*sq_tail_ + queued_) & sq_mask_;
    sq_array_[index] = index;
    ++queued_;
    std::memset(&sqes_[index], 0, sizeof(io_uring_sqe));
    return &sqes_[index];
  }

  // Submit what is queued and wait for `wait` completions. 0, or an errno with what is left still queued.
  int enter(unsigned wait) {
    __atomic_store_n(sq_tail_, *sq_tail_ + queued_, __ATOMIC_RELEASE);
    unsubmitted_ += queued_;
    queued_ = 0;
    const long done =
        syscall(__NR_io_uring_enter, fd_, unsubmitted_, wait, wait ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
    if (done < 0) return errno;
    unsubmitted_ -= static_cast<unsigned>(done);
    return 0;
  }

  // Take back what the kernel has not accepted; their number.
  unsigned withdraw() {
    const unsigned count = unsubmitted_;
    __atomic_store_n(sq_tail_, *sq_tail_ - count, __ATOMIC_RELEASE);
    unsubmitted_ = 0;
    return count;
  }

  template <class F>
  unsigned reap(F&& each) {
    unsigned head = *cq_head_;
    const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    const unsigned count = tail - head;
    for (; head != tail; ++head) each(cqes_[head & cq_mask_].user_data, cqes_[head & cq_mask_].res);
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    return count;
  }

 private:
  template <class T>
  static T* at(uint8_t* base, unsigned offset) {
    return reinterpret_cast<T*>(base + offset);
  }

  uint8_t* map(size_t bytes, off_t what) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, what);
    if (memory == MAP_FAILED) fail(errno);
    return static_cast<uint8_t*>(memory);
  }

  [[noreturn]] void fail(int error) {
    release();
    ReadFailure failure;
    failure.kind = "io_uring";
    failure.error = error;
    throw failure;
  }

  void release() {
    if (sqes_) munmap(sqes_, sqe_bytes_);
    if (cq_) munmap(cq_, cq_bytes_);
    if (sq_) munmap(sq_, sq_bytes_);
    if (fd_ >= 0) close(fd_);
  }

  int fd_ = -1;
  uint8_t *sq_ = nullptr, *cq_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
  size_t sq_bytes_ = 0, cq_bytes_ = 0, sqe_bytes_ = 0;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0, queued_ = 0, unsubmitted_ = 0;
  io_uring_cqe* cqes_ = nullptr;
};

class UringEngine final : public Engine {
 public:
  UringEngine(int depth, int64_t chunk_bytes)
      : depth_(depth), chunk_bytes_(chunk_bytes), ring_(static_cast<unsigned>(depth)), serves_(depth) {
    free_.reserve(static_cast<size_t>(depth));
  }

  void run(const OpenFile& file, const Plan& plan, uint8_t* buffer, ReadFailure& failure) override {
    if (!lanes_) lanes_ = std::make_unique<Lanes>(depth_, chunk_bytes_);
    free_.clear();
    for (int i = depth_; i-- > 0;) free_.push_back(i);
    const size_t count = plan.reads().size();
    size_t next = 0;
    unsigned in_flight = 0;
    while (in_flight || (next < count && !failure.kind)) {
      while (!failure.kind && next < count && !free_.empty()) {
        queue(file, plan, buffer, next++);
        ++in_flight;
      }
      // Without work left to hand out there is nothing to do before the last read is back.
      const bool last = next >= count || failure.kind;
      const int error = ring_.enter(last ? in_flight : std::min(in_flight, batch()));
      if (error && error != EINTR && error != EAGAIN && error != EBUSY) {
        if (!failure.kind) {
          failure.kind = "io_uring";
          failure.path = file.path;
          failure.error = error;
        }
        in_flight -= ring_.withdraw();
      }
      in_flight -= ring_.reap([&](uint64_t lane, int result) {
        free_.push_back(static_cast<int>(lane));
        complete(file, plan, buffer, static_cast<int>(lane), result, failure);
      });
    }
  }

 private:
  // Completions to wait for before new reads are submitted: fewer system calls, at a queue that is a little shorter.
  unsigned batch() const { return static_cast<unsigned>(std::max(1, depth_ / 4)); }

  void queue(const OpenFile& file, const Plan& plan, uint8_t* buffer, size_t index) {
    const PlannedRead& read = plan.reads()[index];
    const int lane = free_.back();
    free_.pop_back();
    serves_[static_cast<size_t>(lane)] = index;
    Lane& state = (*lanes_)[static_cast<size_t>(lane)];
    const int vectors = state.prepare(read, plan.pieces(read), buffer);
    io_uring_sqe* sqe = ring_.next();
    sqe->fd = file.fd;
    sqe->off = static_cast<uint64_t>(read.offset);
    sqe->user_data = static_cast<uint64_t>(lane);
    if (vectors == 1) {
      sqe->opcode = IORING_OP_READ;
      sqe->addr = reinterpret_cast<uint64_t>(state.vectors()->iov_base);
      sqe->len = static_cast<uint32_t>(state.vectors()->iov_len);
    } else {
      sqe->opcode = IORING_OP_READV;
      sqe->addr = reinterpret_cast<uint64_t>(state.vectors());
      sqe->len = static_cast<uint32_t>(vectors);
    }
  }

  void complete(const OpenFile& file, const Plan& plan, uint8_t* buffer, int lane, int result, ReadFailure& failure) {
    if (failure.kind) return;
    const PlannedRead& read = plan.reads()[serves_[static_cast<size_t>(lane)]];
    if (result < 0 && result != -EINTR && result != -EAGAIN) {
      describe_error(failure, file, read, -result);
      return;
    }
    // What the kernel left out, if anything, is read here and now.
    (*lanes_)[static_cast<size_t>(lane)].finish(file, read, plan.pieces(read), buffer, std::max(result, 0), failure);
  }

  const int depth_;
  const int64_t chunk_bytes_;
  Ring ring_;
  std::vector<size_t> serves_;
  std::vector<int> free_;
  std::unique_ptr<Lanes> lanes_;
};

}  // namespace

std::unique_ptr<Engine> make_uring_engine(int depth, int64_t chunk_bytes) {
  return std::make_unique<UringEngine>(depth, chunk_bytes);
}

}  // namespace wb

#else

namespace wb {

std::unique_ptr<Engine> make_uring_engine(int, int64_t) {
  ReadFailure failure;
  failure.kind = "io_uring";
  failure.error = ENOSYS;
  throw failure;
}

}  // namespace wb

#endif
