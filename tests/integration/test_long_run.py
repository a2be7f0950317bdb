"""Figure 8's long text: a record of every token, and a run that goes on where it was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny

from workbench.ablation import Ablation
from workbench.engines.torch_cpu import TorchCpuEngine
from workbench.errors import AblationError, BudgetError, DataError
from workbench.experiments.convert import convert
from workbench.experiments.long_run import STRETCH, WARM_UP, drift, long_run, stretch
from workbench.flash.store import Store
from workbench.spec import RunSpec

PROMPT = [5, 9, 3, 44, 21, 8]
RUN = RunSpec(dram="1GiB", context=32)
ORACLE = Ablation(predictor="oracle")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A tiny model with room for 256 positions, one of whose common tokens ends a text."""
    root = tmp_path_factory.mktemp("long")
    model = make_tiny(root / "model", "llama", max_position_embeddings=256, eos_token_id=None)
    return convert(model, root / "store", dtype="float32")


def counts(record: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What is no time and no memory."""
    return [(row["name"], row["flash_bytes"], row["first_token_bytes"], row["window_trims"]) for row in record["rows"]]


def test_every_token_is_in_the_record(store: Store) -> None:
    told: list[tuple[str, int, int]] = []
    record = long_run(store, None, PROMPT, tokens=110, run=RUN, progress=lambda *seen: told.append(seen))
    assert (record["kind"], record["prompt_tokens"], record["warm_up"], record["stretch"]) == ("long_run", 6, 8, 51)
    assert [(row["name"], row["temperature"], row["top_p"]) for row in record["rows"]] == [
        ("greedy", 0.0, 1.0),
        ("nucleus", 0.8, 0.95),
    ]
    for row in record["rows"]:
        assert len(row["io_ms"]) == len(row["total_ms"]) == len(row["flash_bytes"]) == 110
        assert [mark["token"] for mark in row["rss"]] == [50, 100]
        assert row["flash_bytes_per_s"] > 0
        assert row["io_drift"] == drift(row["io_ms"], 51)
    assert told[-1] == ("done", 220, 220)
    assert [seen[1] for seen in told[:3]] == [1, 2, 3]
    json.dumps(record, allow_nan=False)
    with TorchCpuEngine(store, record_ablation(record), None, RunSpec(dram="1GiB", context=128)) as engine:
        steps = list(engine.generate(PROMPT, 111))
    assert [step.stats.read_bytes for step in steps[1:]] == record["rows"][0]["flash_bytes"]
    assert steps[0].stats.read_bytes == record["rows"][0]["first_token_bytes"]


def record_ablation(record: dict[str, Any]) -> Ablation:
    return Ablation(**record["ablation"])


def test_an_interrupted_run_goes_on(store: Store, tmp_path: Path) -> None:
    whole = long_run(store, None, PROMPT, tokens=40, run=RUN, ablation=ORACLE)
    partial = tmp_path / "long.partial"

    def stop_at(wanted: int) -> Any:
        def progress(what: str, done: int, total: int) -> None:
            if done == wanted:
                raise KeyboardInterrupt

        return progress

    def again(progress: Any = None) -> dict[str, Any]:
        return long_run(
            store, None, PROMPT, tokens=40, run=RUN, ablation=ORACLE, partial=partial, progress=progress
        )  # fmt: skip

    for stop in (17, 25, 61):  # twice in the greedy text, once in the sampled one
        with pytest.raises(KeyboardInterrupt):
            again(stop_at(stop))
        kept = json.loads(partial.read_text())
        assert sum(len(lists["io_ms"]) for lists in kept["pending"].values()) == stop % 40
    told: list[int] = []
    record = again(lambda what, done, total: told.append(done))
    assert counts(record) == counts(whole)
    assert told[0] == 62
    assert counts(again()) == counts(whole)  # nothing is measured again
    other = long_run(store, None, PROMPT, tokens=30, run=RUN, ablation=ORACLE, partial=partial)
    assert len(other["rows"][0]["io_ms"]) == 30


def test_drift_compares_the_ends() -> None:
    values = [99.0] * WARM_UP + [2.0] * STRETCH + [50.0] * 10 + [3.0] * STRETCH
    assert drift(values, STRETCH) == 1.5
    assert drift([0.0] * 40, 10) is None
    assert (stretch(1000), stretch(108), stretch(10)) == (200, 50, 1)


def test_what_cannot_be_run_is_refused(store: Store) -> None:
    with pytest.raises(BudgetError, match="256"):
        long_run(store, None, PROMPT, tokens=1000, run=RUN)
    with pytest.raises(AblationError, match="speculative"):
        long_run(store, None, PROMPT, ablation=Ablation(predictor="oracle", speculative=True))
    with pytest.raises(DataError, match="too few"):
        long_run(store, None, PROMPT, tokens=9)
    with pytest.raises(DataError, match="no tokens"):
        long_run(store, None, [], tokens=40)
