"""The engine as a model of lm-evaluation-harness. Importing this module needs lm_eval (`flash-workbench[eval]`).

A context that several continuations share is computed once; each continuation then follows it and is cut off again.
Every token, of a context too, goes through the engine with the neurons that were predicted for it alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from workbench.engines.budget import context_tokens
from workbench.engines.pipeline import FlashEngine
from workbench.engines.sampling import next_token
from workbench.errors import DataError
from workbench.experiments.accuracy import SAVE_SECONDS

CHUNK = 256
"""Tokens whose logits are held at once."""
NEW_TOKENS = 256

Answer = tuple[float, bool]
Encoded = tuple[Any, list[int], list[int]]


class EngineLM(TemplateLM):
    """Answers the harness's requests from an engine, as its own `HFLM` answers them from a transformers model.

    Tokens are those of the store's tokenizer with its own special tokens; what is longer than the engine's context
    is cut from the left, and `truncated` counts how often. `known` holds answers of an earlier, interrupted run by
    their key and is filled; `save` is called now and then so that they can be kept; `tick(n)` after n more requests.
    """

    def __init__(
        self,
        engine: FlashEngine,
        *,
        known: dict[str, list[Any]] | None = None,
        save: Callable[[], None] | None = None,
        tick: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.known = {} if known is None else known
        self.truncated = 0
        self._save, self._tick = save, tick
        self._saved = time.monotonic()
        self._held: list[int] = []
        engine.reset()

    # what the harness asks of a model

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a continuation without context: beginning of text, or else end of text."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """Tokens that the engine's context holds."""
        return context_tokens(self.engine.store, self.engine.run)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; with the tokenizer's own special tokens unless told otherwise, or where the text has them."""
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            add_special_tokens = False
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **given))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Answer]:
        """For each (context, continuation): the continuation's log-likelihood, and whether greedy decoding gives it."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """For each (text,): its log-likelihood, in windows of the whole context, each token predicted once."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            encoded: list[Encoded] = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(answer[0] for answer in self._answers(encoded, counted=False)))
            self._done(1)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """For each (context, settings): the text that follows, up to the first of the `until` strings."""
        return [self._generate(*request.args) for request in requests]

    def _loglikelihood_tokens(self, requests: list[Encoded], **kwargs: Any) -> list[Answer]:
        return self._answers(requests, counted=True)

    # log-likelihoods

    def _answers(self, requests: list[Encoded], counted: bool) -> list[Answer]:
        """The answers in the order of `requests`; those of one context are computed together."""
        answers: list[Answer | None] = [None] * len(requests)
        by_context: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            by_context.setdefault(tuple(self._fit(context, continuation)), []).append((index, continuation))
        for context, members in sorted(by_context.items()):
            keys = [_key(context, continuation) for _, continuation in members]
            if any(key not in self.known for key in keys):
                first = self._log_probabilities(self._advance(list(context)))
                for key, (_, continuation) in zip(keys, members, strict=True):
                    if key not in self.known:
                        self.known[key] = list(self._score(len(context), first, continuation))
            for key, (index, _) in zip(keys, members, strict=True):
                value, greedy = self.known[key]
                answers[index] = (float(value), bool(greedy))
            self._done(len(members) if counted else 0)
        return [answer for answer in answers if answer is not None]

    def _fit(self, context: list[int], continuation: list[int]) -> list[int]:
        """The context without what does not fit before the continuation, whose last token is not fed."""
        if not continuation or len(continuation) > self.max_length:
            raise DataError(
                f"{self.engine.store.path}: a continuation of {len(continuation)} tokens cannot be scored in a context "
                f"of {self.max_length}; pass a larger --context"
            )
        room = self.max_length + 1 - len(continuation)
        self.truncated += len(context) > room
        return context[-room:]

    def _advance(self, context: list[int]) -> torch.Tensor:
        """Bring the engine to the end of `context`, keeping what it shares with the text so far; logits [vocab]."""
        held, engine = self._held, self.engine
        pairs = zip(held, context[:-1], strict=False)
        shared = next((at for at, (old, new) in enumerate(pairs) if old != new), min(len(held), len(context) - 1))
        self._held = []  # were this interrupted, nothing would be known of the engine's text
        engine.rewind(shared)
        logits = engine.prefill(context[shared:])[0]
        self._held = context
        return logits

    def _score(self, length: int, first: torch.Tensor, continuation: list[int]) -> Answer:
        """`first`: log-probabilities [vocab] after the context of `length` tokens, which is returned to."""
        total, greedy = float(first[continuation[0]]), int(first.argmax()) == continuation[0]
        fed, wanted = continuation[:-1], continuation[1:]
        for at in range(0, len(fed), CHUNK):
            part, targets = fed[at : at + CHUNK], torch.tensor(wanted[at : at + CHUNK])
            rows = self._log_probabilities(self.engine.prefill(part, keep=len(part))[0])
            total += float(rows.gather(1, targets[:, None]).sum())
            greedy = greedy and bool((rows.argmax(-1) == targets).all())
        self.engine.rewind(length)
        return total, greedy

    @staticmethod
    def _log_probabilities(logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits.float(), dim=-1)

    def _done(self, requests: int) -> None:
        if self._tick and requests:
            self._tick(requests)
        if self._save and time.monotonic() - self._saved > SAVE_SECONDS:
            self._save()
            self._saved = time.monotonic()

    # generation

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        key = _key(context, json.dumps(settings, sort_keys=True))
        if key not in self.known:
            self.known[key] = [self._generated(context, settings)]
        self._done(1)
        return str(self.known[key][0])

    def _generated(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        stops = [*([until] if isinstance(until, str) else until), self.tokenizer.decode([self.eot_token_id])]
        most = int(settings.get("max_gen_toks", NEW_TOKENS))
        if most >= self.max_length:
            raise DataError(
                f"{self.engine.store.path}: {most} new tokens leave no room for a prompt in a context of "
                f"{self.max_length}; pass a larger --context"
            )
        temperature = float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0
        generator = torch.Generator().manual_seed(self.engine.run.seed)
        ids = self.tok_encode(context) or [self.prefix_token_id]
        self.truncated += len(ids) > self.max_length - most
        logits = self._advance(ids[-(self.max_length - most) :])
        length, made, text = self.engine.position, list[int](), ""
        while len(made) < most:
            token = next_token(logits, temperature, float(settings.get("top_p", 1.0)), generator)
            if token == self.eot_token_id:
                break
            made.append(token)
            text = self.tokenizer.decode(made, skip_special_tokens=True)
            if any(stop in text for stop in stops if stop):
                break
            logits = self.engine.step(token)[0]
        self.engine.rewind(length)
        for stop in filter(None, stops):
            text = text.split(stop)[0]
        return text


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
