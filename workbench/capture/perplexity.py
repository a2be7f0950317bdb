"""Perplexity of a dense model on windows of tokens, without logits of a whole window in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

FORWARD_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens of one forward."""
CHUNK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Bytes of the float32 logits that exist at a time."""


def perplexity(
    model: Any,
    windows: np.ndarray,
    *,
    autocast: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
) -> float:
    """exp of the mean negative log-likelihood of every token but the first of each window.

    model: a dense model of transformers. windows: int64 [n, T], T at least 2. autocast: compute in this dtype over
    float32 weights. progress: called with the tokens done. Infinite where a token's likelihood underflows everything.
    """
    total, tokens = negative_log_likelihood(model, windows, autocast=autocast, progress=progress)
    mean = total / tokens
    return math.exp(mean) if mean < 700 else math.inf


@torch.inference_mode()
def negative_log_likelihood(
    model: Any,
    windows: np.ndarray,
    *,
    autocast: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[float, int]:
    """The sum over every token but the first of each window, in nats, and how many tokens that are.

    As `perplexity`. ValueError when there is no token to score.
    """
    if windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ValueError(f"windows of shape {windows.shape} have no token to score; give [n, T] with T at least 2")
    head = model.get_output_embeddings()
    device = head.weight.device
    rows = max(1, FORWARD_TOKENS[device.type] // windows.shape[1])
    chunk = max(1, CHUNK_BYTES[device.type] // (4 * head.weight.shape[0]))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for at in range(0, len(windows), rows):
        ids = torch.from_numpy(np.ascontiguousarray(windows[at : at + rows], np.int64)).to(device)
        with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            hidden = model.base_model(input_ids=ids, use_cache=False)[0][:, :-1].flatten(0, 1)
            labels = ids[:, 1:].flatten()
            for start in range(0, len(hidden), chunk):
                logits = head(hidden[start : start + chunk])
                part = labels[start : start + chunk]
                total += F.cross_entropy(logits.float(), part, reduction="sum").double()
        if progress is not None:
            progress(min(len(windows), at + rows) * windows.shape[1])
    return float(total), windows.shape[0] * (windows.shape[1] - 1)
