"""Low-rank predictors: for each layer logits = b (a x) + bias, and a neuron is predicted where they pass a threshold.

Paper section 3.1: x is the FFN's own input. A directory holds `predictors.safetensors` (a.N, b.N, bias.N for layer N;
factors in the stored dtype, biases float32; int8 factors with a_scale.N and b_scale.N), `card.json` and `CARD.md`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from workbench.errors import PredictorError
from workbench.predictor.card import SCHEMA, markdown
from workbench.spec import ModelSpec
from workbench.training.state import sync_directory, write_atomic

TENSORS, CARD, TEXT = "predictors.safetensors", "card.json", "CARD.md"
SCALES = ("a_scale", "b_scale")


@dataclass(frozen=True)
class LayerPredictor:
    """One layer. a [rank, d_model], b [d_ff, rank], bias float32 [d_ff], threshold on the logits.

    `stored` is the dtype of the factors on file; a and b hold exactly those values, once loaded in that dtype. Where it
    is int8, a_scale float32 [rank] and b_scale float32 [d_ff] are there: a value is its integer times its row's scale.
    """

    a: np.ndarray
    b: np.ndarray
    bias: np.ndarray
    threshold: float
    stored: str = "float16"
    a_scale: np.ndarray | None = None
    b_scale: np.ndarray | None = None

    @property
    def rank(self) -> int:
        """Rows of a."""
        return self.a.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes as stored, which is what an engine keeps in DRAM."""
        scales = sum(scale.nbytes for scale in (self.a_scale, self.b_scale) if scale is not None)
        return (self.a.size + self.b.size) * np.dtype(self.stored).itemsize + self.bias.nbytes + scales

    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """a and b in the stored dtype, for the kernels, which take an int8 layer's scales beside them; no value
        changes."""
        return self.a.astype(self.stored, copy=False), self.b.astype(self.stored, copy=False)

    def scores(self, x: np.ndarray) -> np.ndarray:
        """Logits float32 [..., d_ff] of inputs float32 [..., d_model]."""
        a, b = self.a.astype(np.float32, copy=False), self.b.astype(np.float32, copy=False)
        hidden = x @ a.T if self.a_scale is None else (x @ a.T) * self.a_scale
        logits = hidden @ b.T if self.b_scale is None else (hidden @ b.T) * self.b_scale
        return logits + self.bias

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Sorted int32 ids of the neurons predicted for one input [d_model]."""
        return np.flatnonzero(~(self.scores(x) <= self.threshold)).astype(np.int32)  # a NaN has to show


@dataclass(frozen=True)
class Predictors:
    """Predictors of all layers, with the card that says for which model, on what text, and how good they are."""

    layers: list[LayerPredictor]
    card: dict[str, Any]
    model_digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of all layers as stored."""
        return sum(layer.nbytes for layer in self.layers)

    @cached_property
    def false_negatives(self) -> list[float]:
        """The false-negative rates that thresholds were set for."""
        return [point["target"] for point in self.card["layers"][0]["frontier"]] if self.card.get("layers") else []

    def at(self, false_negative: float) -> Predictors:
        """The same with the thresholds, and the card's figures, for another of the rates in `false_negatives`.

        PredictorError for others.
        """
        layers, entries = [], []
        for layer, entry in zip(self.layers, self.card["layers"], strict=True):
            points = [p for p in entry["frontier"] if abs(p["target"] - false_negative) < 1e-9]
            if not points:
                known = ", ".join(f"{rate:g}" for rate in self.false_negatives)
                raise PredictorError(
                    f"predictors: no thresholds for false_negative={false_negative:g}; there are {known}"
                )
            layers.append(dataclasses.replace(layer, threshold=points[0]["threshold"]))
            entries.append({**entry, **{name: value for name, value in points[0].items() if name != "target"}})
        return dataclasses.replace(self, layers=layers, card={**self.card, "layers": entries})

    def check(self, spec: ModelSpec | None, model_digest: str | None = None) -> None:
        """PredictorError unless an engine can use these for the model: they see the FFN's own input, and fit its
        geometry and the fingerprint of its FFN weights."""
        source = self.card.get("input", "ffn")
        if source != "ffn":
            raise PredictorError(
                f"predictors: trained on input {source!r}, for comparison only; run train-predictors with input 'ffn'"
            )
        here = (len(self.layers), self.layers[0].a.shape[1], self.layers[0].b.shape[0])
        if spec is not None and here != (spec.num_layers, spec.d_model, spec.d_ff):
            raise PredictorError(
                f"predictors: trained for {here[0]} layers, d_model {here[1]}, d_ff {here[2]}, but the model has "
                f"{spec.num_layers}, {spec.d_model}, {spec.d_ff}; run train-predictors for this model"
            )
        if model_digest is not None and model_digest != self.model_digest:
            raise PredictorError(
                f"predictors: trained for a model with fingerprint {self.model_digest[:12]}, but this one has "
                f"{model_digest[:12]}; run train-predictors for this model"
            )

    def save(self, directory: str | Path) -> None:
        """Write the directory whole, or not at all. PredictorError when it exists or cannot be written."""
        out = Path(directory)
        if out.exists():
            raise PredictorError(f"{out}: already exists; choose another --out or delete it")
        building = out.with_name(out.name + ".writing")
        body = save(self._tensors())
        card = {**self.card, "model_digest": self.model_digest, "sha256": hashlib.sha256(body).hexdigest()}
        try:
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
            write_atomic(building / TENSORS, body)
            write_atomic(building / CARD, (json.dumps(card, indent=1) + "\n").encode())
            write_atomic(building / TEXT, markdown(card).encode())
            os.replace(building, out)
            sync_directory(out.resolve().parent)
        except OSError as error:
            raise PredictorError(f"{out}: cannot be written ({error.strerror}); choose another --out") from error

    def _tensors(self) -> dict[str, np.ndarray]:
        tensors = {}
        for n, layer in enumerate(self.layers):
            tensors[f"a.{n}"], tensors[f"b.{n}"] = layer.packed()
            tensors[f"bias.{n}"] = layer.bias.astype(np.float32)
            for name in SCALES:
                scale = getattr(layer, name)
                if scale is not None:
                    tensors[f"{name}.{n}"] = scale.astype(np.float32)
        return tensors

    @classmethod
    def load(cls, directory: str | Path) -> Predictors:
        """Read and check a directory. PredictorError: missing, damaged, newer, or tensors that do not fit the card."""
        folder = Path(directory)
        card = _read_card(folder)
        path = folder / TENSORS
        try:
            body = path.read_bytes()
        except OSError as error:
            raise PredictorError(f"{path}: cannot be read ({error.strerror}); run train-predictors again") from error
        if hashlib.sha256(body).hexdigest() != card["sha256"]:
            raise PredictorError(f"{path}: damaged or truncated (SHA-256 is not the card's); copy or train it again")
        try:
            tensors = load(body)
        except SafetensorError as error:
            raise PredictorError(f"{path}: not a safetensors file ({error}); copy or train it again") from error
        layers = [_layer(path, tensors, card, n) for n in range(card["model"]["num_layers"])]
        return cls(layers, card, card["model_digest"])


