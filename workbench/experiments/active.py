"""A dense model that reads text and says which neurons fire: what every analysis of activations begins with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.capture.activations import FfnTap, dense, run_trunk, tokenizer
from workbench.capture.text import windows_and_card
from workbench.errors import DataError, DeviceError
from workbench.models import family
from workbench.models.checkpoint import Checkpoint
from workbench.models.hub import locate
from workbench.models.weights import Weights
from workbench.spec import ModelSpec

SEQUENCE = 256
"""Tokens of a stretch of text that the model reads from an empty context."""
Progress = Callable[[str, int, int], None]
MaskSink = Callable[[int, torch.Tensor], None]


class ActiveText:
    """Stretches of text, and the neurons that fire on them in a dense model.

    tokens: how many to read, in whole stretches of 256 (or of the model's positions, if these are fewer), at least one.
    device: 'cpu' or 'cuda', whose model is float32 on the CPU and bfloat16 on CUDA. DataError when the
    text does not fill one stretch.
    """

    def __init__(self, model: str | Path, data: str | Path, tokens: int, device: str = "cpu") -> None:
        if device not in ("cpu", "cuda"):
            raise DeviceError(f"device: {device!r} is not cpu or cuda")
        if device == "cuda" and not torch.cuda.is_available():
            raise DeviceError("device: cuda was asked for, but torch finds no CUDA device; use --device cpu")
        self.model, self.data, self.device = model, data, device
        path, name = locate(model)
        with Checkpoint(path, name) as checkpoint:
            self.spec: ModelSpec = Weights(checkpoint).spec  # transformers' own config does not keep thresholds
        self.name = Path(model).name
        self.dtype = "float32" if device == "cpu" else "bfloat16"
        self.sequence = min(SEQUENCE, self.spec.max_positions)
        self.wanted = max(1, tokens // self.sequence)

    @cached_property
    def _read(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        windows, card = windows_and_card(self.data, tokenizer(self.model), self.sequence, self.wanted)
        if not windows:
            raise DataError(f"{self.data}: fewer than {self.sequence} tokens; give --data with more text")
        return windows, card.as_dict()

    @property
    def card(self) -> dict[str, Any]:
        """What was read of the text: source, documents, tokens, digest."""
        return self._read[1]

    def run(
        self,
        sink: MaskSink,
        *,
        after: Callable[[int], None] | None = None,
        skip: int = 0,
        progress: Progress | None = None,
    ) -> int:
        """Read all stretches but the first `skip`; returns how many there are with those.

        For each stretch, `sink(layer, mask)` is called with which neurons are active, bool [sequence, d_ff] on the
        device, and then `after(stretch)`.
        """
        windows = self._read[0]
        if skip < len(windows):
            loaded = dense(self.model, self.dtype, self.device)
            ups = family(self.spec.model_type).activated_linears(loaded)
            with FfnTap(ups, lambda layer, x, z: sink(layer, z > 0), self.spec.thresholds):
                for count in range(skip, len(windows)):
                    run_trunk(loaded, windows[count][None, :])
                    if after:
                        after(count)
                    if progress:
                        progress("active neurons", (count + 1) * self.sequence, len(windows) * self.sequence)
        return len(windows)


def ids_by_token(mask: torch.Tensor, dtype: type[np.unsignedinteger[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(counts uint32 [tokens], ids of `dtype`, token after token and sorted in each) of bool [tokens, d_ff]."""
    if mask.device.type == "cuda":
        tokens, neurons = (part.cpu().numpy() for part in mask.nonzero(as_tuple=True))
    else:
        tokens, neurons = np.nonzero(mask.numpy())
    return np.bincount(tokens, minlength=mask.shape[0]).astype(np.uint32), neurons.astype(dtype)
