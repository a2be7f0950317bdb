"""The sparse FFN kernel on a GPU, at OPT-6.7B's geometry, against the card's copy bandwidth and a dense matmul.

Every row is active, so that all of its bytes are read. Several sets of slots, together larger than any cache, are taken
in turn. A repeat is a chain of launches between two device synchronisations; its time by the number of launches is one
time, and the medians are compared. On an NVIDIA card:

- kernel: the CUDA text of the Metal body, both passes, in a CUDA graph;
- mlx: the same through MLX, compiled, each launch after the one before; what the engine gets;
- copy: bytes read and written a second when torch copies one gigabyte on the card;
- dense: torch computes relu(up x + b) down over the same rows, gathered beforehand, in a CUDA graph; `gathered` counts
  the gathering too.

On a Mac: the kernel through MLX, and copy through MLX.

    python benchmarks/gpu_ffn.py [--d 4096] [--rows 4096,16384] [--dtype bfloat16] [--out record.json]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from workbench.engines import device_of
from workbench.experiments.record import commit, machine, this_command, write_json
from workbench.kernels.metal.kernel import Machine
from workbench.kernels.metal.mlx_machine import MlxMachine, available, mlx_core
from workbench.kernels.metal.sparse_ffn import Record, sparse_ffn, tiles
from workbench.kernels.metal.torch_machine import TorchMachine
from workbench.spec import ITEMSIZE

COPY_BYTES = 1 << 30
SET_BYTES = 256 << 20
"""Of all sets of slots together, at least: several times an H200's L2."""
SLOWEST_SHARE = 0.8


