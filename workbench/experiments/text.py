"""Token ids of text for runs of an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from workbench.capture.text import documents, token_windows, windows_and_card
from workbench.engines.tokenizer import store_tokenizer
from workbench.errors import DataError
from workbench.flash.store import Store


def window_and_card(
    data: str | Path, store: Store, length: int, keep: Callable[[str], bool] = lambda text: True
) -> tuple[np.ndarray, dict[str, Any]]:
    """The first `length` token ids (int64) of the documents that `keep` accepts, and the card of what was read."""
    windows, card = windows_and_card(data, store_tokenizer(store), length, 1, keep)
    if not windows:
        raise _too_short(length)
    return windows[0], card.as_dict()


def _too_short(length: int) -> DataError:
    return DataError(
        f"the text has fewer than {length} tokens; give --data with more, or a smaller --prompt or --tokens"
    )


def window_of(data: Any, store: Store, length: int) -> np.ndarray:
    """The first `length` token ids (int64) of the text. `data`: what `documents` takes, or an iterator of texts."""
    docs = documents(data) if isinstance(data, str | Path) else data
    for window in token_windows(docs, store_tokenizer(store), length):
        return window
    raise _too_short(length)
