"""The sentences of the report, computed from the records: no claim that the numbers do not make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from workbench.report.numbers import NONE, chunk, machine_line, ms, percent, ratio, short_commit, size, speed, times
from workbench.report.paper import paper
from workbench.report.records import AblationRecord, AblationRow, FlashRecord, PredictorCard, ReuseRecord
from workbench.report.rows import fit_sentence, less

METHOD = (
    "io is the time spent reading flash; mem inserts, evicts and moves neurons in DRAM; compute is arithmetic, the "
    "predictor's included and also shown apart. Times are medians a token, with the 95th percentile beside them; flash "
    "bytes and reads are means a token. DRAM is planned before anything is read, and measured after as peak resident "
    "memory. The floor is what flash and memory allow for the same bytes on this machine."
)


def headline(record: AblationRecord) -> str:
    """One sentence: all against naive in time and flash bytes, or the fastest row where either is missing."""
    naive, best = record.naive, record.all
    if naive is None or best is None:
        missing = "naive" if naive is None else "'all'"
        fastest = min(record.rows, key=lambda row: row.total)
        return (
            f"The fastest row, {fastest.name}, takes {ms(fastest.total)} ms a token and reads "
            f"{size(fastest.flash_bytes)} of flash; this record has no {missing} row to compare with."
        )
    gain = naive.total / best.total
    change = f"{times(gain)} faster" if gain >= 1 else f"{times(1 / gain)} slower"
    return (
        f"All techniques together make a token {change} than naive, {ms(best.total)} ms against {ms(naive.total)} ms, "
        f"and read {size(best.flash_bytes)} of flash where naive reads {size(naive.flash_bytes)}."
    )


def beside_paper(record: AblationRecord) -> str:
    """The paper's same ratio, and any faster row of ours beyond the paper."""
    reference, naive, best = paper(), record.naive, record.all
    gain = reference.naive.cpu["total_ms"] / reference.all.cpu["total_ms"]
    text = (
        f"The paper: {times(gain)} faster in total ({reference.where}, CPU, its table 3), "
        f"{reference.all.flash_gb:g} GB of flash where naive reads {reference.naive.flash_gb:g} GB (its table 2)."
    )
    fastest = min(record.rows, key=lambda row: row.total)
    if naive and best and fastest is not best and fastest is not naive:
        gain = naive.total / fastest.total
        text += f" The fastest row here, {fastest.name}, takes {ms(fastest.total)} ms ({times(gain)})."
    return text


def tiles(record: AblationRecord) -> list[tuple[str, str, str]]:
    """Value, what it is, the paper's: for the 'all' row, or the fastest one."""
    reference, naive = paper(), record.naive
    row = record.all or min(record.rows, key=lambda r: r.total)
    base, theirs = reference.naive, reference.all
    flash = less(naive.flash_bytes if naive else None, row.flash_bytes)
    io = ratio(naive.times["io"].median, row.times["io"].median) if naive else None
    return [
        (
            times(ratio(naive.total, row.total) if naive else None),
            f"faster than naive (row: {row.name})",
            f"paper: {times(base.cpu['total_ms'] / theirs.cpu['total_ms'])} (CPU)",
        ),
        (times(io), "faster io than naive", f"paper: {times(base.io_ms / theirs.io_ms)}"),
        (flash, "of naive's flash bytes a token", f"paper: {less(base.flash_gb, theirs.flash_gb)}"),
        (
            times(ratio(row.total, row.floor)),
            "the floor that flash and memory set",
            "paper: not given",
        ),
        (
            size(row.peak_rss_bytes),
            f"DRAM at its peak, {size(row.dram_bytes)} planned",
            f"paper: {theirs.dram_gb:g} GB of {base.flash_gb:g} GB",
        ),
    ]


def _split(row: AblationRow) -> str:
    return ", ".join(f"{part} {ms(row.times[part].median)}" for part in ("io", "mem", "compute")) + " ms"


def latency(record: AblationRecord) -> tuple[str, str, str]:
    """Here, the paper's, how: for the latency figure."""
    rows = [row for row in (record.naive, record.all) if row] or [min(record.rows, key=lambda r: r.total)]
    here = "; ".join(f"{row.name}: {_split(row)}" for row in rows) + "."
    reference = paper()
    parts = [
        f"{name}: " + ", ".join(f"{part} {row.cpu[f'{part}_ms']:g}" for part in ("io", "mem", "compute")) + " ms"
        for name, row in (("naive", reference.naive), ("all", reference.all))
    ]
    theirs = "; ".join(parts) + f" ({reference.where}, CPU, table 3)."
    return here, theirs, f"medians over {record.run.tokens:,} tokens; reader: {record.run.io}."


def throughput(record: FlashRecord) -> tuple[str, str, str]:
    """Here, the paper's, how: for the throughput figure."""
    direct = [p for p in record.rows if p.direct]
    points = direct or list(record.rows)
    most = max(p.threads for p in points)
    deep = sorted((p for p in points if p.threads == most), key=lambda p: (p.chunk_bytes, p.engine))
    first, last = deep[0], deep[-1]
    here = (
        f"{most} deep, {speed(first.bytes_per_s)} at {chunk(first.chunk_bytes)} and {speed(last.bytes_per_s)} at "
        f"{chunk(last.chunk_bytes)}{'' if direct else ', through the page cache'}. {fit_sentence(record)}".strip()
    )
    theirs = ", ".join(f"{p['gb_per_s']:.2f} GB/s {p['what']}" for p in paper().throughput)
    return here, f"{theirs} ({paper().source['machine']}).", "reads of each size, thread count and engine in turn."


