"""Table 4: how good the predictors are, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.report import words
from workbench.report.evaluation import read_evaluation
from workbench.report.evaluation_figure import tradeoff_figure
from workbench.report.evaluation_table import evaluation_table
from workbench.report.figures import predictor_figure
from workbench.report.numbers import NONE, percent, ratio, times
from workbench.report.paper import paper
from workbench.report.reading import read_predictors
from workbench.report.records import PredictorCard
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import Drawn, Entry, Measured, Picture, Records, measured
from workbench.report.tables.rows import read_rows

TITLE = "Table 4: predictors, how good and at what cost"
SAYS = (
    "OPT-6.7B: 5% false negatives, 7% false positives, 3 neurons predicted for each active one, 2.4% of the weights, "
    "2.75% of the time on the CPU. These are the figures of its text on predictors; it gives no perplexity."
)
METHOD = "Means over layers on held-out text, from the predictors' card; time from the decoding of tokens."
_LINES = (
    ("false_negative", "false negatives, of the active", percent),
    ("false_positive", "false positives, of the inactive", percent),
    ("predicted_over_active", "predicted / active", times),
    ("share_of_weights", "share of FFN weights", percent),
    ("share_of_size", "share of the model's size", percent),
    ("share_of_time", "share of a token's time", percent),
    ("share_of_time_gpu", "share of a token's time, GPU", percent),
    ("mean_rank", "mean rank", lambda value: NONE if value is None else f"{value:.0f}"),
    ("threshold", "threshold", lambda value: NONE if value is None else f"{value:g}"),
)


def draw(records: Records) -> Drawn:
    """From a predictor's card; with an evaluation also perplexity and bytes by false-negative rate, with an ablation
    the predictors' share of a token's time."""
    card = read_predictors(records["predictors"])
    here = card_means(card)
    parts: list[Measured] = []
    tables, pictures = [], [Picture("Predictor quality by layer", predictor_figure(card))]
    if "ablation" in records:
        rows = read_rows(records["ablation"])
        parts.append(measured("ablation", rows.record))
        best = rows.record.all
        key = "share_of_time" if "cpu" in str(rows.record.machine.get("device", "cpu")) else "share_of_time_gpu"
        here[key] = ratio(best.times["predictor"].median, best.total) if best else None
    tables.append(families_table(here, card_name(card)))
    if "evaluation" in records:
        quality = read_evaluation(records["evaluation"])
        parts.append(measured("perplexity", quality))
        tables.append(evaluation_table(quality))
        pictures.append(Picture("What missed neurons cost and save", tradeoff_figure(quality)))
    theirs = paper().families["OPT-6.7B"]
    headline = (
        f"Here {percent(here['false_negative'])} of the active neurons are missed and "
        f"{times(here['predicted_over_active'])} as many predicted as active; the paper's OPT-6.7B: "
        f"{percent(theirs['false_negative'])} and "
        f"{times(theirs['predicted_over_active'])}."
    )
    return Drawn(
        "table4", TITLE, headline, SAYS, METHOD, tuple(parts), tuple(tables), tuple(pictures),
        notes=(words.card_caption(card), "Counts and shares have no physical floor; times are in tables 2 and 3."),
    )  # fmt: skip


def card_name(card: PredictorCard) -> str:
    """What the card's model is called."""
    model = card.about.get("model")
    return str(model.get("name", "this model")) if isinstance(model, Mapping) else str(model or "this model")


def card_means(card: PredictorCard) -> dict[str, float | None]:
    """Means over layers of what a card says, as the lines of the table name them."""
    names = ("false_negative", "false_positive", "predicted_over_active", "share_of_weights")
    found: dict[str, float | None] = {
        name: sum(getattr(layer, name) for layer in card.layers) / len(card.layers) for name in names
    }
    found["mean_rank"] = sum(layer.rank for layer in card.layers) / len(card.layers)
    return found


def families_table(here: Mapping[str, float | None], name: str) -> Table:
    """A line a figure: here, then each model of the paper."""
    families = paper().families
    columns = [Column("here", name, "here")]
    columns += [Column(family, family, "paper", rank=index) for index, family in enumerate(families)]
    blocks = []
    for key, label, write in _LINES:
        cells: dict[str, str] = {"here": write(here.get(key))}
        cells |= {family: write(_number(figures.get(key))) for family, figures in families.items()}
        blocks.append((Line("measured", label, cells),))
    ranks = "; ".join(f"{family}: {f['rank']}" for family, f in families.items() if "rank" in f)
    return Table(
        "Predictors here and in the paper", "figure", tuple(columns), tuple(blocks),
        (f"A dash: the paper prints no number, or it was not measured here. The paper's ranks: {ranks}.",),
    )  # fmt: skip


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


ENTRY = Entry("table4", TITLE, ("predictors",), draw, ("evaluation", "ablation"), SAYS)
