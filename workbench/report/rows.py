"""Builds tables from records: the ablation beside the paper's table 2, and one for each figure."""

from __future__ import annotations

from collections.abc import Callable

from workbench.report.numbers import NONE, chunk, count, ms, percent, ratio, size, speed, times
from workbench.report.paper import Paper, PaperRow, paper
from workbench.report.records import (
    PARTS,
    AblationRecord,
    AblationRow,
    FlashRecord,
    PredictorCard,
    ReuseRecord,
)
from workbench.report.table import Column, Line, Table

_ABLATION = (
    Column("total", "total", "ms"),
    Column("faster", "total", "vs naive"),
    Column("io", "io", "ms", rank=1),
    Column("io_faster", "io", "vs naive", rank=4),
    Column("mem", "mem", "ms", rank=3),
    Column("compute", "compute", "ms", rank=2),
    Column("predictor", "predictor", "ms", rank=5),
    Column("floor", "floor", "ms", rank=7),
    Column("over_floor", "total /", "floor", rank=6),
    Column("flash", "flash", "a token", group=1),
    Column("flash_less", "flash", "vs naive", group=1, rank=4),
    Column("reads", "reads", "a token", group=1, rank=3),
    Column("throughput", "read", "speed", group=1, rank=2),
    Column("dram", "DRAM", "planned", group=1, rank=1),
    Column("peak", "DRAM", "peak", group=1, rank=5),
)
_ENERGY = Column("per_joule", "tokens", "a joule", group=1, rank=4)


def ablation_table(record: AblationRecord) -> Table:
    """Each row's medians and p95 (ms a token), with the paper's table 2 and 3 in the same columns."""
    reference, naive = paper(), record.naive
    blocks = []
    for row in record.rows:
        lines = [_measured(row, naive), _p95(row)]
        published = reference.row_for(row.ablation)
        if published:
            lines.append(_published(published, reference))
        blocks.append(tuple(lines))
    synthetic = ", synthetic weights" if record.run.synthetic else ""
    title = f"Ablation: {record.run.model} ({record.run.dtype}{synthetic}), beside the paper's {reference.where}"
    measured = any(row.energy_j_per_token for row in record.rows)
    columns = (*_ABLATION, _ENERGY) if measured else _ABLATION
    return Table(title, "row", columns, tuple(blocks), ablation_notes(record, reference))


def _measured(row: AblationRow, naive: AblationRow | None) -> Line:
    cells = {part: ms(row.times[part].median) for part in PARTS}
    cells |= {
        "faster": times(ratio(naive.total, row.total) if naive else None),
        "io_faster": times(ratio(naive.times["io"].median, row.times["io"].median) if naive else None),
        "floor": ms(row.floor),
        "over_floor": times(ratio(row.total, row.floor)),
        "flash": size(row.flash_bytes),
        "flash_less": less(naive.flash_bytes if naive else None, row.flash_bytes),
        "reads": count(row.reads),
        "throughput": speed(row.throughput),
        "dram": size(row.dram_bytes),
        "peak": size(row.peak_rss_bytes),
    }
    if row.energy_j_per_token:
        cells["per_joule"] = f"{1 / row.energy_j_per_token:.3g}"
    return Line("measured", row.name, cells)


def _p95(row: AblationRow) -> Line:
    return Line("p95", "p95", {part: ms(row.times[part].p95) for part in PARTS})


def _published(row: PaperRow, reference: Paper) -> Line:
    naive = reference.naive
    cells = {
        "io": f"{row.io_ms:g}",
        "io_faster": times(naive.io_ms / row.io_ms),
        "flash": f"{row.flash_gb:g} GB",
        "flash_less": less(naive.flash_gb, row.flash_gb),
        "throughput": f"{row.throughput_gb_per_s:.2f} GB/s",
        "dram": f"{row.dram_gb:g} GB",
    }
    if row.cpu:
        cells |= {part: f"{row.cpu[f'{part}_ms']:g}" for part in ("mem", "compute", "total")}
        cells["faster"] = times(naive.cpu["total_ms"] / row.cpu["total_ms"])
    return Line("paper", "paper", cells)


def less(naive: float | None, value: float) -> str:
    """A row's bytes as a share of naive's: '1/46', or '100%' and other plain shares above a half."""
    part = ratio(naive, value)
    if part is None:
        return NONE
    return percent(1 / part) if part < 1.95 else f"1/{part:.0f}" if part >= 9.95 else f"1/{part:.1f}"


def ablation_notes(record: AblationRecord, reference: Paper) -> tuple[str, ...]:
    """What a reader has to know to trust the numbers; each a sentence."""
    ahead = (f"{row.name}: {', '.join(parts)}." for row in record.rows if (parts := reading_ahead(row)))
    return (*notes_without_prefetch(record, reference), *ahead)


