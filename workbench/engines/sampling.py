"""Choosing the next token: greedy, or nucleus sampling (Holtzman et al., 2019)."""

from __future__ import annotations

import torch


def next_token(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """A token id from logits [vocab]. `temperature` 0 is greedy; `top_p` keeps the likeliest tokens
    whose probabilities first sum to at least that much."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, index = (logits.float() / temperature).softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    probabilities[before >= top_p] = 0  # the first token is always kept: nothing comes before it
    return int(index[torch.multinomial(probabilities, 1, generator=generator)])
