"""The engine `torch-cpu`: transformers' own decoder around FFNs that run from flash."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workbench.ablation import Ablation
from workbench.engines.budget import context_tokens, plan_dram, slot_bytes
from workbench.engines.ffn import Biases, FlashFFN, PackedPredictor, Shared
from workbench.engines.kv import PreallocatedLayer, cache_argument, new_cache
from workbench.engines.layers import use_stored_weights
from workbench.engines.resident import ResidentWeights
from workbench.engines.sampling import next_token
from workbench.engines.stats import StepClock, TokenStats
from workbench.engines.tokenizer import store_tokenizer
from workbench.errors import AblationError, BudgetError, DataError, StoreError
from workbench.flash.reader import FlashReader, aligned_buffer
from workbench.flash.store import Store
from workbench.models import family
from workbench.predictor.fingerprint import fingerprint
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec


@dataclass(frozen=True)
class Step:
    """One generated token: its id, the text that it adds, and what it cost."""

    token: int
    text: str
    stats: TokenStats


class TorchCpuEngine:
    """Runs a store on the CPU. Not for several threads at once.

    `ablation` may be set at any time and holds from the next token on. `plan` says where the DRAM goes. Close it, or
    use it in `with`, to give back its threads and files.
    """

    backend = "torch-cpu"

    def __init__(self, store: Store, ablation: Ablation, predictors: Predictors | None, run: RunSpec):
        self.store, self.run, self.predictors = store, run, predictors
        self.spec, self.family = store.spec, family(store.spec.model_type)
        if predictors is not None:
            predictors.check(store.spec, fingerprint(store.activated_rows(i) for i in range(store.spec.num_layers)))
        self._check(ablation)
        self.plan = plan_dram(store, ablation, predictors, run)
        self.threads = run.compute_threads or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        self.clock = StepClock()
        self.reader: FlashReader | None = None
        self.model: Any = self.family.skeleton(store.spec)
        self.weights = ResidentWeights(store, self.model, self.clock)
        self.ffns: list[FlashFFN] = []
        self._ablation, self._wanted = ablation, ablation
        self._packed: list[PackedPredictor] | None = None
        self._tokenizer: Any = None
        try:
            self._set_up(ablation)
        except BaseException:
            self.close()
            raise
        self._cache_argument = cache_argument(self.model)
        self.reset()

    # life

    def __enter__(self) -> TorchCpuEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back files, threads and DRAM. The engine cannot be used afterwards."""
        if self.reader is not None:
            self.reader.close()
        self.ffns, self.reader = [], None
        self.model, self.cache = None, None

    def reset(self) -> None:
        """Forget the text so far: KV cache and neuron windows."""
        self.cache = new_cache(self.spec, context_tokens(self.store, self.run))
        self.position = 0
        for ffn in self.ffns:
            ffn.clear()

    # ablation

    @property
    def ablation(self) -> Ablation:
        """The techniques in use from the next token on."""
        return self._wanted

    @ablation.setter
    def ablation(self, value: Ablation) -> None:
        self._check(value)
        plan_dram(self.store, value, self.predictors, self.run)  # refused now, not in the middle of a token
        self._wanted = value

    def _check(self, ablation: Ablation) -> None:
        if ablation.predictor == "low_rank" and self.predictors is None:
            raise AblationError(
                "ablation: predictor='low_rank' needs trained predictors; "
                "pass --predictors DIR or use predictor='oracle'"
            )

    def _apply(self) -> None:
        if self._wanted is not self._ablation and self._wanted != self._ablation:
            self.plan = plan_dram(self.store, self._wanted, self.predictors, self.run)
            self._set_up(self._wanted)

    def _set_up(self, ablation: Ablation) -> None:
        """Bring the engine from its present ablation to another. What need not change, stays."""
        before, first = self._ablation, not self.ffns
        self._ablation = ablation
        if first or before.io != ablation.io:
            if self.reader is not None:
                self.reader.close()
            self.reader = FlashReader(ablation.io, self.run.depth, self.run.chunk_bytes)
            bundled, split = self.reader.open(self.store.bundled_path), self.reader.open(self.store.split_path)
        else:
            bundled, split = self.ffns[0].shared.bundled, self.ffns[0].shared.split
        assert self.reader is not None
        if first:
            use_stored_weights(self.model, self.store.dtype, self.threads)
            self.shared = Shared(
                self.store, self.run, self.clock, ablation, self.reader, bundled, split, aligned_buffer(0),
                slot_bytes(self.store), self.threads,
            )  # fmt: skip
        if len(self.shared.scratch) != self.plan.scratch_bytes:
            self.shared.scratch = aligned_buffer(self.plan.scratch_bytes)
        self.shared.ablation, self.shared.reader = ablation, self.reader
        self.shared.bundled, self.shared.split = bundled, split
        old_slots = [ffn.slots.capacity if ffn.slots is not None else 0 for ffn in self.ffns]
        keep_slots = not first and (before.predictor == "off") == (ablation.predictor == "off")
        keep_slots = keep_slots and old_slots == list(self.plan.slots)
        if not keep_slots:  # given back before anything new is filled
            for ffn in self.ffns:
                ffn.slots = None
        if first or before.hybrid != ablation.hybrid:
            self._bind_resident(ablation.hybrid)
        if ablation.predictor == "low_rank" and self._packed is None:
            assert self.predictors is not None
            self._packed = [PackedPredictor(layer) for layer in self.predictors.layers]
        for index, ffn in enumerate(self.ffns):
            ffn.predictor = self._packed[index] if self._packed else None
            if not keep_slots:
                ffn.set_slots(self.plan.slots[index])
            elif before.windowing != ablation.windowing:
                ffn.clear()

    def _bind_resident(self, hybrid: bool) -> None:
        assert self.reader is not None
        if hybrid:
            self.weights.make_resident(self.reader)
        else:
            self.weights.make_streamed()
        layers = range(self.spec.num_layers)
        if not self.ffns:
            self.ffns = [FlashFFN(self.shared, i, self._biases(i)) for i in layers]
            for i, ffn in enumerate(self.ffns):
                self.family.install(self.model, i, ffn)
                self._layer(i).register_forward_pre_hook(self._before_layer(i))
        for i in layers:
            if not hybrid:
                # biases are a few KiB and part of the slots: they are read once
                self.weights.load(self.reader, f"layer.{i}")
            self.ffns[i].biases = self._biases(i)

    def _biases(self, layer: int) -> Biases:
        names = self.family.ffn_names(self.spec, layer)
        up, down, gate = (self._bias(name) for name in (names.up_bias, names.down_bias, names.gate_bias))
        first = gate if self.spec.gated else up
        return Biases(
            np.zeros(self.spec.d_ff, np.float32) if first is None else first.numpy(),
            up.numpy() if self.spec.gated and up is not None else None,
            down,
        )

    def _bias(self, name: str | None) -> torch.Tensor | None:
        stored = self.weights.extra.get(name or "")
        return None if stored is None else stored.float().clone()

    def _layer(self, index: int) -> torch.nn.Module:
        name = next(n for n in self.store.group(f"layer.{index}").tensors)
        return self.model.get_submodule(name[: name.index(f".{index}.") + len(f".{index}")])

    def _before_layer(self, index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if not self._ablation.hybrid:
                assert self.reader is not None
                self.weights.load(self.reader, f"layer.{index}")

        return hook

    # tokens

    def _forward(self, ids: torch.Tensor, keep: int = 1) -> torch.Tensor:
        """Logits float32 [keep, vocab] of the last of `ids` [tokens], which follow the text so far."""
        if self.reader is None:
            raise BudgetError("engine: it is closed; load the store again")
        self._check_length(self.position + len(ids))
        if not self._ablation.hybrid:
            self.weights.load(self.reader, "embed")
            self.weights.load(self.reader, "head")
        with torch.no_grad(), _torch_threads(1 if len(ids) == 1 else self.threads):
            out = self.model(
                input_ids=ids[None], use_cache=True, logits_to_keep=keep, **{self._cache_argument: self.cache}
            )
        self.position += len(ids)
        logits = out.logits[0].float()
        if not torch.isfinite(logits).all():
            raise StoreError(
                f"{self.store.path}: logits that are not finite, so weights are damaged; run `workbench verify` on it"
            )
        return logits

    def step(self, token: int) -> tuple[torch.Tensor, TokenStats]:
        """Take one token; logits [vocab] for the next, and what it cost."""
        self._apply()
        self.clock.begin()
        logits = self._forward(torch.tensor([token]))[-1]
        return logits, self.clock.finish(self.position - 1)

    def prefill(self, ids: list[int], keep: int = 0) -> tuple[torch.Tensor, TokenStats]:
        """Take several tokens at once, each with its own neurons, the union of which is read once; and what it cost.

        Returns logits [vocab] for the next token; with `keep`, logits [keep, vocab] after each of the last tokens.
        """
        if not ids:
            raise DataError("prompt: it has no tokens; give at least one word")
        if not 0 <= keep <= len(ids):
            raise ValueError(f"keep={keep} is not in 0..{len(ids)}, the tokens given")
        self._apply()
        self.clock.begin()
        logits = self._forward(torch.tensor(ids), max(1, keep))
        return logits if keep else logits[-1], self.clock.finish(self.position - 1)

    def rewind(self, position: int) -> None:
        """Forget the text after its first `position` tokens. The neuron windows stay: they decide what is read, not
        what comes out."""
        if not 0 <= position <= self.position:
            raise ValueError(f"position={position} is not in 0..{self.position}, the tokens so far")
        for layer in self.cache.layers if self.cache is not None else ():
            assert isinstance(layer, PreallocatedLayer)
            layer.rewind(position)
        self.position = position

    def logits(self, input_ids: Any) -> torch.Tensor:
        """Teacher-forced, token by token, from an empty context: [T] -> float32 [T, vocab]."""
        self.reset()
        return torch.stack([self.step(int(token))[0] for token in input_ids])

    def generate(
        self,
        prompt: str | list[int],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Iterator[Step]:
        """Continue a prompt, from an empty context, one token at a time; greedy unless `temperature` is given.

        The first step's stats are those of the prompt. Ends at the end-of-text token, or after `max_new_tokens`.
        """
        ids = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_length(len(ids) + max_new_tokens - 1)
        generator = torch.Generator().manual_seed(self.run.seed if seed is None else seed)
        end = self.spec.config.get("eos_token_id")
        ends = set(end) if isinstance(end, list) else {end}
        self.reset()
        logits, stats = self.prefill(ids)
        made: list[int] = []
        shown = ""
        for count in range(max_new_tokens):
            token = next_token(logits, temperature, top_p, generator)
            made.append(token)
            whole = self._text(made)
            # a character that is not complete yet is shown with the token that completes it
            text = "" if whole.endswith("\ufffd") else whole[len(shown) :]
            shown += text
            yield Step(token, text, stats)
            if token in ends or count + 1 == max_new_tokens:
                return
            logits, stats = self.step(token)

    def _check_length(self, tokens: int) -> None:
        """BudgetError when a text of that many tokens does not fit the KV cache."""
        capacity, positions = context_tokens(self.store, self.run), self.spec.max_positions
        if tokens > capacity:
            larger = (
                f" or pass a larger --context (the model has {positions} positions)" if capacity < positions else ""
            )
            raise BudgetError(
                f"{self.store.path}: {tokens} tokens of prompt and new text do not fit the context of {capacity}; "
                f"ask for a shorter text{larger}"
            )

    def _encode(self, prompt: str) -> list[int]:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise DataError("prompt: it is not valid UTF-8; give it as text") from None
        return self.tokenizer(prompt)["input_ids"]

    def _text(self, ids: list[int]) -> str:
        return "" if self.store.tokenizer_path is None else self.tokenizer.decode(ids, skip_special_tokens=True)

    @property
    def tokenizer(self) -> Any:
        """The store's tokenizer. DataError when the checkpoint came without one."""
        if self._tokenizer is None:
            self._tokenizer = store_tokenizer(self.store)
        return self._tokenizer


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """torch's own threads within the block. One token's matrices run in our kernels, whose threads torch's would
    disturb while they wait for work."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, count))
    try:
        yield
    finally:
        torch.set_num_threads(before)
