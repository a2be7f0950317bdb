"""Speculative decoding: the text of greedy decoding, token for token, and a window that forgets what was rejected."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import fails, run
from tiny_models import make_opt, make_tiny

from workbench import assets
from workbench.ablation import PAPER_ROWS, Ablation
from workbench.engines.speculative import DraftModel, plan_draft
from workbench.engines.torch_cpu import TorchCpuEngine
from workbench.errors import AblationError, BudgetError, DraftError, StoreError, WorkbenchError
from workbench.experiments.ablate import ablate, beyond_rows
from workbench.experiments.convert import convert
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.report import ablation_table, read_ablation
from workbench.spec import RunSpec
from workbench.widgets.session import Session

FAMILIES = ("opt", "llama", "falcon", "phi", "persimmon")
ORACLE = Ablation(predictor="oracle")
SPECULATIVE = Ablation(predictor="oracle", speculative=True)
RUN = RunSpec(dram="1GiB", context=64)
PROMPT = [5, 9, 3, 44, 21, 8]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    """A tiny model of each family, and one that drafts for all of them."""
    root = tmp_path_factory.mktemp("speculative")
    made = {
        name: convert(make_tiny(root / name, name, eos_token_id=None), root / f"{name}-store", dtype="float32")
        for name in FAMILIES
    }
    draft = make_tiny(root / "draft", "opt", seed=7, hidden_size=32, ffn_dim=64, word_embed_proj_dim=32)
    return {**made, "draft": convert(draft, root / "draft-store", dtype="float16")}


class Scripted:
    """Proposes the tokens of a text that is known, but for places where it is wrong on purpose."""

    nbytes = 1 << 20

    def __init__(self, text: Sequence[int], wrong: Callable[[int], bool] = lambda at: False, vocab: int = 96):
        self.text, self.wrong, self.vocab = list(text), wrong, vocab
        self.forgotten = self.closed = 0

    def take(self, text: Sequence[int]) -> None:
        assert list(text) == self.text[: len(text)]

    def propose(self, text: Sequence[int], count: int) -> list[int]:
        assert list(text) == self.text[: len(text)]
        places = range(len(text), min(len(self.text), len(text) + count))
        return [(self.text[at] + self.wrong(at)) % self.vocab for at in places]

    def forget(self) -> None:
        self.forgotten += 1

    def close(self) -> None:
        self.closed += 1


def plain(store: Store, ablation: Ablation = ORACLE, tokens: int = 40, run: RunSpec = RUN, **given: Any) -> list[int]:
    with TorchCpuEngine(store, ablation, given.get("predictors"), run) as engine:
        return [step.token for step in engine.generate(PROMPT, tokens)]


def drafted(store: Store, draft: Scripted, ablation: Ablation = ORACLE, run: RunSpec = RUN) -> TorchCpuEngine:
    engine = TorchCpuEngine(store, ablation, None, run)
    engine.use_draft(draft)
    engine.ablation = dataclasses.replace(ablation, speculative=True)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ablation", [ORACLE, PAPER_ROWS["hybrid"], PAPER_ROWS["naive"]])
def test_tokens_verified_together_have_the_logits_that_they_have_alone(
    stores: dict[str, Store], family: str, ablation: Ablation
) -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 96, 44).tolist()
    with TorchCpuEngine(stores[family], ablation, None, dataclasses.replace(RUN, compute_threads=2)) as engine:
        engine.prefill(ids[:20])
        alone = torch.stack([engine.step(token)[0] for token in ids[20:]])
        for count in (2, 5, 16):
            engine.rewind(20)
            at = 20
            while at < 44:
                few = ids[at : at + count]
                assert torch.equal(engine.verify(few, int(rng.integers(1, len(few) + 1))), alone[at - 20 :][: len(few)])
                at += len(few)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_that_of_greedy_decoding_whatever_is_drafted(stores: dict[str, Store], family: str) -> None:
    store, draft = stores[family], stores["draft"]
    wanted = plain(store)
    for tokens in (4, 15):
        run = dataclasses.replace(RUN, draft=str(draft.path), draft_tokens=tokens)
        with TorchCpuEngine(store, SPECULATIVE, None, run) as engine:
            assert [step.token for step in engine.generate(PROMPT, 40)] == wanted
            assert engine.position == len(PROMPT) + 39  # as after steps: all but the last are taken
            assert engine.plan.draft_bytes == plan_draft(draft, run).total > 0
    text = [*PROMPT, *wanted]
    for wrong in (lambda at: True, lambda at: at % 7 < 3):
        with drafted(store, Scripted(text, wrong)) as engine:
            assert [step.token for step in engine.generate(PROMPT, 40)] == wanted


def test_a_demo_model_that_drafts_for_itself_is_always_right(demo_store: Store, demo_predictors: Predictors) -> None:
    run = RunSpec(dram="300%", draft=str(demo_store.path), context=128)
    for ablation, predictors in ((Ablation(), demo_predictors), (ORACLE, None)):
        wanted = plain(demo_store, ablation, 40, run, predictors=predictors)
        with TorchCpuEngine(demo_store, dataclasses.replace(ablation, speculative=True), predictors, run) as engine:
            steps = list(engine.generate(PROMPT, 40))
        assert [step.token for step in steps] == wanted
        right, asked = (sum(getattr(s.stats, name) for s in steps) for name in ("accepted", "drafted"))
        assert (right == asked) if predictors is None else 0.8 * asked < right <= asked
        assert all(step.stats.draft_ms > 0 for step in steps)
        assert all(step.stats.compute_ms >= step.stats.draft_ms for step in steps)


@pytest.mark.parametrize("backend", ["mlx-cpu", "mlx-metal", "mlx-cuda"])
def test_the_mlx_engines_draft_too(stores: dict[str, Store], backend: str) -> None:
    """On these nothing but the arithmetic's own care keeps two tokens that tie in order: here none tie."""
    pytest.importorskip("mlx.core", reason="MLX is not installed", exc_type=ImportError)
    from emulated_mlx import EmulatedMlx

    from workbench.engines.mlx.engine import MlxEngine

    store = stores["llama"]
    wanted = plain(store)[:14]
    kernels = None if backend == "mlx-cpu" else EmulatedMlx()
    with MlxEngine(store, ORACLE, None, RUN, backend, kernels) as engine:
        engine.use_draft(Scripted([*PROMPT, *wanted], lambda at: at % 4 == 0))
        engine.ablation = SPECULATIVE
        steps = list(engine.generate(PROMPT, 14))
    assert [step.token for step in steps] == wanted
    assert 0 < sum(step.stats.accepted for step in steps) < sum(step.stats.drafted for step in steps)


