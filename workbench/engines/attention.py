"""Attention of a few tokens at once that gives each token, to the bit, what it gets when it comes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class RowByRow(TorchFunctionMode):
    """Within it, torch's attention takes one query at a time, over the keys that are not behind it.

    The products of one query and of several are added up in different orders, so that one call for all would round
    otherwise than one call a token. The keys of a step are few beside the weights: the calls cost little.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention or args[0].shape[-2] == 1:
            return func(*args, **kwargs)
        return _rows(*args, **kwargs)


def _rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,
) -> torch.Tensor:
    """As F.scaled_dot_product_attention. query: [..., t, width], the last t of the tokens that key and value are of."""
    tokens = query.shape[-2]
    before = key.shape[-2] - tokens
    out = []
    for i in range(tokens):
        seen = before + i + 1
        mask = None if attn_mask is None else attn_mask[..., i : i + 1, :seen]
        if mask is not None and mask.dtype == torch.bool and bool(mask.all()):
            mask = None
        one = F.scaled_dot_product_attention(
            query[..., i : i + 1, :], key[..., :seen, :], value[..., :seen, :], mask, dropout_p, False, **rest
        )
        out.append(one)
    return torch.cat(out, dim=-2)
