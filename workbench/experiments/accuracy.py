"""What `evaluate` measures of one engine: perplexity, missed neurons, a decode's cost, the harness's tasks."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.ablation import Ablation
from workbench.capture.text import DataCard, documents, encode, end_of_text
from workbench.engines.budget import plan_dram
from workbench.engines.layers import as_tensor
from workbench.engines.pipeline import FlashEngine
from workbench.errors import DataError
from workbench.experiments.harness_tasks import LoadedTask, quiet
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

PROMPT, WARM_UP = 64, 8
CHUNK = 256
"""Tokens fed at once."""
SAVE_SECONDS = 30.0
TIMES = ("predictor", "io", "mem", "compute", "total")
NEURONS = ("active", "predicted", "loaded", "in_window")
Tick = Callable[[int], None]


@dataclass(frozen=True)
class Row:
    """One line of the table. rate: the share of active neurons that the thresholds let be missed; None without."""

    name: str
    ablation: Ablation
    predictors: Predictors | None = None
    rate: float | None = None


@dataclass(frozen=True)
class Text:
    """What perplexity is measured on. windows: token ids, each from an empty context, beginning with `prefix`."""

    card: DataCard
    windows: list[list[int]]
    prefix: list[int]

    @property
    def tokens(self) -> int:
        """Tokens that are predicted: all but the first of each window."""
        return sum(len(window) - 1 for window in self.windows)


def read_text(data: str | Path, tokenizer: Any, span: tuple[int, int | None], tokens: int, sequence: int) -> Text:
    """At most `tokens` token ids of the documents of `span`, in windows of `sequence`, the last one shorter.

    Documents are packed, an end-of-text token after each. A window begins as the tokenizer begins a text.
    """
    plain = encode(tokenizer, ["a"])[0]
    marked = list(tokenizer("a")["input_ids"])
    prefix = marked[: len(marked) - len(plain)] if marked[-len(plain) :] == plain else []
    prefix = prefix or [end_of_text(tokenizer)]
    card, ids = DataCard.of(data), list[int]()
    for document in documents(data, *span):
        own = encode(tokenizer, [document])[0]
        card.add(document, len(own))
        ids += [*own, end_of_text(tokenizer)] if own else []
        if len(ids) >= tokens:
            break
    ids = ids[:tokens]
    each = sequence - len(prefix)
    if each < 1:
        raise DataError(f"evaluate: a context of {sequence} has no room for text; give a larger --context")
    return Text(card, [[*prefix, *ids[at : at + each]] for at in range(0, len(ids), each)], prefix)


def perplexity(
    engine: Callable[[], FlashEngine],
    text: Text,
    tick: Tick | None = None,
    known: dict[str, list[Any]] | None = None,
    save: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """exp of the mean negative log-likelihood of each window's tokens after its first, each window from an empty
    context; fed as prompts are, so that each token has its own neurons.

    known: sums of windows that an interrupted run has finished, by their number; it is filled. save: called now and
    then, so that they can be kept.
    """
    known, saved = {} if known is None else known, time.monotonic()
    for number, window in enumerate(text.windows):
        if str(number) not in known:
            known[str(number)] = [_negative_log_likelihood(engine(), window, tick)]
        elif tick:
            tick(len(window) - 1)
        if save and time.monotonic() - saved > SAVE_SECONDS:
            save()
            saved = time.monotonic()
    loss = sum(float(known[str(number)][0]) for number in range(len(text.windows))) / text.tokens
    return {"perplexity": math.exp(min(loss, 700.0)), "loss": loss}


def _negative_log_likelihood(engine: FlashEngine, window: list[int], tick: Tick | None) -> float:
    engine.reset()
    total, fed, wanted = 0.0, window[:-1], window[1:]
    for at in range(0, len(fed), CHUNK):
        part, targets = fed[at : at + CHUNK], torch.tensor(wanted[at : at + CHUNK])
        logits = engine.prefill(part, keep=len(part))[0]
        total -= float(torch.log_softmax(logits, -1).gather(1, targets[:, None]).double().sum())
        if tick:
            tick(len(part))
    return total


def lean(store: Store, ablation: Ablation, run: RunSpec) -> RunSpec:
    """The run of a row without predictors as it is timed: no FFN neuron stays in DRAM, so that what it reads is all of
    them for each token, whatever the budget."""
    return dataclasses.replace(run, dram=str(plan_dram(store, ablation, None, run).fixed))


def missed(engine: FlashEngine, row: Row, ids: list[int]) -> dict[str, Any]:
    """The share of active neurons that a row leaves out, and predicted/active, over the tokens `ids` of a prompt.

    Active: the neurons that fire for the inputs which the row's own FFNs get, found from the store's weights.
    """
    counts = {"active": 0, "predicted": 0, "missed": 0}
    engine.reset()
    hooks = [ffn.register_forward_pre_hook(functools.partial(_count, engine, row, counts)) for ffn in engine.ffns]
    try:
        for at in range(0, len(ids), CHUNK):
            engine.prefill(ids[at : at + CHUNK])
    finally:
        for hook in hooks:
            hook.remove()
    return {
        "false_negative": counts["missed"] / counts["active"] if counts["active"] else 0.0,
        "predicted_over_active": counts["predicted"] / counts["active"] if counts["active"] else 0.0,
        "quality_tokens": len(ids),
    }


def _count(engine: FlashEngine, row: Row, counts: dict[str, int], ffn: Any, args: tuple[torch.Tensor, ...]) -> None:
    x = args[0].reshape(-1, args[0].shape[-1])
    rows = as_tensor(engine.store.activated_rows(ffn.layer), engine.store.dtype).float()
    active = torch.addmm(torch.from_numpy(ffn.biases.first), x, rows.T) > ffn.threshold
    if row.ablation.predictor == "low_rank":
        predicted = ffn.predictor.mask(x)
    else:
        predicted = torch.ones_like(active) if row.ablation.predictor == "off" else active
    counts["active"] += int(active.sum())
    counts["predicted"] += int(predicted.sum())
    counts["missed"] += int((active & ~predicted).sum())


def decode_cost(engine: FlashEngine, ids: list[int], tick: Tick | None = None) -> dict[str, Any]:
    """What a token costs: `ids` token by token after a prompt of PROMPT; the first WARM_UP, which fill the window,
    are not counted. Bytes and neurons are means, times medians with the 95th percentile."""
    engine.reset()
    engine.prefill(ids[:PROMPT])
    steps = []
    for count, token in enumerate(ids[PROMPT:]):
        stats = engine.step(token)[1]
        if count >= WARM_UP:
            steps.append(stats)
        if tick:
            tick(1)
    found: dict[str, Any] = {
        "flash_bytes": float(np.mean([s.read_bytes for s in steps])),
        "reads": float(np.mean([s.reads for s in steps])),
        "dram_bytes": engine.plan.total,
        "decoded": len(steps),
        "window_trims": sum(s.window_trims for s in steps),
    }
    for name in NEURONS:
        found[name] = float(np.mean([getattr(s, name) for s in steps]))
    for part in TIMES:
        values = [getattr(s, f"{part}_ms") for s in steps]
        found[f"{part}_ms"], found[f"{part}_ms_p95"] = float(np.median(values)), float(np.percentile(values, 95))
    return found


def run_task(model: Any, task: LoadedTask, limit: int | None) -> dict[str, Any]:
    """The harness's own scoring of one task; metrics with their standard errors, shares of one."""
    from lm_eval.evaluator import evaluate as harness

    with quiet():
        found: Any = harness(lm=model, task_dict=task.loaded, limit=limit, bootstrap_iters=100, log_samples=False)
    own, metrics = task.own_result(found["results"]), {}
    for key, value in own.items():
        name, _, _ = key.partition(",")
        if "," in key and not name.endswith("_stderr") and isinstance(value, int | float):
            error = own.get(key.replace(name, f"{name}_stderr", 1))
            known = isinstance(error, int | float) and math.isfinite(error)
            metrics[name] = {"value": float(value), "stderr": float(error) if known else None}  # type: ignore[arg-type]
    return {"documents": task.documents, "truncated": model.truncated, "metrics": metrics}
