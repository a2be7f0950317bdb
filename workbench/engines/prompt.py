"""How a prompt's neurons are read: the union of what its tokens use, or all of them in one stream.

The union is fewer bytes, in reads that are short and many; the stream is all bytes, in the longest reads there are, and
gives the prompt the dense model's own result. To cut a prompt into pieces never reads less: the unions of the pieces
have all that the union of the whole has, and what they share is read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.errors import AblationError
from workbench.flash.reader import plan_reads

if TYPE_CHECKING:
    from workbench.engines.ffn import FlashFFN
    from workbench.engines.setting import Setting

WAYS = ("union", "dense", "auto")


def check_prompt(setting: Setting, ways: tuple[str, ...], backend: str) -> None:
    """AblationError for a way that a backend does not have."""
    wanted = setting.run.prompt_neurons
    if wanted not in ways and setting.ablation.predictor != "off":
        raise AblationError(
            f"ablation: prompt_neurons={wanted!r} is not there with backend {backend}; "
            f"set prompt_neurons={ways[0]!r} or use torch-cpu"
        )


def streamed(ffn: FlashFFN, mask: torch.Tensor) -> bool:
    """Whether every neuron of the layer is read for a prompt whose tokens use those of `mask`, bool [tokens, d_ff]."""
    shared = ffn.shared
    if shared.prompt != "auto":
        return shared.prompt == "dense"
    on_flash = ffn._on_flash()
    union = on_flash[mask.any(0).numpy()[on_flash]]
    gap = shared.run.coalesce_gap_bytes if shared.ablation.coalesce else -1
    return read_cost(ffn, on_flash, 0) < read_cost(ffn, union, gap)


def read_cost(ffn: FlashFFN, ids: np.ndarray[Any, Any], gap: int) -> int:
    """What reading neurons costs, in bytes: those read, and for each read as many as a gap that is as cheap to read as
    to skip (`coalesce_gap_bytes`, which `bench flash` fits)."""
    run = ffn.shared.run
    _, offsets, lengths, _ = ffn._requests(np.sort(ids), np.arange(len(ids)))
    reads = plan_reads(offsets, lengths, gap, run.chunk_bytes)
    return sum(nbytes for _, nbytes in reads) + len(reads) * run.coalesce_gap_bytes
