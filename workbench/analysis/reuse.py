"""How much consecutive tokens share: aggregated neuron use, new neurons a token, neurons kept by a window.

Paper section 3.2 and figure 4. A token's use of a layer is the sorted ids of its active (or predicted) neurons. A
window of k keeps the neurons of the k tokens before the present one, so that with the present one's own the slots
hold the neurons of k+1 tokens. The first tokens of a text have fewer tokens before them, as in an engine that starts
with empty slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Uses = Sequence[np.ndarray]
NEVER = np.iinfo(np.int64).max


def ids_of(activity: np.ndarray) -> list[np.ndarray]:
    """bool [tokens, d_ff] as a list of sorted int32 ids, one array a token."""
    tokens, neurons = np.nonzero(activity)
    counts = np.bincount(tokens, minlength=activity.shape[0])
    return np.split(neurons.astype(np.int32), np.cumsum(counts)[:-1]) if activity.shape[0] else []


def gaps(uses: Uses) -> list[np.ndarray]:
    """For each token's neurons, how many tokens ago (1: the one before) each was used last; NEVER for a first use."""
    last = np.full(_size(uses), -1, dtype=np.int64)
    result = []
    for token, ids in enumerate(uses):
        before = last[ids]
        result.append(np.where(before < 0, NEVER, token - before))
        last[ids] = token
    return result


def new_per_token(uses: Uses, window: int) -> np.ndarray:
    """Neurons of each token that none of the `window` tokens before it used: what has to be loaded. int64 [tokens]."""
    _check(window)
    return np.array([np.count_nonzero(gap > window) for gap in gaps(uses)], dtype=np.int64)


def kept(uses: Uses, window: int) -> np.ndarray:
    """Distinct neurons of each token and the `window` tokens before it: what the slots hold. int64 [tokens]."""
    _check(window)
    arrive = new_per_token(uses, window)
    leave = np.zeros(len(uses), dtype=np.int64)
    for token, gap in enumerate(gaps(list(reversed(uses)))):  # backwards in time, a gap is the one to the next use
        gone = len(uses) - 1 - token + window + 1
        if gone < len(uses):
            leave[gone] = np.count_nonzero(gap > window)
    return np.cumsum(arrive - leave)


def aggregated_use(uses: Uses, longest: int) -> np.ndarray:
    """s_agg(k), k = 0..longest: mean distinct neurons in k consecutive tokens, over all places in the text.

    float64 [longest + 1]; s_agg(k+1) - s_agg(k) is what one more token adds (figure 4a). ValueError when the text is
    shorter than `longest` tokens.
    """
    if not 0 <= longest <= len(uses):
        raise ValueError(f"longest={longest} is outside 0..{len(uses)}, the number of tokens")
    distances = gaps(uses)
    distinct = np.zeros(len(uses), dtype=np.int64)  # by the first token of the stretch
    result = np.zeros(longest + 1)
    for length in range(1, longest + 1):
        # the stretch's last token adds the neurons that were not used in the length - 1 tokens before it
        added = np.array([np.count_nonzero(gap >= length) for gap in distances], dtype=np.int64)
        places = len(uses) - length + 1
        distinct[:places] += added[length - 1 :]
        result[length] = distinct[:places].mean()
    return result


@dataclass(frozen=True)
class Reuse:
    """One layer under one window, means over the tokens from `window` on, when the window is full."""

    window: int
    used: float
    new: float
    kept: float
    new_share: float
    kept_share: float


def reuse(uses: Uses, d_ff: int, windows: Sequence[int] = (0, 1, 2, 4, 8, 16)) -> list[Reuse]:
    """The layer's reuse for each window: neurons a token used, new and kept, the last two also as shares of d_ff.

    ValueError when the text has no token beyond the longest window.
    """
    if not uses or max(windows) >= len(uses):
        raise ValueError(f"{len(uses)} tokens are too few for a window of {max(windows)}")
    sizes = np.array([len(ids) for ids in uses], dtype=np.float64)
    result = []
    for window in windows:
        new, held = (f(uses, window)[window:].mean() for f in (new_per_token, kept))
        result.append(Reuse(window, float(sizes[window:].mean()), float(new), float(held), new / d_ff, held / d_ff))
    return result


def _size(uses: Uses) -> int:
    return max((int(ids.max()) + 1 for ids in uses if len(ids)), default=0)


def _check(window: int) -> None:
    if window < 0:
        raise ValueError(f"window={window} is negative")
