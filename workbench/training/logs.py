"""Curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.errors import TrainingError


class Logs:
    """Scalars by step in a TensorBoard event file; does nothing when `folder` is None.

    `purge_step`: the first step of a resumed run; what an interrupted one wrote from there on is hidden. TrainingError
    when TensorBoard is not installed or the folder cannot be written. Use as a context manager.
    """

    def __init__(self, folder: str | Path | None, purge_step: int | None = None) -> None:
        self._writer: Any = None
        if folder is None:
            return
        check_logs(folder)
        make = _writer_class()
        try:
            self._writer = make(str(folder), purge_step=purge_step, flush_secs=30)
        except OSError as error:
            raise TrainingError(
                f"{folder}: cannot be written ({error.strerror or error}); choose another --logs"
            ) from error

    def scalars(self, step: int, values: dict[str, float], at: float | None = None) -> None:
        """Write the values, by tag, of one step. `at`: when they were true, in seconds since 1970 [now]."""
        if self._writer is not None:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step, walltime=at)

    def close(self) -> None:
        """Write out and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def check_logs(folder: str | Path | None) -> None:
    """TrainingError now rather than after an hour, when logs are asked for and TensorBoard is not installed."""
    if folder is not None:
        _writer_class()
        if Path(folder).exists() and not Path(folder).is_dir():
            raise TrainingError(f"{folder}: is not a directory; choose another --logs")


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainingError(
            "logs: TensorBoard is not installed; pip install 'flash-workbench[train]', or leave --logs out"
        ) from error
    return SummaryWriter