def windows(engine: TorchCpuEngine) -> list[set[int]]:
    """Of each layer the neurons that the next token finds."""
    found = []
    for ffn in engine.ffns:
        assert ffn.slots is not None
        found.append(set(ffn.all_ids.tolist()) - set(ffn.slots.missing(ffn.all_ids, engine.run.window).tolist()))
    return found


def test_what_is_accepted_is_read_as_often_as_without_drafting(stores: dict[str, Store]) -> None:
    store = stores["opt"]
    text = [*PROMPT, *plain(store)]
    with TorchCpuEngine(store, ORACLE, None, RUN) as engine:
        alone = [step.stats for step in engine.generate(PROMPT, 40)]
        window = windows(engine)
    with drafted(store, Scripted(text)) as engine:
        together = [step.stats for step in engine.generate(PROMPT, 40)]
        assert windows(engine) == window
    for name in ("loaded", "predicted", "active"):
        assert sum(getattr(s, name) for s in together) == sum(getattr(s, name) for s in alone), name
    assert sum(s.reads for s in together) <= sum(s.reads for s in alone)
    assert sum(s.accepted for s in together) == sum(s.drafted for s in together) == 39 - 8  # eight rounds


def test_the_window_forgets_what_was_rejected(stores: dict[str, Store]) -> None:
    """Of the first round, before anything is known of the draft, every token stays. Then alpha is 0, and the window
    ends at the one token that is sure: when the first round has left it, it is the window of decoding alone."""
    store = stores["llama"]
    text = [*PROMPT, *plain(store, tokens=20)]
    with (
        TorchCpuEngine(store, ORACLE, None, RUN) as alone,
        drafted(store, Scripted(text, lambda at: True)) as engine,
    ):
        ids = [*PROMPT, text[len(PROMPT)]]
        engine.prefill(PROMPT)
        for count in range(8):
            ids += [token for token, _ in engine.round(ids, 99)]
            alone.reset()
            alone.prefill(ids[:-1])
            same = windows(engine) == windows(alone)
            assert same == (count >= RUN.window), count
        assert ids == text[: len(ids)]


def test_few_slots_leave_no_neuron_out(demo_store: Store) -> None:
    wanted = plain(demo_store, ORACLE, 30, dataclasses.replace(RUN, dram="100%"))
    text = [*PROMPT, *wanted]
    draft = Scripted(text, lambda at: at % 5 == 0, demo_store.spec.vocab_size)
    with pytest.raises(BudgetError) as caught:
        TorchCpuEngine(demo_store, ORACLE, None, dataclasses.replace(RUN, dram="1MiB"))
    least = int(str(caught.value).rpartition(" ")[2].removesuffix("MiB"))
    tight = dataclasses.replace(RUN, dram=f"{least + 3}MiB")
    with drafted(demo_store, draft, run=tight) as engine:
        assert max(engine.plan.slots) < demo_store.spec.d_ff // 2
        assert [step.token for step in engine.generate(PROMPT, 30)] == wanted
        assert engine.plan.draft_bytes == draft.nbytes


