"""The dense checkpoint of a generated model, in Hugging Face's layout, and a tokenizer for its vocabulary."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from workbench import assets
from workbench.errors import StoreError
from workbench.experiments.synth_model import Generator, Request
from workbench.flash.journal import naming_write_errors, write_synced
from workbench.flash.manifest import canonical
from workbench.models import family_of
from workbench.spec import ITEMSIZE, ModelSpec


class DenseCheckpoint:
    """A dense checkpoint that grows under the name DIR.partial, a shard for the embedding and one for each layer."""

    def __init__(self, target: Path, request: Request) -> None:
        self.target, self.partial, self._request = target, target.with_name(target.name + ".partial"), request
        self.nbytes = (
            sum(
                torch.Size(shape).numel()
                for shape in family_of(request.spec.config).tensor_shapes(request.spec).values()
            )
            * (ITEMSIZE[request.dtype])
        )
        self._whole = canonical(request.as_dict()).decode()

    def check(self) -> bool:
        """Whether it is there already, complete. StoreError when something else is."""
        for folder in (self.target, self.partial):
            begun = folder is self.partial and not self.present()
            if not os.path.lexists(folder) or begun:
                continue
            try:
                same = (folder / "synthetic.json").read_text() == self._whole
            except OSError:
                same = False
            if not same:
                raise StoreError(
                    f"{folder}: exists and is not this request's checkpoint; choose another --checkpoint, or delete it"
                )
        return self.target.exists()

    def present(self) -> int:
        """Bytes that an interrupted run left."""
        return sum(file.stat().st_size for file in self.partial.glob("*.safetensors")) if self.partial.exists() else 0

    def _file(self, number: int) -> str:
        total = self._request.spec.num_layers + 1
        return f"model-{number + 1:05d}-of-{total:05d}.safetensors"

    def write(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        """Shard `number`, whole or not at all, unless it is there."""
        file = self.partial / self._file(number)
        if self.target.exists() or file.exists():
            return
        with naming_write_errors(self.target):
            self.partial.mkdir(parents=True, exist_ok=True)
            if not (self.partial / "synthetic.json").exists():
                write_synced(self.partial / "synthetic.json", self._whole.encode())
            temporary = file.with_suffix(".new")
            try:
                save_file({n: t.contiguous() for n, t in tensors.items()}, temporary, metadata={"format": "pt"})
            except SafetensorError as error:  # which carries the system's reason as text only
                reason = "the file system is full" if "os error 28" in str(error) else " ".join(str(error).split())
                raise StoreError(f"{file}: cannot be written ({reason}); the same command resumes") from error
            os.replace(temporary, file)

    def finish(self, generator: Generator, layer: Callable[[int], dict[str, torch.Tensor]]) -> None:
        """Shards that are missing, then config.json, index and tokenizer, and the name. layer(n): a layer's tensors."""
        if self.target.exists():
            return
        names = list(_shards(generator))
        for number, inside in enumerate(names):
            if not (self.partial / self._file(number)).exists():
                self.write(number, layer(number - 1) if number else {n: generator.outside(n) for n in inside})
        table = {name: self._file(number) for number, inside in enumerate(names) for name in inside}
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": table}
        with naming_write_errors(self.target):
            write_synced(self.partial / "config.json", json.dumps(generator.spec.config, indent=1).encode())
            for name, text in tokenizer_of(generator.spec).items():
                write_synced(self.partial / name, text.encode())
            write_synced(self.partial / "model.safetensors.index.json", json.dumps(index, indent=1).encode())
            os.replace(self.partial, self.target)


def tokenizer_of(spec: ModelSpec) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json of the demo model for a vocabulary of another size.

    A larger one has tokens that no text gives, shown as ' w50000'; a smaller one the first of its merges. Empty where
    the vocabulary is too small for the 256 bytes.
    """
    folder = assets.path("data/demo-model")
    table, settings = (json.loads((folder / f"{name}.json").read_text()) for name in ("tokenizer", "tokenizer_config"))
    model, size = table["model"], spec.vocab_size
    own = {token: number for token, number in model["vocab"].items() if number < size}
    smallest = len(model["vocab"]) - len(model["merges"])
    if size < smallest:
        return {}
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    model["merges"] = [pair for pair in pairs if "".join(pair) in own]
    model["vocab"] = own | {f"Ġw{number:05d}": number for number in range(len(own), size)}
    settings["model_max_length"] = spec.max_positions
    return {
        "tokenizer.json": json.dumps(table, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(settings, indent=1),
    }


def _shards(generator: Generator) -> Iterator[list[str]]:
    """The checkpoint's tensor names: those outside the layers, then each layer's."""
    outside = [name for name in generator.shapes if generator.family.layer_of(name) is None]
    yield outside
    for layer in range(generator.spec.num_layers):
        yield [name for name in generator.shapes if generator.family.layer_of(name) == layer]
