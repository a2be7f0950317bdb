// A few threads that wait for short jobs. The caller is thread 0 of each job.
#pragma once

#include <cstdint>

namespace wb {

// Cores that this process may run on.
int available_cores();

// Calls job(context, index, threads) once for each index in [0, threads) and returns when all are done. Which index
// does what is up to the job, so that its result depends on `threads` alone. Calls from several threads take turns.
void run_parallel(int threads, void (*job)(const void* context, int index, int threads), const void* context);

template <class F>
void parallel(int threads, const F& body) {
  run_parallel(
      threads, [](const void* context, int index, int count) { (*static_cast<const F*>(context))(index, count); },
      &body);
}

// The part of [0, count) that belongs to `index`, as even as can be.
struct Range {
  int64_t begin, end;
};
inline Range share(int64_t count, int index, int threads) {
  return {count * index / threads, count * (index + 1) / threads};
}

}  // namespace wb