def _read_card(folder: Path) -> dict[str, Any]:
    path = folder / CARD
    try:
        card = json.loads(path.read_text())
    except OSError as error:
        raise PredictorError(
            f"{path}: cannot be read ({error.strerror}); give a directory of train-predictors"
        ) from error
    except ValueError as error:
        raise PredictorError(f"{path}: not JSON ({error}); copy the directory again") from error
    if not isinstance(card, dict) or card.get("schema") != SCHEMA:
        version = card.get("schema") if isinstance(card, dict) else None
        raise PredictorError(f"{path}: schema {version}, but this version reads {SCHEMA}; train again or update")
    missing = {"model", "layers", "model_digest", "sha256", "store_dtype"} - card.keys()
    if missing or len(card["layers"]) != card["model"]["num_layers"]:
        raise PredictorError(f"{path}: incomplete ({', '.join(sorted(missing)) or 'layers'}); copy the directory again")
    return card


def _layer(path: Path, tensors: dict[str, np.ndarray], card: dict[str, Any], n: int) -> LayerPredictor:
    entry, model, stored = card["layers"][n], card["model"], card["store_dtype"]
    wanted = {
        "a": (entry["rank"], model["d_model"]),
        "b": (model["d_ff"], entry["rank"]),
        "bias": (model["d_ff"],),
    }
    if stored == "int8":
        wanted |= {"a_scale": (entry["rank"],), "b_scale": (model["d_ff"],)}
    for name, shape in wanted.items():
        tensor = tensors.get(f"{name}.{n}")
        if tensor is None:
            raise PredictorError(f"{path}: tensor {name}.{n} is missing; copy or train it again")
        if tensor.shape != shape or not np.isfinite(tensor).all():
            raise PredictorError(
                f"{path}: tensor {name}.{n} is {list(tensor.shape)} where finite {list(shape)} is expected; train again"
            )
        if stored == "int8" and name in ("a", "b") and tensor.dtype != np.int8:
            raise PredictorError(f"{path}: tensor {name}.{n} is {tensor.dtype}, but the card says int8; train again")
    a, b = (tensors[f"{name}.{n}"].astype(stored, copy=False) for name in ("a", "b"))
    scales = [tensors[f"{name}.{n}"].astype(np.float32) for name in SCALES] if stored == "int8" else [None, None]
    bias = tensors[f"bias.{n}"].astype(np.float32)
    return LayerPredictor(a, b, bias, float(entry["threshold"]), stored, *scales)
