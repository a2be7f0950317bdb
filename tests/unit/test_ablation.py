"""Ablation and RunSpec: what is refused, and with which words."""

from __future__ import annotations

import itertools

import pytest

from workbench.ablation import PAPER_ROWS, Ablation
from workbench.errors import AblationError
from workbench.spec import RunSpec, format_bytes, parse_bytes, parse_dram


def test_paper_rows_add_one_technique_at_a_time() -> None:
    rows = [(a.hybrid, a.predictor != "off", a.windowing, a.bundling) for a in PAPER_ROWS.values()]
    assert [sum(row) for row in rows] == [0, 1, 2, 3, 4]
    for before, after in itertools.pairwise(rows):
        assert all(now for then, now in zip(before, after, strict=True) if then)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"predictor": "off"}, ["windowing=True", "predictor='off'", "windowing=False"]),
        ({"predictor": "magic"}, ["predictor='magic'", "oracle"]),
        ({"io": "mmap"}, ["io='mmap'", "io_uring"]),
        ({"prefetch": True, "predictor": "off", "windowing": False}, ["prefetch=True", "predictor='off'"]),
        ({"placement": True, "bundling": False}, ["placement=True", "bundling=False", "set bundling=True"]),
        ({"hybrid": 1}, ["hybrid=1"]),
    ],
)
def test_undefined_combinations_are_refused_by_name(fields: dict, words: list[str]) -> None:
    with pytest.raises(AblationError) as caught:
        Ablation(**fields)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("3GiB", 3 << 30), ("500 MB", 500_000_000), ("4096", 4096), ("1.5kib", 1536), ("2B", 2)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert parse_dram(text, 7) == nbytes


def test_shares_are_of_the_model() -> None:
    assert parse_dram("50%", 1000) == 500
    assert parse_dram(" 12.5% ", 1000) == 125


@pytest.mark.parametrize("text", ["", "half", "-1", "5 parsecs", "%", "-5%", "1e9"])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_dram(text, 1000)


@pytest.mark.parametrize("fields", [{"window": -1}, {"depth": 0}, {"chunk_bytes": 1000}, {"chunk_bytes": 5000}])
def test_run_spec_checks(fields: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        RunSpec(**fields)


def test_bytes_are_written_in_decimal_units() -> None:
    assert [format_bytes(n) for n in (12, 1234, 93_503_488, 5.26e9)] == ["12 B", "1.23 kB", "93.5 MB", "5.26 GB"]
