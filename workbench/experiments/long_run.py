"""Figure 8: one long text, greedy and by nucleus sampling, with what each of its tokens cost.

The text goes on beyond an end-of-text token, for the measurement's sake.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.ablation import PAPER_ROWS, Ablation
from workbench.engines import check_backend, device_of, open_engine
from workbench.engines.budget import process_rss
from workbench.engines.pipeline import FlashEngine
from workbench.engines.sampling import next_token
from workbench.engines.stats import TokenStats
from workbench.engines.tokenizer import store_tokenizer
from workbench.errors import AblationError, DataError
from workbench.experiments.ablate import WARM_UP, Progress, probe_flash
from workbench.experiments.record import SCHEMA, commit, machine, model_name, run_info
from workbench.experiments.unfinished import Measured
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

STRETCH = 200
RSS_EVERY = 50
WAYS: dict[str, tuple[float, float]] = {"greedy": (0.0, 1.0), "nucleus": (0.8, 0.95)}
"""Temperature and top_p of each row."""
PER_TOKEN = ("io_ms", "total_ms", "flash_bytes")


def long_run(
    store: Store | str | Path,
    predictors: Predictors | str | Path | None,
    prompt: str | Sequence[int],
    *,
    tokens: int = 1000,
    ways: Mapping[str, tuple[float, float]] = WAYS,
    ablation: Ablation | None = None,
    run: RunSpec | None = None,
    backend: str = "torch-cpu",
    predictors_name: str = "",
    partial: Path | None = None,
    progress: Progress | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """A record of kind long_run: `tokens` tokens after a prompt, once for each of `ways`.

    A row has, token by token, `io_ms`, `total_ms` and `flash_bytes`; the process's resident bytes every 50 tokens
    (`rss`); the prompt and the first token apart (`first_token_ms`, `first_token_bytes`); what random reads of the
    store's records reach (`flash_bytes_per_s`). `io_drift` and `bytes_drift`: the median of the last `stretch` tokens
    over that of the first ones after `warm_up`, None where that is 0. `ablation` is the paper's 'all' unless given,
    with the oracle where there are no predictors. The context is made as long as the text needs.

    The tokens so far are kept in the file `partial`, after an interrupt too: the same request made again goes on with
    them. DataError for too few tokens or an empty prompt, AblationError for speculative decoding, and what `load`
    raises; BudgetError where the model has not as many positions.
    """
    opened = store if isinstance(store, Store) else Store.open(store)
    trained = Predictors.load(predictors) if isinstance(predictors, str | Path) else predictors
    if isinstance(predictors, str | Path) and not predictors_name:
        predictors_name = Path(predictors).name
    ablation = ablation or _all(trained)
    if ablation.speculative:
        raise AblationError(
            "long run: a round of speculative decoding has no cost of each token; set speculative=False"
        )
    if tokens < WARM_UP + 2:
        raise DataError(
            f"long run: {tokens} tokens are too few to compare two stretches; ask for {WARM_UP + 2} or more"
        )
    ids = list(store_tokenizer(opened)(prompt)["input_ids"]) if isinstance(prompt, str) else [int(t) for t in prompt]
    if not ids:
        raise DataError("prompt: it has no tokens; give at least one word")
    run = _with_room(run or RunSpec(), len(ids) + tokens)
    check_backend(backend)
    done = Measured(partial, _request(opened, trained, ids, tokens, ways, ablation, run, backend))
    rows = []
    for index, (name, (temperature, top_p)) in enumerate(ways.items()):
        row = done.get(name, "row")
        if row is None:
            with (
                open_engine(opened, ablation, trained, run, backend) as engine,
                done.answers(name, "tokens") as kept,
            ):
                text = LongText(engine, ids, temperature, top_p, kept)
                text.write(tokens, done, _share(progress, name, index * tokens, len(ways) * tokens))
                rate = probe_flash(opened, ablation, run)
                row = {"name": name, "temperature": temperature, "top_p": top_p, **text.row(tokens)}
                row["flash_bytes_per_s"] = rate
            done.put(name, "row", row)
        rows.append(row)
    if progress:
        progress("done", len(ways) * tokens, len(ways) * tokens)
    return {
        "schema": SCHEMA,
        "kind": "long_run",
        "machine": machine(opened.path, device_of(backend)),
        "run": run_info(
            model_name(opened), opened.spec, opened.dtype, tokens=tokens, io=ablation.io, window=run.window,
            dram=run.dram, seed=run.seed, predictors=predictors_name, command=command, backend=backend,
        ),
        "ablation": dataclasses.asdict(ablation),
        "prompt_tokens": len(ids),
        "warm_up": WARM_UP,
        "stretch": stretch(tokens),
        "rows": rows,
    }  # fmt: skip


def stretch(tokens: int) -> int:
    """Tokens that are compared at either end: 200, or half of what there is after the warm-up."""
    return min(STRETCH, (tokens - WARM_UP) // 2)


def drift(values: Sequence[float], length: int) -> float | None:
    """The median of the last `length` values over that of the first after the warm-up; None where that is 0."""
    first, last = np.median(values[WARM_UP : WARM_UP + length]), np.median(values[-length:])
    return float(last / first) if first > 0 else None


class LongText:
    """A text that grows token by token, and what is kept of it: lists of numbers, in `kept`, that JSON holds."""

    def __init__(
        self, engine: FlashEngine, prompt: list[int], temperature: float, top_p: float, kept: dict[str, list[Any]]
    ) -> None:
        self.engine, self.sampling, self.kept = engine, (temperature, top_p), kept
        self.generator = torch.Generator().manual_seed(engine.run.seed)
        for name in (*PER_TOKEN, "ids", "rss", "trims", "first", "state"):
            kept.setdefault(name, [])
        if kept["ids"]:  # interrupted: its tokens are read again, uncounted
            engine.prefill([*prompt, *kept["ids"][:-1]])
            self.generator.set_state(torch.frombuffer(bytearray(base64.b64decode(kept["state"][0])), dtype=torch.uint8))
        else:
            logits, stats = engine.prefill(prompt)
            kept["first"][:] = [stats.total_ms, stats.read_bytes]
            self._take(logits)

    def write(self, tokens: int, done: Measured, progress: Any) -> None:
        """Go on until there are so many tokens."""
        kept = self.kept
        while len(kept["io_ms"]) < tokens:
            logits, stats = self.engine.step(kept["ids"][-1])
            self._count(stats)
            self._take(logits)
            count = len(kept["io_ms"])
            if count % RSS_EVERY == 0:
                kept["rss"].append({"token": count, "rss_bytes": process_rss()})
                done.write()
            if progress:
                progress(count)

    def _count(self, stats: TokenStats) -> None:
        kept = self.kept
        kept["io_ms"].append(stats.io_ms)
        kept["total_ms"].append(stats.total_ms)
        kept["flash_bytes"].append(stats.read_bytes)
        kept["trims"].append(stats.window_trims)

    def _take(self, logits: torch.Tensor) -> None:
        self.kept["ids"].append(next_token(logits, *self.sampling, self.generator))
        self.kept["state"][:] = [base64.b64encode(bytes(self.generator.get_state().numpy())).decode()]

    def row(self, tokens: int) -> dict[str, Any]:
        """What a record has of it."""
        kept, length = self.kept, stretch(tokens)
        return {
            "first_token_ms": kept["first"][0],
            "first_token_bytes": kept["first"][1],
            **{name: kept[name] for name in PER_TOKEN},
            "rss": kept["rss"],
            "io_drift": drift(kept["io_ms"], length),
            "bytes_drift": drift(kept["flash_bytes"], length),
            "window_trims": sum(kept["trims"]),
        }


def _all(predictors: Predictors | None) -> Ablation:
    best = PAPER_ROWS["+ bundling (all)"]
    return best if predictors is not None else dataclasses.replace(best, predictor="oracle")


def _with_room(run: RunSpec, tokens: int) -> RunSpec:
    return dataclasses.replace(run, context=max(run.context, tokens)) if run.context else run


def _share(progress: Progress | None, name: str, begun: int, total: int) -> Any:
    """Progress of one row as progress of all."""
    return None if progress is None else lambda count: progress(name, begun + count, total)


def _request(
    store: Store,
    predictors: Predictors | None,
    prompt: list[int],
    tokens: int,
    ways: Mapping[str, tuple[float, float]],
    ablation: Ablation,
    run: RunSpec,
    backend: str,
) -> str:
    """A digest of everything that decides a row's result."""
    parts = {
        "store": store.digest,
        "predictors": [[p.threshold for p in predictors.layers], predictors.model_digest] if predictors else None,
        "asked": [prompt, tokens, dict(ways), backend],
        "ablation": dataclasses.asdict(ablation),
        "run": dataclasses.asdict(run),
        "commit": commit(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
