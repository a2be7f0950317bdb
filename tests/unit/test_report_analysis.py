"""Records of `workbench analyze`: read field by field, refused by name, drawn and tabled. Numbers of no machine."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from test_report_records import MACHINE, RUN, ablation_row, predictor_card, reuse_record

from workbench import report
from workbench.ablation import PAPER_ROWS
from workbench.errors import RecordError
from workbench.report.analysis_figures import added, between
from workbench.report.analysis_tables import fitting_sentence

PNG = b"\x89PNG\r\n\x1a\n"


def record(kind: str, **more: Any) -> dict[str, Any]:
    return copy.deepcopy({"schema": 1, "kind": kind, "machine": MACHINE, "run": RUN, **more})


def spread(zeros: float) -> dict[str, float]:
    return {
        "zeros": zeros,
        "p5": zeros - 0.1,
        "p25": zeros - 0.03,
        "p50": zeros,
        "p75": zeros + 0.01,
        "p95": zeros + 0.02,
    }


def sparsity_record() -> dict[str, Any]:
    rows = [{"layer": i, **spread(0.97 - 0.01 * i), "never": i, "top_tenth": 0.4} for i in range(8)]
    places = [{"first": f, "last": max(f, 2 * f - 1), **spread(0.7 + 0.02 * f.bit_length())} for f in (0, 1, 2, 4, 8)]
    return record("sparsity", rows=rows, by_token=spread(0.93), by_place=places)


def window_record() -> dict[str, Any]:
    rows = []
    for k, io in ((0, 9.0), (1, 5.0), (4, 3.0), (16, 2.0)):
        numbers = (io, 0.2, 2.0, 0.1, io, 300, 0.8, 40, 2.0)
        measured = ablation_row(f"k = {k}", PAPER_ROWS["+ bundling (all)"], numbers)
        slots = 1000 + 900 * k
        row: dict[str, Any] = {"window": k, "slots": slots, "slot_bytes": 4096 * slots, "fixed_bytes": 30_000_000}
        row |= {"need_bytes": 30_000_000 + 4096 * slots, "fits": k < 16, "measured": measured}
        rows.append(row)
    sizes = {"budget_bytes": 60_000_000, "model_bytes": 120_000_000, "largest_fitting": 4}
    return record("window", rows=rows, **sizes)


def coactivation_record() -> dict[str, Any]:
    ranks = [1, 2, 4, 8, 16, 32, 64, 127]
    rows = []
    for i in range(6):
        row: dict[str, Any] = {"layer": i, "active": 12.5, "never": 1, "top_share": 0.06, "friends_share": 0.3}
        row |= {"distinct_friends": 9, "hot_friends": 0.8, "top_friend": 0.5, "exponent": 0.4, "r2": 0.98}
        row |= {"rank_share": [0.9 * r**-0.4 for r in ranks], "popularity": [0.5 / r for r in ranks[:4]] + [0.0] * 4}
        row |= {"pairs": [100, 20, 5], "bundle_bytes": 1.9, "bundle_duplicates": 0.4, "bundle_all_duplicates": 0.49}
        row |= {"window_bytes": 1.95, "window_duplicates": 0.45, "window_all_duplicates": 0.47}
        rows.append(row)
    law = {"exponent": 0.4, "scale": 0.9, "r2": 1.0}
    head = {"friends": 8, "hottest": 0.01, "cost_tokens": 512, "ranks": ranks, "power_law": law}
    return record("coactivation", rows=rows, **head)


def aggregated_record() -> dict[str, Any]:
    tokens = [0, 1, 2, 4, 8]
    mean = [0.0, 0.1, 0.15, 0.2, 0.25]
    return reuse_record() | {"aggregated": {"tokens": tokens, "mean": mean, "by_layer": [mean, mean]}}


KINDS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[..., Any], Callable[..., bytes], Callable[..., Any]]] = {
    "sparsity": (sparsity_record, report.read_sparsity, report.sparsity_figure, report.sparsity_table),
    "aggregated": (aggregated_record, report.read_reuse, report.aggregated_figure, report.reuse_table),
    "window": (window_record, report.read_window, report.window_figure, report.window_table),
    "coactivation": (
        coactivation_record, report.read_coactivation, report.coactivation_figure, report.coactivation_table,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_drawn_and_tabled(kind: str) -> None:
    make, read, figure, table = KINDS[kind]
    found = read(make())
    assert read(found) is found
    drawn = figure(found)
    assert drawn.startswith(PNG)
    assert drawn == figure(read(make()))
    lines = list(table(found).lines())
    assert sum(line.kind == "measured" for line in lines) >= len(found.rows)
    assert len(report.to_markdown(table(found))) > 200


@pytest.mark.parametrize("kind", KINDS)
def test_each_missing_or_extra_field_is_named(kind: str) -> None:
    make, read, *_ = KINDS[kind]
    whole = make()
    optional = {"by_layer", "aggregated", "by_token", "by_place"}
    for name in set(whole) - optional:
        with pytest.raises(RecordError, match=name):
            read({key: value for key, value in whole.items() if key != name})
    with pytest.raises(RecordError, match="surplus"):
        read(whole | {"surplus": 1})
    for name in whole["rows"][0]:
        broken = make()
        del broken["rows"][0][name]
        with pytest.raises(RecordError, match=rf"rows\[0\]\.{name}"):
            read(broken)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("sparsity", "zeros", 1.2),
        ("sparsity", "p95", float("nan")),
        ("window", "fits", 1),
        ("window", "measured", 3),
        ("coactivation", "rank_share", [0.1]),
        ("coactivation", "popularity", [0.1] * 7 + ["x"]),
        ("coactivation", "exponent", "steep"),
        ("coactivation", "hot_friends", -0.1),
    ],
)
def test_wrong_values_are_named(kind: str, field: str, value: Any) -> None:
    make, read, *_ = KINDS[kind]
    broken = make()
    broken["rows"][0][field] = value
    with pytest.raises(RecordError, match=field):
        read(broken)


def test_records_of_earlier_versions_are_still_read() -> None:
    old = record("sparsity", rows=[{"layer": 0, "zeros": 0.9}])
    found = report.read_sparsity(old)
    assert (found.rows[0].spread, found.by_token, found.by_place) == (None, None, ())
    assert report.sparsity_figure(found).startswith(PNG)
    with pytest.raises(RecordError, match="aggregated"):
        report.aggregated_figure(report.read_reuse(reuse_record()))


def test_the_card_of_predictors_is_drawn_beside() -> None:
    read, card = report.read_sparsity(sparsity_record()), report.read_predictors(predictor_card())
    assert report.sparsity_figure(read, card) != report.sparsity_figure(read)
    with pytest.raises(RecordError, match="fits"):
        report.sparsity_figure(read, report.read_predictors(predictor_card(5)))


def test_added_use_adds_up() -> None:
    tokens, use = (0, 1, 2, 4, 8), (0.0, 0.1, 0.15, 0.2, 0.25)
    steps = [after - before for before, after in itertools.pairwise(tokens)]
    assert sum(a * s for a, s in zip(added(tokens, use), steps, strict=True)) == pytest.approx(0.25)
    assert between(tokens) == [0, 1, 2.5, 5.5]


def test_the_sentence_says_what_fits() -> None:
    data = window_record()
    assert "k = 4." in fitting_sentence(report.read_window(data))
    data["largest_fitting"] = 16
    assert "none of these is too long" in fitting_sentence(report.read_window(data))
    data["largest_fitting"] = None
    assert "None of these windows" in fitting_sentence(report.read_window(data))


def test_layers_without_any_firing_are_drawn() -> None:
    data: dict[str, Any] = coactivation_record() | {"power_law": None}
    for row in data["rows"]:
        row |= {"exponent": None, "r2": None, "rank_share": [0.0] * 8, "popularity": [0.0] * 8}
        for name in ("bundle", "window"):
            row |= {f"{name}_bytes": None, f"{name}_duplicates": None, f"{name}_all_duplicates": None}
    found = report.read_coactivation(data)
    assert report.coactivation_figure(found).startswith(PNG)
