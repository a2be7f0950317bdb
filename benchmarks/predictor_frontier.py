"""Predicted over active at stated false-negative rates, of trained predictors on text that none of them saw.

    python benchmarks/predictor_frontier.py --model CHECKPOINT --data C4.json.gz --documents 0 200 PREDICTORS...

For each predictor directory two lines of the trade-off: with thresholds set by layer on this same text (the quality of
the scores alone), and with the thresholds that were stored with them (what an engine uses). Over all layers: neurons
predicted by neurons active (ratio of sums), the mean of the layers' own ratios, and what was missed.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.capture.activations import dense, tokenizer
from workbench.capture.text import documents, token_windows
from workbench.models import family
from workbench.models.checkpoint import Checkpoint
from workbench.models.weights import Weights
from workbench.predictor.evaluate import Scorer, measure, thresholds
from workbench.predictor.initialise import Factors
from workbench.predictor.low_rank import LayerPredictor, Predictors
from workbench.predictor.metrics import Counts
from workbench.predictor.taps import View

RATES = (0.01, 0.02, 0.05, 0.1)


def factors(layer: LayerPredictor, device: str) -> Factors:
    """The stored values as float32 on the device."""
    a, b = (
        torch.from_numpy(f.astype(np.float32) if scale is None else f.astype(np.float32) * scale[:, None]).to(device)
        for f, scale in ((layer.a, layer.a_scale), (layer.b, layer.b_scale))
    )
    return Factors(a, b, torch.from_numpy(layer.bias).to(device))


def summary(layers: list[Counts]) -> dict[str, float]:
    total = sum(layers, Counts())
    return {
        "false_negative": total.false_negative,
        "predicted_over_active": total.predicted_over_active,
        "mean_of_layer_ratios": float(np.mean([c.predicted_over_active for c in layers])),
        "missed_activation": total.missed_share,
        "predicted_share": total.predicted / total.neurons,
        "active_share": total.active / total.neurons,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="predictor_frontier", description=__doc__)
    parser.add_argument("predictors", type=Path, nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--documents", type=int, nargs=2, default=(0, 200), metavar=("FROM", "TO"))
    parser.add_argument("--length", type=int, default=512, help="tokens a window")
    parser.add_argument("--batch", type=int, default=8, help="windows a forward")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of the dense model")
    args = parser.parse_args()
    with Checkpoint(Path(args.model), Path(args.model).name) as checkpoint:
        spec = Weights(checkpoint).spec
    model = dense(args.model, args.dtype, args.device)
    linears = family(spec.model_type).activated_linears(model)
    windows = list(token_windows(documents(args.data, *args.documents), tokenizer(args.model), args.length))
    batches = [np.stack(windows[i : i + args.batch]) for i in range(0, len(windows), args.batch)]
    view = View.of(model, spec, "balanced", "ffn")  # knows the thresholds of FATReLU
    rows: list[dict[str, Any]] = []
    for path in args.predictors:
        found = Predictors.load(path)
        found.check(spec)
        scorer = Scorer([factors(layer, args.device) for layer in found.layers])
        fitted = thresholds(model, linears, scorer, batches, list(RATES), lambda done: None, view=view)
        stored = [[p["threshold"] for p in entry["frontier"]] for entry in found.card["layers"]]
        limits = [own + given for own, given in zip(fitted, stored, strict=True)]
        counts = measure(model, linears, scorer, batches, limits, lambda done: None, view=view)
        names = [("on this text", rate) for rate in RATES] + [("stored", rate) for rate in found.false_negatives]
        for i, (kind, rate) in enumerate(names):
            rows.append(
                {
                    "predictors": path.name,
                    "nbytes": found.nbytes,
                    "ranks": [layer.rank for layer in found.layers],
                    "thresholds": kind,
                    "target": rate,
                    **summary([layer[i] for layer in counts]),
                }
            )
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    print(
        json.dumps(
            {
                "benchmark": "predictor_frontier",
                "model": Path(args.model).name,
                "data": Path(args.data).name,
                "documents": list(args.documents),
                "tokens": len(windows) * args.length,
                "device": device,
                "dtype": args.dtype,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