def reading_ahead(row: AblationRow) -> list[str]:
    """What prefetch did for a row, in parts of a sentence; none where nothing is known."""
    parts = []
    if row.prefetched is not None:
        wasted = ratio(row.wasted, row.prefetched) or 0.0
        parts.append(f"{count(round(row.prefetched, 1))} neurons a token read ahead, {percent(wasted)} of them wasted")
    if row.wasted_bytes is not None:
        parts.append(f"{size(row.wasted_bytes)} a token wasted")
    if row.hidden_io_ms is not None:
        parts.append(f"{row.hidden_io_ms:.3g} ms of io hidden behind compute")
    return parts


def notes_without_prefetch(record: AblationRecord, reference: Paper) -> tuple[str, ...]:
    """`ablation_notes` for a page that says elsewhere what was read ahead."""
    all_row = reference.all
    notes = [
        f"Medians a token over {record.run.tokens:,} tokens, with the 95th percentile (p95) below; "
        "compute includes the predictor.",
        f"Paper: {reference.where}, {reference.source['dtype']}; io, flash, read speed and DRAM from its table 2; "
        f"mem, compute and total from its table 3 (CPU), where io of 'all' is {all_row.cpu['io_ms']:g} ms.",
        "Floor: the time that flash and memory allow for the same bytes, one after the other"
        + (
            " (the longer of the two where prefetch is on)." if _named(record, lambda r: r.uses(prefetch=True)) else "."
        ),
    ]
    if record.naive is None:
        notes.append("This record has no naive row, so no ratio to naive can be given.")
    if record.run.synthetic:
        notes.append("Synthetic weights: for latency only; the text that such a model writes means nothing.")
    buffered = _named(record, lambda row: row.uses(io="buffered"))
    if buffered:
        notes.append(f"Read through the page cache (buffered), so not at flash speed: {buffered}.")
    oracle = _named(record, lambda row: row.uses(predictor="oracle"))
    if oracle:
        notes.append(f"Told which neurons are active (oracle), so no predictor runs: {oracle}.")
    if waited := [row for row in record.rows if row.waits]:
        shown = "; ".join(f"{row.name} {row.waits:g} times, {ms(row.wait_ms)} ms" for row in waited)
        notes.append(f"Backend {record.run.backend}: a token waits for the GPU (in compute): {shown}.")
        notes.append("On a GPU the predictor's time is that of the predictors timed by themselves.")
    sources = sorted({row.energy_source for row in record.rows if row.energy_source})
    if sources:
        notes.append(f"Energy: {'; '.join(sources)}.")
    for row in record.rows:
        if row.uses(speculative=True):
            notes.append(_speculation(row, record, reference))
        if row.window_trims:
            notes.append(f"{row.name}: the window was cut short {row.window_trims:,} times to keep the DRAM budget.")
    return tuple(notes)


def _speculation(row: AblationRow, record: AblationRecord, reference: Paper) -> str:
    """What drafting brought a row, beside the same row without it and beside the paper."""
    parts = [f"{row.draft_tokens} tokens at once are drafted by {row.draft}"] if row.draft else []
    if row.text:
        parts.append(f"text is its {row.text}")
    if row.acceptance is not None:
        parts.append(f"{percent(row.acceptance)} of the drafted tokens were accepted")
    if row.tokens_per_round is not None:
        parts.append(f"{row.tokens_per_round:.2f} tokens a round")
    if row.draft_ms is not None:
        parts.append(f"{ms(row.draft_ms)} ms a token of the draft model's, in compute")
    same = {**row.ablation, "speculative": False}
    base = next((other for other in record.rows if {"speculative": False, **other.ablation} == same), None)
    if base is not None:
        published = reference.speculative
        gain = times(ratio(base.total, row.total))
        parts.append(
            f"{gain} as fast as {base.name} (the paper: {published['gain']:g}×, "
            f"and {published['gain_in_dram']:g}× where all is in DRAM)"
        )
    return f"{row.name}: {'; '.join(parts)}."


def _named(record: AblationRecord, wanted: Callable[[AblationRow], bool]) -> str:
    return ", ".join(row.name for row in record.rows if wanted(row))


