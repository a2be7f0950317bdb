"""Section 3.1 and figure 9: how many of each layer's neurons fire, and how that differs from token to token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.analysis.sparsity import QUANTILES, Spread, spread, usage_of, zeros_by_place, zeros_spread
from workbench.experiments.active import ActiveText, Progress
from workbench.experiments.record import SCHEMA, machine, run_info


def analyze_sparsity(
    model: str | Path,
    data: str | Path,
    *,
    tokens: int = 4096,
    device: str = "cpu",
    progress: Progress | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """A record of kind sparsity: the share of zeros in the FFN activations, by layer, by token and by place in text.

    Each row, one a layer, has `zeros`, the mean over tokens, with the percentiles p5 to p95 over tokens; `never`, how
    many neurons did not fire at all; and `top_tenth`, the share of all firing that the busiest tenth of them does.
    `by_token` is the spread over tokens of the mean over layers, `by_place` the same for tokens with so many tokens of
    text before them. Memory holds counts only, whatever the number of tokens.
    """
    text = ActiveText(model, data, tokens, device)
    spec = text.spec
    active: list[list[np.ndarray]] = [[] for _ in range(spec.num_layers)]  # by layer and stretch: int [sequence]
    used = torch.zeros(spec.num_layers, spec.d_ff, dtype=torch.int64)

    def sink(layer: int, mask: torch.Tensor) -> None:
        active[layer].append(mask.sum(dim=1).cpu().numpy())
        used[layer] += mask.sum(dim=0).cpu()

    text.run(sink, progress=progress)
    counts = np.array(active)  # [layers, stretches, places]
    counted = counts[0].size
    rows = []
    for layer, own in enumerate(counts):
        usage = usage_of(used[layer].numpy(), counted)
        rows.append(
            {
                "layer": layer,
                **_spread(zeros_spread(own, spec.d_ff)),
                "never": usage.never,
                "top_tenth": usage.top_tenth,
            }
        )
    return {
        "schema": SCHEMA,
        "kind": "sparsity",
        "machine": {**machine(Path(".")), "device": device},
        "run": run_info(text.name, spec, text.dtype, tokens=counted, io="", command=command, data=text.card),
        "rows": rows,
        "by_token": _spread(spread(1.0 - counts.mean(axis=0) / spec.d_ff)),
        "by_place": [{"first": p.first, "last": p.last, **_spread(p.zeros)} for p in zeros_by_place(counts, spec.d_ff)],
    }


def _spread(found: Spread) -> dict[str, float]:
    return {"zeros": found.mean, **{f"p{q}": value for q, value in zip(QUANTILES, found.quantiles, strict=True)}}
