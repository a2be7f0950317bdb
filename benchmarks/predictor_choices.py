"""What each choice in training predictors brings, all else equal: rank, loss, initialisation, input, text.

    python benchmarks/predictor_choices.py --model data/demo-model --data data/text [--tokens 60000] [--out record.json]

Every run has the same seed, tokens and split; figures are those of its card: thresholds from one half of the validation
text, measured on the other. The last comparison asks how predictors do on text that the model itself wrote: sampled
here at temperature 1 from the first tokens of documents, and written in C4's layout, so that predictors are trained on
it too. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.capture.activations import dense, tokenizer
from workbench.capture.text import documents, split_of, token_windows
from workbench.models import family
from workbench.predictor.config import PredictorSpec
from workbench.predictor.evaluate import Scorer, measure
from workbench.predictor.initialise import Factors
from workbench.predictor.low_rank import Predictors
from workbench.predictor.metrics import Counts
from workbench.predictor.train import train_predictors

RATE = 0.05
HELD_OUT = 0.2
BASE = {
    "rank": 64, "last_rank": 64, "store_dtype": "float16", "false_negative": RATE, "validation_share": HELD_OUT,
}  # fmt: skip
CHOICES: dict[str, dict[str, Any]] = {
    "base: rank 64, balanced, regression, FFN input": {},
    "rank 32": {"rank": 32, "last_rank": 32},
    "rank 128": {"rank": 128, "last_rank": 128},
    "int8 factors, rank 128 (the bytes of rank 64)": {"rank": 128, "last_rank": 128, "store_dtype": "int8"},
    "int8 factors, ranks as measured (the bytes of int8 rank 64)": {"store_dtype": "int8", "allocation": "measured"},
    "loss bce": {"loss": "bce"},
    "loss magnitude": {"loss": "magnitude"},
    "random initialisation": {"init": "random"},
    "input before the norm": {"input": "before_norm"},
    "input of the previous layer's FFN": {"input": "previous_layer"},
}
PROMPT, WRITTEN, BATCH = 16, 256, 32


def write_text(model: Any, words: Any, data: str, passages: int, seed: int, file: Path) -> None:
    """Passages that the model continues from the first tokens of documents, in C4's layout."""
    torch.manual_seed(seed)
    starts = [ids[:PROMPT] for ids in (words(t)["input_ids"] for t in islice(documents(data), 2 * passages))]
    prompts = torch.tensor([ids for ids in starts if len(ids) == PROMPT][:passages])
    device = next(model.parameters()).device
    with gzip.open(file, "wt") as out, torch.inference_mode():
        for part in prompts.split(BATCH):
            rows = model.generate(
                part.to(device), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=WRITTEN - PROMPT
            )
            for row in rows:
                out.write(json.dumps({"text": words.decode(row, skip_special_tokens=True)}) + "\n")


def on_text(found: Predictors, model: Any, linears: list[Any], data: str | Path, words: Any, tokens: int) -> Counts:
    """Counts at the stored thresholds, over all layers, on documents of a text that were not trained on."""
    device = next(model.parameters()).device
    factors = []
    for layer in found.layers:
        values = [layer.a.astype(np.float32), layer.b.astype(np.float32), layer.bias]
        factors.append(Factors(*(torch.from_numpy(v).to(device) for v in values)))
    texts = (text for text in documents(data) if split_of(text, HELD_OUT) == "test")
    windows = list(islice(token_windows(texts, words, WRITTEN), max(1, tokens // WRITTEN)))
    batches = [np.stack(windows[i : i + 8]) for i in range(0, len(windows), 8)]
    limits = [[layer.threshold] for layer in found.layers]
    return sum((row[0] for row in measure(model, linears, Scorer(factors), batches, limits, lambda _: None)), Counts())


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="predictor_choices", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--passages", type=int, default=320, help="that the model writes itself")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="write the record here as well")
    args = parser.parse_args()
    rows, runs = [], {}
    words = tokenizer(args.model)
    with tempfile.TemporaryDirectory() as folder:

        def train(name: str, data: str | Path, **given: Any) -> Predictors:
            began = time.monotonic()
            spec = PredictorSpec(**{**BASE, "tokens": args.tokens, "seed": args.seed, **given})
            made = train_predictors(
                args.model, data, spec, out=Path(folder) / str(len(runs)), device=args.device, dtype="float32"
            )
            runs[name] = made
            layers = made.card["layers"]
            active = sum(layer["active"] for layer in layers)
            row = {
                "choice": name, "nbytes": made.nbytes, "seconds": round(time.monotonic() - began, 1),
                "predicted_over_active": sum(layer["predicted"] for layer in layers) / active,
                "false_negative": sum(layer["false_negative"] * layer["active"] for layer in layers) / active,
                "missed_activation": float(np.mean([layer["missed_activation"] for layer in layers])),
            }  # fmt: skip
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            return made

        for name, given in CHOICES.items():
            train(name, args.data, **given)
        model = dense(args.model, "float32", args.device)
        linears = family(model.config.model_type).activated_linears(model)
        own = Path(folder) / "own.json.gz"
        write_text(model, words, args.data, args.passages, args.seed, own)
        train("trained on the model's own text", own)
        crossed = []
        for trained in ("base: rank 64, balanced, regression, FFN input", "trained on the model's own text"):
            for text, source in (("text", args.data), ("the model's own", own)):
                counts = on_text(runs[trained], model, linears, source, words, 16_384)
                crossed.append(
                    {
                        "trained": trained,
                        "measured_on": text,
                        "false_negative": counts.false_negative,
                        "predicted_over_active": counts.predicted_over_active,
                    }
                )
    record = {
        "benchmark": "predictor_choices", "model": Path(args.model).name, "data": Path(args.data).name,
        "tokens": args.tokens, "seed": args.seed, "target_false_negative": RATE,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine(),
        "rows": rows, "crossed": crossed,
    }  # fmt: skip
    text = json.dumps(record)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
