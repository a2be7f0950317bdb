// Runs Metal kernel bodies on a CPU, and catches what a GPU would let pass: see docs/kernels.md.
//
// One threadgroup at a time; each of its threads is a fiber that runs until it waits for others. Which waiting thread
// goes on is drawn by a seeded generator, and so is the order of the threadgroups.
#pragma once
#include "emulator_fibers.h"

namespace msl {

// --- launching -----------------------------------------------------------------------------------
inline void finished() {
  Thread& m = me();
  m.state = DONE;
  ++G.done;
  go_on();
  __builtin_unreachable();
}
inline void entry() {
  G.body(G.buffers);
  finished();
}

inline void explain(void* address) {
  const char* at = (const char*)address;
  for (uint i = 0; i < G.n_buffers; ++i) {
    const Buffer& b = G.buffers[i];
    if (at < b.mapped || at >= b.mapped + b.span) continue;
    long long offset = at - b.data;
    if (offset >= 0 && uint64_t(offset) < b.bytes) fault("writes %s, which is an input", b.name);
    fault("accesses byte %lld of %s, which has %llu", offset, b.name, (unsigned long long)b.bytes);
  }
  char* stack = me().stack;
  if (at >= stack && at < stack + G.page) fault("overflows its stack of %zu bytes", STACK_BYTES);
  fault("accesses memory that is no buffer's, or a vector at an address that is not a multiple of its size");
}

static struct sigaction old_segv, old_bus;
static thread_local bool launching = false;
static void on_signal(int number, siginfo_t* info, void*) {
  if (launching) explain(info->si_addr);
  sigaction(number, number == SIGSEGV ? &old_segv : &old_bus, nullptr);  // another thread's: handled as before
}

inline void start(Thread& thread, uint index) {
  char* top = thread.stack + G.page + STACK_BYTES;
  void** at;
#if defined(__x86_64__)
  at = (void**)(top - 16);
  at[0] = (void*)entry;
  at[1] = nullptr;
  at -= 6;
  memset(at, 0, 6 * sizeof(void*));
#elif defined(__aarch64__)
  at = (void**)(top - 160);
  memset(at, 0, 160);
  at[11] = (void*)entry;
#endif
  thread.sp = at;
  thread.index = index;
  thread.epoch = thread.simd_epoch = thread.simd_ops = 0;
  thread.line = 0;
  thread.what = "";
  make_ready(thread);
}

inline void run_group() {
  G.n_ready = G.done = G.at_barrier = 0;
  memset(G.at_simd, 0, sizeof G.at_simd);
  for (SharedBase* array = G.launch->arrays; array; array = array->next) array->forget();
  for (uint i = 0; i < G.size; ++i) start(G.threads[i], i);
  uint pick = draw(G.n_ready);
  G.now = &G.threads[G.ready[pick]];
  G.ready[pick] = G.ready[--G.n_ready];
  msl_switch(&G.main_sp, G.now->sp);
  if (G.failed || G.done == G.size) return;
  uint waiting = 0;
  const Thread* first = nullptr;
  for (uint i = 0; i < G.size; ++i)
    if (G.threads[i].state != DONE && ++waiting && !first) first = &G.threads[i];
  G.failed = true;
  snprintf(G.message, G.message_bytes,
           "threadgroup %u, thread %u waits at %s of line %d, which not all threads reach "
           "(divergent: %u wait, %u ended)",
           G.position.x, first->index, first->what, first->line, waiting, G.done);
}

inline uint64_t whole_pages(uint64_t bytes) { return (bytes + G.page - 1) / G.page * G.page; }

inline bool map(Buffer& b, bool against_the_end) {  // between two pages that nobody may touch
  uint64_t inner = whole_pages(b.bytes ? b.bytes : 1);
  b.span = inner + 2 * G.page;
  b.mapped = (char*)mmap(nullptr, b.span, PROT_NONE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (b.mapped == MAP_FAILED) return false;
  char* first = b.mapped + G.page;
  if (mprotect(first, inner, PROT_READ | PROT_WRITE)) return false;
  memset(first, 0xff, inner);
  b.data = against_the_end ? first + inner - (b.bytes + 15) / 16 * 16 : first;
  if (b.mode != OUTPUT) memcpy(b.data, b.host, b.bytes);
  if (b.mode == INPUT) return mprotect(first, inner, PROT_READ) == 0;
  return true;
}

inline bool unharmed(const Buffer& b) {  // what surrounds the data within its pages is as it was
  const char *first = b.mapped + G.page, *last = b.mapped + b.span - G.page;
  for (const char* p = first; p < last; ++p)
    if ((p < b.data || p >= b.data + b.bytes) && *p != char(0xff)) {
      snprintf(G.message, G.message_bytes, "writes byte %lld of %s, which has %llu", (long long)(p - b.data), b.name,
               (unsigned long long)b.bytes);
      return false;
    }
  return true;
}

inline uint common_divisor(uint a, uint b) { return b ? common_divisor(b, a % b) : a; }

// 0: done; 1: a fault, told in `message`; 2: no memory.
inline int launch(void (*body)(Buffer*), Launch* record, Buffer* buffers, uint n, const uint* grid, uint64_t seed,
                  char* message, size_t message_bytes) {
  G.page = size_t(sysconf(_SC_PAGESIZE));
  G.body = body;
  G.launch = record;
  G.buffers = buffers;
  G.n_buffers = n;
  G.message = message;
  G.message_bytes = message_bytes;
  G.random = (seed + 1) * 0x9e3779b97f4a7c15ull | 1;
  G.failed = false;
  G.groups = uint3(grid[0], 1, 1);
  G.size = grid[1];
  for (uint i = 0; i < 4; ++i) draw(2);
  for (uint i = 0; i < G.size; ++i) {
    if (G.threads[i].stack) continue;
    char* stack = (char*)mmap(nullptr, G.page + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, G.page, PROT_NONE)) return 2;
    G.threads[i].stack = stack;
  }
  for (uint i = 0; i < n; ++i) buffers[i].mapped = nullptr;
  bool mapped = true;
  for (uint i = 0; i < n && mapped; ++i) mapped = map(buffers[i], seed % 2 == 0);
  if (mapped) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
#if defined(__linux__)  // a thread whose stack is full cannot tell so there; macOS lets no handler leave its own
    action.sa_flags |= SA_ONSTACK;
    static char signal_stack[65536];
    stack_t mine, theirs;
    memset(&mine, 0, sizeof mine);
    mine.ss_sp = signal_stack;
    mine.ss_size = sizeof signal_stack;
    sigaltstack(&mine, &theirs);
#endif
    sigaction(SIGSEGV, &action, &old_segv);
    sigaction(SIGBUS, &action, &old_bus);
    launching = true;
    uint at = draw(grid[0]), step = 1 + draw(grid[0]);  // a step prime to the number of groups meets each of them once
    while (common_divisor(step, grid[0]) != 1) ++step;
    for (uint i = 0; i < grid[0] && !G.failed; ++i) {
      G.position = uint3(at, 0, 0);
      run_group();
      at = uint((uint64_t(at) + step) % grid[0]);
    }
    launching = false;
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
#if defined(__linux__)
    sigaltstack(&theirs, nullptr);
#endif
  }
  for (uint i = 0; i < n; ++i) {
    Buffer& b = buffers[i];
    if (!b.mapped || b.mapped == MAP_FAILED) continue;
    if (mapped && !G.failed && b.mode != INPUT) {
      if (unharmed(b)) memcpy(b.host, b.data, b.bytes);
      else G.failed = true;
    }
    munmap(b.mapped, b.span);
  }
  return !mapped ? 2 : G.failed ? 1 : 0;
}

}  // namespace msl

