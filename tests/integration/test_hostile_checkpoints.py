"""Damaged, wrong and malicious checkpoints: each one line that names the fault, and nothing written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, make_opt

from workbench.errors import CheckpointError, StoreError
from workbench.experiments.convert import convert, verify

FC1 = "model.decoder.layers.1.fc1.weight"
EMBED = "model.decoder.embed_tokens.weight"
Edit = Callable[[Path], Any]


@pytest.fixture
def model(tiny_opt: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_opt, tmp_path / "model"))


def refused(model: Path | str, out: Path, match: str, **options: Any) -> str:
    """The conversion is refused with one line that matches, and leaves nothing at `out`."""
    with pytest.raises(CheckpointError, match=match) as caught:
        convert(model, out, **options)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    assert not out.with_name(out.name + ".partial").exists()
    return str(caught.value)


def edit_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a checkpoint and save them again."""
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def cut(file: Path, nbytes: int) -> None:
    """Take bytes from a file's end."""
    os.truncate(file, file.stat().st_size - nbytes)


def edit_header(model: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a safetensors header; the tensors' bytes stay."""
    file = model / "model.safetensors"
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    changed = change(header)
    text = (changed if isinstance(changed, str) else json.dumps(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])


def write(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)


CONFIGS: dict[str, tuple[Edit, str]] = {
    "missing": (lambda m: (m / "config.json").unlink(), "no config.json, so not a checkpoint"),
    "not JSON": (lambda m: write(m, "config.json", b"{"), r"config\.json: not JSON"),
    "not text": (lambda m: write(m, "config.json", b"\xff\xfe\x00"), r"config\.json: not JSON"),
    "nested": (lambda m: write(m, "config.json", b"[" * 100_000), r"config\.json: not JSON"),
    "a list": (lambda m: write(m, "config.json", b"[]"), "not a JSON object"),
    "no model_type": (lambda m: write(m, "config.json", b"{}"), "no model_type"),
    "model_type 3": (lambda m: edit_config(m, model_type=3), "no model_type"),
    "unsupported": (lambda m: edit_config(m, model_type="gpt2"), r"'gpt2' is not supported; supported: .*opt"),
    "remote code": (
        lambda m: edit_config(m, model_type="evil", auto_map={"AutoModel": "evil.Model"}),
        r"'evil' has code of its own \(auto_map\).*supported: .*opt",
    ),
    "quantized": (lambda m: edit_config(m, quantization_config={"bits": 4}), "quantized"),
    "gelu": (lambda m: edit_config(m, activation_function="gelu"), "activation 'gelu' is not ReLU.*--force"),
    "no width": (lambda m: edit_config(m, hidden_size=None), "hidden_size is None"),
    "width 64.0": (lambda m: edit_config(m, hidden_size=64.0), "hidden_size is 64.0"),
    "no layers": (lambda m: edit_config(m, num_hidden_layers=0), "num_hidden_layers is 0"),
    "heads": (lambda m: edit_config(m, num_attention_heads=7), "64 is not a multiple of num_attention_heads 7"),
    "bias": (lambda m: edit_config(m, enable_bias="yes"), "enable_bias is 'yes'"),
    "projection": (lambda m: edit_config(m, word_embed_proj_dim="x"), "word_embed_proj_dim is 'x'"),
    "more layers": (lambda m: edit_config(m, num_hidden_layers=3), r"says 3 layers, the weights have 2"),
    "fewer layers": (lambda m: edit_config(m, num_hidden_layers=1), r"says 1 layers, the weights have 2"),
    "far more layers": (lambda m: edit_config(m, num_hidden_layers=10**12), "the weights have 2"),
    "wider": (lambda m: edit_config(m, hidden_size=128, word_embed_proj_dim=128), r"\[128, 64\], .* \[128, 128\]"),
    "wider FFN": (lambda m: edit_config(m, ffn_dim=512), r"layers\.0\.fc1\.weight is \[256, 64\], .* \[512, 64\]"),
    "longer": (lambda m: edit_config(m, max_position_embeddings=256), r"embed_positions.* is \[130, 64\]"),
    "no biases": (lambda m: edit_config(m, enable_bias=False), "bias .* belongs to no part"),
    "untied": (lambda m: edit_config(m, tie_word_embeddings=False), r"lm_head\.weight \[128, 64\] is missing"),
}


@pytest.mark.parametrize(("damage", "match"), CONFIGS.values(), ids=CONFIGS)
def test_config(model: Path, tmp_path: Path, damage: Edit, match: str) -> None:
    damage(model)
    refused(model, tmp_path / "store", match)


def test_non_relu_is_converted_with_force(tmp_path: Path) -> None:
    model = make_opt(tmp_path / "gelu", activation_function="gelu")
    refused(model, tmp_path / "store", "not ReLU")
    assert convert(model, tmp_path / "store", force=True).spec.activation == "gelu"


def _swap_up(weights: dict[str, torch.Tensor]) -> None:
    weights[FC1] = weights[FC1].T.contiguous()


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda w: w.pop(FC1), rf"{FC1} \[256, 64\] is missing"),
    "extra": (lambda w: w.update(adapter=torch.zeros(3)), r"tensor adapter \[3\] belongs to no part of a opt model"),
    "misshapen": (_swap_up, rf"{FC1} is \[64, 256\], config\.json asks for \[256, 64\]"),
    "scalar": (lambda w: w.update({FC1: torch.tensor(1.0)}), rf"{FC1} is \[\], "),
    "empty": (lambda w: w.clear(), "hold no tensors"),
    "float64": (lambda w: w.update({FC1: w[FC1].double()}), rf"{FC1} is F64; float32"),
    "int8": (lambda w: w.update({FC1: w[FC1].to(torch.int8)}), rf"{FC1} is I8; float32"),
    "several dtypes": (lambda w: w.update({FC1: w[FC1].half()}), f"several dtypes.*{FC1} is float16.*--dtype"),
    "another head": (lambda w: w.update({"lm_head.weight": w[EMBED] + 1}), "lm_head.* differs from .*embed_tokens"),
    "head's shape": (lambda w: w.update({"lm_head.weight": torch.zeros(2, 2)}), "lm_head.* differs from"),
    "both names": (lambda w: w.update({EMBED[6:]: w[EMBED] + 0}), f"{EMBED} is there twice"),
}


