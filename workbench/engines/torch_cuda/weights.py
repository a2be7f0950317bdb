"""The part of the model that is not FFN, on the card: for good (hybrid), or read again for each token."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from workbench.engines.resident import ResidentWeights
from workbench.engines.stats import StepClock
from workbench.engines.torch_cuda.card import Card
from workbench.flash.layout import ALIGNMENT, Group
from workbench.flash.reader import FlashReader, ReadStats
from workbench.flash.store import Store
from workbench.kernels.metal.gemv import MOST_TOKENS, gemv


class CardWeights(ResidentWeights):
    """Groups of the store in the card's memory, by way of the engine's staging."""

    def __init__(self, store: Store, model: nn.Module, clock: StepClock, card: Card):
        super().__init__(store, model, clock)
        self._card = card

    def _new_buffer(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._card.device)

    def load(self, reader: FlashReader, name: str) -> None:
        stats = self._fill(reader, self.store.group(name))
        self.clock.read_bytes += stats.read_bytes
        self.clock.reads += stats.reads

    def _fill(self, reader: FlashReader, group: Group) -> ReadStats:
        handle, target, card = self._handle(reader), self.buffers[group.name], self._card
        block = len(card.halves[0].bytes)
        block -= block % ALIGNMENT if block > ALIGNMENT else 0
        total = ReadStats()
        for at in range(0, group.nbytes, block):
            nbytes = min(block, group.nbytes - at)
            half = card.half()
            with self.clock.time("io"):
                total += reader.read(handle, [group.offset + at], [nbytes], half.bytes, [0], 0)
            # in the stream of the arithmetic: what a streamed layer overwrites has been computed from by then
            with self.clock.time("mem"):  # the copy itself is hidden by the next read
                target[at : at + nbytes].copy_(half.host[:nbytes], non_blocking=True)
                half.free = card.mark()
        return total


class CardLinear(nn.Module):
    """A linear layer on the card, weight [out, in] in the store's dtype; takes and returns float32.

    A few tokens through the kernel that reads the weights once; more through torch, the weights widened for the time of
    the product.
    """

    def __init__(self, module: nn.Linear, dtype: str, card: Card):
        super().__init__()
        self._dtype, self._card = dtype, card
        self.register_parameter("weight", cast(nn.Parameter, module.weight))
        self.register_parameter("bias", module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > MOST_TOKENS:
            return F.linear(x, weight.float(), None if bias is None else bias.float())
        given = rows[0] if len(rows) == 1 else rows
        out = gemv(self._card.machine, weight, given.contiguous(), dtype=self._dtype, bias=bias, bias_dtype=self._dtype)
        return out.view(*x.shape[:-1], -1)
