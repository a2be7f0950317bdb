"""A placed store: the format against damage, and the engine's logits, reads and bytes with placement on and off."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_opt

from workbench import assets
from workbench.ablation import Ablation
from workbench.engines.torch_cpu import TorchCpuEngine
from workbench.errors import AblationError, DataError, StoreError
from workbench.experiments.convert import convert, verify
from workbench.experiments.place import place
from workbench.flash.manifest import seal
from workbench.flash.placement import is_placed, read_placement, write_placement
from workbench.flash.reader import plan_reads
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.report import placement_figure, placement_table, to_markdown
from workbench.report import read_placement as read_record
from workbench.spec import RunSpec

FILES = ("ffn.placed", "ffn.order", "placement.json")
ORACLE = Ablation(predictor="oracle")
PLACED = dataclasses.replace(ORACLE, placement=True)
ROOMY = RunSpec(dram="95%")


def random_order(store: Store, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(store.spec.d_ff) for _ in range(store.spec.num_layers)])


@pytest.fixture(scope="module")
def placed_store(demo_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The demo store in a random order. Do not change it."""
    store = Store.open(shutil.copytree(demo_store.path, tmp_path_factory.mktemp("placed") / "store"))
    write_placement(store, random_order(store), {"by": "chance"})
    return store


@pytest.fixture(scope="module")
def whole(tiny_opt: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small placed store. Do not change it."""
    store = convert(tiny_opt, tmp_path_factory.mktemp("stores") / "whole")
    write_placement(store, random_order(store), {"by": "chance"})
    return store.path


@pytest.fixture
def small(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "store"))


def refused(action: Callable[[Path], object], store: Path, match: str) -> None:
    with pytest.raises(StoreError, match=match) as caught:
        action(store)
    assert "\n" not in str(caught.value)


def read(store: Path) -> object:
    return read_placement(Store.open(store))


# the format


def test_bytes_are_where_the_specification_says(placed_store: Store) -> None:
    order = np.fromfile(placed_store.path / "ffn.order", "<i4").reshape(placed_store.spec.num_layers, -1)
    assert np.array_equal(order, random_order(placed_store))
    stride, region = placed_store.layout.bundle_stride, placed_store.layout.bundled_region(placed_store.spec.d_ff)
    bundled, placed = (np.fromfile(placed_store.path / name, np.uint8) for name in ("ffn.bundled", "ffn.placed"))
    assert len(bundled) == len(placed)
    for layer, permutation in enumerate(order):
        start = layer * region
        for position in (0, 1, len(permutation) - 1):
            at, own = start + position * stride, start + permutation[position] * stride
            assert np.array_equal(placed[at : at + stride], bundled[own : own + stride])


def test_a_layer_that_does_not_fill_its_region_ends_in_zeros(tmp_path: Path) -> None:
    store = convert(make_opt(tmp_path / "model", hidden_size=32, ffn_dim=20), tmp_path / "store")
    placement = write_placement(store, random_order(store), {})
    used, region = 20 * store.layout.bundle_stride, store.layout.bundled_region(20)
    assert used < region
    content = placement.placed_path.read_bytes()
    assert all(not any(content[at + used : at + region]) for at in range(0, len(content), region))
    verify(store.path)


def test_placing_again_gives_the_same_bytes_and_leaves_nothing_else(small: Path) -> None:
    before = {name: (small / name).read_bytes() for name in FILES}
    names = sorted(os.listdir(small))
    store = Store.open(small)
    write_placement(store, random_order(store, 1), {"by": "another chance"})
    assert (small / "ffn.placed").read_bytes() != before["ffn.placed"]
    write_placement(store, random_order(store), {"by": "chance"})
    assert {name: (small / name).read_bytes() for name in FILES} == before
    assert sorted(os.listdir(small)) == names


def test_verify_counts_the_placement_to_its_end(small: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    verify(small, lambda *what: seen.append(what))
    assert seen[-1][1] == seen[-1][2]
    assert "ffn.placed" in {name for name, _, _ in seen}
    assert all(done <= total for _, done, total in seen)


def test_a_store_that_is_not_placed_says_how(demo_store: Store) -> None:
    assert not is_placed(demo_store)
    refused(read, demo_store.path, "not placed.*`workbench place MODEL .* --data D`")


@pytest.mark.parametrize("name", ["ffn.placed", "ffn.order"])
def test_files_missing_or_of_another_size(small: Path, name: str) -> None:
    content = (small / name).read_bytes()
    (small / name).write_bytes(content[:-1])
    refused(read, small, rf"{name}: truncated: .*run `workbench place` again")
    (small / name).write_bytes(content + b"\0")
    refused(read, small, f"{name}: too long")
    (small / name).unlink()
    refused(read, small, f"{name}: missing")
    refused(verify, small, f"{name}: missing")


def test_a_flipped_bit_is_found(small: Path) -> None:
    for name, match in (("ffn.placed", r"ffn\.placed: layer 1, offset \d+, .*damaged"), ("ffn.order", "damaged")):
        content = bytearray((small / name).read_bytes())
        content[-5] ^= 4
        (small / name).write_bytes(content)
        refused(verify, small, match)
        content[-5] ^= 4
        (small / name).write_bytes(content)
    verify(small)
    raw = bytearray((small / "placement.json").read_bytes())
    for position in range(0, len(raw), 7):
        damaged = bytearray(raw)
        damaged[position] ^= 2
        (small / "placement.json").write_bytes(damaged)
        refused(read, small, "placement.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b"{}"])
def test_a_card_that_is_none(small: Path, content: bytes) -> None:
    (small / "placement.json").write_bytes(content)
    refused(read, small, r"placement\.json: (not JSON|the file is not a JSON object|field format is missing).*place")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer": (lambda c: c.update(version=2), "format version 2, this workbench reads version 1; install a newer"),
    "older": (lambda c: c.update(version=0), "format version 0.*workbench place"),
    "format": (lambda c: c.update(format="zip"), "not a placement's"),
    "other store": (lambda c: c.update(store="0" * 64), "of another store"),
    "size": (lambda c: c["files"]["ffn.placed"].update(nbytes=1), "has 1 bytes, not"),
    "more files": (lambda c: c["files"].update(x={"nbytes": 1, "sha256": "0" * 64}), "'x' too"),
    "file away": (lambda c: c["files"].pop("ffn.order"), "ffn.order is missing"),
    "layer away": (lambda c: c["layers"].pop(), "layers has 1 entries, not 2"),
    "offset": (lambda c: c["layers"][1].update(offset=0), r"layers\[1\] does not fit"),
    "digest": (lambda c: c["layers"][0].update(sha256="x"), "not a SHA-256"),
    "provenance": (lambda c: c.update(provenance=3), "field provenance is '3', not dict"),
    "another digest": (lambda c: c["layers"][0].update(sha256="0" * 64), "layer 0, offset 0.*damaged"),
    "whole digest": (lambda c: c["files"]["ffn.placed"].update(sha256="0" * 64), "does not fit its layers"),
}


@pytest.mark.parametrize(("change", "match"), CHANGES.values(), ids=CHANGES)
def test_a_card_that_lies(small: Path, change: Callable[[dict[str, Any]], Any], match: str) -> None:
    card = json.loads((small / "placement.json").read_text())
    change(card)
    (small / "placement.json").write_bytes(seal(card))
    refused(verify, small, match)


def test_records_of_another_order_are_found(small: Path) -> None:
    """Every digest fits, but ffn.order is not the order of the records."""
    import hashlib

    order = random_order(Store.open(small), 7).astype("<i4").tobytes()
    (small / "ffn.order").write_bytes(order)
    card = json.loads((small / "placement.json").read_text())
    card["files"]["ffn.order"]["sha256"] = hashlib.sha256(order).hexdigest()
    (small / "placement.json").write_bytes(seal(card))
    refused(verify, small, "are not ffn.bundled's")


def test_orders_that_are_none(small: Path) -> None:
    store = Store.open(small)
    twice = random_order(store)
    twice[1, 3] = twice[1, 4]
    fractions: Any = np.zeros(twice.shape)
    for order, match in ((twice, "layer 1 is not each neuron once"), (twice[:1], "order is"), (fractions, "order is")):
        refused(lambda path, order=order: write_placement(store, order, {}), small, match)
    verify(small)  # the former one is still there


def test_a_damaged_source_is_not_placed(small: Path) -> None:
    store = Store.open(small)
    content = bytearray((small / "ffn.bundled").read_bytes())
    content[-1] ^= 1
    (small / "ffn.bundled").write_bytes(content)
    refused(lambda path: write_placement(store, random_order(store, 2), {}), small, r"ffn\.bundled: layer 1.*damaged")
    assert not list(small.glob("*.new"))
    read(small)  # and the former placement stays


def test_stopped_while_it_writes_the_former_placement_stays(small: Path) -> None:
    store, before = Store.open(small), (small / "placement.json").read_bytes()

    def stop(part: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_placement(store, random_order(store, 3), {}, stop)
    assert (small / "placement.json").read_bytes() == before
    assert not list(small.glob("*.new"))
    verify(small)


def test_killed_while_it_writes_the_same_call_finishes(small: Path) -> None:
    code = (
        "import sys, os, signal, numpy as np\n"
        "from workbench.flash.store import Store\n"
        "from workbench.flash.placement import write_placement\n"
        "store = Store.open(sys.argv[1])\n"
        "order = np.tile(np.arange(store.spec.d_ff)[::-1], (store.spec.num_layers, 1))\n"
        "write_placement(store, order, {}, lambda *a: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, small]).returncode == -signal.SIGKILL
    assert list(small.glob("*.new"))
    verify(small)
    store = Store.open(small)
    write_placement(store, random_order(store, 4), {})
    assert not list(small.glob("*.new"))
    verify(small)


def test_two_runs_do_not_write_at_once(small: Path) -> None:
    store = Store.open(small)

    def again(part: str, done: int, total: int) -> None:
        refused(lambda path: write_placement(store, random_order(store, 6), {}), small, "another run is writing")

    write_placement(store, random_order(store, 5), {}, again)
    verify(small)


# the engine


def test_placement_without_bundling_is_refused() -> None:
    with pytest.raises(AblationError, match=r"placement=True with bundling=False .* set bundling=True or placement"):
        Ablation(placement=True, bundling=False)


def test_an_engine_on_a_store_that_is_not_placed(demo_store: Store) -> None:
    with pytest.raises(StoreError, match=r"not placed.*`workbench place"):
        TorchCpuEngine(demo_store, PLACED, None, ROOMY)
    with TorchCpuEngine(demo_store, ORACLE, None, ROOMY) as engine:
        engine.step(1)
        with pytest.raises(StoreError, match=r"not placed.*`workbench place"):
            engine.ablation = PLACED
        engine.step(2)  # and goes on as it was


VARIANTS = [
    PLACED,
    dataclasses.replace(PLACED, windowing=False),
    dataclasses.replace(PLACED, coalesce=False),
    dataclasses.replace(PLACED, hybrid=False),
    dataclasses.replace(PLACED, io="buffered"),
    Ablation(predictor="off", windowing=False, placement=True),
    Ablation(predictor="off", windowing=False, placement=True, hybrid=False),
]


@pytest.mark.parametrize("ablation", VARIANTS, ids=lambda a: a.describe().replace(" ", ","))
def test_logits_are_the_dense_models(
    placed_store: Store, demo_text: np.ndarray, demo_logits: torch.Tensor, ablation: Ablation
) -> None:
    with TorchCpuEngine(placed_store, ablation, None, ROOMY) as engine:
        assert (engine.logits(demo_text[:48]) - demo_logits[:48]).abs().max() < 1e-4
        engine.reset()
        assert (engine.prefill(demo_text[:48].tolist())[0] - demo_logits[47]).abs().max() < 1e-4


def test_token_by_token_placement_changes_no_bit(
    placed_store: Store, demo_text: np.ndarray, demo_predictors: Predictors
) -> None:
    for ablation in (ORACLE, Ablation()):
        found = []
        for placement in (False, True):
            setting = dataclasses.replace(ablation, placement=placement)
            with TorchCpuEngine(placed_store, setting, demo_predictors, ROOMY) as engine:
                found.append(engine.logits(demo_text[:32]))
        assert torch.equal(*found)


def test_switched_at_any_token(placed_store: Store, demo_text: np.ndarray, demo_logits: torch.Tensor) -> None:
    rng = np.random.default_rng(1)
    rows = [*VARIANTS, *(dataclasses.replace(a, placement=False) for a in VARIANTS)]
    with TorchCpuEngine(placed_store, ORACLE, None, ROOMY) as engine:
        found = []
        for token in demo_text[:40].tolist():
            engine.ablation = rows[rng.integers(len(rows))]
            found.append(engine.step(token)[0])
    assert (torch.stack(found) - demo_logits[:40]).abs().max() < 1e-4


def test_without_a_predictor_the_file_is_read_in_long_stretches(placed_store: Store, demo_text: np.ndarray) -> None:
    counts = []
    for placement in (False, True):
        ablation = Ablation(predictor="off", windowing=False, placement=placement)
        with TorchCpuEngine(placed_store, ablation, None, RunSpec(dram="80%")) as engine:
            stats = engine.step(int(demo_text[0]))[1]
            counts.append((stats.reads, stats.read_bytes, stats.loaded, stats.in_window))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("gap", [None, 0, 16384])
def test_reads_and_bytes_are_the_plans(
    placed_store: Store, demo_text: np.ndarray, gap: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the ids that each layer asked for, by the positions in ffn.order alone."""
    order = np.fromfile(placed_store.path / "ffn.order", "<i4").reshape(placed_store.spec.num_layers, -1)
    place = np.argsort(order, axis=1)
    layout = placed_store.layout
    ablation = dataclasses.replace(PLACED, coalesce=gap is not None)
    run = dataclasses.replace(ROOMY, coalesce_gap_bytes=gap or 0)
    with TorchCpuEngine(placed_store, ablation, None, run) as engine:
        fetched: dict[int, list[np.ndarray]] = {}
        for layer, ffn in enumerate(engine.ffns):
            monkeypatch.setattr(ffn, "_fetch", recorded(ffn._fetch, fetched.setdefault(layer, [])))
        loaded = 0
        for token in demo_text[:30].tolist():
            for ids in fetched.values():
                ids.clear()
            stats = engine.step(token)[1]
            reads = nbytes = loaded = 0
            for layer, (new,) in fetched.items():
                loaded += len(new)
                offsets = placed_store.bundled_offset(layer) + np.sort(place[layer][new]) * layout.bundle_stride
                lengths = np.full(len(new), layout.record_bytes)
                plan = plan_reads(offsets, lengths, -1 if gap is None else gap, run.chunk_bytes)
                reads, nbytes = reads + len(plan), nbytes + sum(size for _, size in plan)
            assert (stats.reads, stats.read_bytes, stats.loaded) == (reads, nbytes, loaded)
    assert loaded


def recorded(fetch: Callable[..., None], into: list[np.ndarray]) -> Callable[..., None]:
    """`fetch`, which also notes the ids that it is asked for."""

    def noting(ids: np.ndarray, *rest: Any, **named: Any) -> None:
        into.append(ids.copy())
        fetch(ids, *rest, **named)

    return noting


def test_another_placement_under_a_running_engine_is_refused(
    placed_store: Store, demo_text: np.ndarray, tmp_path: Path
) -> None:
    store = Store.open(shutil.copytree(placed_store.path, tmp_path / "store"))
    with TorchCpuEngine(store, PLACED, None, ROOMY) as engine:
        first = engine.step(int(demo_text[0]))[0]
        write_placement(store, random_order(store, 9), {})
        with pytest.raises(StoreError, match="changed since the store was opened; open it again"):
            engine.ablation = dataclasses.replace(PLACED, io="buffered")
        engine.reset()
        assert torch.equal(engine.step(int(demo_text[0]))[0], first)  # the file that it has open is still the former


# the experiment


@pytest.fixture(scope="module")
def placing(demo_store: Store, demo_predictors: Predictors, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(store, record) of the demo model placed on its own text."""
    path = shutil.copytree(demo_store.path, tmp_path_factory.mktemp("place") / "store")
    store = Store.open(path)
    record = place(
        assets.path("data/demo-model"), store, assets.path("data/text"), predictors=demo_predictors,
        predictors_name="demo", tokens=4096, held_out=1024, method="clusters", run=RunSpec(dram="80%"), rounds=1,
        compare=True, command="test",
    )  # fmt: skip
    return store, record


def test_placing_lowers_reads_on_held_out_text(placing: Any) -> None:
    store, record = placing
    verify(store.path)
    own, placed = (row for row in record["planned"] if row["gap_bytes"] == record["gap_bytes"])
    assert not own["placement"]
    assert placed["reads"] < own["reads"]
    assert record["fitted"]["placed_reads"] < record["fitted"]["own_reads"]
    assert sum(row["own_reads"] for row in record["by_layer"]) == pytest.approx(own["reads"])
    assert sum(record["runs"]["placed"]) == pytest.approx(1)
    methods = {row["method"]: row for row in record["methods"] if row["gap_bytes"] == record["gap_bytes"]}
    assert methods["own"]["reads"] == pytest.approx(own["reads"])
    assert methods["clusters"]["reads"] == pytest.approx(placed["reads"])
    for row in record["rows"]:
        twin = next(r for r in record["rows"] if r["gap_bytes"] == row["gap_bytes"] and r is not row)
        assert row["loaded"] == twin["loaded"]


def test_the_same_request_keeps_the_placement(placing: Any, demo_predictors: Predictors) -> None:
    store, record = placing
    stamp = (store.path / "ffn.placed").stat().st_mtime_ns
    again = place(
        assets.path("data/demo-model"), store, assets.path("data/text"), predictors=demo_predictors,
        predictors_name="demo", tokens=4096, held_out=512, method="clusters", run=RunSpec(dram="80%"), rounds=1,
        command="test",
    )  # fmt: skip
    assert (store.path / "ffn.placed").stat().st_mtime_ns == stamp
    assert again["placement"] == record["placement"]


def test_the_record_is_drawn(placing: Any, tmp_path: Path) -> None:
    _, record = placing
    (tmp_path / "placement.json").write_text(json.dumps(record))
    parsed = read_record(tmp_path / "placement.json")
    text = to_markdown(placement_table(parsed))
    assert "own order, 16 KiB" in text
    assert "placed, 0 B" in text
    assert placement_figure(parsed).startswith(b"\x89PNG")
    assert placement_figure(parsed) == placement_figure(read_record(record))


def test_what_cannot_be_placed(demo_store: Store, tiny_opt: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not the checkpoint tiny-opt"):
        place(tiny_opt, demo_store, assets.path("data/text"))
    with pytest.raises(StoreError, match="no placement method 'magic'"):
        place(tiny_opt, demo_store, assets.path("data/text"), method="magic")
    short = tmp_path / "short.txt"
    short.write_text("A short text.\n")
    with pytest.raises(DataError, match="fewer than 256 tokens"):
        place(assets.path("data/demo-model"), demo_store, short)
    assert not is_placed(demo_store)


@pytest.mark.slow
def test_the_command_line_places_and_uses_it(demo_store: Store, tmp_path: Path) -> None:
    store = shutil.copytree(demo_store.path, tmp_path / "store")
    data, record = str(assets.path("data/text")), tmp_path / "record.json"
    base = [sys.executable, "-m", "workbench"]
    refused_run = subprocess.run(
        [*base, "ablate", store, "--data", data, "--placement", "--dram", "80%"], capture_output=True, text=True
    )
    assert refused_run.returncode == 1
    assert "not placed" in refused_run.stderr
    assert len(refused_run.stderr.strip().splitlines()) == 1
    options = ["--tokens", "1024", "--held-out", "512", "--rounds", "1", "--dram", "80%", "--json", record]
    made = subprocess.run(
        [*base, "place", assets.path("data/demo-model"), store, "--data", data, *options],
        capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "reads a token" in made.stdout
    assert read_record(record).measured(True).tokens > 0
    used = subprocess.run(
        [*base, "generate", store, "--prompt", "The", "--placement", "--max-new-tokens", "4", "--dram", "80%"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert used.returncode == 0, used.stderr
