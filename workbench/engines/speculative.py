"""Speculative decoding (Leviathan et al., 2023; section 5.2 of the paper): a small model drafts, a large one verifies.

A round: the draft proposes lambda tokens; the model takes the last token and all of these at once, so that neurons and
resident weights are read once for lambda + 1 tokens; its own greedy choice after each is compared with the draft's.
What agrees is accepted, and the first choice that does not is the round's last token. The text so far is rewound to
what was accepted.

The text is that of greedy decoding, token for token, because each token of a round gets the logits that it would get
alone. On torch-cpu these are the same to the bit: every kernel adds up one token's products in the same order, however
many tokens come with it. Other backends round otherwise for several tokens than for one, so that there two tokens
whose logits tie within rounding may change places.

Which neurons stay is decided layer by layer, before it is known how many tokens will be accepted. With an acceptance
rate of alpha so far, the window ends at token alpha * (lambda + 1) of the round; tokens behind it are forgotten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from workbench.ablation import Ablation
from workbench.engines.budget import DramPlan, context_tokens, plan_dram
from workbench.engines.sampling import greedy
from workbench.engines.stats import TokenStats
from workbench.engines.tokenizer import store_tokenizer
from workbench.errors import AblationError, DraftError
from workbench.flash.store import Store
from workbench.spec import RunSpec

if TYPE_CHECKING:
    from workbench.engines.pipeline import FlashEngine
    from workbench.engines.setting import Setting

DENSE = Ablation(predictor="off", windowing=False)
"""How a draft model runs: every neuron, all of them in DRAM."""


NO_DRAFT = "ablation: speculative=True needs a draft model; pass --draft STORE or set speculative=False"
Key = tuple[str, int, str, int, str]
"""What a draft model was opened with: store, context, dtype of its KV cache, threads, io engine."""


class Draft(Protocol):
    """What proposes tokens. `nbytes`: of DRAM that it takes, part of the budget."""

    @property
    def nbytes(self) -> int: ...

    def take(self, text: Sequence[int]) -> None:
        """Get ready to continue a text."""
        ...

    def propose(self, text: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that are likely to come after the tokens of `text`. Any text may follow any other: a
        draft that remembers one finds out by itself what of it still holds."""
        ...

    def forget(self) -> None:
        """Forget what was read."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class DraftModel:
    """A model of another store that drafts greedily, dense and wholly in DRAM. It proposes nothing where the text is
    longer than its context."""

    def __init__(self, store: Store, run: RunSpec, io: Any, backend: str):
        from workbench.engines import open_engine

        plan = plan_draft(store, run)
        ablation = dataclasses.replace(DENSE, io=io)
        self.nbytes = plan.total
        self.engine = open_engine(store, ablation, None, _draft_run(run, f"{plan.total}B"), backend)
        self._taken: list[int] = []

    def take(self, text: Sequence[int]) -> None:
        """Read a text, for the first proposal after it."""
        self._read(list(text[: self.engine.context]))

    def propose(self, text: Sequence[int], count: int) -> list[int]:
        """As `Draft.propose`. Of `text`, what is new since the last time is read."""
        count = min(count, self.engine.context - len(text) + 1)
        if count < 1:
            return []
        logits, found = self._read(list(text)), []
        while True:
            found.append(greedy(logits))
            if len(found) == count:
                return found
            logits = self.engine.step(found[-1])[0]
            self._taken.append(found[-1])

    def _read(self, text: list[int]) -> torch.Tensor:
        """Logits [vocab] after the text."""
        same = 0
        for known, wanted in zip(self._taken, text[:-1], strict=False):
            if known != wanted:
                break
            same += 1
        self.engine.rewind(same)
        del self._taken[same:]
        rest = text[same:]
        logits = (self.engine.step(rest[0]) if len(rest) == 1 else self.engine.prefill(rest))[0]
        self._taken = list(text)
        return logits

    def forget(self) -> None:
        """Forget the text."""
        self.engine.reset()
        self._taken = []

    def close(self) -> None:
        """Give back DRAM, threads and files."""
        self.engine.close()


def _draft_run(run: RunSpec, dram: str) -> RunSpec:
    return dataclasses.replace(run, dram=dram, draft="")


def plan_draft(store: Store, run: RunSpec) -> DramPlan:
    """Where a draft model's bytes go, all of it in DRAM."""
    return plan_dram(store, DENSE, None, _draft_run(run, f"{4 * store.model_bytes + (1 << 40)}B"))


def check_draft(store: Store, run: RunSpec) -> tuple[Store, DramPlan]:
    """The draft's store and its plan. AblationError when none is given, StoreError when it is none, DraftError when it
    speaks another language than `store`."""
    if not run.draft:
        raise AblationError(NO_DRAFT)
    draft = Store.open(Path(run.draft))
    check_vocabulary(store, draft)
    run = dataclasses.replace(run, context=context_tokens(store, run))
    return draft, plan_draft(draft, run)


