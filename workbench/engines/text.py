"""What every engine shares: text in, text out, one token at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from workbench.engines.budget import context_tokens
from workbench.engines.sampling import next_token
from workbench.engines.stats import TokenStats
from workbench.engines.tokenizer import TextStream, store_tokenizer
from workbench.errors import BudgetError, DataError
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
        """Take one token; logits [vocab] for the next, and what it cost."""

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
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.check_length(len(ids) + max_new_tokens - 1)
        generator = torch.Generator().manual_seed(self.run.seed if seed is None else seed)
        ends = self.end_tokens
        self.reset()
        logits, stats = self.prefill(ids)
        text = self.text_stream()
        for count in range(max_new_tokens):
            token = next_token(logits, temperature, top_p, generator)
            yield Step(token, text.push(token), stats)
            if token in ends or count + 1 == max_new_tokens:
                return
            logits, stats = self.step(token)

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
