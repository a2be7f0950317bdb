"""Calibration of a generated model: two streams of tokens run through each layer while its weights are made."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from workbench.analysis.reuse import ids_of, reuse
from workbench.experiments.synth_model import BLOCK, FROM, LAST, TO, WINDOW, Generator, LayerFacts
from workbench.predictor.metrics import count


class Probe:
    """Two streams of tokens on their way through the layers: [0] is calibrated with, [1] measured on.

    `hidden` float32 [2, TO, d_model]: the input of layer `at`.
    """

    def __init__(self, generator: Generator, hidden: torch.Tensor | None = None) -> None:
        self._made = generator
        spec = generator.spec
        config = {**spec.config, "num_hidden_layers": 1}
        one = replace(spec, num_layers=1, config=config, thresholds=spec.thresholds[:1])
        self._model = generator.family.skeleton(one)
        lists = [module for module in self._model.modules() if isinstance(module, nn.ModuleList) and len(module) == 1]
        self._layer: nn.Module = lists[0][0]
        self._settings, first = self._begin()
        self.hidden = first if hidden is None else hidden

    def _begin(self) -> tuple[dict[str, Any], torch.Tensor]:
        """What transformers hands to a layer beside the hidden state, and the first hidden state."""
        made, seen = self._made, {}
        names = [name for name in made.shapes if made.family.group_of(name) == "embed"]
        embedding = next(n for n in names if "embed" in n and "positions" not in n)
        outside = {name: made.outside(name).float() for name in names if name != embedding}
        self._model.load_state_dict(outside, assign=True, strict=False)
        order = torch.randperm(2 * TO, generator=torch.Generator().manual_seed(made.request.seed))
        tokens = made.outside(embedding, 0, 2 * TO)[order].view(2, TO, -1).float()

        class Seen(Exception):
            pass

        def stop(_: Any, inputs: tuple[Any, ...], settings: dict[str, Any]) -> None:
            seen["settings"] = {name: value for name, value in settings.items() if name != "hidden_states"}
            seen["hidden"] = inputs[0] if inputs else settings["hidden_states"]
            raise Seen

        hook = self._layer.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with torch.no_grad():
                self._model.base_model(inputs_embeds=tokens, use_cache=False)
        except Seen:
            pass
        finally:
            hook.remove()
        return seen["settings"], seen["hidden"]

    def run(self, layer: int) -> tuple[LayerFacts, dict[str, torch.Tensor]]:
        """Send the streams through a layer that is made meanwhile: its facts, and its tensors as `Generator.layer`."""
        made, stream = self._made, _rms(self.hidden)
        tensors = made.resident(layer, stream)
        ffn = _Calibrated(made, layer, stream, tensors)
        made.family.install(self._model, 0, ffn)
        inner = {name.split(f".{layer}.", 1)[1]: tensor.float() for name, tensor in tensors.items()}
        self._layer.load_state_dict(inner, assign=True, strict=False)
        with torch.no_grad():
            out = self._layer(self.hidden, **self._settings)
        self.hidden = (out[0] if isinstance(out, tuple) else out).contiguous()
        # The model would hold this layer's weights while they are written and the next one's are made.
        ffn.tensors = {}
        empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in inner.items()}
        self._layer.load_state_dict(empty, assign=True, strict=False)
        assert ffn.facts is not None
        return ffn.facts, tensors


class _Calibrated(nn.Module):
    """Stands where the FFN runs; makes its weights when it sees what they are given."""

    def __init__(self, generator: Generator, layer: int, stream: float, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.made, self.layer, self.stream, self.tensors = generator, layer, stream, tensors
        self.facts: LayerFacts | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made, layer, spec = self.made, self.layer, self.made.spec
        x = inputs.reshape(2, TO, -1)
        names, density, bias = made.ffn(layer), made.request.density(layer), made.bias(layer)
        c, threshold = made.common(), spec.threshold(layer)
        along = float((x[0] @ c).mean())
        spread = float((x[0] - (x[0] @ c)[:, None] * c).square().sum(-1).mean())
        a, b = made.factors(layer, along, spread, 0.0)
        scores = (x[0, FROM:] @ a.T) @ b.T + bias
        scores += made.noise * made.normal(f"noise.{layer}", *scores.shape)
        offset = threshold - float(_quantile(scores, 1 - made.request.active * density))
        factors = a, b = made.factors(layer, along, spread, offset)
        low, high = made.predicted(a, b)
        scores = (x[:, FROM:] @ low.T) @ high.T + bias
        edge = float(_quantile(scores[0], 1 - made.request.predicted * density))
        base = _rms(x) if spec.config.get("do_layer_norm_before", True) is False else self.stream
        facts = LayerFacts(self.stream, along, spread, offset, 0.0, edge)
        matrix = self.tensors[names.gate or names.up] = made.activated(layer, facts, factors)
        z = _product(x, matrix) + bias
        values = torch.where(z > threshold, z, 0.0)
        if spec.activation == "relu2":
            values = values.square()
        pre, acted = z[1, FROM:] - threshold, values[1, FROM:]
        if names.gate:
            self.tensors[names.up] = made.plain_up(layer)
            values = values * (_product(x, self.tensors[names.up]) + self._bias(names.up_bias))
        profile = made.profile(layer, facts, b)
        seen = values[0] if profile is None else values[0] - (values[0] @ profile)[:, None] * profile
        wanted = LAST if layer == spec.num_layers - 1 else made.added
        down = wanted * base / math.sqrt(float(seen.square().sum(-1).mean()))
        by_neuron = made.down(layer, down, profile)
        self.tensors[names.down] = by_neuron.T
        quality = count(scores[1], [edge], pre, acted)[0].as_dict()
        used = reuse(ids_of((scores[1] > edge).numpy()), spec.d_ff, (WINDOW,))[0]
        self.facts = replace(
            facts, down=down, quality=quality, used={"new_share": used.new_share, "kept_share": used.kept_share}
        )
        return (_product(values, by_neuron.T) + self._bias(names.down_bias)).view(inputs.shape)

    def _bias(self, name: str | None) -> torch.Tensor | float:
        return self.tensors[name].float() if name else 0.0


def _product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x [..., in] times a stored matrix [out, in], in float32; widened a block at a time."""
    if matrix.dtype == torch.float32:
        return x @ matrix.T
    out, axis = matrix.shape[0], 0 if matrix.is_contiguous() else 1
    if axis == 0:
        rows = max(1, 8 * BLOCK // matrix.shape[1])
        return torch.cat([x @ matrix[i : i + rows].float().T for i in range(0, out, rows)], -1)
    rows = max(1, 8 * BLOCK // out)
    total = torch.zeros(*x.shape[:-1], out)
    for i in range(0, matrix.shape[1], rows):
        total += x[..., i : i + rows] @ matrix.T[i : i + rows].float()
    return total


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def _quantile(values: torch.Tensor, share: float) -> torch.Tensor:
    """The value that `share` of `values` lie below."""
    flat = values.flatten()
    return flat.kthvalue(max(1, round(share * flat.numel()))).values