// --- what a body sees ----------------------------------------------------------------------------
namespace mem_flags {
enum Flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline Flags operator|(Flags a, Flags b) { return Flags(int(a) | int(b)); }
}  // namespace mem_flags

#define threadgroup_barrier(flags) msl::barrier(int(flags), __LINE__)
#define simdgroup_barrier(flags) msl::simd_barrier(int(flags), __LINE__)

template <class T>
inline T simd_sum(T value, int line = __builtin_LINE()) {  // pairs at distance 1, 2, 4, 8, 16, as the GPUs add
  auto lanes = msl::exchange(value, line, "simd_sum");
  T sum[msl::LANES];
  for (uint i = 0; i < msl::LANES; ++i) sum[i] = lanes[i];
  for (uint step = 1; step < msl::LANES; step *= 2)
    for (uint i = 0; i < msl::LANES; i += 2 * step) sum[i] = T(sum[i] + sum[i + step]);
  return sum[0];
}
template <class T>
inline T simd_prefix_exclusive_sum(T value, int line = __builtin_LINE()) {
  auto lanes = msl::exchange(value, line, "simd_prefix_exclusive_sum");
  T sum = T(0);
  for (uint i = 0; i < msl::me().index % msl::LANES; ++i) sum = T(sum + lanes[i]);
  return sum;
}
template <class T>
inline T simd_broadcast(T value, uint lane, int line = __builtin_LINE()) {
  return msl::exchange(value, line, "simd_broadcast")[lane];
}
template <class T>
inline T simd_shuffle_xor(T value, uint mask, int line = __builtin_LINE()) {
  return msl::exchange(value, line, "simd_shuffle_xor")[(msl::me().index % msl::LANES) ^ mask];
}

#define METAL_FUNC inline
#define threads_per_simdgroup 32u
#define thread_position_in_threadgroup (uint3(msl::me().index, 0, 0))
#define threadgroup_position_in_grid (msl::G.position)
#define threads_per_threadgroup (uint3(msl::G.size, 1, 1))
#define threadgroups_per_grid (msl::G.groups)
#define thread_index_in_threadgroup (msl::me().index)
#define thread_index_in_simdgroup (msl::me().index % 32u)
#define simdgroup_index_in_threadgroup (msl::me().index / 32u)
#define simdgroups_per_threadgroup (msl::G.size / 32u)
#define thread_position_in_grid (uint3(msl::G.position.x * msl::G.size + msl::me().index, 0, 0))
