"""Figure 9: neurons active, predicted and missed, by layer."""

from __future__ import annotations

from workbench.errors import RecordError
from workbench.report.analysis_figures import sparsity_figure
from workbench.report.analysis_records import SparsityRecord, read_sparsity
from workbench.report.numbers import NONE
from workbench.report.paper import paper
from workbench.report.reading import read_predictors
from workbench.report.records import PredictorCard
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import Drawn, Entry, Picture, Records, beside, measured, says
from workbench.report.tables.table5 import share
from workbench.report.words import card_caption

TITLE = "Figure 9: active, predicted and missed neurons, by layer"
METHOD = (
    "Active: of the dense model on text. Predicted and missed: from the predictors' card, on text that they never saw. "
    "Shares of a layer's neurons; they have no physical floor."
)


def draw(records: Records) -> Drawn:
    """From a record of kind sparsity; with a predictor's card also what is predicted and missed."""
    record = read_sparsity(records["sparsity"])
    card = read_predictors(records["predictors"]) if "predictors" in records else None
    active = 1 - sum(row.zeros for row in record.rows) / len(record.rows)
    theirs = 1 - paper().sparsity[paper().source["model"]]
    last, first = record.rows[-1], record.rows[0]
    headline = (
        f"Active: {beside(share(active), share(theirs))} (mean over layers); the last layer {share(1 - last.zeros)}, "
        f"the first {share(1 - first.zeros)}."
    )
    return Drawn(
        "figure9", TITLE, headline, says("figure9"), METHOD, (measured("sparsity", record),),
        (_table(record, card),), (Picture("Zeros by layer, and what is predicted", sparsity_figure(record, card)),),
        notes=(card_caption(card),) if card else ("No predictors were given.",),
    )  # fmt: skip


def _table(record: SparsityRecord, card: PredictorCard | None) -> Table:
    columns = (
        Column("active", "active", "here"),
        Column("predicted", "predicted", "here"),
        Column("missed", "missed", "here"),
        Column("of_active", "missed", "of the active, here"),
        Column("paper_active", "active", "paper"),
        Column("paper_predicted", "predicted", "paper"),
        Column("paper_of_active", "missed", "of the active, paper"),
    )
    blank = {c.key: NONE for c in columns}
    layers = {layer.layer: layer for layer in card.layers} if card else {}
    d_ff = _d_ff(card, len(record.rows))
    blocks: list[tuple[Line, ...]] = []
    sums: dict[str, float] = dict.fromkeys(("active", "predicted", "missed", "of_active"), 0.0)
    for row in record.rows:
        values = {"active": 1 - row.zeros}
        own = layers.get(row.layer)
        if own and d_ff:
            values |= {"predicted": own.predicted / d_ff, "missed": own.false_negative * own.active / d_ff}
            values["of_active"] = own.false_negative
        for name, value in values.items():
            sums[name] += value / len(record.rows)
        blocks.append((Line("measured", f"layer {row.layer}", blank | {k: share(v) for k, v in values.items()}),))
    families, model = paper().families, paper().source["model"]
    zeros, quality = families[model]["zeros"], families[model]
    cells = {k: share(v) for k, v in sums.items() if k == "active" or card}
    cells |= {"paper_active": share(1 - zeros), "paper_of_active": share(quality["false_negative"])}
    cells["paper_predicted"] = share(paper().reuse[0]["new_share"])
    blocks.append((Line("measured", "all layers", blank | cells),))
    note = f"Paper: {model}, means over layers; by layer its figure has curves and no numbers."
    return Table(f"Neurons by layer: {record.run.model}", "layer", columns, tuple(blocks), (note,))


def _d_ff(card: PredictorCard | None, layers: int) -> int | None:
    if card is None:
        return None
    model = card.about.get("model")
    d_ff = model.get("d_ff") if isinstance(model, dict) else None
    if len(card.layers) != layers or not isinstance(d_ff, int) or d_ff < 1:
        raise RecordError(f"{card.source}: is not the card of predictors for this model; pass the one that fits")
    return d_ff


ENTRY = Entry("figure9", TITLE, ("sparsity",), draw, ("predictors",))
