"""Peak memory of an 'all' run against its plan, in a process that would be killed if it took much more.

What is measured: a child process with the benchmark's imports and nothing else is the idle process. The plan is what
`plan_dram` promises for the store, predictors and budget. The child then takes a prompt and tokens, and its peak
resident bytes beyond idle (VmHWM, set back before) are compared with the plan; at most 1.1 times is the target.

Where the machine lets us (root, version 1 memory controller) the child runs in a memory cgroup of its own, below the
one it was started in, whose limit is its usage when idle plus 1.1 times the plan, page cache included: a run that needs
more is killed by the kernel, and the benchmark says so. Elsewhere the record says `"limited": false`.

    python benchmarks/peak_rss.py STORE PREDICTORS [--dram 60%] [--tokens 24]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from workbench.ablation import PAPER_ROWS
from workbench.engines.budget import plan_dram, process_rss
from workbench.engines.torch_cpu import TorchCpuEngine
from workbench.errors import WorkbenchError
from workbench.experiments.ablate import PeakRss
from workbench.experiments.record import machine
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

MARGIN = 1.1
CONTROLLER = Path("/sys/fs/cgroup/memory")


def own_cgroup() -> Path | None:
    """A new memory cgroup below this process's; None where that cannot be."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        where = next(line.split(":", 2)[2] for line in lines if "memory" in line.split(":", 2)[1].split(","))
        made = CONTROLLER / where.lstrip("/") / f"peak-rss-{os.getpid()}"
        made.mkdir()
        if not (made / "memory.limit_in_bytes").exists():
            made.rmdir()
            return None
        return made
    except (OSError, StopIteration):
        return None


def child(args: argparse.Namespace) -> dict[str, Any]:
    """The limited process: idle, plan, limit, run."""
    group = Path(args.cgroup) if args.cgroup else None
    peak = PeakRss()
    store = Store.open(args.store)
    idle, usage = process_rss(), _number(group, "memory.usage_in_bytes")
    predictors = Predictors.load(args.predictors)
    ablation = PAPER_ROWS["+ bundling (all)"]
    text = np.random.default_rng(args.seed).integers(3, store.spec.vocab_size, args.prompt + args.tokens).tolist()
    run = RunSpec(dram=args.dram, context=len(text), seed=args.seed)
    plan = plan_dram(store, ablation, predictors, run)
    limit = None
    if group and usage is not None:
        limit = int(usage + MARGIN * plan.total)
        (group / "memory.limit_in_bytes").write_text(str(limit))
    with TorchCpuEngine(store, ablation, predictors, run) as engine:
        engine.prefill(text[: args.prompt])
        steps = [engine.step(token)[1] for token in text[args.prompt :]]
        in_window = max(s.in_window for s in steps)
    beyond = peak.beyond()
    return {
        "benchmark": "peak_rss",
        "machine": machine(store.path),
        "dram": args.dram,
        "limited": limit is not None,
        "limit_bytes": limit,
        "idle_rss_bytes": idle,
        "idle_usage_bytes": usage,
        "plan": plan.to_dict(),
        "peak_beyond_idle_bytes": beyond,
        "ratio": None if beyond is None else beyond / plan.total,
        "cgroup_peak_bytes": _number(group, "memory.max_usage_in_bytes"),
        "reclaims": _number(group, "memory.failcnt"),
        "slots_used": in_window / sum(plan.slots),
        "median_ms": float(np.median([s.total_ms for s in steps])),
        "target": MARGIN,
    }


def _number(group: Path | None, name: str) -> int | None:
    return int((group / name).read_text()) if group else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("predictors", type=Path)
    parser.add_argument("--dram", default="60%")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cgroup", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        try:
            print(json.dumps(child(args)))
        except WorkbenchError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    group = own_cgroup()
    if group is None:
        print("no memory cgroup could be made here: the run is measured, but not limited", file=sys.stderr)
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    if group:
        # the child joins before it imports anything, so that all it takes is counted
        join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", join, "sh", *command, "--cgroup", str(group)]
    try:
        done = subprocess.run(command, check=False)
    finally:
        if group:
            for _ in range(50):  # the kernel lets go of a cgroup a moment after its last process
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)
    if done.returncode in (-9, 137):
        print(f"killed: it took more than idle and {MARGIN} times the planned budget", file=sys.stderr)
    return 0 if done.returncode == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
