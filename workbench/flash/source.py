"""What a conversion asks of a model: its geometry, its tensors' shapes, and their rows on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from workbench.spec import ModelSpec


class WeightSource(Protocol):
    """Where the weights come from. Errors of reading are CheckpointErrors."""

    @property
    def spec(self) -> ModelSpec:
        """The model's geometry."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype of its weights."""
        ...

    @property
    def groups(self) -> list[tuple[str, dict[str, tuple[int, ...]]]]:
        """Resident tensors by group, in order: 'embed', 'layer.0' .. 'layer.L-1', 'head'."""
        ...

    def ffn(self, layer: int) -> tuple[str, ...]:
        """A layer's FFN matrices by part: up [d_ff, d_model], down [d_model, d_ff], (gate [d_ff, d_model])."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of a tensor's first axis."""
        ...

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        ...

    def source(self) -> dict[str, Any]:
        """Fingerprint: at least name, dtype and digest (SHA-256 hex); equal for equal weights."""
        ...

    def modified(self) -> dict[str, int]:
        """Modification times of the files, so that an edit between two runs is noticed."""
        ...

    def tokenizer_files(self) -> list[Path]:
        """Files to copy into the store's tokenizer/ directory."""
        ...
