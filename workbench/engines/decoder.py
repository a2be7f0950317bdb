"""Engines in torch: transformers' own decoder around FFNs that run from flash."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from workbench.engines.ffn import FlashFFN, Shared
from workbench.engines.kv import cache_argument, new_cache
from workbench.engines.layers import use_stored_weights
from workbench.engines.pipeline import FlashEngine
from workbench.engines.resident import ResidentWeights


class TransformersEngine(FlashEngine):
    """Runs a store in transformers' own modules."""

    @abstractmethod
    def _new_weights(self) -> ResidentWeights:
        """What brings groups of the store to the modules of `model`."""

    @abstractmethod
    def _new_linear(self, module: torch.nn.Linear) -> torch.nn.Module:
        """What computes in place of a linear layer, with its parameters."""

    @abstractmethod
    def _make_ffn(self, shared: Shared, layer: int) -> FlashFFN:
        """The FFN of a layer."""

    def _begin(self) -> None:
        self.model = self.family.skeleton(self.spec)
        self.weights = self._new_weights()
        use_stored_weights(self.model, self._new_linear)
        self._cache_argument = cache_argument(self.model)

    def _new_ffn(self, shared: Shared, layer: int) -> FlashFFN:
        ffn = self._make_ffn(shared, layer)
        self.family.install(self.model, layer, ffn)
        self._layer(layer).register_forward_pre_hook(self._before_layer(layer))
        _watch_residual(ffn, self.family.ffn_norm(self.model, layer))
        return ffn

    def _new_cache(self, capacity: int) -> Any:
        return new_cache(self.spec, capacity, self.run.kv_dtype)

    def _bias(self, name: str) -> np.ndarray[Any, Any] | None:
        stored = self.weights.extra.get(name)
        return None if stored is None else stored.float().cpu().clone().numpy()

    def _layer(self, index: int) -> torch.nn.Module:
        name = next(n for n in self.store.group(f"layer.{index}").tensors)
        return self.model.get_submodule(name[: name.index(f".{index}.") + len(f".{index}")])

    def _before_layer(self, index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            assert self.reader is not None
            if not self.shared.ablation.hybrid:
                self.weights.load(self.reader, f"layer.{index}")

        return hook

    def _run_model(self, ids: torch.Tensor, keep: int, **more: torch.Tensor) -> torch.Tensor:
        """Logits float32 [keep, vocab] for ids int64 [1, T]; `more`: arguments of the model's own forward pass."""
        assert self.reader is not None
        if not self.shared.ablation.hybrid:
            self.weights.load(self.reader, "embed")
            self.weights.load(self.reader, "head")
        given = {"use_cache": True, "logits_to_keep": keep, self._cache_argument: self.cache}
        with torch.no_grad():
            return self.model(input_ids=ids, **given, **more).logits[0].float()


def _watch_residual(ffn: FlashFFN, norm: torch.nn.Module | None) -> None:
    """Let an FFN know the residual stream that its input is made of, and how."""

    def hook(_: object, given: tuple[torch.Tensor, ...]) -> None:
        ffn.residual = given[0]

    (ffn if norm is None else norm).register_forward_pre_hook(hook)
    if norm is not None:
        ffn.norm = norm.forward  # without the hook