@pytest.mark.parametrize(("damage", "match"), TENSORS.values(), ids=TENSORS)
def test_tensors(model: Path, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], Any], match: str) -> None:
    edit_weights(model, damage)
    refused(model, tmp_path / "store", match)


def test_several_dtypes_are_stored_as_asked(model: Path, tmp_path: Path) -> None:
    edit_weights(model, lambda w: w.update({FC1: w[FC1].half()}))
    verify(convert(model, tmp_path / "store", dtype="float16").path)


def _shift(header: dict[str, Any]) -> None:
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]


FILES: dict[str, tuple[Edit, str]] = {
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "no model.safetensors or pytorch_model.bin"),
    "empty file": (lambda m: write(m, "model.safetensors", b""), "truncated: 0 bytes"),
    "truncated": (lambda m: cut(m / "model.safetensors", 1), "truncated: the header promises"),
    "cut in the header": (lambda m: os.truncate(m / "model.safetensors", 100), "truncated: the header claims"),
    "too long": (lambda m: cut(m / "model.safetensors", -1), "1 bytes follow the last tensor"),
    "huge header": (lambda m: write(m, "model.safetensors", b"\xff" * 64), "header error: claims"),
    "header not JSON": (lambda m: edit_header(m, lambda h: "{"), "header error: not JSON"),
    "header a list": (lambda m: edit_header(m, lambda h: "[]"), "header error: not a JSON object"),
    "a name twice": (lambda m: edit_header(m, lambda h: '{"a": {}, "a": {}}'), "a name appears twice"),
    "entry a number": (lambda m: edit_header(m, lambda h: h.update({FC1: 3})), f"{FC1} is not described"),
    "dtype": (lambda m: edit_header(m, lambda h: h[FC1].update(dtype="F31")), f"{FC1} has the unknown dtype 'F31'"),
    "dtype a list": (lambda m: edit_header(m, lambda h: h[FC1].update(dtype=[])), "unknown dtype"),
    "shape": (lambda m: edit_header(m, lambda h: h[FC1].update(shape=[256, 65])), f"{FC1} of 66560 bytes has a range"),
    "negative shape": (lambda m: edit_header(m, lambda h: h[FC1].update(shape=[-256, -64])), "not whole numbers"),
    "offsets": (lambda m: edit_header(m, lambda h: h[FC1].update(data_offsets=[0, 65536])), "starts at"),
    "three offsets": (lambda m: edit_header(m, lambda h: h[FC1].update(data_offsets=[0, 1, 2])), "3 numbers"),
    "hole": (lambda m: edit_header(m, _shift), "starts at 8"),
}


