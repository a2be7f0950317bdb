"""Exact co-activation at a large model's geometry, on synthetic active neurons: seconds a layer and peak memory.

What bounds it on the CPU: a token with a active neurons adds a * a counts, so at 16,384 neurons, 3% active and 10,000
tokens a layer has 2.4e9 of them; a row of counts stays in the first-level cache, so that one costs about a nanosecond.
Neurons that fire in many tokens are counted as bit rows instead. The spill on disk is written and read as in
`workbench analyze coactivation`; only the dense model's pass is left out. Frequencies follow rank ** -0.7.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path

import numpy as np

from workbench.analysis.coactivation import PairCounter, summarise
from workbench.capture.spill import ActiveSpill, id_dtype
from workbench.experiments.coactivation import COST_TOKENS, layer_row, pair_counter

SEQUENCE = 256


def stretch(rng: np.random.Generator, share: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(active neurons of each token, their ids), each neuron active with its own probability."""
    token, ids = np.nonzero(rng.random((tokens, len(share)), dtype=np.float32) < share)
    return np.bincount(token, minlength=tokens), ids.astype(id_dtype(len(share)))


def peak() -> int:
    """Peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-ff", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=10_240)
    parser.add_argument("--active", type=float, default=0.03, help="mean share of neurons a token")
    parser.add_argument("--count", type=int, default=0, help="count only the first so many layers (all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--spill", type=Path, default=None, help="directory of the temporary file (TMPDIR)")
    given = parser.parse_args()
    if given.spill:
        os.environ["TMPDIR"] = str(given.spill)
    rng = np.random.default_rng(0)
    share = np.arange(1, given.d_ff + 1) ** -0.7
    share = rng.permutation(np.minimum(0.95, share * given.active * given.d_ff / share.sum())).astype(np.float32)
    base = peak()
    seconds: dict[str, list[float]] = {"spill": [], "read": [], "count": [], "row": []}
    active = tokens = 0
    with ActiveSpill(None, given.layers, given.d_ff) as spill:
        for _ in range(max(1, given.tokens // SEQUENCE)):
            drawn = stretch(rng, share, SEQUENCE)  # of one layer: drawing all would take longer than the rest
            active += int(drawn[0].sum())
            began = time.perf_counter()
            for layer in range(given.layers):
                spill.add(layer, *drawn)
            seconds["spill"].append(time.perf_counter() - began)
        for layer in range(given.count or given.layers):
            clock = [time.perf_counter()]
            ids, offsets = spill.layer(layer)
            clock.append(time.perf_counter())
            tokens = len(offsets) - 1
            counter: PairCounter = pair_counter(ids, offsets, given.d_ff, given.device)
            found = summarise(counter, given.d_ff, threads=given.threads)
            clock.append(time.perf_counter())
            uses = [ids[offsets[t] : offsets[t + 1]].astype(np.int64) for t in range(min(COST_TOKENS, tokens))]
            layer_row(found, np.bincount(ids, minlength=given.d_ff), tokens, uses, 4, SEQUENCE)
            clock.append(time.perf_counter())
            for name, taken in zip(("read", "count", "row"), np.diff(clock), strict=True):
                seconds[name].append(float(taken))
    print(
        json.dumps(
            {
                "benchmark": "coactivation",
                "device": given.device,
                "geometry": {"layers": given.layers, "d_ff": given.d_ff},
                "tokens": tokens,
                "active_share": active / tokens / given.d_ff,
                "layers_counted": given.count or given.layers,
                "spill_seconds": round(sum(seconds["spill"]), 3),
                **{
                    f"{name}_seconds_a_layer": round(float(np.median(seconds[name])), 3)
                    for name in ("read", "count", "row")
                },
                "peak_rss_bytes": peak(),
                "peak_rss_before_bytes": base,
            }
        )
    )


if __name__ == "__main__":
    main()
