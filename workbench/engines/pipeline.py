"""What every engine over a flash store shares: its setting, reader, windows and life. A backend adds the arithmetic."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, Self

import numpy as np
import torch

from workbench.ablation import Ablation
from workbench.engines.budget import DramPlan, compute_threads, context_tokens, plan_dram, slot_bytes
from workbench.engines.ffn import Biases, FlashFFN, PackedPredictor, Shared
from workbench.engines.prefetch import ReadAhead
from workbench.engines.prompt import check_prompt
from workbench.engines.setting import Setting
from workbench.engines.speculative import Draft, Drafting, draft_and_verify
from workbench.engines.stats import StepClock, TokenStats
from workbench.engines.text import TextEngine
from workbench.errors import AblationError, BudgetError, DataError, StoreError, WorkbenchError
from workbench.flash.placement import Placement, check_present, read_placement
from workbench.flash.reader import FlashReader, aligned_buffer
from workbench.flash.store import Store
from workbench.models import family
from workbench.predictor.fingerprint import fingerprint
from workbench.predictor.low_rank import LayerPredictor, Predictors
from workbench.spec import RunSpec


class FlashEngine(TextEngine):
    """Runs a store. Not for several threads at once, but for `check`.

    `setting`, or its parts `ablation`, `run` and `predictors`, may be set at any time and hold from the next token on;
    the text so far (the KV cache) stays. What cannot be is refused at once; what fails while it is being set up (flash
    that cannot be read) leaves the former setting in use. `plan` says where the DRAM goes. Close it, or use it in
    `with`, to give back its threads, files and DRAM.
    """

    backend: str
    prompt_ways: tuple[str, ...] = ("union",)
    """Of `RunSpec.prompt_neurons`, what the backend has."""

    def __init__(self, store: Store, ablation: Ablation, predictors: Predictors | None, run: RunSpec):
        self.store, self.spec, self.family = store, store.spec, family(store.spec.model_type)
        self.position = 0
        self._fingerprint: str | None = None
        self._placement: Placement | None = None
        self._drafting = Drafting(store, self.backend)
        self._wanted = Setting(ablation, run, predictors)
        self._present: Setting | None = None  # what is set up; None while it is not known to be whole
        self.plan = self.check(self._wanted)
        self.clock = StepClock()
        self.reader: FlashReader | None = None
        self._spare: tuple[tuple[str, int, int], FlashReader] | None = None  # opened when a setting asked for it
        self.model: Any = None
        self.weights: Any = None
        self.cache: Any = None
        self.shared: Any = None  # Shared, once set up
        self.ffns: list[FlashFFN] = []
        self._closed = False
        try:
            self._begin()
            self._set_up(self._wanted)
            self.reset()
        except BaseException:
            self.close()
            raise

    # what a backend adds

    @abstractmethod
    def _begin(self) -> None:
        """Make `model`, still without weights, and `weights`, which brings groups of the store."""

    @abstractmethod
    def _new_ffn(self, shared: Shared, layer: int) -> FlashFFN:
        """The FFN of a layer, in its place in the model."""

    @abstractmethod
    def _new_cache(self, capacity: int) -> Any:
        """An empty KV cache of every layer."""

    @abstractmethod
    def _bias(self, name: str) -> np.ndarray[Any, Any] | None:
        """A copy, float32, of a resident tensor that no module holds."""

    @abstractmethod
    def _logits(self, ids: list[int], keep: int) -> torch.Tensor:
        """Logits float32 [keep, vocab] of the last of `ids`, which follow the text so far."""

    def _use_threads(self, threads: int) -> None:
        """The threads of the CPU's kernels have changed."""

    def _buffer(self, nbytes: int) -> np.ndarray[Any, Any]:
        """uint8 [nbytes] on a page boundary, where neurons lie while the arithmetic reads them."""
        return aligned_buffer(nbytes)

    def _ahead_buffer(self, nbytes: int) -> np.ndarray[Any, Any]:
        """uint8 [nbytes] on a page boundary, which neurons that are read ahead go through."""
        return aligned_buffer(nbytes)

    def _pack(self, layer: LayerPredictor) -> Any:
        """A layer's predictor as the backend's kernels take it."""
        return PackedPredictor(layer)

    # life

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it has given everything back."""
        return self._closed

    def close(self) -> None:
        """Give back files, threads and DRAM. The engine cannot be used afterwards."""
        self._closed, self._present = True, None
        self._drafting.close()
        if self.shared is not None and self.shared.ahead is not None:
            self.shared.ahead.close()
        for reader in (self.reader, self._spare[1] if self._spare else None):
            if reader is not None:
                reader.close()
        self.ffns, self.reader, self._spare = [], None, None
        self.model, self.cache, self.weights, self.shared = None, None, None, None

    def reset(self) -> None:
        """Forget the text so far: KV cache and neuron windows."""
        self._refuse_closed()
        self.cache = self._new_cache(context_tokens(self.store, self.run))
        self.position = 0
        for ffn in self.ffns:
            ffn.clear()
        self._drafting.reset()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise BudgetError("engine: it is closed; load the store again")

    # setting

    @property
    def setting(self) -> Setting:
        """Techniques, run and predictors from the next token on."""
        return self._wanted

    @setting.setter
    def setting(self, value: Setting) -> None:
        self._refuse_closed()
        self.check(value)  # refused now, not in the middle of a token
        self._open_ahead(value)
        self._wanted = value

    @property
    def ablation(self) -> Ablation:
        """The techniques in use from the next token on."""
        return self._wanted.ablation

    @ablation.setter
    def ablation(self, value: Ablation) -> None:
        self.setting = dataclasses.replace(self._wanted, ablation=value)

    @property
    def run(self) -> RunSpec:
        """How the pipeline runs from the next token on. `seed` holds for the next `generate`."""
        return self._wanted.run

    @run.setter
    def run(self, value: RunSpec) -> None:
        self.setting = dataclasses.replace(self._wanted, run=value)

    @property
    def predictors(self) -> Predictors | None:
        """The predictors from the next token on, such as `engine.predictors.at(0.02)` for other thresholds."""
        return self._wanted.predictors

    @predictors.setter
    def predictors(self, value: Predictors | None) -> None:
        self.setting = dataclasses.replace(self._wanted, predictors=value)

    def check(self, setting: Setting) -> DramPlan:
        """Where the DRAM would go. AblationError, PredictorError, StoreError (not placed) or
        BudgetError when that cannot run, or when its
        context is shorter than the text so far. Changes nothing; any thread may ask while another makes tokens."""
        if setting.ablation.predictor == "low_rank" and setting.predictors is None:
            raise AblationError(
                "ablation: predictor='low_rank' needs trained predictors; "
                "pass --predictors DIR or use predictor='oracle'"
            )
        if setting.predictors is not None:
            if self._fingerprint is None:
                rows = (self.store.activated_rows(i) for i in range(self.spec.num_layers))
                self._fingerprint = fingerprint(rows)
            setting.predictors.check(self.spec, self._fingerprint)
        if setting.ablation.placement:
            if self._placement is None:
                self._placement = read_placement(self.store)
            check_present(self._placement)
        capacity = context_tokens(self.store, setting.run)
        if capacity < self.position:
            raise BudgetError(
                f"{self.store.path}: a context of {capacity} is shorter than the text so far, {self.position} tokens; "
                "reset first, or ask for a larger context"
            )
        check_prompt(setting, self.prompt_ways, self.backend)
        draft_bytes = self._drafting.check(setting)
        return plan_dram(self.store, setting.ablation, setting.predictors, setting.run, draft_bytes)

    def _open_ahead(self, setting: Setting) -> None:
        """Open the reader that a setting asks for, so that flash which cannot be read that way is refused now."""
        if self._spare is not None and self._spare[0] != setting.reader:
            self._spare[1].close()
            self._spare = None
        if self._spare is None and (self._present is None or self._present.reader != setting.reader):
            reader = FlashReader(setting.ablation.io, setting.run.depth, setting.run.chunk_bytes)
            try:
                paths = [self.store.bundled_path, self.store.split_path, self.store.resident_path]
                if setting.ablation.placement and self._placement is not None:
                    paths.append(self._placement.placed_path)
                for path in paths:
                    reader.close_file(reader.open(path))
            except BaseException:
                reader.close()
                raise
            self._spare = (setting.reader, reader)

    def settle(self) -> None:
        """Set up what is wanted now; the next token would do it. Where that fails, the setting is the former again."""
        self._refuse_closed()
        wanted, former = self._wanted, self._present
        if former is not None and former.same(wanted):
            return
        try:
            self._set_up(wanted)
        except BaseException:
            if former is not None:
                self._wanted = former
                if self._present is None:
                    with contextlib.suppress(WorkbenchError):  # flash is gone: the next token says so again
                        self._set_up(former)
            raise

    def _set_up(self, new: Setting) -> None:
        """From the present setting to another. What need not change, stays; what goes is given back before anything
        new is filled. Until the end the engine counts as half-changed."""
        old, plan = self._present, self.check(new)
        self._open_ahead(new)
        self._present = None
        self._drafting.let_go(new)
        shared = self._take_shared(new)
        if len(shared.scratch) != plan.scratch_bytes:
            shared.scratch = aligned_buffer(0)
            shared.scratch = self._buffer(plan.scratch_bytes)
        self._make_ahead(shared, plan.ahead_bytes)
        slots = [ffn.slots.capacity if ffn.slots is not None else 0 for ffn in self.ffns]
        keep_slots = old is not None and (old.ablation.predictor == "off") == (new.ablation.predictor == "off")
        keep_slots = keep_slots and slots == list(plan.slots)
        if old is not None and new.ablation.predictor == "off":  # which neurons stay goes by their places on flash
            keep_slots = keep_slots and old.ablation.placement == new.ablation.placement
        if not keep_slots:
            for ffn in self.ffns:
                ffn.slots = None
        for layer in self._cache_layers():
            layer.resize(context_tokens(self.store, new.run), new.run.kv_dtype)
        if old is None or old.ablation.hybrid != new.ablation.hybrid:
            self._bind_resident(shared, new.ablation.hybrid)
        low_rank = new.ablation.predictor == "low_rank"
        for index, ffn in enumerate(self.ffns):
            if low_rank and (ffn.predictor is None or old is None or old.predictors is not new.predictors):
                assert new.predictors is not None
                ffn.predictor = self._pack(new.predictors.layers[index])
            elif not low_rank:
                ffn.predictor = None
            if not keep_slots:
                ffn.set_slots(plan.slots[index])
            elif old is not None and old.ablation.windowing != new.ablation.windowing:
                ffn.clear()
        self._drafting.use(new)
        self._present, self.plan = new, plan

    def _make_ahead(self, shared: Shared, nbytes: int) -> None:
        """A reader-ahead with a buffer of that size; none for 0."""
        present = shared.ahead
        if present is not None and len(present.buffer) == nbytes:
            return
        if present is not None:
            shared.ahead = None
            present.close()
        if nbytes:
            shared.ahead = ReadAhead(self._ahead_buffer(nbytes), shared.slot_bytes)

    def _take_shared(self, new: Setting) -> Shared:
        """What all layers have in common, with the reader and the threads of a setting."""
        threads = compute_threads(new.run)
        if self._spare is not None:
            former, self.reader, self._spare = self.reader, self._spare[1], None
            if former is not None:
                former.close()
            files = (self.reader.open(self.store.bundled_path), self.reader.open(self.store.split_path))
            if self.shared is not None:
                self.shared.placed = None
        else:
            files = (self.shared.bundled, self.shared.split)
        assert self.reader is not None
        if self.shared is None:
            self.shared = Shared(
                self.store, new.run, self.clock, new.ablation, self.reader, *files, aligned_buffer(0),
                slot_bytes(self.store), 0,
            )  # fmt: skip
        shared: Shared = self.shared
        if shared.threads != threads:
            self._use_threads(threads)
        shared.ablation, shared.run, shared.reader, shared.threads = new.ablation, new.run, self.reader, threads
        shared.bundled, shared.split = files
        if new.ablation.placement and shared.placed is None:
            assert self._placement is not None
            shared.placed, shared.placement = self.reader.open(self._placement.placed_path), self._placement
        return shared

    def _bind_resident(self, shared: Shared, hybrid: bool) -> None:
        assert self.reader is not None
        if hybrid:
            self.weights.make_resident(self.reader)
        else:
            self.weights.make_streamed()
        layers = range(self.spec.num_layers)
        if not self.ffns:
            self.ffns = [self._new_ffn(shared, i) for i in layers]
            shared.ffns = self.ffns
        for i in layers:
            if not hybrid:
                # biases are a few KiB and part of the slots: they are read once
                self.weights.load(self.reader, f"layer.{i}")
            self.ffns[i].biases = self._biases(i)

    def _biases(self, layer: int) -> Biases:
        names = self.family.ffn_names(self.spec, layer)
        up, down, gate = (
            None if name is None else self._bias(name) for name in (names.up_bias, names.down_bias, names.gate_bias)
        )
        first = gate if self.spec.gated else up
        return Biases(
            np.zeros(self.spec.d_ff, np.float32) if first is None else first, up if self.spec.gated else None, down
        )

    def _cache_layers(self) -> Any:
        return self.cache.layers if self.cache is not None else ()

    # tokens

    def _forward(self, ids: list[int], keep: int = 1) -> torch.Tensor:
        """Logits float32 [keep, vocab] of the last of `ids`, which follow the text so far."""
        self.check_length(self.position + len(ids))
        for token in ids:
            if not 0 <= token < self.spec.vocab_size:
                raise DataError(f"token {token} is not one of the model's {self.spec.vocab_size:,}")
        try:
            logits = self._logits(ids, keep)
        except BaseException:
            self._take_back()
            raise
        self.position += len(ids)
        if not torch.isfinite(logits).all():
            too_large = "or keys and values too large for kv_dtype=float16; " if self.run.kv_dtype == "float16" else ""
            raise StoreError(
                f"{self.store.path}: logits that are not finite, so weights are damaged; {too_large}"
                "run `workbench verify` on it"
            )
        return logits

    def _take_back(self) -> None:
        """As if the tokens that are being taken had not been begun. Wherever that ended: the first layers have keys of
        tokens that the others never saw, and a table of slots may name neurons that never arrived."""
        if self.shared.ahead is not None:
            self.shared.ahead.drain()
        self.rewind(self.position)
        for ffn in self.ffns:
            ffn.clear()

    def step(self, token: int) -> tuple[torch.Tensor, TokenStats]:
        """Take one token; logits [vocab] for the next, and what it cost."""
        self.settle()
        self.clock.begin()
        logits = self._forward([token])[-1]
        return logits, self.clock.finish(self.position - 1)

    def prefill(self, ids: list[int], keep: int = 0) -> tuple[torch.Tensor, TokenStats]:
        """Take several tokens at once, each with its own neurons, the union of which is read once, or with all neurons
        (`RunSpec.prompt_neurons`); and what it cost.

        Returns logits [vocab] for the next token; with `keep`, logits [keep, vocab] after each of the last tokens.
        """
        if not ids:
            raise DataError("prompt: it has no tokens; give at least one word")
        if not 0 <= keep <= len(ids):
            raise ValueError(f"keep={keep} is not in 0..{len(ids)}, the tokens given")
        self.settle()
        self.clock.begin()
        self.shared.prompt = self.run.prompt_neurons
        try:
            logits = self._forward(ids, max(1, keep))
        finally:
            self.shared.prompt = "union"
        return logits if keep else logits[-1], self.clock.finish(self.position - 1)

    def verify(self, ids: list[int], window_end: int) -> torch.Tensor:
        """Take a few tokens at once; logits float32 [t, vocab] after each, to the bit those of `step` on torch-cpu.

        What it costs is added to the present token's clock. The neuron windows end at token `window_end` of these,
        counted from 1: the tokens behind it are expected to be taken back by `rewind`.
        """
        self.shared.window_end = window_end if len(ids) > 1 else 0
        try:
            return self._forward(ids, len(ids))
        finally:
            self.shared.window_end = 0

    @property
    def speculates(self) -> bool:
        return self.ablation.speculative

    def round(self, text: Sequence[int], most: int, ends: Collection[int] = ()) -> list[tuple[int, TokenStats]]:
        self.settle()
        return draft_and_verify(self, self._drafting.draft, self._drafting.acceptance, text, most, ends)

    def _introduce(self, ids: list[int], stats: TokenStats) -> TokenStats:
        if not self.speculates:
            return stats
        began = time.perf_counter()
        self._drafting.draft.take(ids)
        ms = 1000 * (time.perf_counter() - began)
        return dataclasses.replace(stats, draft_ms=ms, compute_ms=stats.compute_ms + ms, total_ms=stats.total_ms + ms)

    def use_draft(self, draft: Draft | None) -> None:
        """Draft with an object of one's own in place of the model of `RunSpec.draft`; None for that model again. Then
        switch `speculative` on.

        BudgetError, with nothing changed, when its bytes do not fit. Whoever made it closes it.
        """
        self._refuse_closed()
        former, self._drafting.given = self._drafting.given, draft
        try:
            self.plan = self.check(self._wanted)
        except BaseException:
            self._drafting.given = former
            raise
        self._present = None  # set up anew, before the next token

    def rewind(self, position: int) -> None:
        """Forget the text after its first `position` tokens. The neuron windows stay: they decide what is read, not
        what comes out."""
        if not 0 <= position <= self.position:
            raise ValueError(f"position={position} is not in 0..{self.position}, the tokens so far")
        for layer in self._cache_layers():
            layer.rewind(position)
        self.position = position
