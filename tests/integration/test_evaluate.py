"""`evaluate`: what the engine answers is what transformers and the harness's own model answer, and costs are real."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench import assets
from workbench.ablation import Ablation
from workbench.engines.torch_cpu import TorchCpuEngine
from workbench.errors import DataError, PredictorError
from workbench.experiments.accuracy import missed, perplexity, read_text, run_task
from workbench.experiments.evaluate import evaluate, open_store, table_rows
from workbench.experiments.harness_tasks import load_tasks
from workbench.experiments.side_by_side import diverges, side_by_side
from workbench.experiments.unfinished import Measured
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.report import read_evaluation, read_side_by_side
from workbench.spec import RunSpec

OWN = Path(__file__).parents[1] / "data" / "eval"
SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "eval"
DENSE, ORACLE = Ablation(predictor="off", windowing=False), Ablation(predictor="oracle")
RUN = RunSpec(dram="100%", context=512, compute_threads=1)
TEXT = assets.path("data/text")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take most of so small a model's time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engines(demo_store: Store, demo_predictors: Predictors) -> Iterator[dict[str, TorchCpuEngine]]:
    opened = {
        "dense": TorchCpuEngine(demo_store, DENSE, None, RUN),
        "oracle": TorchCpuEngine(demo_store, ORACLE, None, RUN),
        "low_rank": TorchCpuEngine(demo_store, Ablation(), demo_predictors, RUN),
    }
    yield opened
    for engine in opened.values():
        engine.close()


# the engine's prompt path


def test_a_prompts_logits_are_those_of_single_steps(engines: dict[str, TorchCpuEngine], demo_text: np.ndarray) -> None:
    engine, ids = engines["low_rank"], demo_text[:40].tolist()
    steps = engine.logits(ids)
    engine.reset()
    whole = engine.prefill(ids, keep=len(ids))[0]
    torch.testing.assert_close(whole, steps, atol=1e-4, rtol=0)


def test_a_rewound_engine_goes_on_as_if_the_tokens_had_not_been(
    engines: dict[str, TorchCpuEngine], demo_text: np.ndarray
) -> None:
    engine, ids = engines["low_rank"], demo_text[:30].tolist()
    engine.reset()
    engine.prefill(ids[:20])
    engine.prefill([5, 6, 7], keep=3)
    engine.rewind(20)
    after = engine.prefill(ids[20:], keep=10)[0]
    engine.reset()
    torch.testing.assert_close(after, engine.prefill(ids, keep=10)[0], atol=1e-4, rtol=0)


# perplexity and quality


@pytest.mark.parametrize("name", ["dense", "oracle"])
def test_perplexity_is_the_dense_models(engines: dict[str, TorchCpuEngine], demo_dense: Any, name: str) -> None:
    engine = engines[name]
    text = read_text(TEXT, engine.tokenizer, (0, 3), 350, 150)
    assert [len(window) for window in text.windows] == [150, 150, 53]
    assert text.tokens == 350
    assert {window[0] for window in text.windows} == {engine.tokenizer.bos_token_id}
    total = 0.0
    for window in text.windows:
        with torch.no_grad():
            logits = demo_dense(torch.tensor([window[:-1]])).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum"))
    assert perplexity(lambda: engine, text)["perplexity"] == pytest.approx(math.exp(total / 350), rel=1e-4)


def test_missed_neurons_agree_with_what_the_engine_counts(
    engines: dict[str, TorchCpuEngine], demo_predictors: Predictors, demo_text: np.ndarray
) -> None:
    ids = demo_text[:48].tolist()
    row = table_rows(demo_predictors, [0.02])[2]
    found = missed(engines["low_rank"], row, ids)
    engines["low_rank"].reset()
    stats = engines["low_rank"].prefill(ids)[1]
    # the engine counts the predicted neurons and those of them that fire, not those that it misses
    fired = (1 - found["false_negative"]) / found["predicted_over_active"]
    assert stats.active / stats.predicted == pytest.approx(fired, rel=1e-6)
    assert 0 < found["false_negative"] < 0.1


def test_oracle_misses_nothing_and_dense_computes_everything(
    engines: dict[str, TorchCpuEngine], demo_text: np.ndarray
) -> None:
    dense, oracle = table_rows(None, [0.02])
    ids = demo_text[:24].tolist()
    found = missed(engines["oracle"], oracle, ids)
    assert (found["false_negative"], found["predicted_over_active"]) == (0.0, 1.0)
    engines["oracle"].reset()
    active = engines["oracle"].prefill(ids)[1].active
    neurons = engines["dense"].spec.ffn_neurons * len(ids)
    assert missed(engines["dense"], dense, ids)["predicted_over_active"] == pytest.approx(neurons / active, rel=1e-6)


# the harness


def reference(model: Any, engine: TorchCpuEngine, length: int = 512) -> Any:
    """The harness's own model of a transformers model."""
    pytest.importorskip("lm_eval", reason="needs lm_eval")
    pytest.importorskip("accelerate", reason="lm_eval's own HFLM needs accelerate")
    from lm_eval.models import huggingface

    own: Any = huggingface.HFLM
    return own(pretrained=model, tokenizer=engine.tokenizer, batch_size=1, device="cpu", max_length=length)


