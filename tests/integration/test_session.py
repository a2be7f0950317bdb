"""A session: text in a thread, settings changed under it, bounded memory, everything given back."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import make_opt

from workbench import assets
from workbench.ablation import Ablation
from workbench.engines.budget import process_rss
from workbench.engines.setting import Setting
from workbench.engines.torch_cpu import TorchCpuEngine
from workbench.errors import AblationError, BudgetError, DataError, RecordError, StoreError, WorkbenchError
from workbench.experiments.convert import convert
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.report import read_ablation
from workbench.report.figures import latency_figure
from workbench.spec import RunSpec
from workbench.widgets.export import export, session_record
from workbench.widgets.session import Session
from workbench.widgets.stretch import INDEX, KEPT_TOKENS
from workbench.widgets.worker import TEXT_KEPT

ORACLE = Ablation(predictor="oracle")
RUN = RunSpec(dram="1GiB", context=48)
WAIT = 120.0


@pytest.fixture(scope="module")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A random OPT of two layers with the demo model's tokenizer."""
    root = tmp_path_factory.mktemp("session")
    model = make_opt(root / "model", vocab_size=8192)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(assets.path("data/demo-model") / name, model)
    return convert(model, root / "store")


@pytest.fixture
def session(tiny_store: Store) -> Iterator[Session]:
    with Session(TorchCpuEngine(tiny_store, ORACLE, None, RUN)) as opened:
        yield opened


def test_text_is_the_engines_own(demo_store: Store, demo_predictors: Predictors) -> None:
    run = RunSpec(dram="95%")
    with TorchCpuEngine(demo_store, Ablation(), demo_predictors, run) as engine:
        wanted = "".join(step.text for step in engine.generate("Once upon a time", 25))
    with Session(TorchCpuEngine(demo_store, Ablation(), demo_predictors, run)) as session:
        session.start("Once upon a time", tokens=12)
        assert session.wait(WAIT).line == "done: 12 tokens"
        session.go_on(tokens=12)  # the first token comes with the prompt
        shown = session.wait(WAIT)
        assert shown.text == "Once upon a time" + wanted
        assert shown.tokens == 24
        assert shown.rows[:, INDEX["number"]].tolist() == list(range(1, 25))


def test_a_change_is_marked_and_begins_a_stretch(session: Session) -> None:
    session.start("The farmer", tokens=20)
    session.wait(WAIT)
    before = session.pin()
    session.change(bundling=False, coalesce=False)
    session.change(window=8)
    session.wait(WAIT)
    session.go_on(tokens=20)
    shown = session.wait(WAIT)
    assert [m.words for m in shown.marks if m.kind == "setting"] == ["bundling off, coalesce off, window 8"]
    assert [m.token for m in shown.marks if m.kind == "setting"] == [21]
    assert (before.label, before.row["tokens"]) == ("start", 12)
    assert shown.now is not None
    assert shown.pinned is not None
    assert shown.now.row["tokens"] == 12
    assert shown.now.setting.run.window == 8
    assert shown.pinned.row == before.row
    assert shown.now.row["reads"] > shown.pinned.row["reads"]
    rows = shown.rows[-12:]
    assert shown.now.row["reads"] == rows[:, INDEX["reads"]].mean()
    assert shown.now.row["total_ms"] == np.median(rows[:, INDEX["total_ms"]])


def test_changes_while_text_streams(session: Session) -> None:
    session.start("The farmer", tokens=100_000)
    seen = set()
    for count in range(30):
        session.change(bundling=count % 2 == 0, window=count % 5)
        time.sleep(0.01)
        seen.add(session.snapshot().setting.run.window)
    session.change(bundling=False)
    session.stop()
    shown = session.wait(WAIT)
    assert not shown.error
    assert shown.line.startswith("stopped: ")
    assert shown.setting.ablation.bundling is False
    assert len(seen) > 1


