"""The evaluation as files: a page, the table in Markdown, the trade-off figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.report import page
from workbench.report.evaluation import EvaluationRecord, paper_accuracy, read_evaluation
from workbench.report.evaluation_figure import tradeoff_figure
from workbench.report.evaluation_table import METHOD, evaluation_table, headline, perplexity
from workbench.report.html import provenance, write_file
from workbench.report.numbers import caption, percent
from workbench.report.paper import paper
from workbench.report.side_by_side import SideBySide, read_side_by_side, side_by_side_html
from workbench.report.table import to_html, to_markdown

Source = str | Path | Mapping[str, Any]


def write_evaluation(
    out_dir: str | Path, record: Source | EvaluationRecord, *, side_by_side: Source | SideBySide | None = None
) -> list[Path]:
    """Writes evaluation.html, evaluation.md and tradeoff.png into `out_dir`; returns their paths, the page first.

    Records are a path, the parsed JSON, or what the `read_` functions return; `side_by_side` adds texts to the page.
    Raises RecordError for a broken record, WorkbenchError where `out_dir` cannot be written.
    """
    read = read_evaluation(record)
    texts = None if side_by_side is None else read_side_by_side(side_by_side)
    drawn = tradeoff_figure(read)
    markdown = f"{headline(read)}\n\n{to_markdown(evaluation_table(read))}"
    files = {
        "evaluation.html": render_evaluation(read, drawn, texts).encode("utf-8"),
        "evaluation.md": markdown.encode("utf-8"),
        "tradeoff.png": drawn,
    }
    return [write_file(Path(out_dir), name, content) for name, content in files.items()]


def render_evaluation(record: EvaluationRecord, drawn: bytes, texts: SideBySide | None = None) -> str:
    """The page as text; `drawn` is the figure's PNG."""
    run = record.run
    body = ["<header>", page.element("h1", "Accuracy with predictors, measured in the pipeline that runs")]
    if run.synthetic:
        body.append(page.element("div", "synthetic weights: accuracy means nothing", "badge"))
    body += [page.element("p", headline(record), "headline")]
    body += [page.element("p", caption(run, record.machine), "meta"), "</header>", "<main>"]
    body += [page.element("h2", "Accuracy and cost"), to_html(evaluation_table(record))]
    body += [page.element("h2", "What missed neurons cost and save")]
    body.append(page.drawing(drawn, "Trade-off by false-negative rate", *tradeoff_words(record)))
    if texts:
        body += [page.element("h2", "The same prompt, dense and with predictors"), side_by_side_html(texts)]
    parts = provenance(run, record.machine, record.source, METHOD)
    return page.page(f"Accuracy with predictors: {run.model}", [*body, *parts, "</main>"])


def tradeoff_words(record: EvaluationRecord) -> tuple[str, str, str]:
    """Here, the paper's, how: for the trade-off figure."""
    parts = []
    for row in record.predicted:
        figures = [f"{percent(row.false_negative)} missed" if row.false_negative is not None else row.name]
        if row.perplexity is not None:
            figures.append(f"perplexity {perplexity(row.perplexity)}")
        share = record.of_dense(row)
        if share is not None:
            figures.append(f"{percent(share)} of dense's bytes")
        parts.append(", ".join(figures))
    here = "; ".join(parts) + "." if parts else "no predictors were given, so there is no curve to draw."
    changes = ", ".join(
        f"{task} {row['dense']:.1f} to {row['predicted']:.1f}%" for task, row in paper_accuracy().items()
    )
    theirs = (
        f"at {percent(paper().predictors['false_negative'])} missed, {changes} ({paper().source['model']}, table 1)."
    )
    return here, theirs, "each row is an engine of its own on the same text and documents."
