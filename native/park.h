// A word that threads sleep on: a futex on Linux, a condition variable elsewhere.
#pragma once

#include <atomic>
#include <cstdint>

#ifdef __linux__
#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace wb {

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

class ParkingWord {
 public:
  uint32_t load() const { return word_.load(std::memory_order_acquire); }

  // Sleep while the word still holds `seen`. May return early; callers loop.
  void wait(uint32_t seen) {
#ifdef __linux__
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return load() != seen; });
#endif
  }

  // Change the word and wake at most `count` sleepers (all when negative).
  void bump_and_wake(int count) {
#ifdef __linux__
    word_.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, count < 0 ? INT_MAX : count, nullptr,
            nullptr, 0);
#else
    (void)count;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      word_.fetch_add(1, std::memory_order_release);
    }
    changed_.notify_all();
#endif
  }

 private:
  std::atomic<uint32_t> word_{0};
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is 32 bits");
#ifndef __linux__
  std::mutex mutex_;
  std::condition_variable changed_;
#endif
};

}  // namespace wb
