"""What the live panel adds to a token's latency: a session with its panel against the bare engine.

Both run in a real Jupyter kernel, since what could cost is the kernel's main thread: it draws the view and sends it
while the session's thread makes tokens, and both need Python's lock. Rounds of `engine.generate` alternate with
rounds of the panel on the same engine and setting, with the same prompt and greedy text; a token's time is from one
token to the next on the wall clock, everything included. The ratio is formed between neighbouring rounds, so that a
machine that drifts does not decide it; the median of the ratios is the result, and the ceiling is 1.05. Beside it
`drawing_cpu_ms`, the processor time a token that the kernel's main thread took: what the panel could add at most
through Python's lock, however busy the machine.

    python benchmarks/panel_overhead.py STORE PREDICTORS [--dram 80%] [--rounds 9] [--tokens 100] [--out record.json]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

CEILING = 1.05
SET_UP = """
import asyncio, json, time
import workbench as wb
from workbench.widgets.stretch import INDEX
panel = wb.panel({store!r}, {predictors!r}, run=wb.RunSpec(dram={dram!r}))
engine = panel.session._worker.engine
session = panel.session
panel
"""
BARE = """
times, last = [], None
for step in engine.generate("Once upon a time", {tokens}):
    now = time.perf_counter()
    if last is not None:
        times.append(1000 * (now - last))
    last = now
print("ROUND " + json.dumps(times[1:]))
"""
LIVE = """
cpu = time.thread_time()
panel.session.start("Once upon a time", tokens={tokens})
while session.running or not session._worker.idle:
    await asyncio.sleep(0.05)
print("CPU " + json.dumps(1000 * (time.thread_time() - cpu) / {tokens}))
print("ROUND " + json.dumps(session.snapshot().rows[-{tokens} + 2:, INDEX["wall_ms"]].tolist()))
"""


def ask(client: Any, code: str) -> str:
    """Run a cell and return what it printed; the messages of the view are received, as a frontend would."""
    printed: list[str] = []

    def hear(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(code, timeout=600, output_hook=hear)
    if reply["content"]["status"] != "ok":
        raise SystemExit("\n".join(reply["content"].get("traceback", ["the cell failed"])))
    return "".join(printed)


def measured(text: str) -> list[float]:
    """The times, ms, of a round."""
    return json.loads(text.rsplit("ROUND ", 1)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("predictors", type=Path)
    parser.add_argument("--dram", default="80%")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    rounds, drawing = [], []
    try:
        store, predictors = str(args.store.resolve()), str(args.predictors.resolve())
        ask(client, SET_UP.format(store=store, predictors=predictors, dram=args.dram))
        for code in (BARE, LIVE):
            ask(client, code.format(tokens=args.tokens))  # the first of each warms caches
        for number in range(args.rounds):
            order = [("bare", BARE), ("live", LIVE)]
            texts = {name: ask(client, code.format(tokens=args.tokens)) for name, code in order[:: (-1) ** number]}
            found = {name: measured(text) for name, text in texts.items()}
            drawing.append(float(texts["live"].split("CPU ", 1)[1].split("\n", 1)[0]))
            rounds.append({name: [statistics.median(v), statistics.fmean(v)] for name, v in found.items()})
            bare, live = rounds[-1]["bare"][0], rounds[-1]["live"][0]
            print(f"round {number + 1}: bare {bare:.1f} ms, with the panel {live:.1f} ms")
        ask(client, "panel.close()")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    ratios = [r["live"][0] / r["bare"][0] for r in rounds]
    result = {
        "benchmark": "panel_overhead",
        "store": args.store.name,
        "tokens": args.tokens,
        "bare_ms": statistics.median(r["bare"][0] for r in rounds),
        "panel_ms": statistics.median(r["live"][0] for r in rounds),
        "ratio_of_medians": statistics.median(ratios),
        "ratio_of_means": statistics.median(r["live"][1] / r["bare"][1] for r in rounds),
        "drawing_cpu_ms": statistics.median(drawing),
        "ratios": [round(r, 4) for r in ratios],
        "ceiling": CEILING,
        "met": statistics.median(ratios) <= CEILING,
    }
    if args.out:
        args.out.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
