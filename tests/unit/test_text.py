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
import pytest

from workbench.capture.text import (
    TokenStream,
    data_card,
    documents,
    source_identity,
    split_of,
    token_windows,
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
