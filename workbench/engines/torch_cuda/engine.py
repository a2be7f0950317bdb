"""The engine `torch-cuda`: flash on the host, all else on an NVIDIA card."""

from __future__ import annotations

import functools
import warnings
from typing import Any, cast

import numpy as np
import torch

from workbench.ablation import Ablation
from workbench.engines.budget import DramPlan, check_gpu_memory, context_tokens
from workbench.engines.decoder import TransformersEngine
from workbench.engines.ffn import FlashFFN, Shared
from workbench.engines.resident import ResidentWeights
from workbench.engines.setting import Setting
from workbench.engines.torch_cuda.card import Card, Pinned
from workbench.engines.torch_cuda.ffn import CardFFN, CardPredictor
from workbench.engines.torch_cuda.graphs import TokenGraphs, recordable
from workbench.engines.torch_cuda.weights import CardLinear, CardWeights
from workbench.flash.store import Store
from workbench.kernels.metal.kernel import Machine
from workbench.kernels.metal.torch_machine import TorchMachine
from workbench.predictor.low_rank import LayerPredictor, Predictors
from workbench.spec import RunSpec


class TorchCudaEngine(TransformersEngine):
    """Runs a store on a card: resident weights, predictors, KV cache and slots in its memory, the Metal bodies as CUDA.

    Flash is read into pinned memory of the host, from where the card scatters it to slots. mem is the host's work on
    slots and lists, and the card's on moves and scatters that no read hides. The plan's scratch is there twice, on the
    host and on the card. One token is launched as CUDA graphs where its operations are always the same (`graphs`).

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
        self._predictor_s, self._just_recorded = 0.0, False
        super().__init__(store, ablation, predictors, run)

    def check(self, setting: Setting) -> DramPlan:
        plan = super().check(setting)
        if self.card.on_gpu:
            check_gpu_memory(plan.total, torch.cuda.mem_get_info()[1], str(self.store.path))
        return plan

    def close(self) -> None:
        self._drop_graphs()
        super().close()
        self.card.close()

    # what the pipeline asks for

    def _begin(self) -> None:
        super()._begin()
        self._recordable = recordable(self.model.config)
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

    def reset(self) -> None:
        self._drop_graphs()  # they are of the KV cache that goes
        super().reset()

    def _set_up(self, new: Setting) -> None:
        self._drop_graphs()
        super()._set_up(new)

    def _logits(self, ids: list[int], keep: int) -> torch.Tensor:
        card = self.card
        card.forget()
        if len(ids) == 1 and self._as_graphs():
            with card.apart():
                return self._found(self._by_graphs(ids[0]))
        return self._found(self._run_model(torch.tensor([ids], device=card.device), keep))

    def _drop_graphs(self) -> None:
        """Record anew from the next token on. All of them goes now: while others are recorded, pinned memory cannot."""
        for ffn in cast(list[CardFFN], self.ffns):
            ffn.recorded = None
        if self.card.graphs is not None:
            self.card.graphs.close()
            self.card.graphs = None

    def _as_graphs(self) -> bool:
        """Whether a token is the same operations each time, so that it can be recorded."""
        ablation = self.shared.ablation
        same = ablation.predictor == "low_rank" and ablation.hybrid and self.shared.prompt != "dense"
        return self.card.on_gpu and same and self._recordable

    def _by_graphs(self, token: int) -> torch.Tensor:
        card, layers = self.card, self._cache_layers()
        if card.graphs is None:
            capacity = context_tokens(self.store, self.run)
            card.graphs = TokenGraphs(card, len(self.ffns), self.spec.d_ff, capacity)
        graphs: TokenGraphs = card.graphs
        graphs.given(token, self.position, [ffn.margin for ffn in self.ffns])
        if graphs.whole:
            self.clock.seconds["predictor"] += self._predictor_s
            logits = graphs.launch(cast(list[CardFFN], self.ffns))
        else:
            try:
                with graphs.fixed(layers):
                    run = functools.partial(self._run_fixed, graphs)
                    logits = graphs.record(run) if graphs.tokens else run()
            except RuntimeError as error:
                if not graphs.tokens:  # nothing was being recorded
                    raise
                self._recordable = False
                self._take_back()
                self._drop_graphs()
                card.forget()
                self.clock.begin()  # nothing of the attempt is counted
                why = (str(error).splitlines() or [type(error).__name__])[0]
                warnings.warn(
                    f"torch-cuda: {self.spec.model_type} cannot be recorded as CUDA graphs ({why}), so its operations "
                    "are asked for one by one, which is slower",
                    stacklevel=2,
                )
                return self._run_model(torch.tensor([[token]], device=card.device), 1)
            self._just_recorded = graphs.whole
        graphs.tokens += 1
        for layer in layers:
            layer.grow()
        return logits

    def _run_fixed(self, graphs: TokenGraphs) -> torch.Tensor:
        return self._run_model(graphs.ids, 1, attention_mask=graphs.mask(), position_ids=graphs.position[None])

    def _found(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits on the host, once the card has done all."""
        card = self.card
        fired = torch.stack(card.active).sum() if card.active else torch.zeros(1, dtype=torch.int64)
        with self.clock.wait():
            found = logits.cpu()
            self.clock.active += int(fired)
        before = self.clock.seconds["predictor"]
        card.settle(self.clock)
        if self._just_recorded:  # what predictors take by themselves
            self._predictor_s, self._just_recorded = self.clock.seconds["predictor"] - before, False
        return found
