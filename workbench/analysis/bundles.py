"""What it costs to store each neuron together with its closest friend (appendix D of the paper).

A bundle is a neuron's record and a copy of its closest friend's: reading it delivers both. The reader here is better
than any real one could be: of all ways to get the wanted neurons it reads the fewest bundles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class FriendBundles:
    """Bundles of each neuron and its friend: int [d_ff], -1 for a neuron that has none, whose bundle is itself alone
    but as long."""

    def __init__(self, friend: np.ndarray) -> None:
        self.friend = friend.astype(np.int64)
        self._wanted = np.zeros(len(friend) + 1, bool)  # friend -1 is the last, which is never wanted
        self._pointed = np.zeros(len(friend) + 1, bool)

    def fewest(self, wanted: np.ndarray) -> np.ndarray:
        """The fewest bundles that deliver all of `wanted` (ids, each once). Sorted ids of the bundles' own neurons.

        Each neuron points at one friend. One that no wanted neuron points at can only come with its own bundle (or an
        unwanted neuron's, which brings less): that is read, and its friend is then delivered and need not be wanted.
        What is left when there is none of these are rings, of which every second bundle is read.
        """
        chosen: list[np.ndarray] = []
        rest = wanted.astype(np.int64)
        self._wanted[rest] = True
        while len(rest):
            friends = self.friend[rest]
            self._pointed[friends] = True
            leaves = rest[~self._pointed[rest]]
            self._pointed[friends] = False
            if not len(leaves):
                chosen.append(self._rings(rest))
                break
            chosen.append(leaves)
            self._wanted[leaves] = False
            self._wanted[self.friend[leaves]] = False
            rest = rest[self._wanted[rest]]
        self._wanted[wanted] = False
        return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)

    def _rings(self, rest: np.ndarray) -> np.ndarray:
        left, chosen = set(rest.tolist()), []
        for start in rest.tolist():
            at, take = start, True
            while at in left:
                left.discard(at)
                if take:
                    chosen.append(at)
                take, at = not take, int(self.friend[at])
        return np.array(chosen, np.int64)

    def delivered(self, bundles: np.ndarray) -> np.ndarray:
        """Ids in `bundles`, with repeats."""
        friends = self.friend[bundles]
        return np.concatenate([bundles, friends[friends >= 0]])


@dataclass(frozen=True)
class BundleCost:
    """Bundles of friends against records of single neurons, for the same tokens under the same window.

    bytes_ratio: bytes read over the bytes of single records. duplicates: share of the bytes read that held a neuron
    which was in DRAM already or was delivered twice. all_duplicates: the same when every wanted neuron's own bundle is
    read, as the paper did it.
    """

    window: int
    bytes_ratio: float
    duplicates: float
    all_duplicates: float


def bundle_cost(uses: Sequence[np.ndarray], friend: np.ndarray, window: int, sequence: int = 0) -> BundleCost:
    """Read `uses` (ids by token) with bundles and without, keeping what was active or delivered for `window` tokens.

    friend: int [d_ff], the closest friend or -1. sequence: tokens after which DRAM is emptied, 0 for never. A token's
    wanted neurons are its active ones that are not in DRAM. ValueError when nothing is ever wanted.
    """
    bundles, d_ff = FriendBundles(friend), len(friend)
    alone, held = (np.full(d_ff, -window - 2, np.int64) for _ in range(2))  # the token that each neuron was last in
    single = read = twice = own_read = own_twice = 0
    for token, ids in enumerate(uses):
        if sequence and token % sequence == 0:
            alone[:] = held[:] = token - window - 2
        single += np.count_nonzero(token - alone[ids] > window)
        alone[ids] = token
        wanted = ids[token - held[ids] > window]
        chosen = bundles.fewest(wanted)
        got = bundles.delivered(chosen)
        useful = len(np.unique(got[token - held[got] > window]))
        every = bundles.delivered(wanted)
        own_useful = len(np.unique(every[token - held[every] > window]))
        read, twice = read + 2 * len(chosen), twice + 2 * len(chosen) - useful
        own_read, own_twice = own_read + 2 * len(wanted), own_twice + 2 * len(wanted) - own_useful
        held[got] = token
        held[ids] = token
    if not single:
        raise ValueError("no token has an active neuron; give more text")
    return BundleCost(window, read / single, twice / read, own_twice / own_read)
