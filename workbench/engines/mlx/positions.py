"""Where a token stands, for attention: rotary positions, alibi (Press et al. 2022), and the causal mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    import mlx.core as mx

_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the length of the text."""


@dataclass(frozen=True)
class Step:
    """What all layers share in one pass over `tokens` tokens that follow `offset` others.

    `offset` is an int32 scalar on the device, so that a compiled function takes it as data. `wavelengths`: see
    `Rotary.at`; None without rotary positions. `mask`: what mx.fast.scaled_dot_product_attention takes.
    """

    offset: mx.array
    wavelengths: mx.array | None
    mask: mx.array | str | None


class Rotary:
    """Rotary positions (Su et al. 2021), with the frequencies that `module`, transformers' rotary embedding, computes.

    `dims`, the first of a head's `width` values, are rotated.
    """

    def __init__(self, module: Any, width: int) -> None:
        self._module, self._width = module, width
        self._by_length = module.rope_type in _BY_LENGTH
        self._read()

    def at(self, length: int) -> mx.array:
        """Wavelengths [dims // 2] for a text of `length` tokens, in tokens per radian; infinite where none rotates."""
        if self._by_length:
            with torch.no_grad():
                before = self._module.inv_freq.clone()
                self._module(torch.zeros(()), torch.tensor([[length - 1]]))
            if not torch.equal(before, self._module.inv_freq):
                self._read()
        return self._wavelengths

    def rotate(self, x: mx.array, offset: mx.array, wavelengths: mx.array) -> mx.array:
        """x float32 [1, heads, tokens, width] at `offset` and on: the first half of `dims` is turned with the second.

        Where the kind of positions has a factor for attention (yarn, longrope), what is rotated is multiplied by it.
        """
        import mlx.core as mx

        out = mx.fast.rope(
            x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=wavelengths
        )  # fmt: skip
        return out if self._factors is None else out * self._factors

    def _read(self) -> None:
        import mlx.core as mx

        inverse = self._module.inv_freq.numpy()
        self.dims, factor = 2 * len(inverse), float(self._module.attention_scaling)
        factors = [factor] * self.dims + [1.0] * (self._width - self.dims)
        self._factors = None if factor == 1.0 else mx.array(factors, mx.float32)
        with np.errstate(divide="ignore"):
            self._wavelengths = mx.array(np.float32(1) / inverse)


class Alibi:
    """Biases of attention that grow with the key's position, as transformers' Falcon rounds them: to bfloat16."""

    def __init__(self, heads: int, width: int) -> None:
        import mlx.core as mx
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor

        slopes = build_alibi_tensor(torch.ones((1, 2), dtype=torch.long), heads, torch.float32)[:, 0, 1]
        self._slopes = mx.array(slopes.numpy()).astype(mx.bfloat16)
        self._root = width**0.5

    def mask(self, offset: int, tokens: int) -> mx.array:
        """float32 [1, heads, tokens, offset + tokens]: the bias, or the least float32 where a key lies ahead."""
        import mlx.core as mx

        places = mx.arange(offset + tokens)
        bias = (self._slopes[:, None] * places.astype(mx.bfloat16)).astype(mx.float32) / self._root
        if tokens == 1:
            return bias[None, :, None]
        ahead = places[None] > places[offset:, None]
        return mx.where(ahead, mx.finfo(mx.float32).min, bias[:, None])[None]