def adapter(engine: TorchCpuEngine) -> Any:
    pytest.importorskip("lm_eval", reason="needs lm_eval")
    from workbench.experiments.harness import EngineLM

    return EngineLM(engine)


def requests(pairs: list[tuple[Any, ...]], kind: str = "loglikelihood") -> list[Any]:
    pytest.importorskip("lm_eval", reason="needs lm_eval")
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, pair, i) for i, pair in enumerate(pairs)]  # type: ignore[arg-type]


def check_answers(own: list[Any], theirs: list[Any]) -> None:
    assert [answer[0] for answer in own] == pytest.approx([answer[0] for answer in theirs], abs=1e-3)
    assert [answer[1] for answer in own] == [answer[1] for answer in theirs]


@pytest.mark.parametrize("name", ["dense", "oracle"])
def test_answers_are_those_of_the_harness_own_model(
    engines: dict[str, TorchCpuEngine], demo_dense: Any, name: str
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm_eval")
    tasks = load_tasks(["arc_easy", "hellaswag"] if name == "dense" else ["hellaswag"], OWN)
    pairs = [i.args for task in tasks for own in task.loaded["tasks"].values() for i in own.instances]
    assert len(pairs) == (23 + 12 if name == "dense" else 12)
    special = [("", "the sea"), ("", "</s>x"), ("the sea ", "is blue"), ("</s>A dog", " runs"), ("A dog", " runs")]
    asked = requests([*pairs, *special])
    check_answers(
        adapter(engines[name]).loglikelihood(asked), reference(demo_dense, engines[name]).loglikelihood(asked)
    )


def test_accuracy_is_that_of_the_harness_own_model_on_the_shared_data(
    engines: dict[str, TorchCpuEngine], demo_dense: Any
) -> None:
    if not SHARED.is_dir():
        pytest.skip("needs the shared evaluation data")
    pytest.importorskip("lm_eval", reason="needs lm_eval")
    from lm_eval.evaluator import evaluate as harness

    theirs = reference(demo_dense, engines["dense"])
    for task in load_tasks(["arc_easy", "hellaswag"], SHARED, 3):
        own = run_task(adapter(engines["dense"]), task, 3)
        results: Any = harness(lm=theirs, task_dict=task.loaded, limit=3, bootstrap_iters=0)
        found = results["results"][task.name]
        for metric in ("acc", "acc_norm"):
            assert own["metrics"][metric]["value"] == found[f"{metric},none"]
        assert own["documents"] == 3


def test_long_contexts_are_cut_from_the_left_as_the_harness_does(demo_store: Store, demo_dense: Any) -> None:
    long = " ".join(f"word{i}" for i in range(40))
    asked = [(long, " and so on"), (long, " and"), ("short", " and so on")]
    with TorchCpuEngine(demo_store, DENSE, None, dataclasses.replace(RUN, context=32)) as engine:
        own = adapter(engine)
        answers = own.loglikelihood(requests(asked))
        assert own.truncated == 2
        check_answers(answers, reference(demo_dense, engine, 32).loglikelihood(requests(asked)))
        with pytest.raises(DataError, match=r"context of 32; pass a larger --context"):
            own.loglikelihood(requests([("a", " " + long)]))


def test_rolling_loglikelihood_is_the_harness_own(demo_store: Store, demo_dense: Any) -> None:
    text = [("The old teacher told the children about the sea and the stars. " * 5,), ("A dog",)]
    with TorchCpuEngine(demo_store, DENSE, None, dataclasses.replace(RUN, context=32)) as engine:
        asked = requests(text, "loglikelihood_rolling")
        own = adapter(engine).loglikelihood_rolling(asked)
        assert own == pytest.approx(reference(demo_dense, engine, 32).loglikelihood_rolling(asked), abs=1e-3)


def test_generation_stops_at_its_stop_strings(engines: dict[str, TorchCpuEngine]) -> None:
    engine, prompt = engines["oracle"], "Once upon a time there was a"
    whole = "".join(step.text for step in engine.generate(prompt, 12))
    stop = whole[len(whole) // 2 :][:3]
    model = adapter(engine)
    asked = [(prompt, {"until": [], "max_gen_toks": 12}), (prompt, {"until": [stop], "max_gen_toks": 12})]
    assert model.generate_until(requests(asked, "generate_until")) == [whole, whole.split(stop)[0]]


def test_a_shared_context_is_computed_once(engines: dict[str, TorchCpuEngine]) -> None:
    fed: list[int] = []

    class Counting(TorchCpuEngine):
        def prefill(self, ids: list[int], keep: int = 0) -> Any:
            fed.append(len(ids))
            return super().prefill(ids, keep)

    base = engines["dense"]
    with Counting(base.store, DENSE, None, RUN) as engine:
        model = adapter(engine)
        model.loglikelihood(requests([("The sky is", " blue"), ("The sky is", " green"), ("The sky is", " very blue")]))
        context = len(model.tok_encode("The sky is"))
        rest = len(model.tok_encode("The sky is very blue")) - context - 1
        single = sum(len(model.tok_encode(f"The sky is {c}")) - context - 1 for c in ("blue", "green"))
        assert sum(fed) == context + rest + single
        assert fed[0] == context


# where the documents come from


def test_mmlu_from_one_file_pools_its_subjects(engines: dict[str, TorchCpuEngine]) -> None:
    pytest.importorskip("lm_eval", reason="needs lm_eval")
    (task,) = load_tasks(["mmlu"], OWN)
    assert (task.subjects, task.documents, task.requests, task.split) == (2, 4, 16, "test")
    anatomy = task.loaded["tasks"]["mmlu_anatomy"].instances
    assert anatomy[0].args[0].startswith("The following are multiple choice questions (with answers) about anatomy.")
    assert anatomy[0].args[0].endswith("D. the lungs\nAnswer:")
    assert [i.args[1] for i in anatomy[:4]] == [" A", " B", " C", " D"]
    result = run_task(adapter(engines["oracle"]), task, None)
    assert set(result["metrics"]) == {"acc"}
    assert result["metrics"]["acc"]["value"] in (0, 0.25, 0.5, 0.75, 1)


def test_mmlu_and_arc_in_the_hubs_own_layout(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm_eval")
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in (OWN / "mmlu_test.jsonl").read_text().splitlines()]
    for subject in ("anatomy", "astronomy"):
        (tmp_path / "mmlu" / subject).mkdir(parents=True)
        table = pyarrow.Table.from_pylist([row for row in rows if row["subject"] == subject])
        pyarrow.parquet.write_table(table, tmp_path / "mmlu" / subject / "test-00000-of-00001.parquet")
    (tmp_path / "ai2_arc" / "ARC-Easy").mkdir(parents=True)
    (tmp_path / "ai2_arc" / "ARC-Easy" / "validation.jsonl").write_bytes((OWN / "arc_easy_test.jsonl").read_bytes())
    arc, mmlu = load_tasks(["arc_easy", "mmlu"], tmp_path)
    assert (arc.split, arc.documents) == ("validation", 6)
    assert (mmlu.subjects, mmlu.requests) == (2, 16)
    assert load_tasks(["mmlu"], OWN)[0].loaded["tasks"]["mmlu_astronomy"].instances[0].args == (
        mmlu.loaded["tasks"]["mmlu_astronomy"].instances[0].args
    )


def test_what_cannot_be_had_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="needs lm_eval")
    import huggingface_hub.constants

    def refused(match: str, names: list[str], folder: Path | None) -> None:
        with pytest.raises(DataError, match=match) as error:
            load_tasks(names, folder)
        assert "\n" not in str(error.value)

    refused("no such directory", ["arc_easy"], tmp_path / "nothing")
    refused(r"arc_challenge: no file for it in .*arc_challenge_test.jsonl or .*ai2_arc/", ["arc_challenge"], tmp_path)
    path = tmp_path / "arc_easy_test.jsonl"
    path.write_text('{"question": "Why?", "answerKey": "A"}\n')
    refused(r"document 1 has no 'choices' field", ["arc_easy"], tmp_path)
    path.write_text("{not json\n")
    refused(r"line 1 is not a JSON object", ["arc_easy"], tmp_path)
    path.write_text("")
    refused(r"holds no documents", ["arc_easy"], tmp_path)
    path.write_text('{"question": "Why?", "answerKey": "Z", "choices": {"text": ["a"], "label": ["A"]}}\n')
    refused(r"the harness cannot use arc_easy_test.jsonl", ["arc_easy"], tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    refused(r"arc_easy: its data could not be had from the hub .*--tasks-dir", ["arc_easy"], None)


def test_without_the_harness_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(DataError, match=r"pip install 'flash-workbench\[eval\]'"):
        load_tasks(["arc_easy"], OWN)


# the whole


ARGUMENTS: dict[str, Any] = {
    "data": TEXT, "documents": (0, 2), "tokens": 120, "decode": 6, "rates": (0.02, 0.1), "run": RUN,
}  # fmt: skip


def test_a_record_has_accuracy_and_cost_of_every_row(demo_store: Store, demo_predictors: Predictors) -> None:
    record = evaluate(demo_store.path, demo_predictors, **ARGUMENTS)
    json.dumps(record)
    read = read_evaluation(record)
    assert [row.name for row in read.rows] == ["dense", "oracle", "predicted, 2% missed", "predicted, 10% missed"]
    dense, oracle, low, high = read.rows
    assert dense.perplexity == pytest.approx(oracle.perplexity, rel=1e-4)
    assert dense.flash_bytes == demo_store.spec.ffn_neurons * demo_store.layout.bundle_stride
    assert dense.loaded == demo_store.spec.ffn_neurons
    assert (low.predicted or 0) > (high.predicted or math.inf) > 0
    assert 0 < (low.false_negative or 0) < (high.false_negative or 0)
    assert (read.of_dense(low) or math.inf) < 1
    assert record["data"]["documents"] >= 1
    assert len(record["data"]["sha256"]) == 64


def test_an_interrupted_run_goes_on_after_what_is_finished(
    demo_store: Store, demo_predictors: Predictors, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm_eval")
    partial = tmp_path / "evaluation.json.partial"
    arguments = {**ARGUMENTS, "rates": (0.1,), "tasks": ["arc_easy"], "tasks_dir": OWN, "limit": 2, "partial": partial}
    seen: list[str] = []

    def interrupt(what: str, done: int, total: int) -> None:
        seen.append(what)
        if seen.count("oracle: task arc_easy") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(demo_store.path, demo_predictors, progress=interrupt, **arguments)
    kept = json.loads(partial.read_text())
    assert set(kept["rows"]["dense"]) == {"perplexity", "quality", "task arc_easy", "decode"}
    assert set(kept["rows"]["oracle"]) == {"perplexity", "quality"}
    assert len(kept["pending"]["oracle: arc_easy"]) == 8  # both documents have their four answers
    again: list[tuple[str, int, int]] = []
    record = evaluate(demo_store.path, demo_predictors, progress=lambda *step: again.append(step), **arguments)
    assert record["rows"][0]["total_ms"] == kept["rows"]["dense"]["decode"]["total_ms"]
    assert again[-1][1] == again[-1][2]
    assert [done for _, done, _ in again] == sorted(done for _, done, _ in again)
    result = record["rows"][1]["tasks"]["arc_easy"]
    assert result == record["rows"][0]["tasks"]["arc_easy"]
    assert json.loads(partial.read_text())["pending"] == {}
    request = json.loads(partial.read_text())["request"]
    assert Measured(partial, request).get("dense", "decode") == kept["rows"]["dense"]["decode"]
    assert Measured(partial, "another request").get("dense", "decode") is None


def test_an_interrupted_perplexity_goes_on_at_its_window(engines: dict[str, TorchCpuEngine]) -> None:
    engine = engines["oracle"]
    text = read_text(TEXT, engine.tokenizer, (0, 3), 350, 150)
    whole, known, fed = perplexity(lambda: engine, text), dict[str, list[Any]](), list[int]()

    def interrupt(count: int) -> None:
        fed.append(count)
        if len(fed) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perplexity(lambda: engine, text, interrupt, known)
    assert list(known) == ["0"]
    used = []

    def counted() -> TorchCpuEngine:
        used.append(1)
        return engine

    ticks: list[int] = []
    assert perplexity(counted, text, ticks.append, known) == whole
    assert len(used) == 2
    assert sum(ticks) == text.tokens


def test_refusals(demo_store: Store, demo_predictors: Predictors, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document from number 100000 on; give --documents"):
        evaluate(tmp_path / "no such model", data=TEXT, documents=(100_000, None))  # before anything is converted
    with pytest.raises(DataError, match="nothing to measure; give --data"):
        evaluate(demo_store.path, demo_predictors)
    with pytest.raises(PredictorError, match=r"no thresholds for false_negative=0.03"):
        evaluate(demo_store.path, demo_predictors, data=TEXT, rates=(0.03,))
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    with pytest.raises(DataError, match=r"short.txt: .* a decode after a prompt takes at least"):
        evaluate(demo_store.path, demo_predictors, data=short)


def test_a_checkpoint_is_converted_where_it_says(demo_store: Store, tiny_opt: Path, tmp_path: Path) -> None:
    told: list[str] = []
    made = open_store(tiny_opt, tmp_path / "store", tell=told.append)
    assert told == [f"{tiny_opt}: a checkpoint; converting it to a flash store {tmp_path / 'store'}"]
    assert made.digest == open_store(tiny_opt, tmp_path / "store", tell=told.append).digest
    assert told[1] == f"{tiny_opt}: a checkpoint; using its flash store {tmp_path / 'store'}"
    assert open_store(demo_store.path, tell=told.append).path == demo_store.path
    assert len(told) == 2


def test_texts_side_by_side(demo_store: Store, demo_predictors: Predictors) -> None:
    record = side_by_side(
        demo_store, demo_predictors, ["Once upon a time"], rate=0.1, max_new_tokens=24, run=RUN, predictors_name="demo"
    )
    (pair,) = read_side_by_side(record).pairs
    at = pair.diverges_at
    assert at == diverges(pair.dense.tokens, pair.predicted.tokens)
    assert pair.dense.tokens[:at] == pair.predicted.tokens[:at]
    assert 0 < (pair.predicted.flash_bytes or 0) < (pair.dense.flash_bytes or 0)
    with TorchCpuEngine(demo_store, DENSE, None, RUN) as engine:
        assert "".join(pair.dense.pieces) == "".join(s.text for s in engine.generate("Once upon a time", 24))
    with pytest.raises(DataError, match="no prompt"):
        side_by_side(demo_store, demo_predictors, [])


@pytest.mark.parametrize(
    ("first", "second", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [], None)]
)
def test_where_texts_part(first: list[int], second: list[int], at: int | None) -> None:
    assert diverges(first, second) == at
