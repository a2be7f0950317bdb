"""The report: one self-contained HTML page and the figures as PNG, drawn from records alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.report import page, words
from workbench.report.figures import latency_figure, predictor_figure, reuse_figure, throughput_figure
from workbench.report.numbers import caption, machine_line, size
from workbench.report.reading import read_ablation, read_flash, read_predictors, read_reuse
from workbench.report.records import AblationRecord, FlashRecord, PredictorCard, ReuseRecord, Run
from workbench.report.rows import ablation_table, flash_table, neuron_table, predictor_table, reuse_table
from workbench.report.table import to_html

Source = str | Path | Mapping[str, Any]


def write_report(
    out_dir: str | Path,
    *,
    ablation: Source | AblationRecord,
    flash: Source | FlashRecord | None = None,
    reuse: Source | ReuseRecord | None = None,
    predictors: Source | PredictorCard | None = None,
) -> list[Path]:
    """Writes report.html, latency.png and, where their records are given, throughput.png, reuse.png and
    predictors.png into `out_dir`; returns their paths, the page first.

    A record is a path, the parsed JSON, or what `workbench.report.reading` returns. All records are read
    and drawn before anything is written; each file appears whole or not at all. Raises RecordError for a
    broken record, WorkbenchError where `out_dir` cannot be written.
    """
    main = read_ablation(ablation)
    flash_record = None if flash is None else read_flash(flash)
    reuse_record = None if reuse is None else read_reuse(reuse)
    card = None if predictors is None else read_predictors(predictors)
    drawn = {"latency.png": latency_figure(main)}
    if flash_record:
        drawn["throughput.png"] = throughput_figure(flash_record)
    if reuse_record:
        drawn["reuse.png"] = reuse_figure(reuse_record)
    if card:
        drawn["predictors.png"] = predictor_figure(card)
    text = render_html(main, flash=flash_record, reuse=reuse_record, predictors=card, drawn=drawn)
    files = {"report.html": text.encode("utf-8"), **drawn}
    return [write_file(Path(out_dir), name, content) for name, content in files.items()]


def render_html(
    ablation: AblationRecord,
    *,
    flash: FlashRecord | None = None,
    reuse: ReuseRecord | None = None,
    predictors: PredictorCard | None = None,
    drawn: Mapping[str, bytes],
) -> str:
    """The page as text; `drawn` has the PNG of each record given, by file name."""
    run, machine = ablation.run, ablation.machine
    body = ["<header>", page.element("h1", "LLM in a flash, measured on this machine")]
    if run.synthetic:
        body.append(page.element("div", "synthetic weights: latency only", "badge"))
    body += [page.element("p", words.headline(ablation), "headline"), page.element("p", words.beside_paper(ablation))]
    body += [page.element("p", caption(run, machine), "meta"), page.tiles(words.tiles(ablation)), "</header>", "<main>"]
    body += [page.element("h2", "What each technique brings"), to_html(ablation_table(ablation))]
    body.append(page.drawing(drawn["latency.png"], words.headline(ablation), *words.latency(ablation)))
    body.append(to_html(neuron_table(ablation)))
    if flash:
        body += [page.element("h2", "How fast flash reads"), to_html(flash_table(flash))]
        body.append(page.drawing(drawn["throughput.png"], "Read throughput by chunk size", *words.throughput(flash)))
    if reuse:
        body += [page.element("h2", "What consecutive tokens share"), to_html(reuse_table(reuse))]
        body.append(page.drawing(drawn["reuse.png"], "Window reuse against k", *words.reuse(reuse)))
    if predictors:
        body += [page.element("h2", "How good the predictors are"), to_html(predictor_table(predictors))]
        body.append(page.drawing(drawn["predictors.png"], "Predictor quality by layer", *words.predictors(predictors)))
    body += [page.element("h2", "Where the paper's figures can be compared")]
    body.append(page.bullets(words.comparable(ablation, flash, reuse)))
    return page.page(
        f"LLM in a flash on this machine: {run.model}",
        [*body, *provenance(run, machine, ablation.source, words.METHOD), "</main>"],
    )


def provenance(run: Run, machine: Mapping[str, Any], source: str, method: str) -> list[str]:
    """How it was measured, machine, versions, and the command to run it again."""
    known = {"cpu", "cores", "memory_bytes", "os", "device", "disk"}
    memory = machine.get("memory_bytes")
    measured = [
        ("model", f"{run.model}, {run.geometry}" if run.geometry else run.model),
        ("storage", f"{run.dtype}{', synthetic weights' if run.synthetic else ''}"),
        ("tokens", f"{run.tokens:,}"),
        ("window k", "" if run.window is None else str(run.window)),
        ("DRAM budget", run.dram),
        ("reader", run.io),
        ("predictors", run.predictors),
        ("seed", "" if run.seed is None else str(run.seed)),
        ("commit", run.commit),
        ("date", run.date),
        ("text", _text(run.data)),
        ("record", Path(source).name if source != "record" else ""),
    ]
    hardware = [
        ("cpu", str(machine.get("cpu", ""))),
        ("cores", str(machine.get("cores", ""))),
        ("DRAM", size(memory) if isinstance(memory, int | float) else ""),
        ("os", str(machine.get("os", ""))),
        ("device", str(machine.get("device", ""))),
        ("flash", str(machine.get("disk", ""))),
        *((name, str(value)) for name, value in machine.items() if name not in known and value is not None),
    ]
    return [
        page.element("h2", "How it was measured"),
        page.element("p", method),
        page.facts(measured),
        page.element("h2", "Machine and versions"),
        page.element("p", machine_line(machine), "meta"),
        page.facts(hardware),
        page.facts(sorted(run.versions.items())),
        page.element("h2", "Run it again"),
        page.element("pre", run.command),
    ]


def _text(card: Mapping[str, Any]) -> str:
    """A data card in one line; nothing where none was kept."""
    if not card:
        return ""
    return (
        f"{card['source']}, {card['documents']:,} documents, {card['tokens']:,} tokens, "
        f"SHA-256 chain {card['sha256'][:16]}"
    )


def write_file(folder: Path, name: str, content: bytes) -> Path:
    """Write one file whole, or not at all. WorkbenchError where that cannot be done."""
    path, part = folder / name, folder / f".{name}.part"
    if path.exists() and not path.is_file():
        raise WorkbenchError(f"report: {path} is not a regular file; choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True) if folder.is_dir() and os.access(folder, os.W_OK) else None
        raise WorkbenchError(
            f"report: could not write {path} ({error.strerror}); free space or choose another --out"
        ) from error
    return path