def test_refusals_change_nothing(session: Session) -> None:
    before = session.setting
    refused: list[tuple[type[WorkbenchError], str, dict[str, Any]]] = [
        (AblationError, "undefined", {"predictor": "off"}),
        (AblationError, "low_rank", {"predictor": "low_rank"}),
        (AblationError, "window=-1", {"window": -1}),
        (AblationError, "no 'colour'", {"colour": 3}),
        (AblationError, "needs trained predictors", {"false_negative": 0.1}),
        (BudgetError, "too small", {"dram": "100kB"}),
    ]
    for kind, words, values in refused:
        with pytest.raises(kind, match=words) as caught:
            session.change(**values)
        assert "\n" not in str(caught.value)
    assert session.setting is before
    with pytest.raises(DataError, match="prompt"):
        session.start("  ")
    with pytest.raises(DataError, match="tokens=0"):
        session.start("x", tokens=0)
    with pytest.raises(DataError, match="12 are needed"):
        session.pin()
    session.go_on(5)
    assert "start with a prompt" in session.wait(WAIT).line
    session.start("word " * 100)
    shown = session.wait(WAIT)
    assert shown.error
    assert "do not fit the context of 48" in shown.line
    session.start("The farmer", tokens=3)
    assert session.wait(WAIT).line == "done: 3 tokens"  # none of it did any harm


