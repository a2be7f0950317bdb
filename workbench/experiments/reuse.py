"""Figure 4a and section 3.2: how much of the FFN a neuron window holds, and what each token adds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.analysis.reuse import aggregated_use, reuse
from workbench.errors import DataError
from workbench.experiments.active import ActiveText, Progress, ids_by_token
from workbench.experiments.record import SCHEMA, machine, run_info

WINDOWS = (0, 1, 2, 4, 8, 16, 32)
SHARES = ("kept_share", "new_share")


def analyze_reuse(
    model: str | Path,
    data: str | Path,
    *,
    windows: Sequence[int] = WINDOWS,
    tokens: int = 4096,
    device: str = "cpu",
    progress: Progress | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """A record of kind reuse: for each window the share of the FFN kept in DRAM and new with each token.

    Of the dense model's true activations on `tokens` tokens of text. Each stretch of 256 tokens is taken by itself,
    and counted once its window is full; shares are means over stretches and layers. `aggregated` has s_agg(k), the
    neurons that k tokens in a row use together, as a share of d_ff: `tokens` lists k, `mean` and each entry of
    `by_layer` the shares, up to half a stretch: a longer one has few places, most of which hold the first token of the
    text, which uses far more neurons than others do. Memory holds the active neurons of one stretch.
    """
    text = ActiveText(model, data, tokens, device)
    spec, lengths = text.spec, stretch_lengths(text.sequence // 2)
    if max(windows) >= text.sequence:
        raise DataError(f"a window of {max(windows)} tokens has no room in stretches of {text.sequence}; leave it out")
    shares = np.zeros((spec.num_layers, len(windows), len(SHARES)))
    aggregated = np.zeros((spec.num_layers, len(lengths)))

    def sink(layer: int, mask: torch.Tensor) -> None:
        counts, ids = ids_by_token(mask, np.uint32)
        uses = np.split(ids.astype(np.int64), np.cumsum(counts)[:-1])
        shares[layer] += [[point.kept_share, point.new_share] for point in reuse(uses, spec.d_ff, windows)]
        aggregated[layer] += aggregated_use(uses, lengths[-1])[lengths] / spec.d_ff

    stretches = text.run(sink, progress=progress)
    shares, aggregated = shares / stretches, aggregated / stretches
    return {
        "schema": SCHEMA,
        "kind": "reuse",
        "machine": {**machine(Path(".")), "device": device},
        "run": run_info(
            text.name, spec, text.dtype, tokens=stretches * text.sequence, io="", command=command, data=text.card
        ),
        "rows": [{"window": window, **_named(mean)} for window, mean in zip(windows, shares.mean(axis=0), strict=True)],
        "by_layer": [
            {"layer": layer, "window": window, **_named(own)}
            for layer, of_layer in enumerate(shares)
            for window, own in zip(windows, of_layer, strict=True)
        ],
        "aggregated": {
            "tokens": lengths,
            "mean": aggregated.mean(axis=0).tolist(),
            "by_layer": aggregated.tolist(),
        },
    }


def stretch_lengths(longest: int) -> list[int]:
    """k from 0 to `longest`: every one to 16, then about four to each doubling."""
    grown = {round(16 * 2 ** (step / 4)) for step in range(4 * max(0, longest.bit_length() - 4) + 4)}
    return sorted(k for k in {*range(17), *grown, longest} if k <= longest)


def _named(pair: np.ndarray) -> dict[str, float]:
    return dict(zip(SHARES, (float(value) for value in pair), strict=True))