def check_vocabulary(store: Store, draft: Store) -> None:
    """DraftError when a token of the one is another token, or none, of the other."""
    ours, theirs = store.spec.vocab_size, draft.spec.vocab_size
    remedy = "draft with a model of the same family"
    if ours != theirs:
        raise DraftError(f"{draft.path}: its vocabulary has {theirs:,} tokens, {store.path} has {ours:,}; {remedy}")
    if store.tokenizer_path is None or draft.tokenizer_path is None:
        return
    if store.manifest["tokenizer"] == draft.manifest["tokenizer"]:
        return
    known, other = store_tokenizer(store).get_vocab(), store_tokenizer(draft).get_vocab()
    if known != other:
        word = min(
            (word for word in known.keys() | other.keys() if known.get(word) != other.get(word)),
            key=lambda word: (known.get(word, len(known)), word),
        )
        raise DraftError(
            f"{draft.path}: its tokenizer is another than that of {store.path}: {word!r} is token "
            f"{other.get(word, 'none')} there and {known.get(word, 'none')} here; {remedy}"
        )


class Drafting:
    """The draft model of an engine: opened when a setting asks for it, closed when none does, and how many of its
    tokens were accepted in this text. `given`: a draft to use in its place, which its owner closes."""

    def __init__(self, store: Store, backend: str):
        self.store, self.backend = store, backend
        self.given: Draft | None = None
        self.acceptance = Acceptance()
        self._own: tuple[Key, DraftModel] | None = None
        self._checked: dict[tuple[str, int, str], tuple[Store, DramPlan]] = {}

    def check(self, setting: Setting) -> int:
        """Bytes of DRAM that a setting's draft takes. Raises as `check_draft` does."""
        if not setting.ablation.speculative:
            return 0
        return self.given.nbytes if self.given is not None else self._find(setting.run)[1].total

    def _find(self, run: RunSpec) -> tuple[Store, DramPlan]:
        key = (run.draft, context_tokens(self.store, run), run.kv_dtype)
        if key not in self._checked:
            self._checked[key] = check_draft(self.store, run)
        return self._checked[key]

    def _key(self, setting: Setting) -> Key | None:
        if not setting.ablation.speculative or self.given is not None:
            return None
        run = setting.run
        return run.draft, context_tokens(self.store, run), run.kv_dtype, run.compute_threads, setting.ablation.io

    def let_go(self, setting: Setting) -> None:
        """Close a model that the setting does not ask for."""
        if self._own is not None and self._own[0] != self._key(setting):
            self._own[1].close()
            self._own = None

    def use(self, setting: Setting) -> None:
        """Open the model that the setting asks for."""
        self.let_go(setting)
        key = self._key(setting)
        if key is not None and self._own is None:
            run = dataclasses.replace(setting.run, context=key[1])
            self._own = (key, DraftModel(self._find(setting.run)[0], run, setting.ablation.io, self.backend))

    @property
    def draft(self) -> Draft:
        """The one in use. AblationError when there is none."""
        draft = self.given or (self._own[1] if self._own is not None else None)
        if draft is None:
            raise AblationError(NO_DRAFT)
        return draft

    def reset(self) -> None:
        """Another text begins."""
        self.acceptance = Acceptance()
        for draft in (self.given, self._own[1] if self._own is not None else None):
            if draft is not None:
                draft.forget()

    def close(self) -> None:
        """Give back what was opened here."""
        if self._own is not None:
            self._own[1].close()
        self._own = self.given = None


class Acceptance:
    """How many drafted tokens were accepted, of one text."""

    def __init__(self) -> None:
        self.drafted = self.accepted = 0

    @property
    def rate(self) -> float:
        """The paper's alpha; 1 before anything was drafted."""
        return self.accepted / self.drafted if self.drafted else 1.0

    def window_end(self, tokens: int) -> int:
        """Of the lambda + 1 tokens of a round, the one that the window is to end at, counted from 1."""
        return max(1, min(tokens, int(self.rate * tokens + 0.5)))


def draft_and_verify(
    engine: FlashEngine,
    draft: Draft,
    acceptance: Acceptance,
    text: Sequence[int],
    most: int,
    ends: Collection[int] = (),
) -> list[tuple[int, TokenStats]]:
    """One round: the next tokens of greedy text, at least one and no more than `most`, and what each cost.

    text: all tokens so far, the last of which the engine has not taken. ends: tokens after which nothing is wanted.
    The engine is left with all but the last of the tokens taken, as after steps of its own.
    """
    if engine.position != len(text) - 1:
        raise ValueError(f"text: has {len(text)} tokens; the engine, with {engine.position}, is to take the last")
    clock = engine.clock
    clock.begin()
    count = min(engine.run.draft_tokens, most - 1, engine.context - len(text))
    with clock.time("draft"):
        drafted = list(draft.propose(text, count))[:count] if count > 0 else []
    if any(not 0 <= token < engine.spec.vocab_size for token in drafted):
        raise DraftError(f"draft: proposed {drafted}, not all of them tokens of the model; use one with its vocabulary")
    logits = engine.verify([text[-1], *drafted], acceptance.window_end(len(drafted) + 1))
    found: list[int] = []
    for i, row in enumerate(logits):
        found.append(greedy(row))
        if found[-1] in ends or i == len(drafted) or found[-1] != drafted[i]:
            break
    engine.rewind(len(text) - 1 + len(found))
    clock.drafted, clock.accepted = len(drafted), sum(a == b for a, b in zip(found, drafted, strict=False))
    acceptance.drafted += clock.drafted
    acceptance.accepted += clock.accepted
    return list(zip(found, clock.finish(engine.position - 1).shared(len(found)), strict=True))
