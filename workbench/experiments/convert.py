"""`workbench convert`: a checkpoint becomes a flash store."""

from __future__ import annotations

from pathlib import Path

from workbench.flash.convert import write_store
from workbench.flash.store import Progress, Store, verify
from workbench.models.checkpoint import Checkpoint
from workbench.models.hub import locate
from workbench.models.weights import Weights
from workbench.spec import DType

__all__ = ["convert", "verify"]


def convert(
    model: str | Path,
    out: str | Path,
    *,
    dtype: DType | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Store:
    """Convert a checkpoint directory or hub id into a flash store at `out`, and open it.

    dtype: stored as the checkpoint is when None. force: convert a model whose activation is not ReLU.
    progress(part, bytes done, bytes in all). Memory is bounded by one layer; interrupted or killed at any point, the
    same call resumes and the result is the same to the byte.

    Raises CheckpointError (nothing was written: not a checkpoint, unsupported, damaged, NaN weights) or StoreError
    (`out` is something else, the file system is full or cannot be written; what was written stays for resuming).
    """
    path, name = locate(model)
    with Checkpoint(path, name) as checkpoint:
        return write_store(Weights(checkpoint, force), out, dtype, progress)
