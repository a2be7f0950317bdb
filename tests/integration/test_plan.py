"""`workbench plan`: what it counts is what the engine does, from a config alone; what cannot be planned is one line."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import fails, run
from tiny_models import edit_config, make_opt, make_tiny

from workbench import assets
from workbench.ablation import PAPER_ROWS, Ablation
from workbench.engines.budget import plan_dram
from workbench.engines.torch_cpu import TorchCpuEngine
from workbench.errors import BudgetError, CheckpointError, DeviceError, PredictorError, RecordError
from workbench.experiments import plan_inputs
from workbench.experiments.convert import convert
from workbench.experiments.cost import ComputeFit, FlashFit, FlashPoint
from workbench.experiments.plan import ALL, ROWS, count_token, plan, window_fits
from workbench.experiments.plan_inputs import outline, published_reuse, read_flash_fit, read_reuse_curve, use_of
from workbench.experiments.record import geometry
from workbench.experiments.small_model import SmallWeights, small_predictors, small_spec
from workbench.flash.convert import write_store
from workbench.flash.store import Store
from workbench.models import supported
from workbench.predictor.low_rank import Predictors
from workbench.report import to_markdown
from workbench.report.plan import headline, plan_table, read_plan
from workbench.spec import RunSpec

FLASH = FlashFit(
    "made up", "threads",
    tuple(
        FlashPoint(depth, size, seconds + size / 2e9)
        for depth, seconds in ((1, 1e-4), (8, 2e-5), (32, 1e-5)) for size in (4096, 65536, 1 << 20)
    ),
)  # fmt: skip
COMPUTE = ComputeFit(
    2, "float32", 1e10, 1e10, 1e10, 1e10, 1e10, 1e10, 1e-4, {"streamed": 1e-4, "dense": 1e-4, "sparse": 1e-4},
    1e-5, 1e-5, 1e-8, 1e-5, 1e-8, 1e-8,
)  # fmt: skip
OPT_6_7B = {
    "model_type": "opt", "activation_function": "relu", "num_hidden_layers": 32, "hidden_size": 4096,
    "word_embed_proj_dim": 4096, "ffn_dim": 16384, "num_attention_heads": 32, "vocab_size": 50272,
    "max_position_embeddings": 2048, "do_layer_norm_before": True, "torch_dtype": "float16",
}  # fmt: skip


@pytest.fixture
def opt_6_7b(tmp_path: Path) -> Path:
    file = tmp_path / "opt-6.7b.json"
    file.write_text(json.dumps(OPT_6_7B))
    return file


def made(model: str | Path, dram: str = "60%", **options: Any) -> dict[str, Any]:
    return plan(model, dram=dram, flash=FLASH, compute=COMPUTE, **options)


@pytest.mark.parametrize("model_type", supported())
def test_an_outline_is_the_store_that_would_be_made(tmp_path: Path, model_type: str) -> None:
    source = make_tiny(tmp_path / "model", model_type, dtype="float16")
    store, shape = convert(source, tmp_path / "store"), outline(source)
    assert (shape.dtype, shape.layout, shape.groups) == (store.dtype, store.layout, store.groups)
    assert shape.model_bytes == store.model_bytes
    assert outline(tmp_path / "store").groups == store.groups
    use, run_spec = use_of(shape), RunSpec(dram="64MB", context=64)
    for ablation in ROWS.values():
        assert plan_dram(shape, ablation, use, run_spec) == plan_dram(store, ablation, use, run_spec)


@pytest.mark.parametrize("name", ["naive", "hybrid", *(n for n in ROWS if n not in ("naive", "hybrid"))])
def test_counts_are_the_engines(
    demo_store: Store, demo_predictors: Predictors, demo_text: np.ndarray, name: str
) -> None:
    """Dense rows to the byte; with predictors, a neuron's bytes and reads, and the neurons within what text varies."""
    shape, run_spec = outline(demo_store.path), RunSpec(dram="80%", context=320)
    use = use_of(shape, demo_predictors)
    dram = plan_dram(shape, ROWS[name], use, run_spec)
    counts = count_token(shape, ROWS[name], run_spec, dram, use, 100)
    with TorchCpuEngine(demo_store, ROWS[name], demo_predictors, run_spec) as engine:
        assert engine.plan == dram
        engine.prefill(demo_text[:48].tolist())
        few = 2 if ROWS[name].predictor == "off" else 24  # without a predictor each token is as the other
        steps = [engine.step(token)[1] for token in demo_text[48:][:few].tolist()][few // 4 :]
    mean = {n: float(np.mean([getattr(s, n) for s in steps])) for n in ("read_bytes", "reads", "loaded", "predicted")}
    if ROWS[name].predictor == "off":
        assert counts.flash_bytes == mean["read_bytes"]
        assert counts.read_count == mean["reads"]
        assert counts.loaded == mean["loaded"]
        return
    assert counts.predicted == pytest.approx(mean["predicted"], rel=0.3)
    assert counts.flash_bytes / counts.loaded == pytest.approx(mean["read_bytes"] / mean["loaded"], rel=0.15)
    assert counts.read_count / counts.loaded == pytest.approx(mean["reads"] / mean["loaded"], rel=0.15)


def test_a_config_is_enough(tmp_path: Path) -> None:
    source = make_opt(tmp_path / "model", dtype="float16")
    store = convert(source, tmp_path / "store")
    (tmp_path / "alone").mkdir()
    shutil.copy(source / "config.json", tmp_path / "alone")
    models = (source, store.path, tmp_path / "alone", tmp_path / "alone" / "config.json")
    records = [made(model, "60MB", context=64) for model in models]
    for record in records:
        assert record["rows"] == records[0]["rows"]
        assert record["model_bytes"] == store.model_bytes
        assert record["run"]["dtype"] == "float16"


def test_only_the_config_comes_from_the_hub(tmp_path: Path, opt_6_7b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(model: str, file: str) -> str:
        asked.append((model, file))
        return str(opt_6_7b)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    assert made("facebook/opt-6.7b")["run"]["model"] == "facebook/opt-6.7b"
    assert asked == [("facebook/opt-6.7b", "config.json")]


def test_opt_6_7b_as_the_paper_has_it(opt_6_7b: Path) -> None:
    """The paper's bytes a token, at its reuse: 13.4 GB naive, 0.2 GB with a window of 4."""
    record = made(opt_6_7b, "70%", window=4)
    rows = {row["name"]: row for row in record["rows"]}
    assert rows["naive"]["flash_bytes"] == pytest.approx(13.3e9, rel=0.01)
    assert rows[ALL]["loaded"] == pytest.approx(0.024 * 32 * 16384, rel=0.01)
    assert rows[ALL]["in_window"] == pytest.approx(0.24 * 32 * 16384, rel=0.01)
    assert rows[ALL]["flash_bytes"] == pytest.approx(0.2e9, rel=0.1)
    assert rows["+ predictor"]["flash_bytes"] == pytest.approx(0.86e9, rel=0.01)
    totals = [row["total_ms"] for row in record["rows"]]
    assert totals == sorted(totals, reverse=True)
    assert any("paper" in line for line in record["assumed"])
    assert record["window_fits"]


def test_more_dram_is_a_longer_window_and_never_slower(opt_6_7b: Path) -> None:
    records = [made(opt_6_7b, dram) for dram in ("50%", "60%", "70%", "100%")]
    windows = [record["window"] for record in records]
    assert windows == sorted(windows)
    assert windows[0] < windows[-1]
    totals = [next(row["total_ms"] for row in record["rows"] if row["name"] == ALL) for record in records]
    assert totals == sorted(totals, reverse=True)
    for record in records:
        picked = next(row for row in record["windows"] if row["window"] == record["window"])
        least = min(row["total_ms"] for row in record["windows"])
        assert picked["total_ms"] <= 1.001 * least
        shorter = [row for row in record["windows"] if row["window"] < record["window"]]
        assert all(row["total_ms"] > 1.001 * least for row in shorter)
        for row in record["windows"]:
            off = record["dram"]["budget_bytes"] - row["need_bytes"]
            assert row["fits"] == (off >= 0) or abs(off) <= record["model_bytes"] / 1000
        assert record["depth"] == 32  # the drive that was made up gives more, the more are in flight


def test_what_is_given_is_kept(opt_6_7b: Path) -> None:
    record = made(opt_6_7b, "60%", window=64, depth=8, dtype="bfloat16", tokens=10)
    assert (record["window"], record["depth"], record["run"]["dtype"]) == (64, 8, "bfloat16")
    assert record["position"] == 133
    assert not record["window_fits"]
    shape = outline(opt_6_7b, "bfloat16")
    use, run_spec = use_of(shape), RunSpec(dram="60%", window=64)
    assert not window_fits(shape, use, 64, plan_dram(shape, ROWS[ALL], use, run_spec))


def test_a_model_that_is_not_relu_is_planned_as_what_it_will_be(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "model", "llama", hidden_act="relu")
    edit_config(source, hidden_act="silu")
    record = made(source / "config.json", "60MB", context=64)
    assert any("relufy" in line for line in record["assumed"])


def reuse_record(shape: plan_inputs.Outline, **changes: Any) -> dict[str, Any]:
    rows = [{"window": k, "kept_share": 0.2 * (k + 1) ** 0.3, "new_share": 0.2 * (k + 1) ** -1.2} for k in (0, 1, 4)]
    return {
        "schema": 1, "kind": "reuse", "run": {"model": "demo", "geometry": geometry(shape.spec)}, "rows": rows,
        "by_layer": [{**rows[0], "layer": layer} for layer in range(shape.spec.num_layers)], **changes,
    }  # fmt: skip


def test_reuse_of_the_model_itself(tmp_path: Path) -> None:
    model = assets.path("data/demo-model")
    shape, file = outline(model), tmp_path / "reuse.json"
    file.write_text(json.dumps(reuse_record(shape)))
    curve, active = read_reuse_curve(file, shape.spec)
    assert curve.shares(0.2, 4) == pytest.approx((0.2 * 5**0.3, 0.2 * 5**-1.2))
    assert active == (0.2,) * shape.spec.num_layers
    record = made(model, "95%", reuse=file)
    assert record["active_share"] == pytest.approx(0.2)
    assert not any("OPT-6.7B" in line and "window" in line for line in record["assumed"])


def test_a_window_record_counts_what_the_engine_did(tmp_path: Path) -> None:
    shape, file = outline(assets.path("data/demo-model")), tmp_path / "window.json"
    neurons = shape.spec.ffn_neurons
    rows = [
        {
            "window": k,
            "measured": {
                "predicted": 0.3 * neurons, "active": 0.2 * neurons, "in_window": kept * neurons,
                "loaded": new * neurons, "window_trims": trims,
            },
        }
        for k, kept, new, trims in ((0, 0.3, 0.3, 0), (4, 0.5, 0.04, 0), (8, 0.5, 0.04, 31))
    ]  # fmt: skip
    file.write_text(json.dumps(reuse_record(shape, kind="window", rows=rows)))
    curve, active = read_reuse_curve(file, shape.spec)
    assert curve.longest == 4  # what was cut short is no measurement of a window of 8
    assert curve.shares(0.3, 4) == pytest.approx((0.5, 0.04))
    assert active == pytest.approx((0.2,) * shape.spec.num_layers)


def test_published_figures() -> None:
    assert published_reuse().points == ((0, 0.10, 0.10), (4, 0.24, 0.024))


def test_the_record_as_a_table(opt_6_7b: Path) -> None:
    record = json.loads(json.dumps(made(opt_6_7b, "70%")))
    read = read_plan(record)
    text = to_markdown(plan_table(read))
    for name in ROWS:
        assert name in text
    assert "13.3 GB" in text
    assert f"--window {record['window']}" in headline(read)
    with pytest.raises(RecordError, match="surprise"):
        read_plan({**record, "surprise": 1})
    with pytest.raises(RecordError, match="window"):
        read_plan({name: value for name, value in record.items() if name != "window"})


def test_a_row_that_does_not_fit_says_so(opt_6_7b: Path) -> None:
    """Without a predictor a layer's whole FFN passes through the scratch, which needs more than 'all' does."""
    shape = outline(opt_6_7b)
    use = use_of(shape)
    least = plan_dram(shape, ROWS[ALL], use, RunSpec(dram="13GB")).fixed + 32 * 64 * 16384
    record = made(opt_6_7b, f"{least}B")
    rows = {row["name"]: row for row in record["rows"]}
    assert rows[ALL]["problem"] == ""
    assert "least that works" in rows["hybrid"]["problem"] or rows["hybrid"]["total_ms"] > 0
    text = to_markdown(plan_table(read_plan(record)))
    assert "GB" in text


@pytest.mark.parametrize("model_type", supported())
def test_a_small_model_of_every_family_runs(tmp_path: Path, model_type: str) -> None:
    spec = outline(make_tiny(tmp_path / "model", model_type)).spec
    small = small_spec(spec, 2)
    assert (small.num_layers, small.activation in ("relu", "relu2"), small.parts) == (2, True, spec.parts)
    store = write_store(SmallWeights(small, "float16", 0), tmp_path / "store")
    predictors = small_predictors(store, np.random.default_rng(0))
    ablation = Ablation(**{**dataclasses.asdict(PAPER_ROWS[ALL]), "io": "buffered"})
    with TorchCpuEngine(store, ablation, predictors, RunSpec(dram="1GiB", context=16)) as engine:
        engine.prefill([3, 4, 5])
        stats = engine.step(6)[1]
    assert 0 < stats.predicted < small.ffn_neurons


def test_the_command_measures_this_machine(tmp_path: Path) -> None:
    source = make_opt(tmp_path / "model")
    (source / "model.safetensors").unlink()
    record = tmp_path / "plan.json"
    flash = tmp_path / "flash"
    flash.mkdir()
    done = run("plan", source, "--dram", "60MB", "--context", "64", "--store-dir", flash, "--json", record)
    assert done.returncode == 0, done.stderr
    assert "+ bundling (all)" in done.stdout
    assert list(flash.iterdir()) == []  # what was written to measure is gone
    read = json.loads(record.read_text())
    assert read["kind"] == "plan"
    assert "measured now" in read["flash"]["source"]
    assert all(row["total_ms"] > 0 for row in read["rows"])
    again = json.loads(record.read_text())
    assert read_plan(again).rows[0].figures["total_ms"] == again["rows"][0]["total_ms"]


def test_bad_input_is_one_line(tmp_path: Path, opt_6_7b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", _offline)
    assert "--dram 5239MiB" in fails("plan", opt_6_7b, "--dram", "1GB")
    assert "--dram" in fails("plan", opt_6_7b, "--dram", "much")
    assert "no such" in fails("plan", tmp_path / "nothing", "--dram", "50%")
    assert "no such directory" in fails("plan", "no-such-org/no-such-model", "--dram", "50%")
    assert "config.json" in fails("plan", tmp_path, "--dram", "50%")
    other = tmp_path / "other.json"
    other.write_text("{")
    assert "not JSON" in fails("plan", other, "--dram", "50%")
    other.write_text("{}")
    assert "model_type" in fails("plan", other, "--dram", "50%")
    other.write_text(json.dumps({**OPT_6_7B, "model_type": "mamba"}))
    assert "supported" in fails("plan", other, "--dram", "50%")
    other.write_text(json.dumps({**OPT_6_7B, "num_hidden_layers": 10**9}))
    assert "num_hidden_layers" in fails("plan", other, "--dram", "50%")
    other.write_text(json.dumps({**OPT_6_7B, "quantization_config": {}}))
    assert "quantized" in fails("plan", other, "--dram", "50%")
    assert "torch-cpu" in fails("plan", opt_6_7b, "--dram", "50%", "--backend", "mlx-metal")
    assert "bench_flash" in fails("plan", opt_6_7b, "--dram", "60%", "--flash", opt_6_7b)
    assert "could not be read" in fails("plan", opt_6_7b, "--dram", "60%", "--reuse", tmp_path / "no.json")
    assert "--store-dir" in fails("plan", opt_6_7b, "--dram", "60%", "--store-dir", tmp_path / "no")
    bench = tmp_path / "flash.json"
    bench.write_text(json.dumps(bench_record()))
    asked = ("plan", opt_6_7b, "--dram", "60%", "--flash", bench)
    assert "--store-dir" in fails(*asked, "--store-dir", tmp_path / "no")
    bench.write_text(json.dumps({**bench_record(), "rows": [{"engine": "threads"}]}))
    assert "damaged" in fails(*asked)
    predictors = assets.path("predictors/demo-model")
    assert "predictors" in fails("plan", opt_6_7b, "--dram", "60%", "--predictors", predictors)
    reuse = tmp_path / "reuse.json"
    reuse.write_text(json.dumps(reuse_record(outline(assets.path("data/demo-model")))))
    assert "another geometry" in fails("plan", opt_6_7b, "--dram", "60%", "--reuse", reuse)
    reuse.write_text(json.dumps({"kind": "reuse", "rows": []}))
    assert "reuse.json" in fails("plan", opt_6_7b, "--dram", "60%", "--reuse", reuse)


def bench_record() -> dict[str, Any]:
    rows = [
        {
            "chunk_bytes": size, "threads": depth, "engine": engine, "direct": True, "bytes_per_s": depth * 1e8,
            "reads_per_s": depth * 1e8 / size,
        }
        for engine in ("threads", "io_uring") for depth in (1, 32) for size in (4096, 1 << 20)
    ]  # fmt: skip
    return {"schema": 1, "kind": "bench_flash", "machine": {"disk": "ext4 on vda"}, "rows": rows}


def test_flash_as_bench_flash_measured_it(tmp_path: Path) -> None:
    file = tmp_path / "flash.json"
    file.write_text(json.dumps(bench_record()))
    fit = read_flash_fit(file)
    assert (fit.engine, fit.depths, len(fit.points)) == ("threads", (1, 32), 4)
    assert fit.read_seconds(4096, 32) == pytest.approx(4096 / 3.2e9)


def _offline(*_: Any) -> str:
    raise OSError("no network")


def test_errors_by_kind(tmp_path: Path, opt_6_7b: Path, demo_predictors: Predictors) -> None:
    with pytest.raises(BudgetError, match="least that works"):
        made(opt_6_7b, "1GB")
    with pytest.raises(CheckpointError):
        made(tmp_path / "nothing.json")
    with pytest.raises(DeviceError):
        made(opt_6_7b, backend="mlx-cpu")
    with pytest.raises(PredictorError):
        made(opt_6_7b, predictors=demo_predictors)
