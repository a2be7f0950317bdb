"""A checkpoint seen through its architecture: every weight that the model needs, by today's names, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.spec import ModelSpec

_BLOCK_ROWS = 4096


class Weights:
    """A validated checkpoint; what `workbench.flash.convert` reads from.

    Names, number and shapes of the tensors are compared with what the config asks for when it is made;
    CheckpointError names the first that is missing, extra or misshapen. `groups`: the resident tensors' shapes, by
    group, in the store's order.
    """

    def __init__(self, checkpoint: Checkpoint, force: bool = False) -> None:
        self.checkpoint = checkpoint
        self._family = family_of(checkpoint.config)
        self.spec: ModelSpec = self._family.spec(checkpoint.config, force)
        self._names = self._rename()
        self._check_layers()
        shapes = self._family.tensor_shapes(self.spec)
        self._compare(shapes)
        self._drop_tied()
        matrices = {name for layer in range(self.spec.num_layers) for name in self.ffn(layer)}
        order = ["embed", *(f"layer.{i}" for i in range(self.spec.num_layers)), "head"]
        grouped: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in order}
        for name, shape in shapes.items():
            if name not in matrices:
                grouped[self._family.group_of(name)][name] = shape
        self.groups: list[tuple[str, dict[str, tuple[int, ...]]]] = list(grouped.items())

    @property
    def dtype(self) -> str:
        """The checkpoint's dtype. CheckpointError when its tensors have several."""
        return self.checkpoint.dtype

    def ffn(self, layer: int) -> tuple[str, ...]:
        """Names of a layer's FFN matrices by part: up [d_ff, d_model], down [d_model, d_ff], (gate)."""
        return self._family.ffn_names(self.spec, layer).matrices

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of a tensor's first axis, in the checkpoint's dtype."""
        return self.checkpoint.read(self._names[name], start, stop)

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        return str(self._where(self._names[name]))

    def source(self) -> dict[str, Any]:
        """The checkpoint's fingerprint, for store.json."""
        dtypes = sorted({info.dtype for info in self.checkpoint.tensors.values()})
        return {**self.checkpoint.fingerprint(), "dtype": ", ".join(dtypes)}

    def modified(self) -> dict[str, int]:
        """Modification times of the weight files, ns."""
        return self.checkpoint.modified()

    def tokenizer_files(self) -> list[Path]:
        """Files to copy into the store, so that it can be run by itself."""
        return self.checkpoint.tokenizer_files()

    def _rename(self) -> dict[str, str]:
        names: dict[str, str] = {}
        for own in self.checkpoint.tensors:
            name = self._family.canonical(own)
            if name is None:
                continue
            if name in names:
                raise CheckpointError(f"{self._where(own)}: tensor {name} is there twice, as {names[name]} and {own}")
            names[name] = own
        return names

    def _drop_tied(self) -> None:
        """A second copy of a tied tensor is accepted when it is equal."""
        for copy, original in self._family.tied(self.spec).items():
            if copy not in self._names:
                continue
            one, two = (self.checkpoint.tensors[self._names[name]] for name in (copy, original))
            equal = one.shape == two.shape and one.dtype == two.dtype
            for start in range(0, one.shape[0] if equal and one.shape else 0, _BLOCK_ROWS):
                stop = min(start + _BLOCK_ROWS, one.shape[0])
                equal = equal and torch.equal(self.read(copy, start, stop), self.read(original, start, stop))
            if not equal:
                raise CheckpointError(
                    f"{self._where(self._names[copy])}: tensor {copy} differs from {original}, though the config ties "
                    f"them; set tie_word_embeddings to false in config.json if they are meant to differ"
                )
            del self._names[copy]

    def _check_layers(self) -> None:
        found = {layer for name in self._names if (layer := self._family.layer_of(name)) is not None}
        if len(found) != self.spec.num_layers or max(found) >= self.spec.num_layers:
            raise CheckpointError(
                f"{self.checkpoint.path}: config.json says {self.spec.num_layers} layers, the weights have "
                f"{_ranges(found)}; use the config.json that belongs to these weights"
            )

    def _compare(self, shapes: dict[str, tuple[int, ...]]) -> None:
        path = self.checkpoint.path
        for name, shape in shapes.items():
            if name not in self._names:
                raise CheckpointError(f"{path}: tensor {name} {list(shape)} is missing; download the checkpoint again")
            info = self.checkpoint.tensors[self._names[name]]
            if info.shape != shape:
                raise CheckpointError(
                    f"{path / info.file}: tensor {name} is {list(info.shape)}, config.json asks for {list(shape)}; "
                    f"use the config.json that belongs to these weights"
                )
        tied = self._family.tied(self.spec)
        for name, own in self._names.items():
            if name not in shapes and name not in tied:
                shape = list(self.checkpoint.tensors[own].shape)
                raise CheckpointError(
                    f"{self._where(own)}: tensor {own} {shape} belongs to no part of a {self.spec.model_type} model; "
                    f"use the config.json that belongs to these weights, or remove the tensor"
                )

    def _where(self, own: str) -> Path:
        return self.checkpoint.path / self.checkpoint.tensors[own].file


def _ranges(layers: set[int]) -> str:
    return f"{len(layers)} (up to layer {max(layers)})" if layers else "none"
