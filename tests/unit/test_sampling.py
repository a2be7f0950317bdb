"""Choosing a token: what greedy and nucleus sampling keep."""

from __future__ import annotations

import pytest
import torch

from workbench.engines.sampling import next_token

LOGITS = torch.tensor([0.1, 3.0, 2.0, -1.0, 2.9])


def draws(temperature: float, top_p: float, count: int = 400) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {next_token(LOGITS, temperature, top_p, generator) for _ in range(count)}


def test_greedy_is_the_largest() -> None:
    assert draws(0.0, 1.0, 3) == {1}


@pytest.mark.parametrize("temperature", [1e-320, 1e-9, 1.0, 100.0])
def test_a_nucleus_of_nothing_is_the_likeliest(temperature: float) -> None:
    assert draws(temperature, 0.0, 20) == {1}


def test_the_nucleus_ends_where_the_share_is_reached() -> None:
    share = LOGITS.softmax(-1)
    assert draws(1.0, float(share[1] + share[4]) - 1e-3) == {1, 4}
    assert draws(1.0, float(share[1] + share[4]) + 1e-3) == {1, 4, 2}


def test_draws_follow_the_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    found = torch.bincount(torch.tensor([next_token(LOGITS, 1.0, 1.0, generator) for _ in range(4000)]), minlength=5)
    assert (found / 4000 - LOGITS.softmax(-1)).abs().max() < 0.03