def test_flash_that_fails_is_one_line_and_the_former_setting_stays(tiny_store: Store, tmp_path: Path) -> None:
    shutil.copytree(tiny_store.path, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    with Session(TorchCpuEngine(store, ORACLE, None, RUN)) as session:
        before = session.setting
        os.rename(store.split_path, tmp_path / "elsewhere")
        session.change(io="buffered")
        assert "ffn.split" in session.wait(WAIT).notice
        assert session.setting is before
        os.rename(tmp_path / "elsewhere", store.split_path)
        session.change(io="buffered")
        assert session.wait(WAIT).notice == ""
        assert session.setting.ablation.io == "buffered"
        session.start("The farmer", tokens=4)
        session.wait(WAIT)
        os.truncate(store.bundled_path, 0)
        session.go_on(100)
        shown = session.wait(WAIT)
        assert shown.error
        assert "short read" in shown.line
        assert "\n" not in shown.line


def test_reset_forgets_all_but_the_setting(session: Session) -> None:
    session.start("The farmer", tokens=15)
    session.wait(WAIT)
    session.pin()
    session.change(window=9)
    session.reset()
    shown = session.wait(WAIT)
    assert (shown.tokens, shown.text, shown.marks, len(shown.rows), shown.pinned) == (0, "", (), 0, None)
    assert shown.setting.run.window == 9
    session.stop()
    assert session.wait(WAIT).state == "ready"


def test_stop_before_text_has_begun_ends_the_wait(session: Session) -> None:
    for window in range(5, 25):  # each change keeps the thread busy when text is asked for and taken back
        session.change(window=window)
        session.start("hi", 500)
        session.stop()
        assert session.wait(WAIT).state == "stopped"


def test_closing_drops_what_was_asked_for(tiny_store: Store) -> None:
    opened = Session(TorchCpuEngine(tiny_store, ORACLE, None, RUN))
    opened.start("hi", 500)
    waiting = threading.Thread(target=opened.wait, daemon=True)
    waiting.start()
    opened.start("again", 500)
    opened.close()
    assert opened.wait(WAIT).state == "closed"
    waiting.join(WAIT)
    assert not waiting.is_alive()


def test_text_after_a_reset_is_running_and_is_stopped_by_the_next(session: Session) -> None:
    session.start("hi", 4)
    session.wait(WAIT)
    session.reset()
    session.start("hi there", 100_000)
    until = time.monotonic() + WAIT
    while session.snapshot().tokens < 8:
        assert session.running
        assert time.monotonic() < until
        time.sleep(0.01)
    session.start("new", 5)
    last = session.wait(WAIT)
    assert last.line == "done: 5 tokens"
    assert last.tokens < 100_000


def test_numbers_that_are_none_are_refused_by_name(session: Session) -> None:
    for value in (1.5, "a", True):
        with pytest.raises(WorkbenchError, match=f"window={value!r} is not a whole number"):
            session.change(window=value)
    assert session.setting.run.window == RUN.window


def test_thousands_of_tokens_do_not_grow_memory(session: Session) -> None:
    """2,000 tokens in a context of 48, which slides many times: nothing that is kept grows."""
    session.start("The farmer", tokens=600)  # allocators and caches have what they want
    session.wait(WAIT)
    gc.collect()
    objects, rss = len(gc.get_objects()), process_rss()
    session.go_on(tokens=2000)
    shown = session.wait(10 * WAIT)
    assert not shown.error, shown.line
    del shown
    gc.collect()
    after = session.snapshot()
    assert len(after.rows) == KEPT_TOKENS
    assert len(after.text) <= TEXT_KEPT + 2
    assert after.text.startswith("… ")
    assert [m for m in after.marks if m.kind == "context"]
    assert len(gc.get_objects()) - objects < 500
    assert process_rss() - rss < 8 << 20


def test_closing_gives_everything_back(tiny_store: Store) -> None:
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    session = Session(TorchCpuEngine(tiny_store, ORACLE, None, RUN))
    engine = weakref.ref(session._worker.engine)  # type: ignore[arg-type]
    session.start("The farmer", tokens=100_000)
    session.close()
    session.close()
    assert session.closed
    assert engine() is None
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (files, threads)
    for ask in (lambda: session.start("x"), session.stop, session.reset, lambda: session.change(window=1)):
        with pytest.raises(BudgetError, match="closed"):
            ask()
    assert session.snapshot().state == "closed"


def test_losing_the_last_reference_closes(tiny_store: Store) -> None:
    session = Session(TorchCpuEngine(tiny_store, ORACLE, None, RUN))
    thread = session._worker.thread
    session.start("The farmer", tokens=100_000)
    del session
    gc.collect()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_a_process_ends_while_text_streams(tiny_store: Store) -> None:
    code = (
        "from workbench.widgets.session import Session; from workbench import Ablation, RunSpec\n"
        f"s = Session.open({str(tiny_store.path)!r}, ablation=Ablation(predictor='oracle'), run=RunSpec(dram='1GiB'))\n"
        "s.start('The farmer', tokens=100000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT)
    assert (done.returncode, done.stderr) == (0, "")


def test_open_says_what_is_missing(tiny_store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        Session.open(tmp_path / "none")
    with pytest.raises(BudgetError, match="--dram"):
        Session.open(tiny_store.path, run=RunSpec(dram="1kB"))
    with Session.open(tiny_store.path, run=RUN) as session:
        assert session.setting.ablation.predictor == "oracle"


def test_exports_are_what_the_report_reads(session: Session, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="12 tokens"):
        export(session, tmp_path / "early.json")
    session.start("The farmer", tokens=14)
    session.wait(WAIT)
    session.change(bundling=False)
    session.wait(WAIT)
    session.go_on(5)  # too few for a row
    session.wait(WAIT)
    session.change(window=2, bundling=True)
    session.wait(WAIT)
    session.go_on(13)
    session.wait(WAIT)
    path = export(session, tmp_path / "made" / "live.json")
    record = read_ablation(path)
    assert [row.name for row in record.rows] == ["1. start", "3. bundling on, window 2"]
    assert [row.tokens for row in record.rows] == [6, 5]
    assert record.run.window is None  # the rows differ
    assert record.run.tokens == 11
    assert json.loads(path.read_text())["kind"] == "ablation"
    assert latency_figure(record).startswith(b"\x89PNG")
    assert r"3. bundling on, window 2 &" in export(session, tmp_path / "live.tex").read_text()
    assert "**1. start**" in export(session, tmp_path / "live.md").read_text()
    with pytest.raises(RecordError, match=r"\.tex"):
        export(session, tmp_path / "live.pdf")
    (tmp_path / "file").write_text("")
    for name in ("x.json", "x.md"):
        with pytest.raises(RecordError, match="cannot be written"):
            export(session, tmp_path / "file" / name)
    assert session_record(session)["rows"] == json.loads(path.read_text())["rows"]


def test_settings_change_by_name(tiny_store: Store) -> None:
    setting = Setting(ORACLE, RUN, None)
    other = setting.changed(window=7, bundling=False)
    assert other.difference(setting) == {"window": 7, "bundling": False}
    assert setting.changed(window=RUN.window).same(setting)
    with pytest.raises(AblationError, match="chunk_bytes=5000"):
        setting.changed(chunk_bytes=5000)
    with pytest.raises(AblationError, match="setting"):
        setting.changed(window="many")
