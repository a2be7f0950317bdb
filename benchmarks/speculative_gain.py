"""What speculative decoding brings where the draft is right so often: the paper's 1.4x (section 5.2), by acceptance.

A model of random weights has no smaller model that says the same, so the draft is scripted: it proposes the tokens of
the greedy text, each with the probability that is given, else another; after a wrong one all that follow are refused.
It costs nothing. So this is what the flash, the window at alpha * (lambda + 1) and the verification of several tokens
at once make of an acceptance rate, and an upper bound of what a real draft model would bring. The text has to be that
of greedy decoding, and the record says if it was.

    python benchmarks/speculative_gain.py STORE PREDICTORS [--backend torch-cuda] [--acceptance 0.6 0.8 1.0]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from workbench.ablation import PAPER_ROWS
from workbench.engines import BACKENDS, device_of, open_engine
from workbench.engines.pipeline import FlashEngine
from workbench.engines.sampling import greedy
from workbench.errors import WorkbenchError
from workbench.experiments.ablate import WARM_UP
from workbench.experiments.record import machine, model_name, run_info
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import DType, RunSpec

PAPER_GAIN = 1.4
FIGURES = ("total_ms", "io_ms", "mem_ms", "compute_ms", "read_bytes", "loaded")


class Scripted:
    """A draft that knows the text. right: by place, whether what it proposes there is the text's own token."""

    nbytes = 0

    def __init__(self, text: list[int], right: np.ndarray) -> None:
        self._text, self._right = text, right

    def take(self, text: Sequence[int]) -> None:
        pass

    def propose(self, text: Sequence[int], count: int) -> list[int]:
        places = range(len(text), min(len(text) + count, len(self._text)))
        return [self._text[at] if self._right[at] else self._text[at] ^ 1 for at in places]

    def forget(self) -> None:
        pass

    def close(self) -> None:
        pass


def means(steps: list[Any]) -> dict[str, float]:
    """Of times and counts, a token: those of a round share what it cost."""
    return {name: statistics.fmean(getattr(s, name) for s in steps) for name in FIGURES}


def plain(engine: FlashEngine, prompt: list[int], tokens: int) -> tuple[list[int], dict[str, float]]:
    """The greedy text, and what a token of it costs."""
    text, steps = [*prompt, greedy(engine.prefill(prompt)[0])], []
    while len(text) < len(prompt) + WARM_UP + tokens:
        logits, stats = engine.step(text[-1])
        text.append(greedy(logits))
        steps.append(stats)
    return text, means(steps[WARM_UP:])


def drafted(engine: FlashEngine, prompt: list[int], text: list[int]) -> dict[str, Any]:
    """The same text by rounds of drafting and verifying."""
    ids, steps, rounds = [*prompt, greedy(engine.prefill(prompt)[0])], [], 0
    while len(ids) < len(text):
        found = engine.round(ids, len(text) - len(ids))
        ids += [token for token, _ in found]
        if len(ids) > len(prompt) + WARM_UP:
            steps += [stats for _, stats in found]
            rounds += 1
    proposed = sum(s.drafted for s in steps)
    return {
        **means(steps), "greedy_text": ids == text, "first_difference": difference(ids, text),
        "acceptance": sum(s.accepted for s in steps) / proposed if proposed else None,
        "tokens_per_round": len(steps) / rounds,
    }  # fmt: skip


def difference(ids: list[int], text: list[int]) -> int | None:
    """Where two texts first differ; None where they do not."""
    return next((at for at, (a, b) in enumerate(zip(ids, text, strict=True)) if a != b), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("predictors", type=Path)
    parser.add_argument("--backend", choices=BACKENDS, default="torch-cpu")
    parser.add_argument("--dram", default="50%")
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--kv-dtype", choices=get_args(DType), default="float32")
    parser.add_argument("--draft-tokens", type=int, default=4, help="the paper's lambda")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.8, 1.0])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    random = np.random.default_rng(args.seed)
    try:
        store, predictors = Store.open(args.store), Predictors.load(args.predictors)
        best = PAPER_ROWS["+ bundling (all)"]
        run = RunSpec(
            dram=args.dram, window=args.window, kv_dtype=args.kv_dtype, draft_tokens=args.draft_tokens,
            context=args.prompt + WARM_UP + args.tokens + args.draft_tokens + 1, seed=args.seed,
        )  # fmt: skip
        prompt = random.integers(3, store.spec.vocab_size, args.prompt).tolist()
        rows = []
        with open_engine(store, best, predictors, run, args.backend) as engine:
            text, usual = plain(engine, prompt, args.tokens)
            print(f"one by one       {usual['total_ms']:8.1f} ms a token", flush=True)
            for share in args.acceptance:
                engine.ablation = best  # a scripted draft is given before it is asked for
                engine.use_draft(Scripted(text, random.random(len(text)) < share))
                engine.ablation = replace(best, speculative=True)
                engine.reset()
                found = drafted(engine, prompt, text)
                found |= {"asked_acceptance": share, "gain": usual["total_ms"] / found["total_ms"]}
                rows.append(found)
                same = "greedy text" if found["greedy_text"] else f"differs from token {found['first_difference']}"
                print(
                    f"acceptance {found['acceptance']:5.0%}  {found['total_ms']:8.1f} ms a token, {found['gain']:.2f}x "
                    f"(the paper: {PAPER_GAIN}x), {found['tokens_per_round']:.2f} tokens a round, {same}", flush=True,
                )  # fmt: skip
    except (WorkbenchError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    record = {
        "benchmark": "speculative_gain", "machine": machine(store.path, device_of(args.backend)),
        "run": run_info(
            model_name(store), store.spec, store.dtype, tokens=args.tokens, io=best.io, window=args.window,
            dram=args.dram, seed=args.seed, predictors=args.predictors.name, backend=args.backend,
        ),
        "draft": "scripted: proposes the greedy text, right as often as asked, costs nothing",
        "paper_gain": PAPER_GAIN, "one_by_one": usual, "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(record) + "\n")
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