def test_speculation_can_be_switched_at_any_token(stores: dict[str, Store]) -> None:
    store = stores["phi"]
    wanted = plain(store)
    draft = Scripted([*PROMPT, *wanted], lambda at: at % 4 == 0)
    with drafted(store, draft) as engine:
        got = []
        for count, step in enumerate(engine.generate(PROMPT, 40)):
            got.append(step.token)
            if count % 5 == 4:
                on = dataclasses.replace(engine.ablation, speculative=not engine.ablation.speculative)
                engine.ablation = on
        assert got == wanted
        assert draft.forgotten == 1
    assert draft.closed == 0  # whoever made it closes it


def test_a_round_ends_at_an_end_token_and_at_the_last_token_wanted(stores: dict[str, Store]) -> None:
    store = stores["opt"]
    wanted = plain(store)
    text = [*PROMPT, *wanted]
    with drafted(store, Scripted(text)) as engine:
        assert [step.token for step in engine.generate(PROMPT, 7)] == wanted[:7]
        assert engine.position == len(PROMPT) + 6
        engine.spec.config["eos_token_id"] = wanted[8]
        try:
            last = wanted.index(wanted[8])
            steps = list(engine.generate(PROMPT, 40))
        finally:
            engine.spec.config["eos_token_id"] = None
        assert [step.token for step in steps] == wanted[: last + 1]
        assert engine.position == len(PROMPT) + last
        assert list(engine.generate(PROMPT, 0)) == []


