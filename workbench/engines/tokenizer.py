"""The tokenizer that a store brings along."""

from __future__ import annotations

from typing import Any

from workbench.errors import DataError
from workbench.flash.store import Store


def store_tokenizer(store: Store) -> Any:
    """The tokenizer that lies in a store. DataError when there is none."""
    if store.tokenizer_path is None:
        raise DataError(f"{store.path}: it has no tokenizer; convert a checkpoint that has tokenizer.json")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(store.tokenizer_path, trust_remote_code=False)