def neuron_table(record: AblationRecord) -> Table:
    """Neurons a token, all layers together: active, predicted, loaded, in the window."""
    columns = (
        Column("active", "active", "neurons"),
        Column("predicted", "predicted", "neurons"),
        Column("over", "predicted /", "active", rank=1),
        Column("loaded", "loaded", "neurons"),
        Column("in_window", "in DRAM", "neurons"),
        Column("trims", "window", "cuts", rank=2),
        Column("tokens", "tokens", "", rank=3),
    )
    blocks = []
    for row in record.rows:
        cells = {
            "active": count(row.active),
            "predicted": count(row.predicted),
            "over": times(ratio(row.predicted, row.active)),
            "loaded": count(row.loaded),
            "in_window": count(row.in_window),
            "trims": count(row.window_trims),
            "tokens": count(row.tokens),
        }
        blocks.append((Line("measured", row.name, cells),))
    note = "Active counts the computed neurons that fired; those that a trained predictor misses are not seen."
    return Table("Neurons a token, all layers together (mean)", "row", columns, tuple(blocks), (note,))


def flash_table(record: FlashRecord) -> Table:
    """Read throughput by chunk size; one column for each engine and thread count."""
    series = sorted({(p.direct, p.engine, p.threads) for p in record.rows}, key=lambda s: (not s[0], s[1], s[2]))
    # The page cache and the fewest threads go first where there is no room.
    least = sorted(series, key=lambda s: (s[0], s[2]), reverse=True)
    columns = [
        Column(f"{engine}/{direct}/{threads}", engine, f"{threads} deep", rank=least.index((direct, engine, threads)))
        for direct, engine, threads in series
    ]
    blocks = []
    for chunk_bytes in sorted({p.chunk_bytes for p in record.rows}):
        points = [p for p in record.rows if p.chunk_bytes == chunk_bytes]
        cells = {f"{p.engine}/{p.direct}/{p.threads}": speed(p.bytes_per_s) for p in points}
        blocks.append((Line("measured", chunk(chunk_bytes), cells),))
    notes = ()
    if record.fit:
        notes = (fit_sentence(record),)
    return Table("Read throughput by chunk size", "chunk", tuple(columns), tuple(blocks), notes)


def fit_sentence(record: FlashRecord) -> str:
    """The fitted cost model in words; empty where none was fitted."""
    if not record.fit:
        return ""
    fit = record.fit
    return (
        f"Fitted cost model: {fit['latency_us']:.3g} µs a read and {speed(fit['bytes_per_s'])}; "
        f"a gap of up to {chunk(round(fit['gap_bytes'] / 1024) * 1024)} is cheaper to read than to skip."
    )


def reuse_table(record: ReuseRecord) -> Table:
    """Shares of the FFN kept in DRAM and new for each window, beside the paper's."""
    columns = (Column("kept", "kept in DRAM", "of the FFN"), Column("new", "new a token", "of the FFN"))
    published = {point["window"]: point for point in paper().reuse}
    blocks = []
    for row in sorted(record.rows, key=lambda point: point.window):
        cells = {"kept": percent(row.kept_share), "new": percent(row.new_share)}
        lines = [Line("measured", f"k = {row.window}", cells)]
        if row.window in published:
            point = published[row.window]
            cells = {"kept": percent(point.get("kept_share")), "new": percent(point["new_share"])}
            lines.append(Line("paper", "paper", cells))
        blocks.append(tuple(lines))
    return Table("Neuron window: what is kept and what is new", "window", columns, tuple(blocks))


def predictor_table(card: PredictorCard) -> Table:
    """Quality of each layer's predictor, with the paper's mean figures as a last block."""
    columns = (
        Column("rank", "rank", "", rank=2),
        Column("fn", "false", "negative"),
        Column("fp", "false", "positive"),
        Column("active", "active", "neurons", rank=3),
        Column("predicted", "predicted", "neurons", rank=4),
        Column("over", "predicted /", "active"),
        Column("missed", "missed", "activation", rank=5),
        Column("weights", "share of", "weights", rank=1),
    )
    blocks = []
    for layer in sorted(card.layers, key=lambda item: item.layer):
        cells = {
            "rank": count(layer.rank),
            "fn": percent(layer.false_negative),
            "fp": percent(layer.false_positive),
            "active": count(layer.active),
            "predicted": count(layer.predicted),
            "over": times(layer.predicted_over_active),
            "missed": percent(layer.missed_activation),
            "weights": percent(layer.share_of_weights),
        }
        blocks.append((Line("measured", f"layer {layer.layer}", cells),))
    published = paper().predictors
    cells = {
        "fn": percent(published["false_negative"]),
        "fp": percent(published["false_positive"]),
        "over": times(published["predicted_over_active"]),
        "weights": percent(published["share_of_weights"]),
    }
    blocks.append((Line("paper", f"paper ({paper().source['model']})", cells),))
    notes = (f"The paper's ranks: {published['rank']}.",)
    return Table("Predictor quality by layer", "layer", columns, tuple(blocks), notes)
