"""The command line: output, exit status, one line for each failure."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import fails, run
from tiny_models import make_opt

from workbench import assets
from workbench.ablation import Ablation
from workbench.flash.store import Store


def test_a_process_of_its_own(tmp_path: Path) -> None:
    """What `tests/command_line.py` leaves out: the entry point, the streams, the exit status."""
    command = [sys.executable, "-m", "workbench", "verify", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("workbench: ")
    assert len(done.stderr.splitlines()) == 1


def test_help_lists_the_commands_in_order() -> None:
    text = run("--help").stdout
    commands = [
        "demo",
        "convert",
        "verify",
        "relufy",
        "train-predictors",
        "evaluate",
        "analyze",
        "ablate",
        "generate",
        "plan",
        "bench",
        "tables",
        "synth",
        "lab",
        "kernels",
    ]
    places = [text.index(f" {name} ") for name in commands]
    assert places == sorted(places)


def test_ablation_options_come_from_the_fields() -> None:
    for command in ("ablate", "generate"):
        text = run(command, "--help").stdout
        for f in dataclasses.fields(Ablation):
            assert f"--{f.name}" in text


def test_convert_verify_generate_ablate(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert run("convert", assets.path("data/demo-model"), store, "--dtype", "float16").returncode == 0
    assert run("verify", store).returncode == 0
    record = tmp_path / "generation.json"
    done = run(
        "generate", store, "--prompt", "Once upon a time", "--predictors", assets.path("predictors/demo-model"),
        "--dram", "90%", "--max-new-tokens", "12", "--json", record,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == json.loads(record.read_text())["text"].strip()
    assert "tokens/s" in done.stderr
    record = tmp_path / "ablation.json"
    done = run(
        "ablate", store, "--data", assets.path("data/text"), "--predictors", assets.path("predictors/demo-model"),
        "--dram", "90%", "--prompt", "16", "--tokens", "4", "--no-windowing", "--json", record,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(record.read_text())["rows"]
    assert [row["name"] for row in rows][-1] == "asked for"
    assert rows[-1]["ablation"]["windowing"] is False
    assert not record.with_name("ablation.json.partial").exists()
    asked = (
        "ablate", store, "--data", assets.path("data/text"), "--predictors", assets.path("predictors/demo-model"),
        "--dram", "90%", "--prompt", "16", "--tokens", "4",
    )  # fmt: skip
    done = run(*asked, "--row", "all + coalesce, prefetch", "--row", "naive", "--json", record)
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in json.loads(record.read_text())["rows"]] == ["all + coalesce, prefetch", "naive"]
    for wrong, said in (
        (("--row", "everything"), "'everything' is not one of"),
        (("--row", "naive", "--draft", store), "--draft is for the row"),
    ):
        done = run(*asked, *wrong)
        assert done.returncode == 2
        assert said in done.stderr


def test_bench_flash(demo_store: Store, tmp_path: Path) -> None:
    record = tmp_path / "flash.json"
    assert run("bench", "flash", demo_store.path, "--seconds", "0.02", "--json", record).returncode == 0
    rows = json.loads(record.read_text())["rows"]
    assert {row["threads"] for row in rows} == {1, 8, 32}


def test_analyze(tmp_path: Path) -> None:
    model, text = assets.path("data/demo-model"), assets.path("data/text")
    for name in ("sparsity", "reuse"):
        record = tmp_path / f"{name}.json"
        done = run("analyze", name, model, "--data", text, "--tokens", "256", "--json", record)
        assert done.returncode == 0, done.stderr
        assert json.loads(record.read_text())["kind"] == name
    zeros = [row["zeros"] for row in json.loads((tmp_path / "sparsity.json").read_text())["rows"]]
    assert sum(zeros) / len(zeros) > 0.9


def test_failures_are_one_line(demo_store: Store, tmp_path: Path) -> None:
    text = assets.path("data/text")
    assert "no such" in fails("verify", tmp_path / "nothing")
    assert "--dram" in fails("generate", demo_store.path, "--prompt", "x", "--dram", "1%")
    assert "prefetch" in fails("generate", demo_store.path, "--prompt", "x", "--prefetch")
    assert "windowing" in fails("generate", demo_store.path, "--prompt", "x", "--predictor", "off")
    assert "low_rank" in fails("generate", demo_store.path, "--prompt", "x", "--predictor", "low_rank")
    fails("generate", demo_store.path, "--prompt", "x", "--predictors", tmp_path)
    fails("ablate", demo_store.path, "--data", tmp_path / "no.txt", "--dram", "90%")
    fails("train-predictors", tmp_path, "--data", text, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "short.txt").write_text("Only a few words.")
    assert "--data" in fails("ablate", demo_store.path, "--data", tmp_path / "short.txt", "--dram", "90%")


def test_odd_values_are_refused_before_any_work(demo_store: Store, tmp_path: Path) -> None:
    base = ("generate", demo_store.path, "--prompt", "x", "--dram", "90%")
    assert "--json" in fails(*base, "--json", tmp_path)
    assert "--json" in fails(*base, "--json", tmp_path / "no" / "such.json")
    assert not (tmp_path / "no").exists()
    assert "context of 512" in fails(*base, "--max-new-tokens", "100000")
    for option in ("--depth", "--window", "--seed"):
        assert run(*base, option, "1" + 20 * "0").returncode == 2
    odd = run(*base, "--max-new-tokens", "3", "--temperature", "1e-320", "--top-p", "0")
    assert odd.returncode == 0, odd.stderr


def test_failed_training_does_not_block_the_next(tmp_path: Path) -> None:
    (tmp_path / "bad.json.gz").write_bytes(b"\x1f\x8b not gzip")
    (tmp_path / "good.txt").write_text("Only a few words.")
    model, out = assets.path("data/demo-model"), tmp_path / "out"
    fails("train-predictors", model, "--data", tmp_path / "bad.json.gz", "--out", out)
    assert "another request" not in fails("train-predictors", model, "--data", tmp_path / "good.txt", "--out", out)


def test_predictors_of_another_model_are_refused(tmp_path: Path) -> None:
    make_opt(tmp_path / "model", hidden_size=512, ffn_dim=2048, num_hidden_layers=6)
    assert run("convert", tmp_path / "model", tmp_path / "store").returncode == 0
    line = fails(
        "generate", tmp_path / "store", "--prompt", "x", "--predictors", assets.path("predictors/demo-model"),
        "--dram", "1GiB",
    )  # fmt: skip
    assert "fingerprint" in line


@pytest.mark.parametrize(
    "arguments", [["convert"], ["generate", "--window", "-1"], ["nothing"], ["demo", "--seed", "x"]]
)
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 2
