"""Sparsity, reuse, windows and co-activation of the demo model: records against the activations themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import fails, run
from safetensors.numpy import load_file
from tiny_models import make_opt

from workbench import assets, report
from workbench.analysis.reuse import aggregated_use, reuse
from workbench.capture.activations import active_neurons, dense, tokenizer
from workbench.capture.text import windows_and_card
from workbench.engines.budget import plan_dram
from workbench.errors import AblationError, BudgetError, DataError, DeviceError, RecordError
from workbench.experiments import window as window_module
from workbench.experiments.coactivation import analyze_coactivation, discard
from workbench.experiments.reuse import analyze_reuse
from workbench.experiments.sparsity import analyze_sparsity
from workbench.experiments.window import plan_whole, window_sweep
from workbench.flash.store import Store
from workbench.models import family
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

MODEL, TEXT = assets.path("data/demo-model"), assets.path("data/text")
TOKENS, SEQUENCE = 512, 256
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def active() -> list[list[np.ndarray]]:
    """Active ids by layer and token of the text that the analyses read, found with the tap alone."""
    loaded = dense(MODEL)
    windows, _ = windows_and_card(TEXT, tokenizer(MODEL), SEQUENCE, TOKENS // SEQUENCE)
    return active_neurons(loaded, family("opt").activated_linears(loaded), windows)


@pytest.fixture(scope="module")
def coactivation(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    arrays = tmp_path_factory.mktemp("coactivation") / "friends.safetensors"
    record = analyze_coactivation(MODEL, TEXT, tokens=TOKENS, friends=4, arrays=arrays)
    return record, load_file(str(arrays))


def test_sparsity_is_that_of_the_activations(active: list[list[np.ndarray]]) -> None:
    record = analyze_sparsity(MODEL, TEXT, tokens=TOKENS)
    d_ff = record["run"]["geometry"]["d_ff"]
    for row, own in zip(record["rows"], active, strict=True):
        zeros = np.array([1 - len(ids) / d_ff for ids in own])
        assert row["zeros"] == pytest.approx(zeros.mean())
        assert [row[f"p{q}"] for q in (5, 50, 95)] == pytest.approx(np.percentile(zeros, [5, 50, 95]))
        assert row["never"] == d_ff - len(np.unique(np.concatenate(own)))
    first = np.mean([[1 - len(own[at]) / d_ff for at in (0, SEQUENCE)] for own in active])
    assert record["by_place"][0]["zeros"] == pytest.approx(first)
    assert record["run"]["data"]["tokens"] >= TOKENS
    assert report.sparsity_figure(report.read_sparsity(record)).startswith(PNG)


def test_reuse_and_aggregated_use(active: list[list[np.ndarray]]) -> None:
    record = analyze_reuse(MODEL, TEXT, tokens=TOKENS, windows=(0, 4))
    d_ff = record["run"]["geometry"]["d_ff"]
    stretches = [active[0][:SEQUENCE], active[0][SEQUENCE:]]
    found = [point for point in record["by_layer"] if (point["layer"], point["window"]) == (0, 4)]
    assert found[0]["new_share"] == pytest.approx(np.mean([reuse(own, d_ff, [4])[0].new_share for own in stretches]))
    use = record["aggregated"]
    assert use["tokens"][:3] == [0, 1, 2]
    assert use["tokens"][-1] == SEQUENCE // 2
    expected = np.mean([aggregated_use(own, SEQUENCE // 2)[use["tokens"]] / d_ff for own in stretches], axis=0)
    assert use["by_layer"][0] == pytest.approx(expected)
    assert use["mean"] == pytest.approx(np.mean(use["by_layer"], axis=0))
    read = report.read_reuse(record)
    assert report.aggregated_figure(read).startswith(PNG)
    with pytest.raises(DataError, match="window of 256"):
        analyze_reuse(MODEL, TEXT, windows=(0, 256))


def test_coactivation_is_exact(
    active: list[list[np.ndarray]], coactivation: tuple[dict[str, Any], dict[str, np.ndarray]]
) -> None:
    record, arrays = coactivation
    d_ff = record["run"]["geometry"]["d_ff"]
    for layer in (0, len(active) - 1):
        mask = torch.zeros(TOKENS, d_ff, dtype=torch.float64)
        for token, ids in enumerate(active[layer]):
            mask[token, torch.from_numpy(ids.astype(np.int64))] = 1
        counts = (mask.T @ mask).numpy().astype(np.int64)
        assert np.array_equal(arrays["frequency"][layer], counts.diagonal())
        total = counts.sum() - counts.diagonal().sum()
        np.fill_diagonal(counts, -1)
        order = np.argsort(-counts, axis=1, kind="stable")[:, :4]
        best = np.take_along_axis(counts, order, axis=1)
        assert np.array_equal(arrays["friend_counts"][layer], best)
        assert np.array_equal(arrays["friends"][layer], np.where(best > 0, order, -1))
        row = record["rows"][layer]
        assert row["top_share"] == pytest.approx(best[:, 0].sum() / total)
        assert row["distinct_friends"] == len(np.unique(order[best[:, 0] > 0, 0]))
        assert sum(row["pairs"]) == d_ff * (d_ff - 1) // 2
        assert 1 <= row["bundle_bytes"] <= 2
    found = report.read_coactivation(record)
    assert report.coactivation_figure(found).startswith(PNG)
    assert "layer 0" in report.to_markdown(report.coactivation_table(found))


@pytest.mark.parametrize("stage", ["active neurons", "layer 0, pairs", "layer 4, pairs"])
def test_an_interrupted_coactivation_goes_on(
    tmp_path: Path, coactivation: tuple[dict[str, Any], dict[str, np.ndarray]], stage: str
) -> None:
    partial, stages = tmp_path / "record.partial", []

    def stop(what: str, done: int, total: int) -> None:
        if what == stage:
            raise KeyboardInterrupt

    def asked(**more: Any) -> dict[str, Any]:
        return analyze_coactivation(MODEL, TEXT, tokens=TOKENS, friends=4, partial=partial, **more)

    with pytest.raises(KeyboardInterrupt):
        asked(progress=stop)
    record = asked(progress=lambda what, done, total: stages.append((what, done)))
    assert record["rows"] == coactivation[0]["rows"]
    assert (stages[0] == ("active neurons", TOKENS)) == (stage == "active neurons")
    assert any(what.startswith("layer 3") for what, _ in stages) == (stage != "layer 4, pairs")
    stages.clear()
    analyze_coactivation(MODEL, TEXT, tokens=SEQUENCE, friends=4, partial=partial,
                         progress=lambda what, done, total: stages.append((what, done)))  # fmt: skip
    assert stages[0] == ("active neurons", SEQUENCE)  # another request takes nothing over
    discard(partial)
    assert not partial.exists()


def test_coactivation_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="friends=0"):
        analyze_coactivation(MODEL, TEXT, friends=0)
    (tmp_path / "short.txt").write_text("Only a few words.")
    with pytest.raises(DataError, match="--data"):
        analyze_coactivation(MODEL, tmp_path / "short.txt")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    with pytest.raises(RecordError, match="something else"):
        analyze_coactivation(MODEL, TEXT, partial=tmp_path / "other")
    assert (tmp_path / "other" / "thesis.tex").exists()
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="--device cpu"):
            analyze_coactivation(MODEL, TEXT, device="cuda")


def test_windows_need_what_they_hold_and_go_on(
    demo_store: Store, demo_predictors: Predictors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation, partial = window_module.PAPER_ROWS["+ bundling (all)"], tmp_path / "window.partial"
    fitting = plan_whole(demo_store, ablation, demo_predictors, RunSpec(window=8, context=128)).total
    run_spec = RunSpec(dram=f"{fitting}B", context=128)
    measure, measured = window_module._measure, []

    def counted(name: str, *rest: Any) -> dict[str, Any]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(name)
        return measure(name, *rest)

    def sweep() -> dict[str, Any]:
        return window_sweep(demo_store, demo_predictors, TEXT, windows=(8, 0, 64), run=run_spec, prompt=16, tokens=6,
                            partial=partial)  # fmt: skip

    with monkeypatch.context() as patched:
        patched.setattr(window_module, "_measure", counted)
        with pytest.raises(KeyboardInterrupt):
            sweep()
        measured.clear()
        record = sweep()
        assert measured == ["k = 64"]
    rows = record["rows"]
    assert [row["window"] for row in rows] == [0, 8, 64]
    assert [row["need_bytes"] for row in rows] == sorted(row["need_bytes"] for row in rows)
    assert rows[0]["measured"]["flash_bytes"] > rows[1]["measured"]["flash_bytes"]
    for row in rows:
        assert row["need_bytes"] == row["fixed_bytes"] + row["slot_bytes"]
        assert row["fits"] == (row["need_bytes"] <= record["budget_bytes"])
        assert row["measured"]["dram_bytes"] <= record["budget_bytes"]
        if row["fits"]:  # then the engine's plan is the whole need
            assert row["measured"]["dram_bytes"] == row["need_bytes"]
    assert [row["fits"] for row in rows] == [True, True, False]
    assert record["largest_fitting"] == 8
    found = report.read_window(record)
    assert report.window_figure(found).startswith(PNG)
    assert "k = 8" in report.to_markdown(report.window_table(found))


def test_a_window_that_fits_is_planned_whole(demo_store: Store, demo_predictors: Predictors) -> None:
    ablation = window_module.PAPER_ROWS["+ bundling (all)"]
    whole = plan_whole(demo_store, ablation, demo_predictors, RunSpec(window=2))
    exact = RunSpec(window=2, dram=f"{whole.total}B")
    assert plan_dram(demo_store, ablation, demo_predictors, exact).slots == whole.slots
    less = RunSpec(window=2, dram=f"{whole.total - whole.slot_bytes}B")
    assert sum(plan_dram(demo_store, ablation, demo_predictors, less).slots) < sum(whole.slots)


def test_window_refusals(demo_store: Store, demo_predictors: Predictors) -> None:
    def sweep(**more: Any) -> dict[str, Any]:
        return window_sweep(demo_store, demo_predictors, TEXT, **more)

    with pytest.raises(AblationError, match="low_rank"):
        sweep(ablation=window_module.PAPER_ROWS["hybrid"])
    with pytest.raises(AblationError, match="windows"):
        sweep(windows=(1, 1))
    with pytest.raises(BudgetError, match="--dram"):
        sweep(run=RunSpec(dram="1%"))


COMMANDS: dict[str, Callable[[Path], list[str | Path]]] = {
    "sparsity": lambda store: [MODEL, "--tokens", "256"],
    "reuse": lambda store: [MODEL, "--tokens", "256"],
    "coactivation": lambda store: [MODEL, "--tokens", "256", "--friends", "2", "--arrays", "friends.safetensors"],
    "window": lambda store: [
        store, "--predictors", assets.path("predictors/demo-model"), "--dram", "90%", "--windows", "0,2", "--prompt",
        "8", "--tokens", "4", "--context", "64",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_write_record_and_figure(name: str, demo_store: Store, tmp_path: Path) -> None:
    arguments = COMMANDS[name](demo_store.path)
    done = run(
        "analyze", name, *arguments, "--data", TEXT, "--json", "record.json", "--figure", "figure.png", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "figure.png" in done.stdout
    assert json.loads((tmp_path / "record.json").read_text())["kind"] == name
    assert (tmp_path / "figure.png").read_bytes().startswith(PNG)
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {"friends.safetensors"} == {"record.json", "figure.png"}


def test_commands_fail_in_one_line(demo_store: Store, tmp_path: Path) -> None:
    assert "friends=3000" in fails("analyze", "coactivation", MODEL, "--data", TEXT, "--friends", "3000")
    base = ("analyze", "window", demo_store.path, "--data", TEXT, "--predictors")
    fails(*base, tmp_path)
    assert "--dram" in fails(*base, assets.path("predictors/demo-model"), "--dram", "1%")
    assert run(*base, assets.path("predictors/demo-model"), "--windows", "1,x").returncode == 2
    swiglu = make_opt(tmp_path / "gelu", activation_function="gelu")
    assert "gelu" in fails("analyze", "sparsity", swiglu, "--data", TEXT)
