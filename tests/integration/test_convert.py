"""Conversion of real checkpoints: every byte of the store against the checkpoint, and what may interrupt it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import make_opt

from workbench.errors import CheckpointError, StoreError
from workbench.experiments.convert import convert, verify
from workbench.flash.store import Store
from workbench.models.checkpoint import Checkpoint
from workbench.spec import ITEMSIZE

DRIVERS = Path(__file__).parent
LAYER = "model.decoder.layers.{}."


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative name."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def check_bytes(store: Store, weights: dict[str, torch.Tensor]) -> None:
    """Every byte of the three weight files is the checkpoint's, or zero where nothing is stored."""
    dtype, size, layout = getattr(torch, store.dtype), ITEMSIZE[store.dtype], store.layout
    raw = {name: t.to(dtype).contiguous().view(torch.uint8).numpy().tobytes() for name, t in weights.items()}
    bundled, split = bytearray(store.bundled_path.stat().st_size), bytearray(store.split_path.stat().st_size)
    row = store.spec.d_model * size
    for layer in range(store.spec.num_layers):
        up = raw[LAYER.format(layer) + "fc1.weight"]
        transposed = weights[LAYER.format(layer) + "fc2.weight"].to(dtype).T.contiguous()
        down = transposed.view(torch.uint8).numpy().tobytes()
        for i in range(store.spec.d_ff):
            pair = [up[i * row : (i + 1) * row], down[i * row : (i + 1) * row]]
            start = store.bundled_offset(layer) + i * layout.bundle_stride
            bundled[start : start + 2 * row] = pair[0] + pair[1]
            for part in (0, 1):
                start = store.split_offset(layer, part) + i * layout.row_stride
                split[start : start + row] = pair[part]
    assert store.bundled_path.read_bytes() == bundled
    assert store.split_path.read_bytes() == split
    resident = store.resident_path.read_bytes()
    body = bytearray(len(resident))
    stored = set()
    for group in store.groups:
        for name, slot in group.tensors.items():
            assert slot.shape == tuple(weights[name].shape)
            body[group.offset + slot.offset : group.offset + slot.offset + slot.nbytes] = raw[name]
            stored.add(name)
    start = store.groups[0].offset
    assert resident[start:] == body[start:]
    assert stored == {name for name in weights if not name.endswith(("fc1.weight", "fc2.weight"))}
    with safe_open(store.resident_path, "pt") as opened:
        assert all(torch.equal(opened.get_tensor(name), weights[name].to(dtype)) for name in stored)


