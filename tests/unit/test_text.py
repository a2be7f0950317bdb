"""Reading text: layouts, damage, packing, splitting, and positions to come back to."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from workbench.capture.text import (
    TokenStream,
    data_card,
    documents,
    source_identity,
    split_of,
    token_windows,
    windows_and_card,
)
from workbench.errors import DataError

SHARED = Path(__file__).parents[3] / "shared" / "data" / "c4_en_2000.json.gz"


class Letters:
    """A real, if small, tokenizer: one token a character, 0 ends a text."""

    eos_token_id: int | None = 0

    def __call__(self, texts: list[str], add_special_tokens: bool, verbose: bool) -> dict[str, Any]:
        return {"input_ids": [[ord(c) for c in text] for text in texts]}

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return ord(token) if len(token) == 1 else None

    def convert_ids_to_tokens(self, number: int) -> str:
        return chr(number)


def write_json(path: Path, texts: list[str]) -> Path:
    body = "".join(json.dumps({"text": t, "timestamp": "2019", "url": "u"}) + "\n" for t in texts).encode()
    path.write_bytes(gzip.compress(body) if path.name.endswith(".gz") else body)
    return path


def test_c4_layout_from_file_and_directory(tmp_path: Path) -> None:
    write_json(tmp_path / "c4.00001.json.gz", ["three", "four"])
    write_json(tmp_path / "c4.00000.json.gz", ["one", "two\nlines"])
    (tmp_path / "README").write_text("not data")
    assert list(documents(tmp_path)) == ["one", "two\nlines", "three", "four"]
    assert list(documents(tmp_path, 1, 3)) == ["two\nlines", "three"]
    assert list(documents(tmp_path / "c4.00001.json.gz", 1)) == ["four"]
    assert list(documents(write_json(tmp_path / "more.jsonl", ["a", "b"]))) == ["a", "b"]


def test_plain_text_is_gathered_into_documents(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("short\n\n" + "x" * 2500 + "\n\nlast paragraph\nof two lines\n")
    assert list(documents(path)) == ["short\n\n" + "x" * 2500, "last paragraph\nof two lines"]


def damaged(tmp_path: Path, kind: str) -> Path:
    good = gzip.compress(b"".join(json.dumps({"text": f"{i} " * 400}).encode() + b"\n" for i in range(50)))
    path = tmp_path / "shard.json.gz"
    if kind == "truncated":
        path.write_bytes(good[: len(good) // 2])
    elif kind == "flipped":
        path.write_bytes(good[:40] + bytes(b ^ 0x55 for b in good[40:60]) + good[60:])
    elif kind == "not gzip":
        path.write_bytes(b'{"text": "plain"}\n')
    else:
        lines = {
            "not json": b'{"text": "fine"}\n{"text": \n',
            "no text": b'{"text": "fine"}\n{"body": "x"}\n',
            "text a number": b'{"text": "fine"}\n{"text": 3}\n',
            "a list": b'{"text": "fine"}\n[1]\n',
            "not utf-8": b'{"text": "fine"}\n{"text": "\xff"}\n',
        }[kind]
        path = tmp_path / "shard.jsonl"
        path.write_bytes(lines)
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("truncated", "damaged gzip after line"),
        ("flipped", "damaged gzip after line"),
        ("not gzip", "damaged gzip after line 0"),
        ("not json", "line 2 is not JSON"),
        ("no text", "line 2 has no 'text'"),
        ("text a number", "line 2 has no 'text'"),
        ("a list", "line 2 has no 'text'"),
        ("not utf-8", "line 2 is not UTF-8"),
    ],
)
def test_damage_names_file_and_line(tmp_path: Path, kind: str, says: str) -> None:
    path = damaged(tmp_path, kind)
    with pytest.raises(DataError) as caught:
        list(documents(path))
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_empty_and_binary_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        documents(tmp_path / "absent")
    with pytest.raises(DataError, match=r"no \.json\.gz"):
        documents(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"PK\0\0")
    with pytest.raises(DataError, match="line 1 holds binary data"):
        list(documents(tmp_path / "model.bin"))


def test_c4_without_the_datasets_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # Python then raises ImportError for it
    with pytest.raises(DataError, match=r"pip install 'flash-workbench\[data\]'"):
        next(documents("c4"))


def test_windows_are_packed_with_end_of_text_between_documents() -> None:
    windows = list(token_windows(["abc", "", "de", "fghij"], Letters(), 4))
    assert all(w.dtype == np.int64 for w in windows)
    joined = [c for t in ("abc", "de", "fghij") for c in [*map(ord, t), 0]]
    assert np.concatenate(windows).tolist() == joined[: len(joined) // 4 * 4]
    assert [w.shape for w in windows] == [(4,)] * (len(joined) // 4)


def test_a_tokenizer_without_end_of_text_is_refused() -> None:
    words = Letters()
    words.eos_token_id = None
    with pytest.raises(DataError, match="end-of-text"):
        list(token_windows(["abc"], words, 2))


def test_card_counts_and_chains_what_was_read(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", ["abc", "de"])
    card = data_card(path, Letters())
    link = hashlib.sha256(hashlib.sha256(b"abc").digest()).digest()
    link = hashlib.sha256(link + hashlib.sha256(b"de").digest()).digest()
    assert (card.source, card.documents, card.tokens, card.sha256) == ("a.jsonl", 2, 5, link.hex())
    assert data_card(path, Letters(), 0, 1).sha256 != card.sha256


def test_splits_are_disjoint_stable_and_near_their_share() -> None:
    parts = [split_of(f"document {i}", 0.2) for i in range(4000)]
    assert parts == [split_of(f"document {i}", 0.2) for i in range(4000)]
    share = {part: parts.count(part) / 4000 for part in ("train", "calibrate", "test")}
    assert share["train"] == pytest.approx(0.8, abs=0.03)
    assert share["calibrate"] == pytest.approx(0.1, abs=0.03)
    assert share["test"] == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stop_after", [0, 1, 7, 60])
def test_a_stream_goes_on_where_it_was_left(tmp_path: Path, stop_after: int, ahead: bool) -> None:
    path = write_json(tmp_path / "a.json.gz", [f"text {i} " * (i % 7 + 1) for i in range(80)])

    def stream() -> TokenStream:
        return TokenStream(path, Letters(), 32, lambda text: split_of(text, 0.2) == "train", loop=True, ahead=ahead)

    whole = stream()
    wanted = [next(whole) for _ in range(150)]  # several rounds of the text
    assert whole.round >= 1
    first, second = stream(), stream()
    for _ in range(stop_after):
        next(first)
    second.seek(json.loads(json.dumps(first.position())))
    rest = [next(second) for _ in range(150 - stop_after)]
    assert np.array_equal(np.stack(wanted[stop_after:]), np.stack(rest))
    assert second.card == whole.card
    kept = [t for t in documents(path) if split_of(t, 0.2) == "train"]
    assert whole.card.documents == len(kept)
    before = threading.active_count()
    for one in (whole, first, second):
        one.close()
    assert threading.active_count() == before - (3 if ahead and stop_after else 2 if ahead else 0)


def test_a_failure_ahead_is_met_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * 40}) + "\n" for _ in range(64)) + "not json\n")
    stream = TokenStream(path, Letters(), 41, lambda text: True, ahead=True)
    assert len([next(stream) for _ in range(64)]) == 64
    for _ in range(2):
        with pytest.raises(DataError, match="line 65 is not JSON"):
            next(stream)
    stream.close()


def test_a_text_without_tokens_does_not_loop_for_ever(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", ["", ""])
    assert list(TokenStream(path, Letters(), 4, lambda text: True, loop=True)) == []


def test_identity_changes_with_the_content(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", ["abc"])
    before = source_identity(path)
    assert before == source_identity(path)
    write_json(path, ["abd"])
    assert source_identity(path) != before
    assert source_identity("c4")["source"] == "c4"


@pytest.mark.skipif(not SHARED.exists(), reason="the shared C4 documents are not here")
def test_genuine_c4_documents() -> None:
    texts = list(documents(SHARED, 10, 20))
    assert len(texts) == 10
    assert all(len(text) > 20 for text in texts)


def write_parquet(path: Path, texts: list[Any], column: str = "text", rows: int = 3) -> Path:
    """Row groups of `rows`, so that starts fall inside and between them."""
    table = pyarrow.table({"id": list(range(len(texts))), column: texts})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


TEXTS = [f"text {i} " * (i % 5 + 1) for i in range(40)]


def columnar(tmp_path: Path, kind: str) -> str:
    """The same 40 documents, 1 or 2 files, in each of the layouts that have a column `text`."""
    if kind == "parquet":
        write_parquet(tmp_path / "b.parquet", TEXTS[17:])
        write_parquet(tmp_path / "a.parquet", TEXTS[:17])
    elif kind == "one file":
        return str(write_parquet(tmp_path / "a.parquet", TEXTS, rows=1000))
    elif kind == "saved":
        Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved", num_shards=2)
        return str(tmp_path / "saved")
    else:  # a data set's folder, as the hub lays it out: a configuration with two splits
        (tmp_path / "data").mkdir()
        write_parquet(tmp_path / "data" / "train-00000.parquet", TEXTS)
        write_parquet(tmp_path / "data" / "rest-00000.parquet", TEXTS[:2])
        lines = "".join(f"  - {{split: {split}, path: data/{split}-*}}\n" for split in ("train", "rest"))
        (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: own\n  data_files:\n{lines}---\n")
        return f"hub:{tmp_path}:own"
    return str(tmp_path)


LAYOUTS = ["parquet", "one file", "saved", "hub"]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout_gives_the_same_documents_by_number(tmp_path: Path, kind: str) -> None:
    source = columnar(tmp_path, kind)
    assert list(documents(source)) == TEXTS
    for start, stop in ((0, 1), (2, 9), (3, 3), (16, 18), (39, None), (40, None), (0, 100)):
        assert list(documents(source, start, stop)) == TEXTS[start:stop]
    card = data_card(source, Letters())
    assert (card.documents, card.tokens) == (40, sum(map(len, TEXTS)))
    assert card.files == (1 if kind == "one file" else 2)
    json_card = data_card(write_json(tmp_path / "same.jsonl", TEXTS), Letters())
    assert card.sha256 == json_card.sha256


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout_has_positions_to_come_back_to(tmp_path: Path, kind: str) -> None:
    source = columnar(tmp_path, kind)

    def stream() -> TokenStream:
        return TokenStream(source, Letters(), 32, lambda text: True, loop=True)

    whole, first, second = stream(), stream(), stream()
    wanted = [next(whole) for _ in range(80)]
    for _ in range(37):
        next(first)
    second.seek(json.loads(json.dumps(first.position())))
    assert np.array_equal(np.stack(wanted[37:]), np.stack([next(second) for _ in range(43)]))


def test_a_split_is_chosen_by_name(tmp_path: Path) -> None:
    source = columnar(tmp_path, "hub")
    assert list(documents(f"{source}:rest")) == TEXTS[:2]
    with pytest.raises(DataError, match=r"absent.*could not be streamed"):
        list(documents(f"{source}:absent"))


def test_identity_of_a_columnar_source_changes_with_its_content(tmp_path: Path) -> None:
    for kind in ("parquet", "hub"):
        folder = tmp_path / kind
        folder.mkdir()
        source = columnar(folder, kind)
        before = source_identity(source)
        assert before["files"] == 2
        assert before["sha256"]
        write_parquet(next(folder.rglob("*.parquet")), ["other"])
        assert source_identity(source) != before


def test_columns_that_hold_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'text' \(it has id, body\)"):
        list(documents(write_parquet(tmp_path / "a.parquet", ["x"], column="body")))
    with pytest.raises(DataError, match="row 4 has no text"):
        list(documents(write_parquet(tmp_path / "b.parquet", ["x", "x", "x", "x", None])))
    with pytest.raises(DataError, match="row 0 has no text"):
        list(documents(write_parquet(tmp_path / "c.parquet", [1, 2])))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_damaged_columnar_file_is_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    whole = write_parquet(tmp_path / "whole.parquet", TEXTS).read_bytes()
    for content in (b"", b"not columns at all", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.{kind}: cannot be read as {kind}") as caught:
            list(documents(path))
        assert "\n" not in str(caught.value)


def test_several_saved_splits_are_named(tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_dict({"text": ["a"]}), "test": Dataset.from_dict({"text": ["b"]})}).save_to_disk(
        tmp_path / "both"
    )
    with pytest.raises(DataError, match=r"several splits \(test, train\)"):
        documents(tmp_path / "both")
    assert list(documents(tmp_path / "both" / "test")) == ["b"]


def test_what_is_missing_for_columns_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"`pyarrow` is not installed; pip install 'flash-workbench\[data\]'"):
        list(documents(path))


def test_a_data_set_that_the_hub_does_not_give_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("Name or service not known\nand much more")

    monkeypatch.setattr("datasets.load_dataset", no_network)
    for source, says in (
        ("owner/name", "no such file or directory, and it could not be streamed"),
        ("owner/name:config:test", "no such file or directory, and it could not be streamed"),
        ("hub:owner/name", "hub:owner/name: could not be streamed"),
        ("c4", "c4: could not be streamed"),
    ):
        with pytest.raises(DataError) as caught:
            next(documents(source))
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_names_of_data_sets(tmp_path: Path) -> None:
    named = {
        "hub:owner/name": "owner/name:train",
        "owner/name:config": "owner/name:config:train",
        "owner/name::test": "owner/name:test",
        "hub:name:config:test": "name:config:test",
    }
    for source, name in named.items():
        assert source_identity(source) == {"source": name, "files": 0, "bytes": 0, "sha256": ""}
    for wrong in ("hub:", "hub:a:b:c:d"):
        with pytest.raises(DataError, match="not a data set's name"):
            source_identity(wrong)
    for path in ("some/text.jsonl", "./owner/name", "a/b/c", str(tmp_path / "absent")):
        with pytest.raises(DataError, match="no such file"):
            source_identity(path)


def test_a_card_shows_itself_in_a_line_and_in_a_notebook(tmp_path: Path) -> None:
    card = data_card(write_json(tmp_path / "<a>.jsonl", ["abc", "de"]), Letters())
    assert str(card) == f"<a>.jsonl, files 1, documents 2, tokens 5, SHA-256 chain {card.sha256[:16]}"
    assert "&lt;a&gt;.jsonl" in card._repr_html_()


def test_windows_come_with_the_card_of_what_was_read_for_them(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", ["x" * 9] * 100)
    windows, card = windows_and_card(path, Letters(), 10, 3)
    assert [w.shape for w in windows] == [(10,)] * 3
    assert (card.documents, card.tokens) == (32, 9 * 32)


def test_half_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "\\ud800 lone"}\n')
    with pytest.raises(DataError, match=r"half\.jsonl: document 1 holds half of a surrogate pair at character 0"):
        list(documents(path))


def test_an_empty_name_is_not_the_present_folder() -> None:
    with pytest.raises(DataError, match="its name is empty"):
        documents("")
