#pragma once

#include <cstddef>

namespace wb {

// Zeroed anonymous memory on a page boundary, resident only where it has been touched; `bytes` is a multiple of the page
// size. nullptr when there is none.
void* map_pages(size_t bytes);
void unmap_pages(void* memory, size_t bytes) noexcept;

}  // namespace wb
