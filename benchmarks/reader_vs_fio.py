"""The flash reader against fio: same file, block size, depth, direct I/O.

Drives drift by tens of percent within a minute, so each figure is the median over pairs: fio and the reader take
turns on the same file, and a pair's ratio is formed before anything is averaged. fio runs as psync with 32 threads and
as io_uring with 32 entries in every pair, and so does the reader; a ratio is against fio's better engine. Offsets are
random blocks of the file, unsorted, new in every batch. The reader's buffer is in huge pages, as in the engine; fio's
in ordinary ones, its default. With `--small-pages` the reader's is too, so that only the readers differ.

    python benchmarks/reader_vs_fio.py [--file F] [--size-mib 4096] [--seconds 1.5] [--pairs 5] [--out record.json]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import mmap
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import ReaderError
from workbench.flash.reader import FlashReader, aligned_buffer

BLOCKS_KIB = (4, 16, 32, 128)
DEPTH = 32
TARGET = 0.95
FIO = {
    "psync": ["--ioengine=psync", f"--numjobs={DEPTH}", "--thread", "--group_reporting"],
    "io_uring": ["--ioengine=io_uring", f"--iodepth={DEPTH}"],
}


def fill(path: Path, size: int) -> None:
    """Random bytes, so that no layer below can compress or deduplicate them."""
    block = np.random.default_rng(0).integers(0, 256, 1 << 24, dtype=np.uint8)
    with path.open("wb") as file:
        for at in range(0, size, len(block)):
            block[:8] = np.frombuffer(at.to_bytes(8, "little"), np.uint8)
            file.write(block[: size - at].tobytes())


def fio(path: Path, engine: str, block: int, seconds: float, seed: int) -> float:
    """Bytes/s of fio's random direct reads."""
    command = [
        "fio",
        "--name=read",
        f"--filename={path}",
        "--rw=randread",
        f"--bs={block}",
        "--direct=1",
        "--time_based",
        f"--runtime={max(1, round(seconds * 1000))}ms",
        f"--randseed={seed}",
        "--norandommap",
        "--output-format=json",
        *FIO[engine],
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    # Not fio's own bw_bytes, which is 0 now and then after short runs.
    if not job["io_bytes"] or not job["runtime"]:
        raise SystemExit("fio measured nothing; give it more --seconds")
    return job["io_bytes"] / (job["runtime"] / 1000)


def ours(path: Path, engine: str, block: int, seconds: float, seed: int, small_pages: bool) -> float:
    """Bytes/s of the reader on batches of random blocks, planning and Python calls included."""
    rng = np.random.default_rng(seed)
    blocks = path.stat().st_size // block
    count = max(64 * DEPTH, (64 << 20) // block)
    if small_pages:
        pages = mmap.mmap(-1, count * block)
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        buffer = np.frombuffer(pages, np.uint8)
    else:
        buffer = aligned_buffer(count * block)
    places = np.arange(count, dtype=np.int64) * block
    lengths = np.full(count, block, np.int64)
    read_bytes = 0
    with FlashReader(engine, DEPTH) as reader:  # type: ignore[arg-type]
        handle = reader.open(path)
        # Threads, bounce buffers and the pages of the destination, as fio has them before its clock starts.
        reader.read(handle, rng.integers(0, blocks, count) * block, lengths, buffer, places)
        start = time.perf_counter()
        elapsed = 0.0
        while elapsed < seconds:
            # Offsets are new in every batch: a cache below the file system would serve those read before.
            read_bytes += reader.read(
                handle, rng.integers(0, blocks, count) * block, lengths, buffer, places
            ).read_bytes
            elapsed = time.perf_counter() - start
    return read_bytes / elapsed


def compare(path: Path, block: int, pairs: int, seconds: float, small_pages: bool) -> dict[str, Any]:
    """Alternate fio and the reader `pairs` times at one block size."""
    engines = ("threads", "io_uring")
    rates: dict[str, list[float]] = {f"fio_{name}": [] for name in FIO} | {name: [] for name in engines}
    for pair in range(pairs):
        mine = partial(ours, small_pages=small_pages)
        turns: list[tuple[str, Callable[..., float], str]] = [
            *((f"fio_{name}", fio, name) for name in FIO),
            *((name, mine, name) for name in engines),
        ]
        shift = pair % len(turns)  # so that no one always comes first
        for key, run, name in turns[shift:] + turns[:shift]:
            rates[key].append(run(path, name, block, seconds, pair + 1))
    best = max(FIO, key=lambda name: statistics.median(rates[f"fio_{name}"]))
    ratios = {
        name: statistics.median(a / b for a, b in zip(rates[name], rates[f"fio_{best}"], strict=True))
        for name in engines
    }
    return {
        "block_kib": block >> 10,
        "fio_engine": best,
        "bytes_per_second": {key: round(statistics.median(values)) for key, values in rates.items()},
        "ratio": {name: round(ratio, 3) for name, ratio in ratios.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="an existing file to read; otherwise one is written and removed")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where to write it")
    parser.add_argument("--size-mib", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--small-pages", action="store_true", help="4 KiB pages for the reader's buffer, as fio has")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not shutil.which("fio"):
        print("fio is not installed; install it with the system's package manager", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        path = args.file or Path(scratch) / "reader_vs_fio.bin"
        if args.file is None:
            fill(path, args.size_mib << 20)
        try:
            rows = []
            for kib in BLOCKS_KIB:
                rows.append(compare(path, kib << 10, args.pairs, args.seconds, args.small_pages))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        except ReaderError as error:
            print(error, file=sys.stderr)
            return 1
    fio_version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    record = {
        "benchmark": "reader_vs_fio",
        "depth": DEPTH,
        "direct": True,
        "small_pages": args.small_pages,
        "pairs": args.pairs,
        "fio": fio_version,
        "rows": rows,
        "best_ratio": {str(row["block_kib"]): max(row["ratio"].values()) for row in rows},
        "target": TARGET,
    }
    text = json.dumps(record)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
