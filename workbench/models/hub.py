"""Where a model is: a directory, or an id on the Hugging Face hub."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.errors import CheckpointError
from workbench.models.checkpoint import TOKENIZER_FILES

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def locate(model: str | Path, code: bool = False) -> tuple[Path, str]:
    """The checkpoint's directory and the name to record for it: a directory's own name, or the hub id.

    A hub id is downloaded (safetensors when the repository has them, pickled weights otherwise, config and
    tokenizer; with `code` its Python files too) into the hub's own cache. CheckpointError when there is neither such a
    directory nor such an id, or without network.
    """
    path = Path(model)
    if path.exists() or not isinstance(model, str) or not _HUB_ID.fullmatch(model):
        return path, path.absolute().name
    return _download(model, code), model


def _download(model: str, code: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with no_retry_lines():
            files = HfApi().list_repo_files(model)
            weights = "safetensors" if any(file.endswith(".safetensors") for file in files) else "bin"
            patterns = [f"*.{weights}", f"*.{weights}.index.json", "config.json", *TOKENIZER_FILES]
            patterns += ["*.py"] if code else []
            return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub's client and its transport raise classes of their own
        try:
            return Path(snapshot_download(model, local_files_only=True))
        except (LocalEntryNotFoundError, OSError, ValueError):
            pass
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{model}: no such directory, and the Hugging Face hub did not give it ({reason}); "
            f"check the name and the network, or give a local checkpoint directory"
        ) from error


@contextmanager
def no_retry_lines() -> Iterator[None]:
    """The hub's client warns before each of its retries; what comes of them is said once, in one line."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
