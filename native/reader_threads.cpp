// `depth` threads, each with one pread in flight: the paper's engine.
#include <atomic>
#include <thread>

#include "park.h"
#include "reader.h"

namespace wb {

namespace {

class ThreadsEngine final : public Engine {
 public:
  ThreadsEngine(int depth, int64_t chunk_bytes) : depth_(depth), chunk_bytes_(chunk_bytes) {}

  ~ThreadsEngine() override { stop_threads(); }

  void run(const OpenFile& file, const Plan& plan, uint8_t* buffer, ReadFailure& failure) override {
    start_threads();
    const int64_t count = static_cast<int64_t>(plan.reads().size());
    file_ = &file;
    plan_ = &plan;
    buffer_ = buffer;
    failure_ = &failure;
    count_ = count;
    failed_.store(false, std::memory_order_relaxed);
    pending_.store(count, std::memory_order_relaxed);
    uint32_t seen = done_.load();
    // Publishes all of the above: a worker that gets a ticket has seen it.
    tickets_.store(count, std::memory_order_release);
    work_.bump_and_wake(static_cast<int>(count < depth_ ? count : depth_));
    while (pending_.load(std::memory_order_acquire) > 0) {
      done_.wait(seen);  // a signal ends the wait early; the batch in flight is finished first
      seen = done_.load();
    }
  }

 private:
  void start_threads() {
    if (!threads_.empty()) return;
    lanes_ = std::make_unique<Lanes>(depth_, chunk_bytes_);
    threads_.reserve(static_cast<size_t>(depth_));
    try {
      for (int i = 0; i < depth_; ++i) threads_.emplace_back([this, i] { work((*lanes_)[static_cast<size_t>(i)]); });
    } catch (...) {  // fewer threads than asked for would be another measurement
      stop_threads();
      throw;
    }
  }

  void stop_threads() {
    stop_.store(true, std::memory_order_release);
    work_.bump_and_wake(-1);
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    stop_.store(false, std::memory_order_release);
  }

  void work(Lane& lane) {
    while (!stop_.load(std::memory_order_acquire)) {
      const uint32_t seen = work_.load();
      int64_t served = 0;
      // Tickets count down, so that a thread that comes late, after the last one, cannot mistake an old number for one
      // of the next batch: it gets a positive number only from a batch that cannot end without it.
      for (int64_t ticket; (ticket = tickets_.fetch_sub(1, std::memory_order_acq_rel)) > 0; ++served) {
        if (failed_.load(std::memory_order_relaxed)) continue;
        const PlannedRead& read = plan_->reads()[static_cast<size_t>(count_ - ticket)];
        ReadFailure failure;
        if (!lane.run(*file_, read, plan_->pieces(read), buffer_, failure)) {
          if (!failed_.exchange(true, std::memory_order_acq_rel)) *failure_ = std::move(failure);
        }
      }
      if (served && pending_.fetch_sub(served, std::memory_order_acq_rel) == served) done_.bump_and_wake(1);
      if (served == 0 && !stop_.load(std::memory_order_acquire)) work_.wait(seen);
    }
  }

  const int depth_;
  const int64_t chunk_bytes_;
  std::unique_ptr<Lanes> lanes_;
  std::vector<std::thread> threads_;
  ParkingWord work_, done_;
  std::atomic<bool> stop_{false}, failed_{false};
  alignas(64) std::atomic<int64_t> tickets_{0};
  alignas(64) std::atomic<int64_t> pending_{0};
  const OpenFile* file_ = nullptr;
  const Plan* plan_ = nullptr;
  uint8_t* buffer_ = nullptr;
  ReadFailure* failure_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_threads_engine(int depth, int64_t chunk_bytes) {
  return std::make_unique<ThreadsEngine>(depth, chunk_bytes);
}

}  // namespace wb
