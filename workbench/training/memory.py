"""How much memory is free, on the card or in this process's part of the machine."""

from __future__ import annotations

from pathlib import Path

import torch

_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: on a CUDA card what the driver and torch's own pool have left; on the CPU what
    the system calls available, or what the control group's limit leaves where that is less."""
    if device.type == "cuda":
        pooled = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + pooled
    found = [value for value in (_available(), *(_left(limit, used) for limit, used in _GROUPS)) if value is not None]
    return min(found) if found else 4 << 30


def _available() -> int | None:
    """MemAvailable of Linux; on other systems the free pages, where they are told."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return None


def _left(limit: Path, used: Path) -> int | None:
    try:
        return max(0, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        return None
