"""What a user would pick first, beside ours: the same checkpoint, the same memory limit, ms a token.

Each contender is a process of its own in a memory cgroup of its own, page cache included, since without a limit the
page cache holds the whole model and every figure of an offloading program is a figure of RAM. The page cache is dropped
before each. All take the same prompt and then the same tokens one at a time; the first `--warm-up` do not count, the
median of the others does. The limit holds for all but these: 'dense', which has the model wholly in RAM; 'oracle',
which is there for its tokens; and 'all, half', whose limit is half of the model beside what Python and its packages
take.

'oracle' (our store, the true activations) must choose the same tokens as 'dense': that is what makes the comparison one
of the same model. Of every contender the record says how many of its likeliest tokens are the dense model's.

    workbench synth opt-1.3b STORE --dtype float32 --checkpoint CHECKPOINT
    python benchmarks/side_by_side.py CHECKPOINT STORE STORE-predictors --work DIR [--limit 3.5GiB] [--out record.json]

AirLLM and llama-cpp-python are no dependencies of the project: `--python airllm=/path/bin/python` names an interpreter
that has one. llama.cpp runs where the checkpoint is a llama; its GGUF file is written into DIR. What is finished is
kept in DIR: the same call made again goes on after it; `--again NAME` measures one anew. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from contenders import CONTENDERS, versions
from memory_limit import MemoryLimit, NoMemoryLimit, drop_page_cache

from workbench.ablation import Ablation
from workbench.errors import AblationError, WorkbenchError
from workbench.experiments.record import commit, machine, model_name
from workbench.flash.store import Store
from workbench.spec import parse_dram

SLOW = ("naive", "mmap", "accelerate", "accelerate, auto", "airllm")
UNLIMITED = ("dense", "oracle", "all, half")
"""'all, half' limits itself once it is known what its imports take."""
TARGETS = {"accelerate_against_all": 10.0, "accelerate_aim": 20.0, "half_against_dense": 1.5, "naive_against_all": 10.0}
ROOM_FOR_PYTHON = 1 << 30
"""What 'accelerate, auto' leaves of the limit: for the interpreter, and the layer that comes from flash."""


def wanted(args: argparse.Namespace, model_type: str) -> list[str]:
    """The contenders that apply to a model, in the order of CONTENDERS."""
    names = list(args.contenders or CONTENDERS)
    if model_type != "llama":
        names = [name for name in names if name != "llama.cpp"]
    try:
        Ablation(prefetch=True)
    except AblationError:
        names = [name for name in names if name != "all + prefetch"]
    return names


def ask(args: argparse.Namespace, config: dict[str, Any], store: Store) -> dict[str, Any]:
    """What all contenders are asked."""
    limit = parse_dram(args.limit, store.model_bytes)
    count = args.prompt + args.warm_up + args.tokens
    text = np.random.default_rng(args.seed).integers(3, store.spec.vocab_size, count).tolist()
    share = max(1 << 20, limit - ROOM_FOR_PYTHON) if args.accelerate is None else parse_dram(args.accelerate, limit)
    return {
        "checkpoint": str(args.checkpoint), "store": str(args.store), "predictors": str(args.predictors),
        "work": str(args.work), "gguf": str(args.work / "model.gguf"), "model_type": config["model_type"],
        "dtype": store.dtype, "text": text, "prompt": args.prompt, "warm_up": args.warm_up, "limit": limit,
        "threads": args.threads or len(os.sched_getaffinity(0)), "window": args.window,
        "half_window": args.half_window, "accelerate_bytes": share,
    }  # fmt: skip


def measure(name: str, request: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """One contender in its cgroup."""
    each = dict(request)
    if name in SLOW:
        each["text"] = request["text"][: args.prompt + args.warm_up + args.slow_tokens]
    if name in UNLIMITED:
        each["limit"] = None
    file = args.work / "request.json"
    python = dict(entry.split("=", 1) for entry in args.python).get(name, sys.executable)
    drop_page_cache()
    with MemoryLimit("side-by-side", each["limit"]) as group:
        file.write_text(json.dumps({**each, "group": str(group.path)}))
        try:
            done = group.run([python, str(Path(__file__).with_name("contenders.py")), name, str(file)], args.seconds)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {args.seconds:.0f} s"}
        peak, reclaims = group.peak(), group.reclaims()
    for folder in ("offload", "airllm"):
        shutil.rmtree(args.work / folder, ignore_errors=True)
    found: dict[str, Any]
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1][:300]
        killed = "killed: it needed more than the limit; " if done.returncode in (-9, 137) else ""
        found = {"failed": f"{killed}exit status {done.returncode}: {said}"}
    if "ms" in found:
        found["median_ms"], found["worst_ms"] = statistics.median(found["ms"]), max(found["ms"])
    return {"limit_bytes": each["limit"], **found, "peak_bytes": peak, "reclaims": reclaims}


def write_gguf(request: dict[str, Any]) -> None:
    """The checkpoint as llama.cpp reads it, unless it is there."""
    if not Path(request["gguf"]).exists():
        from to_gguf import to_gguf

        to_gguf(Path(request["checkpoint"]), Path(request["gguf"]))


def compared(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ratios of medians, and of how many likeliest tokens each agrees with the dense model."""
    ms = {name: found["median_ms"] for name, found in results.items() if "median_ms" in found}

    def ratio(above: str, below: str) -> float | None:
        return ms[above] / ms[below] if above in ms and below in ms else None

    ours = min((name for name in ms if name in ("all", "all + coalesce", "all + prefetch")), key=ms.__getitem__,
               default="all")  # fmt: skip
    others = (*SLOW, "llama.cpp")
    found: dict[str, Any] = {f"{name}_against_all": ratio(name, "all") for name in others}
    found |= {"ours": ours, **{f"{name}_against_ours": ratio(name, ours) for name in others}}
    found["half_against_dense"] = ratio("all, half", "dense")
    truth = results.get("dense", {}).get("choices")
    found["agrees"] = {
        name: f"{sum(a == b for a, b in zip(each['choices'], truth, strict=False))} of {len(each['choices'])}"
        for name, each in results.items() if truth and each.get("choices")
    }  # fmt: skip
    if truth and "last_logits" in results.get("oracle", {}):
        a, b = (np.array(results[name]["last_logits"]) for name in ("dense", "oracle"))
        found["oracle_logits_off_by"] = float(np.abs(a - b).max() / np.abs(a).max())
    return found


