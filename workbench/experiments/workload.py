"""What a calibration is for, and memory of weights that kernels are timed on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workbench import _native
from workbench.engines.layers import TORCH_DTYPES
from workbench.flash.reader import aligned_buffer
from workbench.spec import DType, ModelSpec

LEAST_WORK, MOST_WORK = 8 << 20, 256 << 20
"""Bytes that kernels are timed over, one stretch after the other, so that caches hold no more than they will later."""
MOST_DISTURBANCE = 16 << 20


@dataclass(frozen=True)
class Workload:
    """What the kernels are timed at. `touched_bytes`: of DRAM, that a token of the model reads. `active`: share of the
    computed neurons that fire, once of a sparse FFN and once of a dense one. `context`: tokens in the KV cache."""

    spec: ModelSpec
    dtype: DType
    touched_bytes: int
    sparse_active: float
    dense_active: float
    predicted: int
    context: int
    rank: int
    predictor_dtype: str


class Arena:
    """Memory of weights, as large as what a token touches within limits, given out stretch after stretch."""

    def __init__(self, work: Workload, rng: np.random.Generator) -> None:
        self.nbytes = max(LEAST_WORK, min(work.touched_bytes, MOST_WORK)) // 4096 * 4096
        self.bytes = aligned_buffer(self.nbytes)
        block = torch.from_numpy(rng.standard_normal(1 << 18, np.float32) * np.float32(0.02))
        stored = block.to(TORCH_DTYPES[work.dtype]).view(torch.uint8).numpy()
        for start in range(0, self.nbytes, len(stored)):
            part = self.bytes[start : start + len(stored)]
            part[:] = stored[: len(part)]
        self._at = 0
        self._per_layer = min(MOST_DISTURBANCE, max(1 << 20, work.touched_bytes // work.spec.num_layers))

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        """The next `nbytes`, from the start again where they would not fit."""
        if self._at + nbytes > self.nbytes:
            self._at = 0
        start, self._at = self._at, self._at + -(-nbytes // 4096) * 4096
        return self.bytes[start : start + nbytes]

    def disturb(self, threads: int) -> None:
        """Read as many bytes as a layer does, so that what was in the caches is not."""
        nbytes = min(self._per_layer, self.nbytes)
        _native.read_sum(self.take(nbytes), threads)


def typical(times: Sequence[float]) -> float:
    """What a call takes as a part of a token: the mean without the slowest twentieth. A token makes so many calls that
    what happens to few of them (another process, an interrupt) happens to every token; a median would leave it out."""
    kept = sorted(times)[: max(1, math.ceil(0.95 * len(times)))]
    return sum(kept) / len(kept)
