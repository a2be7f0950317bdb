"""Figure 4a and section 3.2: how much of the FFN a neuron window holds, and what each token adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from workbench.analysis.reuse import reuse
from workbench.analysis.sparsity import zeros_by_layer
from workbench.capture.activations import active_neurons, dense, tokenizer
from workbench.capture.text import documents, token_windows
from workbench.errors import DataError
from workbench.experiments.record import SCHEMA, machine, run_info
from workbench.models import family
from workbench.models.checkpoint import Checkpoint
from workbench.models.hub import locate
from workbench.models.weights import Weights

WINDOWS = (0, 1, 2, 4, 8, 16, 32)
SEQUENCE = 256
Progress = Callable[[str, int, int], None]


def capture_active(
    model: str | Path, data: str | Path, tokens: int, progress: Progress | None
) -> tuple[Any, list[list[list[np.ndarray]]]]:
    """The model's spec, and the active neurons by window of text, layer and token."""
    path, name = locate(model)
    with Checkpoint(path, name) as checkpoint:
        spec = Weights(checkpoint).spec  # transformers' own config does not keep thresholds
    loaded = dense(model)
    ups = family(spec.model_type).activated_linears(loaded)
    sequence = min(SEQUENCE, spec.max_positions)
    count = max(1, tokens // sequence)
    found: list[list[list[np.ndarray]]] = []
    for window in islice(token_windows(documents(data), tokenizer(model), sequence), count):
        found.append(active_neurons(loaded, ups, [window], spec.thresholds))
        if progress:
            progress("active neurons", len(found) * sequence, count * sequence)
    if not found:
        raise DataError(f"{data}: fewer than {sequence} tokens; give --data with more text")
    return spec, found


def analyze_reuse(
    model: str | Path,
    data: str | Path,
    *,
    windows: Sequence[int] = WINDOWS,
    tokens: int = 4096,
    progress: Progress | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """A record of kind reuse: for each window the share of the FFN kept in DRAM and new with each token.

    Of the dense model's true activations on `tokens` tokens of text. Each stretch of 256 tokens is taken by itself,
    and counted once its window is full; shares are means over stretches and layers.
    """
    spec, found = capture_active(model, data, tokens, progress)
    by_layer = []
    for layer in range(spec.num_layers):
        points = [reuse(stretch[layer], spec.d_ff, windows) for stretch in found]
        for index, window in enumerate(windows):
            by_layer.append(
                {
                    "layer": layer,
                    "window": window,
                    "kept_share": float(np.mean([p[index].kept_share for p in points])),
                    "new_share": float(np.mean([p[index].new_share for p in points])),
                }
            )
    rows = []
    for window in windows:
        own = [point for point in by_layer if point["window"] == window]
        rows.append({"window": window, **{k: float(np.mean([p[k] for p in own])) for k in ("kept_share", "new_share")}})
    counted = sum(len(stretch[0]) for stretch in found)
    return {
        "schema": SCHEMA,
        "kind": "reuse",
        "machine": machine(Path(".")),
        "run": run_info(Path(model).name, spec, "float32", tokens=counted, io="", command=command),
        "rows": rows,
        "by_layer": by_layer,
    }


def analyze_sparsity(
    model: str | Path,
    data: str | Path,
    *,
    tokens: int = 4096,
    progress: Progress | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """A record of kind sparsity: the share of zeros in each layer's FFN activations on text (section 3.1)."""
    spec, found = capture_active(model, data, tokens, progress)
    uses = [[ids for stretch in found for ids in stretch[layer]] for layer in range(spec.num_layers)]
    return {
        "schema": SCHEMA,
        "kind": "sparsity",
        "machine": machine(Path(".")),
        "run": run_info(Path(model).name, spec, "float32", tokens=len(uses[0]), io="", command=command),
        "rows": [{"layer": i, "zeros": float(z)} for i, z in enumerate(zeros_by_layer(uses, spec.d_ff))],
    }