class Sets:
    """Slots filled with small random weights, and a bias under which every neuron fires."""

    def __init__(self, gpu: Machine, d: int, rows: int, dtype: str) -> None:
        self.gpu, self.rows, self.d, self.dtype = gpu, rows, d, dtype
        self.record = Record(d, dtype, 2 * d * ITEMSIZE[dtype])
        self.nbytes = rows * self.record.slot_bytes
        count = max(2, -(-SET_BYTES // self.nbytes))
        rng = np.random.default_rng(0)
        # float32 values between 0.015 and 0.031 in the upper 16 bits, which are bfloat16's; float16's are as small
        words = rng.integers(0x3C80, 0x3D00, (self.nbytes // 2,), np.uint16)
        if dtype == "float16":
            words = rng.integers(0x2400, 0x2800, (self.nbytes // 2,), np.uint16)
        self.slots = [gpu.array(np.roll(words, number).view(np.uint8), "uint8") for number in range(count)]
        self.order = [gpu.array(rng.permutation(rows).astype(np.uint32), "uint32") for _ in range(count)]
        self.x = gpu.array(rng.standard_normal(d).astype(np.float32), "float32")
        self.bias = gpu.array(np.full(rows, 100.0, np.float32), "float32")
        self.threshold = gpu.array(np.zeros(1, np.float32), "float32")
        self.count = gpu.array(np.array([rows], np.uint32), "uint32")

    def arrays(self, number: int) -> tuple[Any, ...]:
        """What the FFN of a set is called with."""
        at = number % len(self.slots)
        return self.slots[at], self.order[at], self.count, self.x, self.bias, self.threshold

    def check(self, active: Any) -> None:
        """That all rows were computed."""
        if int(self.gpu.numpy(active)[0]) != self.rows:
            raise SystemExit("gpu_ffn: not every row was active, so not every byte was read")


def through_mlx(sets: Sets, launches: int, repeats: int) -> list[float]:
    """Seconds a launch, one for each repeat; the graph of a chain is built before its time begins."""
    mx = mlx_core()

    @mx.compile
    def ffn(slots: Any, order: Any, count: Any, x: Any, bias: Any, threshold: Any, after: Any) -> Any:
        return sparse_ffn(sets.gpu, sets.record, slots, order, count, x, bias, threshold, order=after)

    times = []
    for repeat in range(repeats + 2):
        after, y = sets.count, None
        for number in range(launches):
            y, after = ffn(*sets.arrays(repeat * launches + number), after)
        began = time.perf_counter()
        mx.eval(y, after)
        mx.synchronize()
        times.append((time.perf_counter() - began) / launches)
        sets.check(after)
    return times[2:]


def in_graph(work: Callable[[int], Any], launches: int, repeats: int) -> list[float]:
    """Seconds of work(number), one for each repeat of a CUDA graph of many."""
    import torch

    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [work(number) for number in range(launches)]
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / launches)
    del kept
    return times[2:]


def on_cuda(d: int, rows: int, dtype: str, launches: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of the kernel, of the dense matmul over rows that were gathered before, and with the gathering."""
    import torch

    sets = Sets(TorchMachine(), d, rows, dtype)

    def kernel(number: int) -> Any:
        return sparse_ffn(sets.gpu, sets.record, *sets.arrays(number))

    found = {"kernel": in_graph(kernel, launches, repeats)}
    sets.check(kernel(0)[1])
    kind = getattr(torch, dtype)
    whole = [slots.view(kind).view(rows, 2 * d) for slots in sets.slots]
    order = [order.long() for order in sets.order]
    x, bias = sets.x.to(kind), sets.bias.to(kind)

    def dense(taken: Any) -> Any:
        return torch.relu(torch.addmv(bias, taken[:, :d], x)) @ taken[:, d:]

    found["gathered"] = in_graph(
        lambda n: dense(whole[n % len(whole)].index_select(0, order[n % len(whole)])), launches, repeats
    )
    parts = [(w[:, :d].contiguous(), w[:, d:].contiguous()) for w in whole]

    def plain(number: int) -> Any:
        up, down = parts[number % len(parts)]
        return torch.relu(torch.addmv(bias, up, x)) @ down

    return {**found, "dense": in_graph(plain, launches, repeats)}


def copy_bandwidth(device: str, repeats: int) -> float:
    """Bytes read and written a second, the median of copies of one gigabyte."""
    rates = []
    if device == "cuda":
        import torch

        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        for _ in range(repeats + 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            rates.append(2 * COPY_BYTES / (time.perf_counter() - began))
    else:
        mx = mlx_core()
        source = mx.zeros((COPY_BYTES // 4,), mx.uint32)
        mx.eval(source)
        for number in range(repeats + 2):
            began = time.perf_counter()
            mx.eval(source + number)
            mx.synchronize()
            rates.append(2 * COPY_BYTES / (time.perf_counter() - began))
    return statistics.median(rates[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=4096)
    parser.add_argument("--rows", default="4096,16384")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(ITEMSIZE))
    parser.add_argument("--launches", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    here = available()
    if not here:
        raise SystemExit("gpu_ffn: MLX has no GPU here; run it on a Mac with Apple silicon or beside an NVIDIA card")
    gpu = MlxMachine(here[0])
    copied = copy_bandwidth(here[0], args.repeats)
    result: dict[str, Any] = {
        "benchmark": "gpu_ffn",
        "machine": machine(Path("."), device_of(f"mlx-{here[0]}")),
        "where": gpu.where,
        "commit": commit(),
        "versions": {name: importlib.metadata.version(name) for name in ("mlx", "torch")},
        "command": this_command(),
        "d": args.d,
        "dtype": args.dtype,
        "copy_bytes_per_s": copied,
        "rows": [],
    }
    for rows in (int(part) for part in args.rows.split(",")):
        sets = Sets(gpu, args.d, rows, args.dtype)
        found = {"mlx": through_mlx(sets, args.launches, args.repeats)}
        nbytes, count = sets.nbytes, len(sets.slots)
        del sets
        if here[0] == "cuda":
            found |= on_cuda(args.d, rows, args.dtype, args.launches, args.repeats)
        medians = {name: statistics.median(times) for name, times in found.items()}
        best = medians.get("kernel", medians["mlx"])
        row: dict[str, Any] = {"rows": rows, "sets": count, **{f"{name}_us": 1e6 * t for name, t in medians.items()}}
        row["cut"] = asdict(tiles(gpu, Record(args.d, args.dtype, nbytes // rows), rows))
        row |= {"bytes_per_s": nbytes / best, "of_copy": nbytes / best / copied}
        row |= {f"kernel_over_{n}": best / medians[n] for n in ("dense", "gathered") if n in medians}
        result["rows"].append(row)
        shown = ", ".join(f"{name} {1e6 * t:.1f}" for name, t in medians.items())
        print(
            f"{rows:,} rows x {args.d} {args.dtype}, {gpu.where}, us: {shown}; kernel {nbytes / best / 1e12:.2f} TB/s, "
            f"{row['of_copy']:.2f} of copy (at least {SLOWEST_SHARE})"
        )
    result["compilations"] = gpu.compilations
    result["at_least"] = {"of_copy": SLOWEST_SHARE}
    if args.out:
        write_json(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
