#include "thread_pool.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#endif

#include "park.h"

namespace wb {

namespace {

// Long enough to bridge the gap between two kernels of a layer, short enough to leave the core to others.
constexpr int kSpins = 2000;

class ThreadPool {
 public:
  ~ThreadPool() {
    stop_.store(true, std::memory_order_release);
    for (auto& worker : workers_) worker->start.bump_and_wake(1);
    for (auto& worker : workers_) worker->thread.join();
  }

  void run(int threads, void (*job)(const void*, int, int), const void* context) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (static_cast<int>(workers_.size()) < threads - 1) add_worker();
    job_ = job;
    context_ = context;
    threads_ = threads;
    pending_.store(threads - 1, std::memory_order_relaxed);
    const uint32_t seen = done_.load();
    for (int i = 0; i + 1 < threads; ++i) workers_[static_cast<size_t>(i)]->begin();
    job(context, 0, threads);
    for (int spin = 0; spin < kSpins && pending_.load(std::memory_order_acquire); ++spin) cpu_relax();
    uint32_t latest = seen;
    while (pending_.load(std::memory_order_acquire)) {
      done_.wait(latest);
      latest = done_.load();
    }
  }

 private:
  struct Worker {
    std::thread thread;
    ParkingWord start;
    std::atomic<bool> asleep{false};

    void begin() { start.bump_and_wake(1); }
  };

  void add_worker() {
    workers_.push_back(std::make_unique<Worker>());
    Worker& worker = *workers_.back();
    const int index = static_cast<int>(workers_.size());
    try {
      worker.thread = std::thread([this, &worker, index] { work(worker, index); });
    } catch (...) {
      workers_.pop_back();
      throw;
    }
  }

  void work(Worker& worker, int index) {
    uint32_t seen = 0;
    while (true) {
      for (int spin = 0; spin < kSpins && worker.start.load() == seen; ++spin) cpu_relax();
      while (worker.start.load() == seen) worker.start.wait(seen);
      seen = worker.start.load();
      if (stop_.load(std::memory_order_acquire)) return;
      job_(context_, index, threads_);
      if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.bump_and_wake(1);
    }
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Worker>> workers_;
  ParkingWord done_;
  std::atomic<int> pending_{0};
  std::atomic<bool> stop_{false};
  void (*job_)(const void*, int, int) = nullptr;
  const void* context_ = nullptr;
  int threads_ = 0;
};

// One pool a process. A forked child has none of the parent's threads: it gets a new pool, and the old one is left
// alone, since its threads cannot be joined there. At exit the pool is left to the kernel for the same reason.
ThreadPool& pool() {
  static std::mutex mutex;
  static ThreadPool* current = nullptr;
  static pid_t owner = 0;
  std::lock_guard<std::mutex> lock(mutex);
  const pid_t pid = getpid();
  if (!current || owner != pid) {
    current = new ThreadPool();
    owner = pid;
  }
  return *current;
}

}  // namespace

int available_cores() {
#ifdef __linux__
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
#endif
  const unsigned cores_known = std::thread::hardware_concurrency();
  return cores_known ? static_cast<int>(cores_known) : 1;
}

void run_parallel(int threads, void (*job)(const void*, int, int), const void* context) {
  if (threads <= 1) {
    job(context, 0, 1);
    return;
  }
  pool().run(threads, job, context);
}

}  // namespace wb
