"""Weights in PyTorch's pickle format, mapped and read with weights_only: a pickle that names code is refused."""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from pathlib import Path

import torch

from workbench.errors import CheckpointError

REMAP_BYTES = 16 << 20
"""After this many bytes the file is mapped anew, so that pages already read stop counting as this process's memory."""
SAMPLES, SAMPLE_BYTES = 8, 4096
_FAULT_BYTES = 64 << 10
"""What the kernel maps around a page that is touched."""


def sample_starts(values: int, itemsize: int) -> list[int]:
    """First values of the blocks of 4096 bytes that stand for a tensor in its checkpoint's digest; at most 8."""
    last = values - min(SAMPLE_BYTES // itemsize, values)
    return sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)})


class PickledShard:
    """One .bin file in the zip form that torch.save has written since 1.6."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: dict[str, torch.Tensor] = {}
        self._read_bytes = 0
        if not zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path}: truncated, or in the pickle form of before PyTorch 1.6, which cannot be read lazily; "
                f"download it again or save it as safetensors"
            )
        self._map()
        listed = [f"{n} {t.dtype} {list(t.shape)}" for n, t in sorted(self._state.items())]
        self.header_sha256 = hashlib.sha256("\n".join(listed).encode()).hexdigest()

    def _map(self) -> None:
        try:
            state = torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{self.path}: refused: the pickle holds more than tensors and may run code; use safetensors"
            ) from error
        except Exception as error:  # a damaged file makes the unpickler raise nearly anything
            raise CheckpointError(f"{self.path}: damaged or truncated; download it again") from error
        if not isinstance(state, dict) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
        ):
            raise CheckpointError(f"{self.path}: not a table of named tensors; save the model's state_dict")
        self._state = dict(state)

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor."""
        return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in self._state.items()}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of the first axis, in memory of their own."""
        self._forget_pages()
        rows = self._state[name][start:stop]
        self._read_bytes += rows.nbytes
        return rows.detach().clone(memory_format=torch.contiguous_format)

    def sample(self, name: str) -> bytes:
        """The bytes of up to 8 blocks of values, evenly spaced over the tensor."""
        self._forget_pages()
        flat = self._state[name].detach().reshape(-1)
        self._read_bytes += min(flat.nbytes, SAMPLES * _FAULT_BYTES)
        size, starts = SAMPLE_BYTES // flat.itemsize, sample_starts(flat.numel(), flat.itemsize)
        return b"".join(flat[s : s + size].contiguous().view(torch.uint8).numpy().tobytes() for s in starts)

    def _forget_pages(self) -> None:
        if self._read_bytes > REMAP_BYTES:
            self._state.clear()
            self._map()
            self._read_bytes = 0

    def close(self) -> None:
        """Unmap the file."""
        self._state.clear()
