#include "aligned_buffer.h"

#include <cstdint>

#include <sys/mman.h>

namespace wb {

namespace {

void* map_anonymous(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

#ifdef MADV_HUGEPAGE

// A direct read into 4 KiB pages is a request of many segments, and a drive's queue holds only so many: reads of 128 KiB
// were seen to be three times as fast into huge pages. They are only a wish, so a refusal is no failure.
void* map_pages(size_t bytes) {
  constexpr size_t huge = size_t{2} << 20;
  if (bytes < 2 * huge) return map_anonymous(bytes);
  uint8_t* const start = static_cast<uint8_t*>(map_anonymous(bytes + huge));
  if (!start) return nullptr;
  const size_t head = (huge - reinterpret_cast<uintptr_t>(start) % huge) % huge;
  if (head) munmap(start, head);
  munmap(start + head + bytes, huge - head);
  (void)madvise(start + head, bytes, MADV_HUGEPAGE);
  return start + head;
}

#else

void* map_pages(size_t bytes) { return map_anonymous(bytes); }

#endif

void unmap_pages(void* memory, size_t bytes) noexcept { munmap(memory, bytes); }

}  // namespace wb
