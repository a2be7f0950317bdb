"""The report of an evaluation, and of texts side by side."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from workbench.errors import RecordError
from workbench.report import (
    evaluation_table,
    read_evaluation,
    read_side_by_side,
    side_by_side_html,
    side_by_side_markdown,
    side_by_side_rich,
    to_html,
    to_markdown,
    to_rich,
    tradeoff_figure,
    write_evaluation,
    write_side_by_side,
)
from workbench.report.evaluation_table import headline

MACHINE = {"cpu": "a cpu", "cores": 8, "memory_bytes": 16 * 10**9, "os": "Linux 6", "device": "cpu", "disk": "nvme"}
RUN = {
    "model": "small-model", "geometry": {"layers": 2, "d_model": 64, "d_ff": 256, "vocab": 100}, "dtype": "float16",
    "tokens": 4096, "window": 4, "dram": "100%", "seed": 0, "commit": "0123456789ab", "versions": {"torch": "2.13"},
    "io": "threads", "command": "workbench evaluate small-model", "synthetic": False, "predictors": "preds",
    "date": "2026-01-01 00:00 UTC",
}  # fmt: skip


def row(name: str, predictor: str, rate: float | None, ppl: float, missed: float, bytes_: float, acc: float) -> Any:
    times = {f"{p}_ms{end}": 5.0 for p in ("predictor", "io", "mem", "compute") for end in ("", "_p95")}
    metrics = {"acc": {"value": acc, "stderr": 0.0123}, "acc_norm": {"value": acc + 0.01, "stderr": None}}
    return {
        "name": name, "predictor": predictor, "rate": rate, "ablation": {"predictor": predictor},
        "perplexity": ppl, "loss": 2.0, "false_negative": missed, "predicted_over_active": 2.5, "quality_tokens": 512,
        "flash_bytes": bytes_, "reads": 12.0, "dram_bytes": 4 * 10**6, "decoded": 64, "window_trims": 0,
        "active": 10.0, "predicted": 25.0, "loaded": 5.0, "in_window": 50.0, **times, "total_ms": 15.0,
        "total_ms_p95": 20.0,
        "tasks": {"arc_easy": {"documents": 20, "truncated": 0, "metrics": metrics}},
    }  # fmt: skip


@pytest.fixture
def record() -> dict[str, Any]:
    card = {
        "name": "arc_easy", "source": "arc_easy_test.jsonl", "split": "test", "sha256": "ab" * 32, "version": "1.0",
        "subjects": 1, "documents": 20, "requests": 80,
    }  # fmt: skip
    return copy.deepcopy(
        {
            "schema": 1,
            "kind": "evaluation",
            "machine": MACHINE,
            "run": RUN,
            "settings": {"sequence": 512, "prompt": 64},
            "data": {"source": "c4.json.gz", "documents": 9, "tokens": 4096, "sha256": "cd" * 32},
            "tasks": [card],
            "harness": "0.4.13",
            "ffn_neurons": 512,
            "rows": [
                row("dense", "off", None, 10.0, 0.0, 2.0e6, 0.6),
                row("oracle", "oracle", 0.0, 10.0, 0.0, 1.0e5, 0.6),
                row("predicted, 1% missed", "low_rank", 0.01, 10.05, 0.009, 4.0e5, 0.6),
                row("predicted, 5% missed", "low_rank", 0.05, 10.4, 0.048, 2.0e5, 0.58),
            ],
        }
    )


def without_text(record: dict[str, Any]) -> dict[str, Any]:
    """As a run with tasks only writes it."""
    record["data"] = None
    for one in record["rows"]:
        for name in set(one) - {"name", "predictor", "rate", "ablation", "tasks"}:
            one[name] = None
    return record


def test_table_has_accuracy_and_cost_beside_the_papers(record: dict[str, Any]) -> None:
    table = evaluation_table(read_evaluation(record))
    lines = {(block[0].label, line.kind): line for block in table.blocks for line in block}
    five = lines["predicted, 5% missed", "measured"]
    assert five.cell("perplexity") == "10.40"
    assert five.cell("arc_easy/acc") == "58.0 ± 1.2"
    assert five.cell("arc_easy/acc_norm") == "59.0"
    assert (five.cell("bytes"), five.cell("of_dense"), five.cell("missed")) == ("200 kB", "10%", "4.8%")
    assert five.cell("total") == "15.0"
    assert lines["dense", "paper"].cell("arc_easy/acc") == "66.1"
    assert lines["predicted, 5% missed", "paper"].cell("arc_easy/acc") == "66.2"
    assert ("predicted, 1% missed", "paper") not in lines
    notes = " ".join(table.notes)
    assert "4,096 tokens of c4.json.gz: 9 documents" in notes
    assert "20 documents of the test split (arc_easy_test.jsonl), zero-shot, lm-evaluation-harness 0.4.13" in notes


def test_headline_states_what_is_lost_and_saved(record: dict[str, Any]) -> None:
    assert headline(read_evaluation(record)) == (
        "Predicted, 5% missed: perplexity is 10.40 (dense 10.00), accuracy changes by -2.0 points on average, at worst "
        "-2.0 on arc_easy and a token loads 10% of the bytes of dense."
    )


def test_every_renderer_takes_the_table(record: dict[str, Any]) -> None:
    table = evaluation_table(read_evaluation(record))
    screen = Console(file=io.StringIO(), width=100)
    screen.print(to_rich(table))
    assert isinstance(screen.file, io.StringIO)
    assert "predicted, 5% missed" in screen.file.getvalue()
    assert "| **predicted, 5% missed** | 10.40 | 58.0 ± 1.2 |" in to_markdown(table)
    assert "<td>58.0 ± 1.2</td>" in to_html(table)


@pytest.mark.parametrize("kind", ["whole", "tasks only", "text only", "no predictors"])
def test_files_are_drawn_from_what_there_is(record: dict[str, Any], tmp_path: Path, kind: str) -> None:
    if kind == "tasks only":
        record = without_text(record)
    if kind == "text only":
        record["tasks"], record["harness"] = [], None
        for one in record["rows"]:
            one["tasks"] = {}
    if kind == "no predictors":
        record["rows"] = record["rows"][:2]
    paths = write_evaluation(tmp_path, record)
    assert [path.name for path in paths] == ["evaluation.html", "evaluation.md", "tradeoff.png"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    assert paths[2].read_bytes() == tradeoff_figure(read_evaluation(record))
    text = paths[0].read_text(encoding="utf-8")
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "")
    assert "nothing is masked in a dense model" in text
    assert ("arc_easy" in text) == (kind != "text only") or "66.1 to 66.2%" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["rows"][0].pop("perplexity"), r"rows\[0\].perplexity is missing"),
        (lambda r: r["rows"][1].update(extra=1), r"rows\[1\].extra is not a documented field"),
        (lambda r: r["rows"][1].update(io_ms=None), r"rows\[1\].io_ms is null where tokens were decoded"),
        (lambda r: r["rows"].pop(0), r"rows have none with predictor 'off'"),
        (lambda r: r["rows"][2].update(tasks={}), r"other tasks in 'predicted, 1% missed'"),
        (lambda r: r.update(kind="ablation"), r"is a record of kind 'ablation', not 'evaluation'"),
        (lambda r: r["rows"][0]["tasks"]["arc_easy"]["metrics"]["acc"].pop("value"), r"metrics.acc.value is missing"),
    ],
)
def test_a_broken_record_is_named(record: dict[str, Any], change: Any, message: str) -> None:
    change(record)
    with pytest.raises(RecordError, match=message) as error:
        read_evaluation(record)
    assert "\n" not in str(error.value)


# side by side


@pytest.fixture
def texts() -> dict[str, Any]:
    dense = {"tokens": [1, 2, 3], "pieces": ["a", " <b>", " | end"], "flash_bytes": 2.0e6, "tokens_per_s": 10.0}
    other = {"tokens": [1, 2, 9], "pieces": ["a", " <b>", " *other*"], "flash_bytes": 1.0e5, "tokens_per_s": 31.26}
    pairs = [
        {"prompt": "Say\nit", "dense": dense, "predicted": other, "diverges_at": 2},
        {"prompt": "Same", "dense": dense, "predicted": copy.deepcopy(dense), "diverges_at": None},
    ]
    return {"schema": 1, "kind": "side_by_side", "machine": MACHINE, "run": RUN, "rate": 0.05, "pairs": pairs}


def test_texts_are_shown_beside_each_other_and_marked_where_they_part(texts: dict[str, Any], tmp_path: Path) -> None:
    read = read_side_by_side(texts)
    screen = Console(file=io.StringIO(), width=120)
    screen.print(side_by_side_rich(read))
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert "predicted, 5% missed" in shown
    assert "a <b>▸ | end" in shown
    assert "They part at token 3 of 3." in shown
    assert "They are the same 3 tokens." in shown
    assert "3 tokens, 31.3 tokens/s, 100 kB a token from flash" in shown
    markdown = side_by_side_markdown(read)
    assert "| a \\<b> **▸** **\\| end** | a \\<b> **▸** **\\*other\\*** |" in markdown
    assert "Prompt: Say<br>it" in markdown
    page = side_by_side_html(read)
    assert "<td>a &lt;b&gt;<b>▸</b><mark> *other*</mark></td>" in page
    paths = write_side_by_side(tmp_path, texts)
    assert [path.name for path in paths] == ["side_by_side.html", "side_by_side.md"]
    assert page in paths[0].read_text(encoding="utf-8")


def test_an_evaluations_page_can_hold_texts(record: dict[str, Any], texts: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "texts.json"
    source.write_text(json.dumps(texts), encoding="utf-8")
    page = write_evaluation(tmp_path / "out", record, side_by_side=source)[0].read_text(encoding="utf-8")
    assert "The same prompt, dense and with predictors" in page
    assert "They part at token 3 of 3." in page


def test_broken_texts_are_named(texts: dict[str, Any]) -> None:
    texts["pairs"][0]["dense"]["pieces"].pop()
    with pytest.raises(RecordError, match=r"pairs\[0\].dense.pieces is not a list"):
        read_side_by_side(texts)
