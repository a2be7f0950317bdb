"""The thread that makes a session's tokens: the only one that ever touches the engine.

Everything else asks it: a wish (start, go on, reset) or a setting is left under the lock, and taken between two tokens.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch

from workbench.engines.budget import process_rss
from workbench.engines.pipeline import FlashEngine
from workbench.engines.sampling import next_token
from workbench.engines.setting import Setting
from workbench.engines.stats import TokenStats
from workbench.errors import BudgetError, WorkbenchError
from workbench.report.numbers import ms
from workbench.widgets.stretch import Ring, Stretch, first_label, in_words

TEXT_KEPT = 4000
"""Characters of the text that are kept for showing."""
STRETCHES_KEPT = 32
MARKS_KEPT = 64
RSS_EVERY = 16
"""Tokens between two looks at the process's memory."""
State = Literal["ready", "running", "stopped", "closed"]


@dataclass(frozen=True)
class Wish:
    """Text to make: after `prompt` from an empty context, or after the text so far when it is None."""

    prompt: str | None
    tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    past_end: bool = True


@dataclass(frozen=True)
class Mark:
    """Something that happened before the token of that number: a setting changed, a text began, the context slid."""

    token: int
    kind: Literal["setting", "text", "context"]
    words: str


class Worker:
    """Owns an engine. Attributes are read and written under `lock` only, but for `engine`, which is the thread's."""

    def __init__(self, engine: FlashEngine, rss_before: int):
        self.engine: FlashEngine | None = engine
        self.rss_before, self.rss = rss_before, process_rss()
        self.lock = threading.Condition()
        self.setting, self.plan = engine.setting, engine.plan
        self.pending: Setting | None = None
        self.state: State = "ready"
        self.line, self.failed, self.notice = "ready", False, ""
        self.version = 0  # grows with everything that a view could show
        self.tokens = 0
        self.text, self.text_cut = "", False
        self.ring = Ring()
        self.marks: deque[Mark] = deque(maxlen=MARKS_KEPT)
        self.stretches: deque[Stretch] = deque(maxlen=STRETCHES_KEPT)
        self.stretches.append(Stretch(1, first_label(engine.setting), engine.setting, engine.plan.total))
        self._wish: Wish | None = None
        self.busy = False  # the thread is doing something that was asked for
        self._making = False  # and that is text
        self._reset_wanted = self._stop_wanted = self._closing = False
        # the text so far, the thread's own
        self._history: list[int] = []
        self._next: int | None = None  # sampled and shown, not yet taken by the engine
        self._sampling: tuple[Wish, torch.Generator, Any] | None = None
        self._last_time: float | None = None
        self.thread = threading.Thread(target=self._loop, name="workbench-session", daemon=True)
        self.thread.start()

    # asked from any thread

    def ask(
        self,
        *,
        wish: Wish | None = None,
        setting: Setting | None = None,
        stop: bool = False,
        reset: bool = False,
        close: bool = False,
    ) -> None:
        """Leave something to do; returns at once. BudgetError when the session is closed."""
        with self.lock:
            if self.state == "closed" and not close:
                raise BudgetError("session: it is closed; run the cell that opened it again")
            if wish is not None:
                self._wish, self._stop_wanted = wish, self._making
                self.state, self.line, self.failed = "running", "reading the prompt", False
            if setting is not None:
                self.pending, self.notice = setting, ""
            if stop or reset:
                self._wish, self._stop_wanted = None, True
                if self.state == "running" and not self._making:  # it had not begun
                    self.state, self.line = "stopped", "stopped: nothing was made"
            self._reset_wanted |= reset
            self._closing |= close
            self._changed()

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing is asked for. Under the lock."""
        return not (self.busy or self.state == "running" or self.pending or self._wish or self._reset_wanted)

    def close(self) -> None:
        """End the thread after the present token; the engine's DRAM, threads and files are given back."""
        if self.thread.is_alive():
            self.ask(close=True)
            if threading.current_thread() is not self.thread:
                self.thread.join()

    def _changed(self) -> None:
        self.version += 1
        self.lock.notify_all()

    # the thread

    def _loop(self) -> None:
        while True:
            with self.lock:
                while not (self._closing or self._wish or self._reset_wanted or self.pending):
                    self.lock.wait()
                if self._closing:
                    break
                self.busy = True
                wish, self._wish = self._wish, None
                self._making = wish is not None
                reset, self._reset_wanted = self._reset_wanted, False
                self._stop_wanted = False
            try:
                self._take_setting()
                if reset:
                    self._forget()
                if wish is not None:
                    self._make(wish)
            except BaseException as error:
                self._fail(error)
            with self.lock:
                self.busy = self._making = False
                self._changed()
        self._give_back()

    def _give_back(self) -> None:
        assert self.engine is not None
        self.engine.close()
        self.engine, self._sampling = None, None
        gc.collect()  # the decoder's modules refer to each other
        with self.lock:
            self.state, self.pending, self._wish, self._reset_wanted = "closed", None, None, False
            if not self.failed:
                self.line = "closed: DRAM, threads and files are given back"
            self._changed()

    def _fail(self, error: BaseException) -> None:
        with self.lock:
            self._making = False
            if self._wish is None:
                self.state, self.line, self.failed = "stopped", one_line(error), True
            else:  # other text was asked for meanwhile: that goes on
                self.notice = one_line(error)
            self._changed()

    def _take_setting(self) -> None:
        """Put the setting that was asked for in use. Where that fails the former stays, and the reason is shown."""
        engine = self.engine
        assert engine is not None
        with self.lock:
            new, self.pending = self.pending, None
        if new is None or new.same(engine.setting):
            return
        try:
            engine.setting = new
            engine.settle()
            notice = ""
        except (WorkbenchError, OSError, MemoryError) as error:
            notice = one_line(error)
        with self.lock:
            self.setting, self.plan, self.notice = engine.setting, engine.plan, notice
            if not notice:
                self._new_stretch(engine.setting)
            self._changed()
        self._last_time = None  # setting up is no token's time

    def _new_stretch(self, new: Setting) -> None:
        """Begin a stretch; one that has no token yet is replaced, as if both changes had been one."""
        last = self.stretches[-1]
        number = last.number + 1
        if not last.ring.count and len(self.stretches) > 1:
            self.stretches.pop()
            number = last.number
            if self.marks and self.marks[-1].kind == "setting":
                self.marks.pop()
        former = self.stretches[-1]
        changes = new.difference(former.setting)
        if not former.ring.count:
            self.stretches.pop()
            self.stretches.append(Stretch(former.number, first_label(new), new, self.plan.total))
            return
        words = in_words(changes) or "as before"
        self.stretches.append(Stretch(number, words, new, self.plan.total))
        self._mark("setting", words)

    def _mark(self, kind: Literal["setting", "text", "context"], words: str) -> None:
        self.marks.append(Mark(self.tokens + 1, kind, words))

    def _forget(self) -> None:
        assert self.engine is not None
        self.engine.reset()
        self._history, self._next, self._sampling, self._last_time = [], None, None, None
        with self.lock:
            if not (self._making or self._wish):
                self.state, self.line, self.failed = "ready", "ready", False
            self.text, self.text_cut, self.tokens, self.ring = "", False, 0, Ring()
            self.marks.clear()
            self.stretches.clear()
            self.stretches.append(Stretch(1, first_label(self.setting), self.setting, self.plan.total))
            self._changed()

    # tokens

    def _make(self, wish: Wish) -> None:
        """Make a wish's tokens, one after the other, until it is enough or something else is wanted."""
        self._last_time = None
        if wish.prompt is not None:
            self._begin(wish)
        elif self._sampling is None:
            raise BudgetError("continue: there is no text yet; start with a prompt")
        assert self._sampling is not None
        begun_with, generator, stream = self._sampling
        ends = self.engine.end_tokens if self.engine is not None else set()
        with self.lock:
            self.line = "running"
        made, ended = 0, False
        while made < wish.tokens and not ended:
            with self.lock:
                if self._stop_wanted or self._closing:
                    break
                waiting = self.pending is not None
            if waiting:
                self._take_setting()
            last = () if begun_with.past_end else ends
            for token in self._advance(begun_with, generator, wish.tokens - made, last):
                ended = token in last
                self._show(token, stream.push(token))
                made += 1
        with self.lock:
            self._making = False
            if self._wish is None and not self._reset_wanted:
                why = (
                    "end of the text" if ended else f"{made:,} of {wish.tokens:,} tokens" if made < wish.tokens else ""
                )
                self.state, self.line = "stopped", f"stopped: {why}" if why else f"done: {made:,} tokens"
            self._changed()

    def _begin(self, wish: Wish) -> None:
        """An empty context, and the prompt. The first token is sampled from its logits."""
        engine = self.engine
        assert engine is not None
        assert wish.prompt is not None
        ids = engine.encode(wish.prompt)
        if len(ids) > engine.context:
            engine.check_length(len(ids) + 1)
        engine.reset()
        logits, stats = engine.prefill(ids)
        stream, generator = engine.text_stream(), torch.Generator().manual_seed(wish.seed)
        self._sampling, self._history = (wish, generator, stream), ids
        token = next_token(logits, wish.temperature, wish.top_p, generator)
        self._next = token
        with self.lock:
            self.text, self.text_cut = wish.prompt + stream.push(token), False
            self._mark("text", f"prompt of {len(ids):,} tokens, {ms(stats.total_ms)} ms")
            self._changed()

    def _advance(self, wish: Wish, generator: torch.Generator, most: int, ends: Collection[int]) -> list[int]:
        """The engine takes the token that was sampled last; the next one, or with speculative decoding the next ones,
        no more than `most` and none after one of `ends`. Counted.

        When the KV cache is full, the text goes on from its last half: that is read again, as a prompt, without the
        token's cost being counted.
        """
        engine = self.engine
        assert engine is not None
        assert self._next is not None
        if engine.position < engine.context and engine.speculates:
            engine.refuse_sampling(wish.temperature)
            found = engine.round([*self._history, self._next], most, ends)
            self._history += [self._next, *(token for token, _ in found[:-1])]
            self._count([stats for _, stats in found])
            return [token for token, _ in found]
        if engine.position < engine.context:
            logits, stats = engine.step(self._next)
            self._history.append(self._next)
            self._count([stats])
            return [next_token(logits, wish.temperature, wish.top_p, generator)]
        kept = [*self._history, self._next][-max(1, engine.context // 2) :]
        engine.reset()
        logits, stats = engine.prefill(kept)
        self._history, self._last_time = kept, None
        with self.lock:
            self._mark("context", f"context of {engine.context:,} full: on from the last {len(kept):,} tokens")
        return [next_token(logits, wish.temperature, wish.top_p, generator)]

    def _count(self, found: list[TokenStats]) -> None:
        """Tokens that came together, which share the time equally."""
        now, before = time.perf_counter(), self._last_time
        self._last_time = now
        wall = float("nan") if before is None else 1000 * (now - before) / len(found)
        rss = process_rss() if self.tokens % RSS_EVERY < len(found) else None
        with self.lock:
            stretch = self.stretches[-1]
            for stats in found:
                self.tokens += 1
                self.ring.append(stats, self.tokens, wall)
                stretch.ring.append(stats, self.tokens, wall)
            if rss is not None:
                self.rss = rss
                stretch.rss_bytes = max(stretch.rss_bytes or 0, rss - self.rss_before)

    def _show(self, token: int, text: str) -> None:
        self._next = token
        with self.lock:
            self.text += text
            if len(self.text) > 2 * TEXT_KEPT:
                self.text, self.text_cut = self.text[-TEXT_KEPT:], True
            self._changed()


def one_line(error: BaseException) -> str:
    """A failure as one line; those that have no name of their own say their kind."""
    words = " ".join(str(error).split())
    return words if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {words}".rstrip(": ")