@pytest.mark.parametrize(("damage", "match"), FILES.values(), ids=FILES)
def test_files(model: Path, tmp_path: Path, damage: Edit, match: str) -> None:
    damage(model)
    refused(model, tmp_path / "store", match)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of several shards."""
    return make_opt(tmp_path / "sharded", max_shard_size="100KB")


def edit_index(model: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the weight_map of the index."""
    file = model / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = change(index["weight_map"]) or index["weight_map"]
    file.write_text(json.dumps(index))


def shard(model: Path, number: int = 0) -> Path:
    return sorted(model.glob("*.safetensors"))[number]


SHARDS: dict[str, tuple[Edit, str]] = {
    "missing shard": (lambda m: shard(m).unlink(), "missing, though the index names it"),
    "truncated shard": (lambda m: cut(shard(m, 1), 5), "truncated: the header promises"),
    "the same shard twice": (lambda m: shutil.copy(shard(m, 0), shard(m, 1)), "is also in"),
    "outside": (
        lambda m: edit_index(m, lambda i: i.update({FC1: "../secret.safetensors"})),
        "not a weight file beside",
    ),
    "script": (lambda m: edit_index(m, lambda i: i.update({FC1: "setup.py"})), "not a weight file beside"),
    "no map": (lambda m: edit_index(m, lambda i: [1]), "no weight_map"),
    "numbers": (lambda m: edit_index(m, lambda i: i.update({FC1: 3})), "no weight_map"),
    "wrong shard": (lambda m: edit_index(m, lambda i: i.update({FC1: i[EMBED]})), f"tensor {FC1} is not in it"),
    "unknown tensor": (lambda m: edit_index(m, lambda i: i.update({"x": i[EMBED]})), "tensor x is not in it"),
    "index not JSON": (lambda m: write(m, "model.safetensors.index.json", b"{"), "index.json: not JSON"),
}


@pytest.mark.parametrize(("damage", "match"), SHARDS.values(), ids=SHARDS)
def test_shards(sharded: Path, tmp_path: Path, damage: Edit, match: str) -> None:
    damage(sharded)
    refused(sharded, tmp_path / "store", match)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [FC1, FC1.replace("fc1", "fc2"), EMBED, "model.decoder.layers.1.fc2.bias"])
def test_values_that_are_not_finite(model: Path, tmp_path: Path, name: str, value: float) -> None:
    edit_weights(model, lambda w: w[name].view(-1).__setitem__(40, value))
    refused(model, tmp_path / "store", rf"model\.safetensors: tensor {name} holds NaN or infinity")


@pytest.mark.parametrize("name", [FC1, EMBED])
def test_overflow_of_the_storage_dtype(model: Path, tmp_path: Path, name: str) -> None:
    edit_weights(model, lambda w: w[name].view(-1).__setitem__(40, 70000.0))
    refused(model, tmp_path / "store", f"{name} holds 70000, too large for float16", dtype="float16")
    convert(model, tmp_path / "store", dtype="bfloat16")


