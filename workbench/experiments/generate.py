"""Streamed text, and what each of its tokens cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from workbench.engines import device_of
from workbench.engines.pipeline import FlashEngine
from workbench.experiments.record import SCHEMA, machine, model_name, run_info


def stream(
    engine: FlashEngine,
    prompt: str,
    max_new_tokens: int,
    *,
    temperature: float,
    top_p: float,
    write: Callable[[str], object],
) -> dict[str, Any]:
    """Generate, handing each piece of text to `write`; a record of kind generation with the stats of each token.

    `summary` is one line: the prompt's time, then medians a token.
    """
    steps = []
    for step in engine.generate(prompt, max_new_tokens, temperature=temperature, top_p=top_p):
        write(step.text)
        steps.append(step)
    first, rest = steps[0].stats, [step.stats for step in steps[1:]]
    summary = f"prompt {first.total_ms:.0f} ms"
    if rest:
        ms = {k: float(np.median([getattr(s, f"{k}_ms") for s in rest])) for k in ("io", "mem", "compute", "predictor")}
        total = float(np.median([s.total_ms for s in rest]))
        summary += (
            f"; then {1000 / total:.1f} tokens/s, {total:.1f} ms a token: io {ms['io']:.1f}, mem {ms['mem']:.1f}, "
            f"compute {ms['compute']:.1f} (predictor {ms['predictor']:.1f}); "
            f"{np.mean([s.read_bytes for s in rest]) / 1e6:.2f} MB a token from flash; "
            f"DRAM planned {engine.plan.total / 1e6:.1f} MB"
        )
        drafted = sum(s.drafted for s in rest)
        if drafted:
            summary += f"; {sum(s.accepted for s in rest) / drafted:.0%} of {drafted} drafted tokens accepted"
    run = engine.run
    return {
        "schema": SCHEMA,
        "kind": "generation",
        "machine": machine(engine.store.path, device_of(engine.backend)),
        "run": run_info(
            model_name(engine.store), engine.spec, engine.store.dtype, tokens=len(steps), io=engine.ablation.io,
            window=run.window, dram=run.dram, seed=run.seed, backend=engine.backend,
        ),
        "ablation": dataclasses.asdict(engine.ablation),
        "prompt": prompt,
        "text": "".join(step.text for step in steps),
        "steps": [{"token": step.token, **dataclasses.asdict(step.stats)} for step in steps],
        "summary": summary,
    }  # fmt: skip
