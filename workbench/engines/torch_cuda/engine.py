"""The engine `torch-cuda`: flash on the host, all else on an NVIDIA card."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from workbench.ablation import Ablation
from workbench.engines.budget import DramPlan, check_gpu_memory
from workbench.engines.decoder import TransformersEngine
from workbench.engines.ffn import FlashFFN, Shared
from workbench.engines.resident import ResidentWeights
from workbench.engines.setting import Setting
from workbench.engines.torch_cuda.card import Card, Pinned
from workbench.engines.torch_cuda.ffn import CardFFN, CardPredictor
from workbench.engines.torch_cuda.weights import CardLinear, CardWeights
from workbench.flash.store import Store
from workbench.kernels.metal.kernel import Machine
from workbench.kernels.metal.torch_machine import TorchMachine
from workbench.predictor.low_rank import LayerPredictor, Predictors
from workbench.spec import RunSpec


class TorchCudaEngine(TransformersEngine):
    """Runs a store on a card: resident weights, predictors, KV cache and slots in its memory, the Metal bodies as CUDA.

    Flash is read into pinned memory of the host. mem is the host's work on slots and lists, and the card's on copies
    and scatters; the plan's scratch is there twice, on the host and on the card.

    kernels: what runs the Metal bodies. With others than the card's, all tensors are on the CPU (emulation).
    """

    backend = "torch-cuda"

    def __init__(
        self,
        store: Store,
        ablation: Ablation,
        predictors: Predictors | None,
        run: RunSpec,
        kernels: Machine | None = None,
    ):
        self.card = Card(kernels or TorchMachine(), torch.device("cuda" if kernels is None else "cpu"))
        super().__init__(store, ablation, predictors, run)

    def check(self, setting: Setting) -> DramPlan:
        plan = super().check(setting)
        if self.card.on_gpu:
            check_gpu_memory(plan.total, torch.cuda.mem_get_info()[1], str(self.store.path))
        return plan

    def close(self) -> None:
        super().close()
        self.card.close()

    # what the pipeline asks for

    def _begin(self) -> None:
        super()._begin()
        rotary = getattr(self.model.base_model, "rotary_emb", None)
        if rotary is not None:  # the one part with buffers of its own
            rotary.to(self.card.device)

    def _new_weights(self) -> ResidentWeights:
        return CardWeights(self.store, self.model, self.clock, self.card)

    def _new_linear(self, module: torch.nn.Linear) -> torch.nn.Module:
        return CardLinear(module, self.store.dtype, self.card)

    def _make_ffn(self, shared: Shared, layer: int) -> FlashFFN:
        return CardFFN(shared, layer, self._biases(layer), self.card)

    def _buffer(self, nbytes: int) -> np.ndarray[Any, Any]:
        return self.card.staging(nbytes, self.plan.slot_bytes)

    def _ahead_buffer(self, nbytes: int) -> np.ndarray[Any, Any]:
        return Pinned(nbytes, self.card.on_gpu).bytes

    def _pack(self, layer: LayerPredictor) -> Any:
        return CardPredictor(layer, self.card)

    def _logits(self, ids: list[int], keep: int) -> torch.Tensor:
        card = self.card
        card.forget()
        logits = self._run_model(torch.tensor([ids], device=card.device), keep)
        fired = torch.stack(card.active).sum() if card.active else torch.zeros(1, dtype=torch.int64)
        with self.clock.wait():
            found = logits.cpu()
            self.clock.active += int(fired)
        card.settle(self.clock)
        return found
