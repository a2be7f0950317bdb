"""The engine `torch-cpu`: all arithmetic on the CPU, the FFNs' in our own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from workbench.engines.attention import RowByRow
from workbench.engines.decoder import TransformersEngine
from workbench.engines.ffn import FlashFFN, Shared
from workbench.engines.layers import FEW_TOKENS, StoredLinear
from workbench.engines.prompt import WAYS
from workbench.engines.resident import ResidentWeights


class TorchCpuEngine(TransformersEngine):
    """Runs a store on the CPU."""

    backend = "torch-cpu"
    prompt_ways = WAYS

    def _new_weights(self) -> ResidentWeights:
        return ResidentWeights(self.store, self.model, self.clock)

    def _new_linear(self, module: torch.nn.Linear) -> torch.nn.Module:
        return StoredLinear.like(module, self.store.dtype, 0)

    def _make_ffn(self, shared: Shared, layer: int) -> FlashFFN:
        return FlashFFN(shared, layer, self._biases(layer))

    def _use_threads(self, threads: int) -> None:
        for module in self.model.modules():
            if isinstance(module, StoredLinear):
                module.threads = threads

    def _logits(self, ids: list[int], keep: int) -> torch.Tensor:
        few = len(ids) <= FEW_TOKENS
        rows = RowByRow() if few and len(ids) > 1 else nullcontext()
        with rows, _torch_threads(1 if few else self.shared.threads):
            return self._run_model(torch.tensor([ids]), keep)


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """torch's own threads within the block. A few tokens' matrices run in our kernels, whose threads torch's would
    disturb while they wait for work."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, count))
    try:
        yield
    finally:
        torch.set_num_threads(before)