def test_what_cannot_draft_is_refused_in_one_line(stores: dict[str, Store], demo_store: Store, tmp_path: Path) -> None:
    store, draft = stores["opt"], stores["draft"]

    def refused(kind: type[WorkbenchError], *words: str, of: Store = store, **given: Any) -> None:
        with pytest.raises(kind) as caught:
            TorchCpuEngine(of, SPECULATIVE, None, dataclasses.replace(RUN, **given))
        assert "\n" not in str(caught.value)
        assert all(word in str(caught.value) for word in words), caught.value

    refused(AblationError, "speculative=True", "--draft STORE")
    refused(StoreError, "nothing", draft=str(tmp_path / "nothing"))
    refused(DraftError, "8,192", "96", "vocabulary", draft=str(demo_store.path))
    refused(BudgetError, "--dram", draft=str(draft.path), dram="300000")
    model = make_opt(tmp_path / "model", vocab_size=8192)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(assets.path("data/demo-model") / name, model)
    same = convert(model, tmp_path / "same")
    words = json.loads((model / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    first, second = (next(word for word, at in vocabulary.items() if at == wanted) for wanted in (700, 701))
    vocabulary[first], vocabulary[second] = 701, 700
    (model / "tokenizer.json").write_text(json.dumps(words))
    other = convert(model, tmp_path / "other")
    refused(DraftError, "tokenizer", "701", "700", of=demo_store, draft=str(other.path))
    with TorchCpuEngine(demo_store, SPECULATIVE, None, dataclasses.replace(RUN, draft=str(same.path))) as engine:
        with pytest.raises(AblationError, match="temperature"):
            next(engine.generate(PROMPT, 4, temperature=0.5))
        engine.ablation = ORACLE
        assert engine.plan.draft_bytes > 0  # until the next token
        engine.settle()
        assert engine.plan.draft_bytes == 0
    with drafted(store, Scripted([*PROMPT, *range(96)], vocab=10_000)) as engine:
        draft_of_it = engine._drafting.draft
        assert isinstance(draft_of_it, Scripted)
        draft_of_it.propose = lambda text, count: [96] * count  # type: ignore[method-assign]
        with pytest.raises(DraftError, match="vocabulary"):
            list(engine.generate(PROMPT, 4))


def test_the_drafts_kv_cache_is_of_the_dtype_that_is_asked_for(stores: dict[str, Store]) -> None:
    run = dataclasses.replace(RUN, draft=str(stores["draft"].path))
    speculative = dataclasses.replace(ORACLE, speculative=True)
    with TorchCpuEngine(stores["opt"], speculative, None, run) as engine:
        for dtype in ("float32", "bfloat16", "float32"):
            engine.run = dataclasses.replace(run, kv_dtype=dtype)  # type: ignore[arg-type]
            engine.settle()
            draft = engine._drafting.draft
            assert isinstance(draft, DraftModel)
            assert draft.engine.run.kv_dtype == dtype
            assert engine.plan.draft_bytes == draft.nbytes == draft.engine.plan.total


def test_a_draft_with_a_short_context_stops_drafting(tmp_path: Path, stores: dict[str, Store]) -> None:
    model = make_tiny(tmp_path / "short", "llama", seed=3, max_position_embeddings=16)
    short = convert(model, tmp_path / "store")
    run = dataclasses.replace(RUN, draft=str(short.path))
    with TorchCpuEngine(stores["llama"], SPECULATIVE, None, run) as engine:
        steps = list(engine.generate(PROMPT, 40))
    assert [step.token for step in steps] == plain(stores["llama"])
    assert steps[1].stats.drafted > 0
    assert sum(step.stats.drafted for step in steps[20:]) == 0


@pytest.fixture(scope="module")
def demo_draft(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The demo model in 16 bits: nearly always right."""
    return convert(assets.path("data/demo-model"), tmp_path_factory.mktemp("draft") / "store", dtype="float16")


def test_an_ablation_row_writes_its_own_text(demo_store: Store, demo_draft: Store, demo_text: np.ndarray) -> None:
    run = RunSpec(dram="200%", context=128, draft=str(demo_draft.path), draft_tokens=3)
    rows = beyond_rows(run)
    assert "all + speculative" in rows
    assert "all + speculative" not in beyond_rows(RUN)
    chosen = {
        name: dataclasses.replace(rows[name], predictor="oracle") for name in ("all, oracle", "all + speculative")
    }
    record = ablate(demo_store, None, demo_text, rows=chosen, run=run, prompt=16, tokens=12)
    given, own = record["rows"]
    assert own["text"] == "own greedy continuation"
    assert "text" not in given
    assert own["tokens"] == given["tokens"] == 12
    assert 0.5 < own["acceptance"] <= 1
    assert 2 < own["tokens_per_round"] <= 4
    assert 0 < own["draft_ms"] < own["compute_ms"]
    assert own["draft_tokens"] == 3
    read = read_ablation(record)
    assert read.rows[1].acceptance == own["acceptance"]
    note = next(note for note in ablation_table(read).notes if note.startswith("all + speculative"))
    assert all(word in note for word in ("own greedy", "accepted", "as fast as all, oracle", "1.4×", "1.58×")), note


def test_the_command(demo_store: Store, demo_draft: Store) -> None:
    common = ("--prompt", "One day", "--max-new-tokens", "12", "--dram", "300%")
    usual = run("generate", demo_store.path, *common)
    drafting = run(
        "generate", demo_store.path, *common, "--speculative", "--draft", demo_draft.path, "--draft-tokens", "3"
    )
    assert drafting.returncode == usual.returncode == 0, drafting.stderr
    assert drafting.stdout == usual.stdout
    assert "accepted" in drafting.stderr
    assert "--draft STORE" in fails("generate", demo_store.path, *common, "--speculative")
    wrong = run("generate", demo_store.path, *common, "--draft", demo_draft.path)
    assert wrong.returncode == 2
    assert "temperature" in fails(
        "generate", demo_store.path, *common, "--speculative", "--draft", demo_draft.path, "--temperature", "1"
    )


def test_a_session_drafts_too(demo_store: Store, demo_draft: Store) -> None:
    run = RunSpec(dram="300%", context=128)
    with Session(TorchCpuEngine(demo_store, ORACLE, None, run)) as session:
        session.start("One day", tokens=30)
        wanted = session.wait(120).text
        with pytest.raises(AblationError, match="--draft"):
            session.change(speculative=True)
        session.change(draft=str(demo_draft.path))
        session.change(speculative=True)
        session.start("One day", tokens=30)
        shown = session.wait(120)
        assert (shown.text, shown.tokens) == (wanted, 60)
        assert shown.plan.draft_bytes > 0
        assert not shown.error, shown.line


@pytest.mark.slow
def test_the_135m_model_with_a_part_of_itself_as_draft(relu_135m: Path, tmp_path: Path) -> None:
    """Its first layers draft, and so does the whole of it: the text is that of greedy decoding both times."""
    from transformers import AutoModelForCausalLM

    store = convert(relu_135m, tmp_path / "store", dtype="float16")
    model = AutoModelForCausalLM.from_pretrained(relu_135m, dtype=torch.float16)
    model.model.layers = model.model.layers[:20]
    model.config.num_hidden_layers = 20
    shutil.copytree(relu_135m, tmp_path / "first", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(tmp_path / "first")
    first = convert(tmp_path / "first", tmp_path / "draft", dtype="float16")
    prompt = "The history of the steam engine begins with"
    base = RunSpec(dram="100%", context=256)
    with TorchCpuEngine(store, ORACLE, None, base) as engine:
        wanted = [step.token for step in engine.generate(prompt, 120)]
    for draft in (first, store):
        run = dataclasses.replace(base, dram="300%", draft=str(draft.path))
        with TorchCpuEngine(store, SPECULATIVE, None, run) as engine:
            assert [step.token for step in engine.generate(prompt, 120)] == wanted
