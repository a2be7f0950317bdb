"""The engine against transformers' dense model, on real text: same logits, and exactly the bytes that were due."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import make_opt

from workbench import load
from workbench.ablation import PAPER_ROWS, Ablation
from workbench.engines.torch_cpu import TorchCpuEngine
from workbench.errors import AblationError, BudgetError, DataError, DeviceError, PredictorError, ReaderError, StoreError
from workbench.experiments.convert import convert
from workbench.flash.reader import plan_reads
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

ROOMY = RunSpec(dram="95%")
SWITCHES = itertools.product((True, False), ("off", "oracle"), (True, False), (True, False))
BASIC = [
    Ablation(hybrid=h, predictor=p, windowing=w, bundling=b)
    for h, p, w, b in SWITCHES
    if not (p == "off" and w)  # the one undefined combination
]
COMBINATIONS = [
    *BASIC,
    *(dataclasses.replace(a, coalesce=False) for a in BASIC if a.hybrid and a.predictor == "oracle"),
    *(dataclasses.replace(a, io=io) for a in BASIC if a.hybrid and a.bundling for io in ("io_uring", "buffered")),
]


def engine(store: Store, ablation: Ablation, predictors: Predictors | None = None, **run: Any) -> TorchCpuEngine:
    try:
        return TorchCpuEngine(store, ablation, predictors, dataclasses.replace(ROOMY, **run))
    except ReaderError as error:
        if "io_uring is not available" in str(error):
            pytest.skip(f"this kernel refuses io_uring: {error}")
        raise


@pytest.mark.parametrize("ablation", COMBINATIONS, ids=lambda a: a.describe().split(" prefetch")[0])
def test_oracle_logits_are_the_dense_models(
    demo_store: Store, demo_text: np.ndarray, demo_logits: torch.Tensor, ablation: Ablation
) -> None:
    with engine(demo_store, ablation) as running:
        logits = running.logits(demo_text[:64])
        prompt = running_prompt(running, demo_text[:64])
    assert (logits - demo_logits[:64]).abs().max() < 1e-4
    assert (prompt - demo_logits[63]).abs().max() < 1e-4


def running_prompt(running: TorchCpuEngine, ids: np.ndarray) -> torch.Tensor:
    running.reset()
    return running.prefill(ids.tolist())[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ablation", [Ablation(predictor="oracle"), PAPER_ROWS["naive"], PAPER_ROWS["hybrid"]])
def test_16_bit_storage_is_float32_arithmetic(tmp_path: Path, dtype: str, ablation: Ablation) -> None:
    source = make_opt(tmp_path / "model", d_model=96, d_ff=200)
    store = convert(source, tmp_path / "store", dtype=dtype)  # type: ignore[arg-type]
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).float().eval()
    ids = np.random.default_rng(0).integers(0, store.spec.vocab_size, 24)
    with torch.no_grad():
        wanted = reference(torch.from_numpy(ids)[None]).logits[0]
    with engine(store, ablation, dram="40MB") as running:
        assert (running.logits(ids) - wanted).abs().max() < 1e-4
        assert (running_prompt(running, ids) - wanted[-1]).abs().max() < 1e-4
        assert running.plan.resident_bytes <= sum(group.nbytes for group in store.groups)


def test_a_toggle_at_any_token_gives_what_a_fresh_engine_gives(
    demo_store: Store, demo_text: np.ndarray, demo_logits: torch.Tensor
) -> None:
    rng = np.random.default_rng(3)
    with engine(demo_store, Ablation(predictor="oracle")) as running:
        got = []
        for token in demo_text[:40].tolist():
            running.ablation = COMBINATIONS[rng.integers(len(COMBINATIONS))]
            got.append(running.step(token)[0])
    assert (torch.stack(got) - demo_logits[:40]).abs().max() < 1e-4


def expected_traffic(
    running: TorchCpuEngine, chosen: list[list[np.ndarray]], window: int, ablation: Ablation
) -> tuple[int, int, int]:
    """(bytes, reads, neurons loaded) of a run, from the ids chosen by token and layer, by set arithmetic alone."""
    store, layout, gap = running.store, running.store.layout, running.run.coalesce_gap_bytes
    nbytes = reads = loaded = 0
    for token, layers in enumerate(chosen):
        for layer, ids in enumerate(layers):
            first = max(0, token - window) if ablation.windowing else token
            held = set().union(*(chosen[t][layer].tolist() for t in range(first, token)))
            missing = np.array(sorted(set(ids.tolist()) - held), np.int64)
            loaded += len(missing)
            if ablation.bundling:
                offsets = store.bundled_offset(layer) + missing * layout.bundle_stride
                lengths = [layout.record_bytes] * len(missing)
            else:
                offsets = np.concatenate([store.split_offset(layer, p) + missing * layout.row_stride for p in (0, 1)])
                lengths = [layout.row_bytes] * (2 * len(missing))
            plan = plan_reads(offsets, lengths, gap if ablation.coalesce else -1, running.run.chunk_bytes)
            nbytes, reads = nbytes + sum(n for _, n in plan), reads + len(plan)
    return nbytes, reads, loaded


def proc_read_bytes() -> int | None:
    try:
        return next(int(x.split()[1]) for x in Path("/proc/self/io").read_text().splitlines() if "read_bytes" in x)
    except OSError:
        return None


@pytest.mark.parametrize("coalesce", [False, True])
@pytest.mark.parametrize("row", ["+ predictor", "+ windowing", "+ bundling (all)"])
def test_flash_bytes_are_what_the_window_says(
    demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors, row: str, coalesce: bool
) -> None:
    ablation = dataclasses.replace(PAPER_ROWS[row], coalesce=coalesce)
    with engine(demo_store, ablation, demo_predictors) as running:
        chosen: list[list[np.ndarray]] = []
        for ffn in running.ffns:
            ffn.set_slots(demo_store.spec.d_ff)  # no token needs two passes, nothing is trimmed
            choose = ffn._choose
            ffn._choose = lambda x, choose=choose: chosen[-1].append(choose(x)) or chosen[-1][-1]  # type: ignore[method-assign]
        before, totals = proc_read_bytes(), np.zeros(3, np.int64)
        for token in demo_text[:24].tolist():
            chosen.append([])
            stats = running.step(token)[1]
            totals += [stats.read_bytes, stats.reads, stats.loaded]
        after = proc_read_bytes()
        assert totals.tolist() == list(expected_traffic(running, chosen, running.run.window, ablation))
        if before is not None and after is not None:
            assert after - before == totals[0]


def test_naive_and_hybrid_read_the_bytes(demo_store: Store, demo_text: np.ndarray) -> None:
    seen = {}
    for name in ("naive", "hybrid"):
        with engine(demo_store, PAPER_ROWS[name]) as running:
            before = proc_read_bytes()
            stats = [running.step(token)[1] for token in demo_text[:3].tolist()]
            after = proc_read_bytes()
            seen[name] = stats[-1].read_bytes
            if before is not None and after is not None:
                assert after - before == sum(s.read_bytes for s in stats)
            held = sum(running.plan.slots)
        if name == "naive":
            ffn = 2 * demo_store.layout.split_region(demo_store.spec.d_ff) * demo_store.spec.num_layers
            assert seen[name] == ffn + sum(group.nbytes for group in demo_store.groups)
            assert seen[name] >= demo_store.model_bytes
        else:
            assert held > 0
            assert stats[-1].loaded == demo_store.spec.ffn_neurons - held
    assert seen["hybrid"] < seen["naive"]


def test_flash_bytes_fall_down_the_papers_rows(
    demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors
) -> None:
    sizes = []
    for ablation in PAPER_ROWS.values():
        with engine(demo_store, ablation, demo_predictors) as running:
            running.prefill(demo_text[:32].tolist())
            steps = [running.step(token)[1] for token in demo_text[32:56].tolist()]
            sizes.append(sum(s.read_bytes for s in steps[8:]))
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    assert sizes[0] > 10 * sizes[-1]


def test_low_rank_perplexity_is_near_dense(
    demo_store: Store, demo_text: np.ndarray, demo_logits: torch.Tensor, demo_predictors: Predictors
) -> None:
    with engine(demo_store, Ablation(), demo_predictors) as running:
        logits = running.logits(demo_text)
    target = torch.from_numpy(demo_text)[1:]
    dense = F.cross_entropy(demo_logits[:-1], target).item()
    ours = F.cross_entropy(logits[:-1], target).item()
    assert not torch.equal(logits, demo_logits)  # neurons were really left out
    assert abs(math.exp(ours - dense) - 1) < 0.02


def test_prompt_and_single_tokens_agree(demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors) -> None:
    with engine(demo_store, Ablation(), demo_predictors) as running:
        single = running.logits(demo_text[:48])[-1]
        held = [set(ffn.slots.ids().tolist()) for ffn in running.ffns if ffn.slots]
        after = running.step(int(demo_text[48]))
        prompt = running_prompt(running, demo_text[:48])
        assert [set(ffn.slots.ids().tolist()) for ffn in running.ffns if ffn.slots] == held
        again = running.step(int(demo_text[48]))
    assert (single - prompt).abs().max() < 1e-4
    assert (after[0] - again[0]).abs().max() < 1e-4
    assert after[1].read_bytes == again[1].read_bytes  # the window is as warm after a prompt


@pytest.mark.parametrize("slots", [3, 40])
def test_few_slots_leave_no_neuron_out(
    demo_store: Store, demo_text: np.ndarray, demo_logits: torch.Tensor, slots: int
) -> None:
    with engine(demo_store, Ablation(predictor="oracle")) as running:
        for ffn in running.ffns:
            ffn.set_slots(slots)
        steps = [running.step(token) for token in demo_text[:12].tolist()]
    assert (torch.stack([s[0] for s in steps]) - demo_logits[:12]).abs().max() < 1e-4
    assert all(s[1].in_window <= slots * demo_store.spec.num_layers for s in steps)
    assert sum(s[1].window_trims for s in steps) > 0


def test_stats_add_up(demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors) -> None:
    with engine(demo_store, Ablation(), demo_predictors) as running:
        for token in demo_text[:10].tolist():
            s = running.step(token)[1]
            assert s.total_ms == pytest.approx(s.io_ms + s.mem_ms + s.compute_ms)
            assert 0 < s.predictor_ms < s.compute_ms
            assert 0 < s.active <= s.predicted <= s.in_window <= sum(running.plan.slots)
            assert s.loaded <= s.predicted


def test_the_plan_keeps_to_the_budget(demo_store: Store, demo_predictors: Predictors) -> None:
    for dram in ("75%", "80MB", "200%"):
        for ablation in [*PAPER_ROWS.values(), Ablation(predictor="oracle")]:
            with engine(demo_store, ablation, demo_predictors, dram=dram) as running:
                assert running.plan.total <= running.plan.budget_bytes


def test_small_budget_names_the_least_that_works(demo_store: Store, demo_predictors: Predictors) -> None:
    with pytest.raises(BudgetError, match="pass --dram") as caught:
        engine(demo_store, Ablation(), demo_predictors, dram="20%")
    least = str(caught.value).rsplit("--dram ", 1)[1]
    assert "\n" not in str(caught.value)
    engine(demo_store, Ablation(), demo_predictors, dram=least).close()


def test_refusals(demo_store: Store, demo_predictors: Predictors, demo_text: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(AblationError, match=r"low_rank.*--predictors"):
        engine(demo_store, Ablation())
    with pytest.raises(DeviceError, match="torch-cpu"):
        load(demo_store.path, backend="torch-tpu", ablation=Ablation(predictor="oracle"))
    with pytest.raises(PredictorError):
        load(demo_store.path, predictors=tmp_path / "none")
    with pytest.raises(BudgetError, match="--dram"):
        load(demo_store.path, ablation=Ablation(predictor="oracle"), dram="half")
    other = convert(make_opt(tmp_path / "model"), tmp_path / "store")
    with pytest.raises(PredictorError, match="trained for"):
        engine(other, Ablation(), demo_predictors, dram="1GiB")
    with engine(demo_store, Ablation(predictor="oracle"), context=8) as running:
        with pytest.raises(AblationError, match="low_rank"):
            running.ablation = Ablation()
        with pytest.raises(BudgetError, match="the context of 8"):
            running.logits(demo_text[:9])
        with pytest.raises(DataError, match="no tokens"):
            running.prefill([])
    with pytest.raises(BudgetError, match="closed"):
        running.step(1)


def test_a_failed_read_leaves_no_garbage(
    demo_store: Store, demo_text: np.ndarray, demo_logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(demo_store, Ablation(predictor="oracle")) as running:
        assert running.reader is not None
        read = running.reader.read

        def failing(*args: Any) -> Any:
            raise ReaderError("short read")

        running.step(int(demo_text[0]))
        position = running.position
        monkeypatch.setattr(running.reader, "read", failing)
        with pytest.raises(ReaderError):
            running.step(int(demo_text[1]))
        assert running.position == position
        monkeypatch.setattr(running.reader, "read", read)
        running.reset()
        assert (running.logits(demo_text[:8]) - demo_logits[:8]).abs().max() < 1e-4


def test_damaged_weights_are_no_text(demo_store: Store, demo_text: np.ndarray, tmp_path: Path) -> None:
    shutil.copytree(demo_store.path, tmp_path / "store")
    with open(tmp_path / "store" / "ffn.split", "r+b") as file:
        for record in range(0, demo_store.spec.d_ff, 3):
            file.seek(record * demo_store.layout.row_stride)
            file.write(b"\xff" * 64)
    with (
        engine(Store.open(tmp_path / "store"), PAPER_ROWS["hybrid"]) as running,
        pytest.raises(StoreError, match="workbench verify"),
    ):
        running.step(int(demo_text[0]))


def test_greedy_text_is_transformers_own(demo_store: Store, demo_dense: Any) -> None:
    with engine(demo_store, Ablation(predictor="oracle")) as running:
        ids = running.tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
        steps = list(running.generate("Once upon a time", 40))
        with torch.no_grad():
            wanted = demo_dense.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
        assert [step.token for step in steps] == wanted
        assert "".join(step.text for step in steps) == running.tokenizer.decode(wanted, skip_special_tokens=True)


def test_nucleus_sampling_repeats_with_its_seed(demo_store: Store) -> None:
    with engine(demo_store, Ablation(predictor="oracle")) as running:
        runs = [
            [s.token for s in running.generate("The farmer", 16, temperature=0.9, top_p=0.8, seed=seed)]
            for seed in (1, 1, 2)
        ]
    assert runs[0] == runs[1] != runs[2]