def reuse(record: ReuseRecord) -> tuple[str, str, str]:
    """Here, the paper's, how: for the reuse figure."""
    window = paper().source["window"]
    point = min(record.rows, key=lambda p: abs(p.window - window))
    here = (
        f"k = {point.window} keeps {percent(point.kept_share)} of the FFN and reads {percent(point.new_share)} a token."
    )
    theirs = next(p for p in paper().reuse if p["window"] == window)
    return (
        here,
        f"k = {window} keeps {percent(theirs['kept_share'])} and reads {percent(theirs['new_share'])} "
        f"({paper().source['model']}).",
        f"over {record.run.tokens:,} tokens; new neurons are those that no token of the window used.",
    )


def predictors(card: PredictorCard) -> tuple[str, str, str]:
    """Here, the paper's, how: for the predictor figure."""
    layers, theirs = card.layers, paper().predictors
    mean = {name: sum(getattr(layer, name) for layer in layers) / len(layers) for name in _QUALITY}
    here = ", ".join(_QUALITY[name].format(percent(value), f"{value:.1f}") for name, value in mean.items())
    text = ", ".join(_QUALITY[name].format(percent(theirs[name]), f"{theirs[name]:.1f}") for name in _QUALITY)
    return (
        f"mean over {len(layers)} layers: {here}.",
        f"{text} ({paper().source['model']}).",
        "false negatives as a share of active neurons, false positives as a share of inactive ones.",
    )


def card_caption(card: PredictorCard) -> str:
    """The line under the predictor figure: what the card says of model, text, tokens, ranks and version."""
    about = card.about
    model, data, versions = (about.get(name) for name in ("model", "data", "versions"))
    ranks = sorted({layer.rank for layer in card.layers})
    parts = [model.get("name") if isinstance(model, Mapping) else model]
    parts.append("rank " + (f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"))
    if isinstance(data, Mapping):
        train, test = (part if isinstance(part := data.get(name), Mapping) else {} for name in ("train", "test"))
        # The name only: where a text lay on the trainer's machine is nobody's business.
        parts.append(f"trained on {PurePath(str(train['source'])).name}" if train.get("source") else None)
        parts.append(f"measured on {test['tokens']:,} held-out tokens" if isinstance(test.get("tokens"), int) else None)
    parts.append(f"stored as {about['store_dtype']}" if about.get("store_dtype") else None)
    if isinstance(versions, Mapping) and versions.get("flash-workbench"):
        parts.append(f"flash-workbench {versions['flash-workbench']}")
    parts += [f"commit {short_commit(str(about['commit']))}" if about.get("commit") else None, about.get("date")]
    return " · ".join(str(part) for part in parts if part)


_QUALITY = {
    "false_negative": "{0} false negatives",
    "false_positive": "{0} false positives",
    "predicted_over_active": "{1} predicted for each active",
    "share_of_weights": "{0} of the weights",
}


def comparable(record: AblationRecord, flash: FlashRecord | None, reuse: ReuseRecord | None) -> Sequence[str]:
    """Where the paper's figures may stand beside ours and where not."""
    reference, run = paper(), record.run
    source = reference.source
    items = [
        f"Ratios between rows may be compared; milliseconds and bytes may not: the paper runs {source['model']} "
        f"({source['dtype']}) on {source['machine']}, this record {run.model} ({run.dtype}) on "
        f"{machine_line(record.machine) or 'an unnamed machine'}.",
        f"The paper reads with {source['io']}; here: {run.io}.",
        f"The paper generates {source['generated_tokens']} tokens after {source['prompt_tokens']} of prompt, k = "
        f"{source['window']}; here {run.tokens:,} tokens"
        + (f", k = {run.window}." if run.window is not None else ", no neuron window."),
        f"The paper's 'all' has two io times: {reference.all.io_ms:g} ms in its table 2, "
        f"{reference.all.cpu['io_ms']:g} ms in its table 3 (CPU); "
        "the table of rows prints the first, the latency figure's caption the second.",
        "Sparsity, reuse and predictor quality belong to a model; compare them before any ratio that rests on them.",
    ]
    naive = record.naive
    if naive and naive.throughput:
        items.insert(
            1,
            f"The gain depends on how slow flash is beside compute: naive reads {speed(naive.throughput)} here, "
            f"{reference.naive.throughput_gb_per_s:.2f} GB/s in the paper.",
        )
    if run.synthetic:
        items.append("Synthetic weights: latency and bytes may be compared, text and accuracy may not.")
    if any(row.uses(io="buffered") for row in record.rows):
        items.append("Rows read through the page cache (buffered) measure DRAM as much as flash: not comparable.")
    for name, other in (("throughput", flash), ("reuse", reuse)):
        if other and dict(other.machine) != dict(record.machine):
            items.append(f"The {name} figure is of another machine: {machine_line(other.machine) or NONE}.")
    return items
