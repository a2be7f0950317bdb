"""Pair counts on a CUDA card: products of 0/1 matrices, exact."""

from __future__ import annotations

import numpy as np
import torch

from workbench.analysis.coactivation import BINS, Summary

CHUNK = 2048
"""Tokens of one product. Each of its sums, in whatever order and precision the card adds, is a whole number of at most
2048 = 2^11, and float16 holds every whole number up to 2^11: no rounding can occur, not even where partial sums are
kept in float16. Products of several chunks are added as int32, which holds 2^31 tokens."""


class CudaPairs:
    """As `coactivation.NativePairs`, on the card. Holds the layer's 0/1 matrix there: 2 bytes * tokens * d_ff."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, d_ff: int, device: str = "cuda") -> None:
        self.d_ff, self.device = d_ff, torch.device(device)
        tokens = len(offsets) - 1
        place = np.repeat(np.arange(tokens), np.diff(offsets))
        rows = torch.from_numpy(place).to(self.device)
        columns = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        self.chunks: list[torch.Tensor] = []
        for first in range(0, tokens, CHUNK):
            begin, end = int(offsets[first]), int(offsets[min(first + CHUNK, tokens)])
            # float32 on the CPU, where the tests run this file without a card and float16 products are slow
            kind = torch.float16 if self.device.type == "cuda" else torch.float32
            active = torch.zeros(min(CHUNK, tokens - first), d_ff, dtype=kind, device=self.device)
            active[rows[begin:end] - first, columns[begin:end]] = 1
            self.chunks.append(active)

    def _rows(self, begin: int, end: int) -> torch.Tensor:
        counts = torch.zeros(end - begin, self.d_ff, dtype=torch.int32, device=self.device)
        for active in self.chunks:
            counts += (active[:, begin:end].T @ active).to(torch.int32)
        return counts

    def rows(self, begin: int, end: int, threads: int = 0) -> np.ndarray:
        """As PairCounter; `threads` is of no use here."""
        return self._rows(begin, end).cpu().numpy().astype(np.uint32)

    def summarise(self, begin: int, end: int, friends: int, ranks: np.ndarray, threads: int = 0) -> Summary:
        """As PairCounter; `threads` is of no use here."""
        counts, size = self._rows(begin, end), end - begin
        local = torch.arange(size, device=self.device)
        own = counts[local, begin + local].clone()
        totals = counts.sum(dim=1, dtype=torch.int64) - own
        counts[local, begin + local] = -1  # last in every order
        width = min(friends, self.d_ff - 1)
        ids = torch.full((size, friends), -1, dtype=torch.int32, device=self.device)
        kept = torch.zeros(size, friends, dtype=torch.int64, device=self.device)
        if width:
            # by count and then by id, in one number, since topk does not say which of two equal ones it takes
            key = counts.to(torch.int64) * self.d_ff + torch.arange(self.d_ff - 1, -1, -1, device=self.device)
            top = key.topk(width, dim=1).values
            kept[:, :width] = top // self.d_ff
            found = (self.d_ff - 1 - top % self.d_ff).to(torch.int32)
            ids[:, :width] = torch.where(kept[:, :width] > 0, found, -1)
        places = torch.from_numpy(ranks - 1).to(self.device)
        by_rank = counts.sort(dim=1, descending=True).values[:, places]
        powers = 2 ** torch.arange(BINS - 2, dtype=torch.int32, device=self.device)
        bins = torch.bucketize(counts, powers, right=True)
        pairs = torch.bincount(bins.reshape(-1), minlength=BINS)
        pairs[0] -= size  # the neurons themselves
        return Summary(
            ids.cpu().numpy(),
            kept.cpu().numpy().astype(np.uint32),
            by_rank.cpu().numpy().astype(np.uint32),
            totals.cpu().numpy().astype(np.uint64),
            pairs.cpu().numpy().astype(np.uint64),
        )