def line(name: str, found: dict[str, Any]) -> str:
    """One contender, for people."""
    if "failed" in found:
        return f"{name:15} failed: {found['failed']}"
    shares = f"new {found['new_share']:.1%} kept {found['kept_share']:.1%}" if "new_share" in found else ""
    limit = f"{found['limit_bytes'] / 2**30:.2f}" if found["limit_bytes"] else "none"
    return (
        f"{name:15} {found['median_ms']:9.1f} ms a token (worst {found['worst_ms']:9.1f}, prompt "
        f"{found['prompt_ms'] / 1000:6.1f} s)  peak {found['peak_bytes'] / 2**30:5.2f} GiB of {limit}  {shares}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("predictors", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for partial results and files of contenders")
    parser.add_argument("--limit", default="3.5GiB", help="memory of a contender: a size, or a share of the model")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    parser.add_argument("--again", nargs="+", choices=CONTENDERS, default=[], help="measure these anew")
    parser.add_argument("--python", nargs="+", default=[], metavar="NAME=PATH", help="another interpreter for one")
    parser.add_argument("--accelerate", help="DRAM for the weights of 'accelerate, auto' (1 GiB below the limit)")
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--half-window", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="counted")
    parser.add_argument("--slow-tokens", type=int, default=5, help="counted where the whole model is read for each")
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core")
    parser.add_argument("--seconds", type=float, default=1200.0, help="the longest that one contender may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        store = Store.open(args.store)
        config = json.loads((args.checkpoint / "config.json").read_text())
        names, request = wanted(args, config["model_type"]), ask(args, config, store)
        args.work.mkdir(parents=True, exist_ok=True)
        asked = {**request, "store": store.digest, "slow": args.slow_tokens}
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
        partial = args.work / f"partial-{digest}.json"
        results: dict[str, dict[str, Any]] = json.loads(partial.read_text()) if partial.exists() else {}
        for name in names:
            if name not in results or name in args.again or "failed" in results[name]:
                if name == "llama.cpp":
                    write_gguf(request)
                results[name] = measure(name, request, args)
                partial.write_text(json.dumps(results))
            print(line(name, results[name]), flush=True)
    except (NoMemoryLimit, WorkbenchError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    chosen = {name: results[name] for name in names}
    record = {
        "benchmark": "side_by_side", "command": " ".join(["python", *sys.argv]), "commit": commit(),
        "machine": machine(store.path), "versions": versions(), "model": model_name(store),
        "model_bytes": store.model_bytes, "limit_bytes": request["limit"], "threads": request["threads"],
        "targets": TARGETS, "compared": compared(chosen), "contenders": chosen,
    }  # fmt: skip
    text = json.dumps(record)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
