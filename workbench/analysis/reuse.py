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
    return _new_and_kept(gaps(uses), gaps(list(reversed(uses))), window)[1]


def _new_and_kept(before: Uses, after: Uses, window: int) -> tuple[np.ndarray, np.ndarray]:
    """`after`: the gaps of the reversed text; backwards in time, a gap is the one to the next use."""
    arrive = np.array([np.count_nonzero(gap > window) for gap in before], dtype=np.int64)
    leave = np.zeros(len(before), dtype=np.int64)
    for token, gap in enumerate(after):
        gone = len(before) - 1 - token + window + 1
        if gone < len(before):
            leave[gone] = np.count_nonzero(gap > window)
    return arrive, np.cumsum(arrive - leave)


def aggregated_use(uses: Uses, longest: int) -> np.ndarray:
    """s_agg(k), k = 0..longest: mean distinct neurons in k consecutive tokens, over all places in the text.

    float64 [longest + 1]; s_agg(k+1) - s_agg(k) is what one more token adds (figure 4a). ValueError when the text is
    shorter than `longest` tokens.
    """
    tokens = len(uses)
    if not 0 <= longest <= tokens:
        raise ValueError(f"longest={longest} is outside 0..{tokens}, the number of tokens")
    # A neuron is missing from a stretch of k tokens only when the whole stretch lies in one of its pauses; a pause of p
    # tokens has p - k + 1 such places. So the lengths of all pauses, those at both ends too, decide every k.
    size = _size(uses)
    last = np.full(size, -1, dtype=np.int64)
    pauses = np.zeros(tokens + 1, dtype=np.int64)
    for token, ids in enumerate(uses):
        pauses += np.bincount(token - last[ids] - 1, minlength=tokens + 1)
        last[ids] = token
    used = last >= 0
    pauses += np.bincount(tokens - 1 - last[used], minlength=tokens + 1)
    pauses[0] = 0
    # missing[k] = sum over p >= k of pauses[p] * (p - k + 1): the sums from the end, twice over
    missing = np.cumsum(np.cumsum(pauses[::-1]))[::-1][: longest + 1]
    lengths = np.arange(longest + 1)
    places = tokens - lengths + 1
    result = (np.count_nonzero(used) * places - missing) / places
    result[0] = 0.0
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
    before, after = gaps(uses), gaps(list(reversed(uses)))
    for window in windows:
        _check(window)
        new, held = (counts[window:].mean() for counts in _new_and_kept(before, after, window))
        result.append(Reuse(window, float(sizes[window:].mean()), float(new), float(held), new / d_ff, held / d_ff))
    return result


def _size(uses: Uses) -> int:
    return max((int(ids.max()) + 1 for ids in uses if len(ids)), default=0)


def _check(window: int) -> None:
    if window < 0:
        raise ValueError(f"window={window} is negative")