@pytest.mark.parametrize("stored", [None, "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
def test_every_byte(tmp_path: Path, source: str, stored: Any) -> None:
    model = make_opt(tmp_path / "opt", dtype=source, hidden_size=72, ffn_dim=251)
    store = convert(model, tmp_path / "store", dtype=stored)
    assert store.dtype == (stored or source)
    check_bytes(store, load_file(model / "model.safetensors"))
    assert (
        store.model_bytes
        == sum(t.numel() for t in load_file(model / "model.safetensors").values()) * (ITEMSIZE[store.dtype])
    )
    verify(store.path)
    assert not (tmp_path / "store.partial").exists()
    assert not (tmp_path / "store" / "convert.json").exists()


VARIANTS: dict[str, dict[str, Any]] = {
    "post-norm": {"do_layer_norm_before": False},
    "no bias": {"enable_bias": False},
    "norm without weights": {"layer_norm_elementwise_affine": False},
    "projected embedding": {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "untied": {"tie_word_embeddings": False},
    "no final norm": {"_remove_final_layer_norm": True},
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_every_kind_of_opt(tmp_path: Path, overrides: dict[str, Any]) -> None:
    model = make_opt(tmp_path / "opt", **overrides)
    check_bytes(convert(model, tmp_path / "store"), load_file(model / "model.safetensors"))


def test_activated_rows_and_groups(tiny_opt: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_opt / "model.safetensors")
    store = convert(tiny_opt, tmp_path / "store", dtype="bfloat16")
    for layer in range(2):
        up = weights[LAYER.format(layer) + "fc1.weight"].to(torch.bfloat16).view(torch.uint16)
        assert (store.activated_rows(layer) == up.numpy()).all()
        down = weights[LAYER.format(layer) + "fc2.weight"].to(torch.bfloat16).T.contiguous().view(torch.uint16)
        assert (store.rows(layer, 1) == down.numpy()).all()
    assert [group.name for group in store.groups] == ["embed", "layer.0", "layer.1", "head"]
    assert store.group("head").tensors.keys() == {
        "model.decoder.final_layer_norm.weight",
        "model.decoder.final_layer_norm.bias",
    }
    assert LAYER.format(1) + "fc2.bias" in store.group("layer.1").tensors
    with pytest.raises(IndexError):
        store.bundled_offset(2)
    with pytest.raises(IndexError):
        store.split_offset(0, 2)


def test_shards_pickles_and_old_names_give_the_same_store(tiny_opt: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_opt / "model.safetensors")
    wanted = convert(tiny_opt, tmp_path / "wanted")
    sharded = make_opt(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    pickled, old, twice = (tmp_path / name for name in ("pickled", "old", "twice"))
    for path in (pickled, old, twice):
        path.mkdir()
        shutil.copy(tiny_opt / "config.json", path)
    torch.save(weights, pickled / "pytorch_model.bin")
    old_names = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file({**old_names, "decoder.version": torch.zeros(1)}, old / "model.safetensors")
    save_file(
        {**weights, "lm_head.weight": weights["model.decoder.embed_tokens.weight"].clone()}, twice / "model.safetensors"
    )
    for path in (sharded, pickled, old, twice):
        assert convert(path, tmp_path / f"{path.name}-store").digest == wanted.digest, path.name
    for path in (sharded, pickled):
        with Checkpoint(path) as opened:
            assert opened.fingerprint()["digest"] == wanted.source_digest


def test_sharded_pickle(tiny_opt: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_opt / "model.safetensors")
    path = tmp_path / "opt"
    path.mkdir()
    shutil.copy(tiny_opt / "config.json", path)
    names = sorted(weights)
    halves = {"pytorch_model-1.bin": names[:15], "pytorch_model-2.bin": names[15:]}
    for file, half in halves.items():
        torch.save({name: weights[name] for name in half}, path / file)
    index = {"weight_map": {name: file for file, half in halves.items() for name in half}}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    check_bytes(convert(path, tmp_path / "store"), weights)


def test_tokenizer_travels_with_the_store(tiny_opt: Path, tmp_path: Path) -> None:
    model = tmp_path / "opt"
    shutil.copytree(tiny_opt, model)
    assert convert(model, tmp_path / "without").tokenizer_path is None
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    store = convert(model, tmp_path / "with")
    assert store.tokenizer_path is not None
    assert store.tokenizer_path == tmp_path / "with" / "tokenizer"
    assert (store.tokenizer_path / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert (store.tokenizer_path / "generation_config.json").exists()
    verify(store.path)
    (store.tokenizer_path / "tokenizer.json").write_text('{"version": "1.1"}')
    with pytest.raises(StoreError, match=r"tokenizer\.json: offset 0: damaged"):
        verify(store.path)


def test_progress_ends_at_the_total(tiny_opt: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    store = convert(tiny_opt, tmp_path / "store", progress=lambda *step: seen.append(step))
    total = sum(entry["nbytes"] for entry in store.manifest["files"].values())
    assert seen[-1][1:] == (total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    seen.clear()
    verify(store.path, lambda *step: seen.append(step))
    assert seen[-1][1] == seen[-1][2] >= total


class TestTarget:
    """What may stand at the target already."""

    def test_the_same_store_is_done_at_once(self, tiny_opt: Path, tmp_path: Path) -> None:
        store = convert(tiny_opt, tmp_path / "store")
        before = {name: (store.path / name).stat().st_mtime_ns for name in store.manifest["files"]}
        again = convert(tiny_opt, tmp_path / "store", dtype="float32")
        assert again.digest == store.digest
        assert {name: (store.path / name).stat().st_mtime_ns for name in before} == before

    def test_another_store_is_left_alone(self, tiny_opt: Path, tmp_path: Path) -> None:
        convert(tiny_opt, tmp_path / "store")
        before = tree(tmp_path / "store")
        with pytest.raises(StoreError, match="already holds a store of tiny-opt as float32"):
            convert(tiny_opt, tmp_path / "store", dtype="float16")
        with pytest.raises(StoreError, match="already holds a store"):
            convert(make_opt(tmp_path / "other", seed=1), tmp_path / "store")
        assert tree(tmp_path / "store") == before
        assert sorted(os.listdir(tmp_path)) == ["other", "store"]

    def test_anything_else_is_left_alone(self, tiny_opt: Path, tmp_path: Path) -> None:
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "chapter1.txt").write_text("words")
        (tmp_path / "file").write_text("words")
        with pytest.raises(StoreError, match="not a flash store"):
            convert(tiny_opt, tmp_path / "thesis")
        with pytest.raises(StoreError, match="not a directory"):
            convert(tiny_opt, tmp_path / "file")
        (tmp_path / "new.partial").mkdir()
        (tmp_path / "new.partial" / "chapter2.txt").write_text("words")
        with pytest.raises(StoreError, match=r"chapter2\.txt"):
            convert(tiny_opt, tmp_path / "new")
        assert sorted(tree(tmp_path)) == ["file", "new.partial/chapter2.txt", "thesis/chapter1.txt"]

    def test_an_empty_directory_and_a_link_to_one_are_used(self, tiny_opt: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        one, two = convert(tiny_opt, tmp_path / "empty"), convert(tiny_opt, tmp_path / "link")
        assert one.digest == two.digest
        assert (tmp_path / "elsewhere" / "store.json").exists()
        assert (tmp_path / "link").is_symlink()

    def test_missing_parents_are_made(self, tiny_opt: Path, tmp_path: Path) -> None:
        assert convert(tiny_opt, tmp_path / "a" / "b" / "store").path == tmp_path / "a" / "b" / "store"

    def test_unknown_dtype(self, tiny_opt: Path, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="int8"):
            convert(tiny_opt, tmp_path / "store", dtype="int8")  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == []


class _StopError(Exception):
    pass


def stop_at(part: str, error: BaseException) -> Any:
    """A progress callback that raises when `part` is reached."""

    def progress(name: str, done: int, total: int) -> None:
        if name == part:
            raise error

    return progress


class TestResume:
    """Interrupted runs, and what a later run makes of what they left."""

    def test_ctrl_c_leaves_a_partial_that_resumes(self, tiny_opt: Path, tmp_path: Path) -> None:
        wanted = tree(convert(tiny_opt, tmp_path / "wanted").path)
        with pytest.raises(KeyboardInterrupt):
            convert(tiny_opt, tmp_path / "store", progress=stop_at("layer.1", KeyboardInterrupt()))
        assert not (tmp_path / "store").exists()
        journal = json.loads((tmp_path / "store.partial" / "convert.json").read_text())
        assert list(journal["done"]) == ["embed", "layer.0"]
        assert tree(convert(tiny_opt, tmp_path / "store").path) == wanted

    def test_another_checkpoint_or_dtype_is_refused(self, tiny_opt: Path, tmp_path: Path) -> None:
        model = tmp_path / "opt"
        shutil.copytree(tiny_opt, model)
        with pytest.raises(_StopError):
            convert(model, tmp_path / "store", progress=stop_at("layer.1", _StopError()))
        before = tree(tmp_path / "store.partial")
        with pytest.raises(StoreError, match="as float32, not float16"):
            convert(model, tmp_path / "store", dtype="float16")
        with pytest.raises(StoreError, match=r"another checkpoint \(opt\).*delete .*store\.partial"):
            convert(make_opt(tmp_path / "other", seed=1), tmp_path / "store")
        weights = load_file(model / "model.safetensors")
        weights[LAYER.format(0) + "fc1.weight"][100, 3] += 1
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(StoreError, match="a checkpoint since changed"):
            convert(model, tmp_path / "store")
        assert tree(tmp_path / "store.partial") == before

    def test_damage_to_a_partial_is_repaired(self, tiny_opt: Path, tmp_path: Path) -> None:
        wanted = tree(convert(tiny_opt, tmp_path / "wanted").path)
        for name in ("resident.safetensors", "ffn.bundled", "ffn.split"):
            with pytest.raises(_StopError):
                convert(tiny_opt, tmp_path / name, progress=stop_at("head", _StopError()))
            with open(tmp_path / f"{name}.partial" / name, "r+b") as file:
                file.seek(-9000, os.SEEK_END)
                file.write(b"damage")
            assert tree(convert(tiny_opt, tmp_path / name).path) == wanted

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"request": 1}', b'{"request": {}, "done": []}'])
    def test_a_damaged_journal_is_refused(self, tiny_opt: Path, tmp_path: Path, content: bytes) -> None:
        with pytest.raises(_StopError):
            convert(tiny_opt, tmp_path / "store", progress=stop_at("layer.1", _StopError()))
        (tmp_path / "store.partial" / "convert.json").write_bytes(content)
        with pytest.raises(StoreError, match=r"delete .*store\.partial"):
            convert(tiny_opt, tmp_path / "store")

    def test_two_conversions_at_once(self, tiny_opt: Path, tmp_path: Path) -> None:
        refused: list[StoreError] = []

        def progress(*_: object) -> None:
            with pytest.raises(StoreError, match="another conversion") as caught:
                convert(tiny_opt, tmp_path / "store")
            refused.append(caught.value)

        verify(convert(tiny_opt, tmp_path / "store", progress=progress).path)
        assert refused

    @pytest.mark.parametrize("mode", ["each", "seeds"])
    def test_killed_at_any_point(self, tmp_path: Path, mode: str) -> None:
        """A real SIGKILL at every write, sync and rename of a run, torn writes too; or several in a row, at random."""
        model = make_opt(tmp_path / "opt", num_hidden_layers=1 if mode == "each" else 3)
        (model / "tokenizer.json").write_text("{}")
        wanted = tree(convert(model, tmp_path / "wanted").path)
        command = [sys.executable, str(DRIVERS / "kill_convert.py"), str(model), str(tmp_path / "out"), mode]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        outcomes = json.loads(done.stdout.splitlines()[-1])
        assert outcomes["killed"] >= (40 if mode == "each" else 8)
        for store in outcomes["stores"]:
            assert tree(Path(store)) == wanted, store


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured through Linux's /proc")
@pytest.mark.parametrize("kind", ["safetensors", "pickle"])
def test_memory_is_bounded_by_a_layer(tmp_path: Path, kind: str) -> None:
    model = make_opt(tmp_path / "opt", num_hidden_layers=16, hidden_size=512, ffn_dim=1024)
    if kind == "pickle":
        torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
        (model / "model.safetensors").unlink()
    command = [sys.executable, str(DRIVERS / "measure_convert.py"), str(model), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout.splitlines()[-1])["grown"]
    store = Store.open(tmp_path / "store")
    layer = store.group("layer.0").nbytes + store.spec.ffn_bytes("float32") // 16
    constant = 32 << 20
    assert 2 * layer + constant < store.model_bytes / 2
    assert grown < 2 * layer + constant


def test_hub_id_without_network_and_from_the_cache(tiny_opt: Path, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom workbench.errors import CheckpointError\nfrom workbench.experiments.convert import convert\n"
        "try:\n    print(convert(sys.argv[1], sys.argv[2]).manifest['source']['name'])\n"
        "except CheckpointError as error:\n    print('refused', error)\n"
    )
    cache = tmp_path / "cache" / "models--someone--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("a" * 40)
    shutil.copytree(tiny_opt, cache / "snapshots" / ("a" * 40))
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    for model, wanted in (
        ("someone/absent", "refused someone/absent: no such directory"),
        ("someone/tiny", "someone/tiny"),
    ):
        command = [sys.executable, "-c", script, model, str(tmp_path / "store")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(wanted)
        assert len(done.stdout.splitlines()) == 1


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        convert(tmp_path / "absent", tmp_path / "store")
    with pytest.raises(CheckpointError, match="no such directory"):
        convert("./absent", tmp_path / "store")
