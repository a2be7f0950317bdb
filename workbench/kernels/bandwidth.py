"""How fast a plain read of memory is here: the yardstick of every CPU kernel."""

from __future__ import annotations

import time

from workbench import _native


def read_bandwidth(nbytes: int, threads: int = 0, repeats: int = 5) -> float:
    """Bytes/s at which `threads` threads (0: one a core) sum `nbytes` of memory: the best of `repeats` passes.

    nbytes should be well beyond the last-level cache.
    """
    buffer = _native.aligned_buffer(nbytes)
    buffer.fill(1)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        _native.read_sum(buffer, threads)
        best = max(best, nbytes / (time.perf_counter() - start))
    return best