class _Evil:
    """Unpickled without care, it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.marker, "code ran"))


@pytest.mark.parametrize("form", ["zip", "plain"])
def test_a_pickle_that_runs_code(model: Path, tmp_path: Path, form: str) -> None:
    marker = tmp_path / "marker"
    weights: dict[str, Any] = {**load_file(model / "model.safetensors"), FC1: _Evil(marker)}
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"
    if form == "zip":
        torch.save(weights, file)
    else:
        file.write_bytes(pickle.dumps(weights))
    torch.load(file, weights_only=False) if form == "zip" else pickle.loads(file.read_bytes())
    assert marker.read_text() == "code ran"  # the pickle is a live one
    marker.unlink()
    refused(model, tmp_path / "store", "may run code" if form == "zip" else "cannot be read lazily")
    assert not marker.exists()


def test_pickles_that_are_not_a_state_dict(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"
    torch.save([1, 2], file)
    refused(model, tmp_path / "store", "not a table of named tensors")
    torch.save({"model": weights}, file)
    refused(model, tmp_path / "store", "not a table of named tensors")
    torch.save({**weights, FC1: weights[FC1].to(torch.int32)}, file)
    refused(model, tmp_path / "store", f"{FC1} is int32")
    torch.save(weights, file)
    cut(file, 1000)
    refused(model, tmp_path / "store", "truncated")
    torch.save(weights, file, _use_new_zipfile_serialization=False)
    refused(model, tmp_path / "store", "before PyTorch 1.6")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of its own, of a given size in KiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()

    def mount(kib: int) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(place)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("this machine does not let tests mount a file system")
        return place

    yield mount
    subprocess.run(["umount", str(place)], capture_output=True, check=False)


def test_too_little_space_is_noticed_before_writing(tiny_opt: Path, small: Callable[[int], Path]) -> None:
    place = small(512)
    with pytest.raises(StoreError, match=r"\(1789952 bytes\) needed, .*\(524288 bytes\) free") as caught:
        convert(tiny_opt, place / "store")
    assert "\n" not in str(caught.value)
    assert list(place.iterdir()) == []


def test_space_that_runs_out_while_writing(tiny_opt: Path, tmp_path: Path, small: Callable[[int], Path]) -> None:
    place = small(3000)
    ballast = place / "ballast"

    def fill(part: str, done: int, total: int) -> None:
        if part == "layer.0" and not ballast.exists():
            with ballast.open("wb") as file:
                file.truncate(0)
                while os.statvfs(place).f_bavail > 40:
                    file.write(bytes(4096))
                    file.flush()

    with pytest.raises(StoreError, match=r"file system is full .* run the same command again to resume") as caught:
        convert(tiny_opt, place / "store", progress=fill)
    assert "\n" not in str(caught.value)
    assert not (place / "store").exists()
    ballast.unlink()
    assert convert(tiny_opt, place / "store").digest == convert(tiny_opt, tmp_path / "wanted").digest


def test_read_only_target(tiny_opt: Path, small: Callable[[int], Path]) -> None:
    place = small(4000)
    (place / "thesis.txt").write_text("words")
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    for out in (place / "store", place / "a" / "store"):
        with pytest.raises(StoreError, match=r"cannot be written \(Read-only file system\)") as caught:
            convert(tiny_opt, out)
        assert "\n" not in str(caught.value)
    assert [file.name for file in place.iterdir()] == ["thesis.txt"]


def test_parent_that_is_a_file(tiny_opt: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    with pytest.raises(StoreError, match="cannot be written"):
        convert(tiny_opt, tmp_path / "file" / "store")
    assert (tmp_path / "file").read_text() == "words"


def test_a_file_and_nothing_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    refused(tmp_path / "weights.bin", tmp_path / "store", "no such directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path / "store", "no config.json, so not a checkpoint")


def test_a_tokenizer_of_no_directory_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    from workbench.capture.activations import tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("asked transformers"))
    with pytest.raises(CheckpointError, match="absent: no such directory"):
        tokenizer(tmp_path / "absent")
