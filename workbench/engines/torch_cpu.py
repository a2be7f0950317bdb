"""The engine `torch-cpu`: transformers' own decoder around FFNs that run from flash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from workbench.engines.ffn import FlashFFN, Shared
from workbench.engines.kv import cache_argument, new_cache
from workbench.engines.layers import StoredLinear, use_stored_weights
from workbench.engines.pipeline import FlashEngine
from workbench.engines.resident import ResidentWeights


class TorchCpuEngine(FlashEngine):
    """Runs a store on the CPU, in transformers' own modules."""

    backend = "torch-cpu"

    def _begin(self) -> None:
        self.model = self.family.skeleton(self.spec)
        self.weights = ResidentWeights(self.store, self.model, self.clock)
        use_stored_weights(self.model, self.store.dtype, 0)
        self._cache_argument = cache_argument(self.model)

    def _use_threads(self, threads: int) -> None:
        for module in self.model.modules():
            if isinstance(module, StoredLinear):
                module.threads = threads

    def _new_ffn(self, shared: Shared, layer: int) -> FlashFFN:
        ffn = FlashFFN(shared, layer, self._biases(layer))
        self.family.install(self.model, layer, ffn)
        self._layer(layer).register_forward_pre_hook(self._before_layer(layer))
        return ffn

    def _new_cache(self, capacity: int) -> Any:
        return new_cache(self.spec, capacity)

    def _bias(self, name: str) -> np.ndarray[Any, Any] | None:
        stored = self.weights.extra.get(name)
        return None if stored is None else stored.float().clone().numpy()

    def _layer(self, index: int) -> torch.nn.Module:
        name = next(n for n in self.store.group(f"layer.{index}").tensors)
        return self.model.get_submodule(name[: name.index(f".{index}.") + len(f".{index}")])

    def _before_layer(self, index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            assert self.reader is not None
            if not self.shared.ablation.hybrid:
                self.weights.load(self.reader, f"layer.{index}")

        return hook

    def _logits(self, ids: list[int], keep: int) -> torch.Tensor:
        assert self.reader is not None
        if not self.shared.ablation.hybrid:
            self.weights.load(self.reader, "embed")
            self.weights.load(self.reader, "head")
        given = {"use_cache": True, "logits_to_keep": keep, self._cache_argument: self.cache}
        with torch.no_grad(), _torch_threads(1 if len(ids) == 1 else self.shared.threads):
            return self.model(input_ids=torch.tensor([ids]), **given).logits[0].float()


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """torch's own threads within the block. One token's matrices run in our kernels, whose threads torch's would
    disturb while they wait for work."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, count))
    try:
        yield
    finally:
        torch.set_num_threads(before)
