// Threads of a threadgroup as fibers, the waits between them, and threadgroup memory that watches over its use.
#pragma once
#include "emulator_types.h"

extern "C" void msl_switch(void** save, void* to) asm("msl_switch_stacks");
#if defined(__x86_64__)
asm(R"(
.text
msl_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 2
msl_switch_stacks:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#endif

namespace msl {

constexpr uint LANES = 32, MOST_THREADS = 1024, THREADGROUP_BYTES = 32768;
constexpr size_t STACK_BYTES = 65536;
enum State : uint8_t { READY, AT_BARRIER, AT_SIMD, DONE };
enum Flags { NONE = 0, DEVICE = 1, THREADGROUP = 2 };

struct Thread {
  void* sp;
  char* stack;
  uint index, epoch, simd_epoch, simd_ops;
  int line;
  const char* what;
  State state;
};
struct alignas(16) Slot { char bytes[16]; };

struct SharedBase {
  const char* name;
  size_t bytes;
  SharedBase* next;
  virtual void forget() = 0;
};
struct Launch {  // one kernel and template arguments; its threadgroup arrays register here
  SharedBase* arrays = nullptr;
  size_t bytes = 0;
};

enum Mode : uint32_t { INPUT, IN_PLACE, OUTPUT };
struct Buffer {  // as Python passes it, then where the emulator keeps it
  const char* name;
  void* host;
  uint64_t bytes;
  uint64_t mode;
  char *mapped, *data;
  uint64_t span;
};

struct Group {
  Thread threads[MOST_THREADS];
  Thread* now;
  uint ready[MOST_THREADS], n_ready, size, done, at_barrier, at_simd[MOST_THREADS / LANES];
  int barrier_line;
  Slot slots[2][MOST_THREADS];
  uint3 position, groups;
  uint64_t random;
  void* main_sp;
  Launch* launch;
  void (*body)(Buffer*);
  Buffer* buffers;
  uint n_buffers;
  bool failed, running;
  char* message;
  size_t message_bytes;
  size_t page;
};
static Group G;
inline Thread& me() { return *G.now; }

inline uint draw(uint below) {  // xorshift
  G.random ^= G.random << 13;
  G.random ^= G.random >> 7;
  G.random ^= G.random << 17;
  return uint((G.random >> 32) * below >> 32);
}

inline void leave() {  // to the launcher, for good
  void* unused;
  msl_switch(&unused, G.main_sp);
  __builtin_unreachable();
}

[[noreturn]] inline void fault(const char* format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  snprintf(G.message, G.message_bytes, "threadgroup %u, thread %u %s", G.position.x, me().index, text);
  G.failed = true;
  leave();
  __builtin_unreachable();
}

inline void go_on() {  // to a thread drawn from those that can run, or to the launcher
  Thread* from = G.now;
  if (G.n_ready == 0) {
    msl_switch(&from->sp, G.main_sp);
    return;
  }
  uint pick = draw(G.n_ready);
  Thread* to = &G.threads[G.ready[pick]];
  G.ready[pick] = G.ready[--G.n_ready];
  G.now = to;
  if (to != from) msl_switch(&from->sp, to->sp);
}

inline void make_ready(Thread& thread) {
  thread.state = READY;
  G.ready[G.n_ready++] = thread.index;
}

inline void barrier(int flags, int line) {
  Thread& m = me();
  m.line = line;
  m.what = "threadgroup_barrier";
  if (G.at_barrier && G.barrier_line != line)
    fault("is at the threadgroup_barrier of line %d while others wait at that of line %d", line, G.barrier_line);
  G.barrier_line = line;
  m.state = AT_BARRIER;
  if (++G.at_barrier == G.size) {
    G.at_barrier = 0;
    for (uint i = 0; i < G.size; ++i) make_ready(G.threads[i]);
  }
  go_on();
  if (flags & THREADGROUP) {
    ++m.epoch;
    m.simd_epoch = 0;
  }
}

inline uint arrive(int line, const char* what) {  // waits for the SIMD group; returns which buffer of slots to use
  Thread& m = me();
  uint simd = m.index / LANES, first = simd * LANES;
  for (uint i = first; i < first + LANES; ++i)
    if (G.threads[i].state == AT_SIMD && (G.threads[i].line != line || strcmp(G.threads[i].what, what) != 0))
      fault("is at %s of line %d while thread %u of its SIMD group waits at %s of line %d", what, line, i,
            G.threads[i].what, G.threads[i].line);
  m.line = line;
  m.what = what;
  m.state = AT_SIMD;
  uint parity = m.simd_ops++ & 1;
  if (++G.at_simd[simd] == LANES) {
    G.at_simd[simd] = 0;
    for (uint i = first; i < first + LANES; ++i)
      if (i != m.index) make_ready(G.threads[i]);
    m.state = READY;
    if (draw(2)) {  // the last to arrive goes on first only half of the time
      make_ready(m);
      go_on();
    }
  } else {
    go_on();
  }
  return parity;
}

inline void simd_barrier(int flags, int line) {
  arrive(line, "simdgroup_barrier");
  if (flags & THREADGROUP) ++me().simd_epoch;
}

template <class T>
struct Lanes {
  const Slot* slots;
  T operator[](uint lane) const {
    T value;
    memcpy(&value, slots[lane].bytes, sizeof value);
    return value;
  }
};
template <class T>
inline Lanes<T> exchange(T value, int line, const char* what) {
  static_assert(sizeof(T) <= sizeof(Slot), "value too large for a SIMD operation");
  Thread& m = me();
  memcpy(G.slots[m.simd_ops & 1][m.index].bytes, &value, sizeof value);
  uint parity = arrive(line, what);
  return {&G.slots[parity][m.index / LANES * LANES]};
}

// --- threadgroup memory --------------------------------------------------------------------------
struct Access {  // the last one of an element
  uint epoch, simd_epoch;
  uint16_t thread;
  uint8_t any, many;
};
inline bool collides(const Access& a) {
  const Thread& m = me();
  if (!a.any || a.epoch != m.epoch) return false;
  if (a.many) return true;
  if (a.thread == m.index) return false;
  return a.thread / LANES != m.index / LANES || a.simd_epoch == m.simd_epoch;
}

template <class T> struct Wide { typedef T Type; };
template <> struct Wide<half> { typedef float Type; };
template <> struct Wide<bfloat> { typedef float Type; };

template <class T, int N>
struct Shared : SharedBase {
  T data[N];
  Access read[N], written[N];
  explicit Shared(const char* its_name) {
    name = its_name;
    bytes = sizeof data;
    next = G.launch->arrays;
    G.launch->arrays = this;
    G.launch->bytes += bytes;
    forget();
  }
  void forget() override {
    memset((void*)data, 0xff, sizeof data);
    memset((void*)read, 0, sizeof read);
    memset((void*)written, 0, sizeof written);
  }
  void check(int64_t i) const {
    if (i < 0 || i >= N) fault("uses %s[%lld], which has %d elements", name, (long long)i, N);
  }
  T get(int64_t i) {
    check(i);
    Access &w = written[i], &r = read[i];
    if (!w.any) fault("reads %s[%lld], which no thread has written", name, (long long)i);
    if (collides(w))
      fault("reads %s[%lld], which thread %u wrote with no barrier between (race)", name, (long long)i, uint(w.thread));
    const Thread& m = me();
    if (r.any && r.epoch == m.epoch && r.thread != m.index) r.many = 1;
    else r = {m.epoch, m.simd_epoch, uint16_t(m.index), 1, 0};
    return data[i];
  }
  void set(int64_t i, T value) {
    check(i);
    if (collides(written[i]) || collides(read[i]))
      fault("writes %s[%lld], which another thread used with no barrier between (race)", name, (long long)i);
    const Thread& m = me();
    written[i] = {m.epoch, m.simd_epoch, uint16_t(m.index), 1, 0};
    data[i] = value;
  }
  struct Element {
    Shared& array;
    int64_t i;
    operator typename Wide<T>::Type() const { return array.get(i); }
    Element& operator=(T value) { array.set(i, value); return *this; }
    Element& operator=(const Element& other) { return *this = T(other); }
    Element& operator+=(T value) { return *this = T(T(*this) + value); }
  };
  Element operator[](int64_t i) { return {*this, i}; }
};

inline void declared(const SharedBase& array) {
  if (G.launch->bytes > THREADGROUP_BYTES)
    fault("declares %s, which brings threadgroup memory to %zu bytes; Metal allows %u", array.name, G.launch->bytes,
          THREADGROUP_BYTES);
}

}  // namespace msl
