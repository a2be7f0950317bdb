"""Choosing the next token: greedy, or nucleus sampling (Holtzman et al., 2019)."""

from __future__ import annotations

import torch


def greedy(logits: torch.Tensor) -> int:
    """The likeliest token of logits [vocab]."""
    return int(logits.argmax())


def next_token(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """A token id from logits [vocab]. `temperature` 0 is greedy; `top_p` keeps the likeliest tokens
    whose probabilities first sum to at least that much."""
    if temperature == 0:
        return greedy(logits)
    # From the largest down, so that no temperature overflows: the largest is 0, the others fall towards -inf.
    scaled, index = ((logits.float() - logits.max()) / max(temperature, 1e-6)).sort(descending=True)
    probabilities = scaled.softmax(-1)
    beyond = probabilities.cumsum(-1) - probabilities >= top_p
    beyond[0] = False  # the likeliest token is always kept
    probabilities[beyond] = 0
    return int(index[torch.multinomial(probabilities, 1, generator=generator)])
