"""Active neurons on disk: back by layer, cut off anywhere, damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from workbench.capture.spill import ActiveSpill
from workbench.errors import DataError


def stretches(layers: int, seed: int = 0) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(4):
        own = []
        for _ in range(layers):
            counts = rng.integers(0, 6, 10)
            own.append((counts, rng.integers(0, 1 << 16, counts.sum()).astype(np.uint16)))
        made.append(own)
    return made


def fill(spill: ActiveSpill, parts: list[list[tuple[np.ndarray, np.ndarray]]]) -> None:
    for own in parts:
        for at, (counts, ids) in enumerate(own):
            spill.add(at, counts, ids)


@pytest.mark.parametrize("named", [True, False])
def test_spilled_ids_come_back_by_layer(tmp_path: Path, named: bool) -> None:
    parts = stretches(3)
    with ActiveSpill(tmp_path / "ids" if named else None, 3, 1 << 16) as spill:
        fill(spill, parts)
        assert spill.stretches == 4
        for at in range(3):
            ids, offsets = spill.layer(at)
            assert np.array_equal(ids, np.concatenate([own[at][1] for own in parts]))
            assert np.array_equal(np.diff(offsets), np.concatenate([own[at][0] for own in parts]))
            assert ids.dtype == np.uint16
        with pytest.raises(ValueError, match="layer 2"):
            spill.add(2, *parts[0][2])


def test_a_cut_spill_goes_on_after_its_last_whole_stretch(tmp_path: Path) -> None:
    parts, path = stretches(2), tmp_path / "ids"
    with ActiveSpill(path, 2, 1 << 16, "request") as spill:
        fill(spill, parts)
    whole = path.read_bytes()
    seen = set()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with ActiveSpill(path, 2, 1 << 16, "request") as spill:
            seen.add(spill.stretches)
            fill(spill, parts[spill.stretches :])
            assert np.array_equal(spill.layer(1)[0], np.concatenate([own[1][1] for own in parts]))
        assert path.read_bytes() == whole
    assert seen == {0, 1, 2, 3}
    with ActiveSpill(path, 2, 1 << 16, "another request") as spill:
        assert spill.stretches == 0


def test_a_damaged_spill_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    with ActiveSpill(path, 2, 1 << 16) as spill:
        fill(spill, stretches(2))
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged"):
            spill.layer(1)
    with pytest.raises(DataError, match="cannot be kept"):
        ActiveSpill(tmp_path / "no" / "ids", 2, 8)
