"""Tables of what `workbench analyze` measures, beside the paper's figures where it gives them."""

from __future__ import annotations

from workbench.report.analysis_records import CoactivationRecord, SparsityRecord, WindowRecord
from workbench.report.numbers import NONE, count, ms, percent, size
from workbench.report.paper import paper
from workbench.report.table import Column, Line, Table


def zeros_text(value: float | None) -> str:
    """A share of zeros, exact enough near 100%: '97.3%'."""
    return NONE if value is None else f"{100 * value:.1f}%"


def sparsity_table(record: SparsityRecord) -> Table:
    """Share of zeros of each layer, its spread over tokens, and how evenly neurons are used; the paper's below."""
    columns = (
        Column("zeros", "zeros", "mean"),
        Column("p5", "zeros", "5th pct.", rank=1),
        Column("p50", "zeros", "median", rank=3),
        Column("p95", "zeros", "95th pct.", rank=2),
        Column("never", "never", "fire", rank=4),
        Column("top_tenth", "firing of the", "busiest tenth", rank=5),
    )
    blocks = []
    for row in record.rows:
        cells = {"zeros": zeros_text(row.zeros), "never": count(row.never), "top_tenth": percent(row.top_tenth)}
        if row.spread:
            low, _, middle, _, high = row.spread.quantiles
            cells |= {"p5": zeros_text(low), "p50": zeros_text(middle), "p95": zeros_text(high)}
        blocks.append((Line("measured", f"layer {row.layer}", cells),))
    mean = sum(row.zeros for row in record.rows) / len(record.rows)
    whole = [Line("measured", "all layers", {"zeros": zeros_text(mean)})]
    whole += [
        Line("paper", f"paper ({model})", {"zeros": zeros_text(value)}) for model, value in paper().sparsity.items()
    ]
    note = "Percentiles over tokens: at 5% of the tokens a layer has no more zeros than the 5th percentile says."
    return Table(
        f"FFN activations that are zero: {record.run.model}", "layer", columns, (*blocks, tuple(whole)), (note,)
    )


def window_table(record: WindowRecord) -> Table:
    """What each neuron window needs, and what it gives within the budget."""
    columns = (
        Column("need", "DRAM", "needed"),
        Column("slots", "of it", "slots", rank=2),
        Column("fits", "fits", "budget"),
        Column("total", "total", "ms"),
        Column("io", "io", "ms", rank=1),
        Column("mem", "mem", "ms", rank=4),
        Column("compute", "compute", "ms", rank=3),
        Column("flash", "flash", "a token"),
        Column("trims", "window", "cuts", rank=5),
    )
    blocks = []
    for row in record.rows:
        cells = {part: ms(row.measured.times[part].median) for part in ("total", "io", "mem", "compute")}
        cells |= {
            "need": size(row.need_bytes),
            "slots": size(row.slot_bytes),
            "fits": "yes" if row.fits else "no",
            "flash": size(row.measured.flash_bytes),
            "trims": count(row.measured.window_trims),
        }
        blocks.append((Line("measured", f"k = {row.window}", cells),))
    return Table(
        f"Neuron windows within {size(record.budget_bytes)} of DRAM: {record.run.model} ({record.run.dtype})",
        "window",
        columns,
        tuple(blocks),
        (
            fitting_sentence(record),
            f"Medians over {record.run.tokens:,} tokens. A window that does not fit is cut short where it has to be; "
            "window cuts counts how often.",
        ),
    )


def fitting_sentence(record: WindowRecord) -> str:
    """Which window fits, in words."""
    budget = f"{size(record.budget_bytes)} of DRAM ({record.run.dram})"
    if record.largest_fitting is None:
        return f"None of these windows fits {budget} whole."
    longest = max(row.window for row in record.rows)
    more = "; none of these is too long" if record.largest_fitting == longest else ""
    return f"The longest of these windows that fits {budget} whole is k = {record.largest_fitting}{more}."


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}×"


def coactivation_table(record: CoactivationRecord) -> Table:
    """Who fires with whom, layer by layer, and what bundles of closest friends would cost."""
    window = record.run.window
    columns = (
        Column("active", "active", "a token", rank=5),
        Column("top_share", "co-activation", "with the closest", rank=3),
        Column("exponent", "power law", "exponent", rank=4),
        Column("distinct", "distinct", "closest friends"),
        Column("hot", "closest is", f"in the hottest {percent(record.hottest)}"),
        Column("top", "closest is", "the same one", rank=2),
        Column("bytes", "bundles read", "no window"),
        Column("duplicates", "of them", "duplicates", rank=1),
        Column("window_bytes", "bundles read", f"k = {window}"),
        Column("window_duplicates", "of them", "duplicates", rank=1),
    )
    blocks = []
    for row in record.rows:
        cells = {
            "active": count(row.active),
            "top_share": percent(row.top_share),
            "exponent": NONE if row.exponent is None else f"{row.exponent:.2f}",
            "distinct": count(row.distinct_friends),
            "hot": percent(row.hot_friends),
            "top": percent(row.top_friend),
            "bytes": _ratio(row.bundle_bytes),
            "duplicates": percent(row.bundle_all_duplicates),
            "window_bytes": _ratio(row.window_bytes),
            "window_duplicates": percent(row.window_all_duplicates),
        }
        blocks.append((Line("measured", f"layer {row.layer}", cells),))
    notes = (
        f"Exact counts over {record.run.tokens:,} tokens, {record.d_ff:,} neurons a layer. Bundles read: bytes for the "
        "same neurons, each stored with a copy of its closest friend, over the bytes of single records; the fewest "
        f"bundles that hold them all, on {record.cost_tokens:,} tokens.",
        "Duplicates: share of the bytes that hold a neuron again, or one already in DRAM, when each wanted neuron's "
        "own bundle is read, as in the paper.",
        f"The paper has no numbers here ({paper().where}): {paper().coactivation['appendix_d']}.",
    )
    return Table(f"Co-activation: {record.run.model}", "layer", columns, tuple(blocks), notes)
