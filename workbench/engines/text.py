"""What every engine shares: text in, text out, one token at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.engines.budget import context_tokens
from workbench.engines.sampling import next_token
from workbench.engines.stats import TokenStats
from workbench.engines.tokenizer import TextStream, store_tokenizer
from workbench.errors import AblationError, BudgetError, DataError
from workbench.flash.store import Store
from workbench.spec import ModelSpec, RunSpec


@dataclass(frozen=True)
class Step:
    """One generated token: its id, the text that it adds, and what it cost."""

    token: int
    text: str
    stats: TokenStats


class TextEngine(ABC):
    """A store that takes tokens and gives logits; what is made of them is the same for every backend."""

    store: Store
    spec: ModelSpec
    _tokenizer: Any = None

    @property
    @abstractmethod
    def run(self) -> RunSpec:
        """How the pipeline runs."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the text so far."""

    @abstractmethod
    def prefill(self, ids: list[int], keep: int = 0) -> tuple[torch.Tensor, TokenStats]:
        """Take several tokens; logits [vocab] for the next, and what they cost."""

    @abstractmethod
    def step(self, token: int) -> tuple[torch.Tensor, TokenStats]:
        """Take one token; logits [vocab] for the next, and what it cost. The token is given, so that nothing can be
        drafted: `speculative` acts in `generate` alone."""

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
        With `speculative` the tokens come in rounds, so that where the caller stops early, the text so far may have
        tokens of the last round that were not given out; AblationError for a temperature above 0.
        """
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.check_length(len(ids) + max_new_tokens - 1)
        generator = torch.Generator().manual_seed(self.run.seed if seed is None else seed)
        ends = self.end_tokens
        self.reset()
        self.refuse_sampling(temperature)
        logits, stats = self.prefill(ids)
        if max_new_tokens < 1:
            return
        text, made = self.text_stream(), 0
        ready = [(next_token(logits, temperature, top_p, generator), self._introduce(ids, stats))]
        while True:
            for token, stats in ready:
                ids.append(token)
                made += 1
                yield Step(token, text.push(token), stats)
            if ids[-1] in ends or made == max_new_tokens:
                return
            self.refuse_sampling(temperature)
            if self.speculates:
                ready = self.round(ids, max_new_tokens - made, ends)
            else:
                logits, stats = self.step(ids[-1])
                ready = [(next_token(logits, temperature, top_p, generator), stats)]

    @property
    def speculates(self) -> bool:
        """Whether the next token of a text is made by drafting and verifying."""
        return False

    def round(self, text: Sequence[int], most: int, ends: Collection[int] = ()) -> list[tuple[int, TokenStats]]:
        """The next tokens of greedy text with `speculative`, 1 to `most`, and what each cost.

        text: all tokens so far, the last of which is not taken yet. A token of `ends` is the last.
        """
        raise NotImplementedError(f"{type(self).__name__} has no draft model")

    def _introduce(self, ids: list[int], stats: TokenStats) -> TokenStats:
        """What a prompt cost, with what has to be done for the rounds after it."""
        return stats

    def refuse_sampling(self, temperature: float) -> None:
        """AblationError for a temperature above 0 with `speculative`: what is drafted is verified greedily."""
        if self.speculates and temperature > 0:
            raise AblationError(
                f"ablation: speculative=True makes greedy text, and the temperature is {temperature:g}; "
                "set the temperature to 0 or speculative=False"
            )

    @property
    def context(self) -> int:
        """Tokens that the text may have, the prompt's and the new ones together."""
        return context_tokens(self.store, self.run)

    @property
    def end_tokens(self) -> set[int]:
        """The tokens that end a text; empty where the model has none."""
        end = self.spec.config.get("eos_token_id")
        return {e for e in (end if isinstance(end, list) else [end]) if e is not None}

    def encode(self, prompt: str) -> list[int]:
        """A prompt's tokens. DataError when it is not text, or the store has no tokenizer."""
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise DataError("prompt: it is not valid UTF-8; give it as text") from None
        return self.tokenizer(prompt)["input_ids"]

    def text_stream(self) -> TextStream:
        """Makes text of the tokens pushed into it; '' of every token where the store has no tokenizer."""
        if self.store.tokenizer_path is None:
            return TextStream(lambda ids: "")
        tokenizer = self.tokenizer
        return TextStream(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))

    @property
    def tokenizer(self) -> Any:
        """The store's tokenizer. DataError when the checkpoint came without one."""
        if self._tokenizer is None:
            self._tokenizer = store_tokenizer(self.store)
        return self._tokenizer

    def check_length(self, tokens: int) -> None:
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
