"""Token ids of text for runs of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from workbench.capture.text import documents, token_windows
from workbench.engines.tokenizer import store_tokenizer
from workbench.errors import DataError
from workbench.flash.store import Store


def window_of(data: Any, store: Store, length: int) -> np.ndarray:
    """The first `length` token ids (int64) of the text. `data`: what `documents` takes, or an iterator of texts."""
    docs = documents(data) if isinstance(data, str | Path) else data
    for window in token_windows(docs, store_tokenizer(store), length):
        return window
    raise DataError(
        f"the text has fewer than {length} tokens; give --data with more, or a smaller --prompt or --tokens"
    )
