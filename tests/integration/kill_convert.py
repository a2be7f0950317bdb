"""Convert in child processes that are killed (SIGKILL) at a chosen system call, then resume. Run by test_convert.

usage: kill_convert.py MODEL OUT each|seeds. Prints {"killed": number of kills, "stores": [finished stores]}.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from workbench.experiments.convert import convert

CALLS = ("pwrite", "fsync", "replace", "rename", "ftruncate", "mkdir")


def killing(name: str, real: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    """The system call `real`, but the process dies at its `left`-th call; a write dies half-way."""

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            if name == "pwrite":
                real(args[0], args[1][: len(args[1]) // 2], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    return call


def run(model: str, out: str, at: int) -> bool:
    """One conversion in a child that dies at call `at` (0: never); True when it was killed."""
    child = os.fork()
    if not child:
        left = [at]
        for name in CALLS if at else ():
            setattr(os, name, killing(name, getattr(os, name), left))
        try:
            convert(model, out)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    if os.WEXITSTATUS(status):
        raise SystemExit(f"the conversion failed after a kill before call {at}")
    return False


def main(model: str, out: str, mode: str) -> None:
    """Kill and resume; see the module's docstring."""
    killed, stores = 0, []
    if mode == "each":
        at = 1
        while run(model, f"{out}-{at}", at):
            killed += 1
            run(model, f"{out}-{at}", 0)
            stores.append(f"{out}-{at}")
            at += 1
    else:
        for seed in range(5):
            draw = random.Random(seed)
            while run(model, f"{out}-{seed}", draw.randint(1, 60)):
                killed += 1
            stores.append(f"{out}-{seed}")
    print(json.dumps({"killed": killed, "stores": stores}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
