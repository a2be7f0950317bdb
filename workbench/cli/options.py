"""Options made from the fields of dataclasses, and progress bars."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from workbench.ablation import Ablation
from workbench.errors import RecordError
from workbench.fields import field_help

Number = TypeVar("Number", int, float)
ProgressFunction = Callable[[str, int, int], None]
BYTES_FROM = 1 << 22
"""Totals above this are bytes."""


def ablation_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command one option for each field of Ablation; it receives those given as the mapping `ablation`."""
    helps = {f.name: f.metadata["help"] for f in dataclasses.fields(Ablation)}
    return _with_options(function, "ablation", Ablation, helps, "Techniques")


def spec_options(kind: Any, panel: str, **given: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command one option for each field of a dataclass that the command does not have itself.

    It receives those given as the mapping `spec`. Help comes from the class's docstring, whose sentences begin with
    the names of the fields that they explain; `given` adds to it.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return _with_options(function, "spec", kind, {**field_help(kind), **given}, panel)

    return decorate


def _with_options(
    function: Callable[..., Any], name: str, kind: Any, helps: dict[str, str], panel: str
) -> Callable[..., Any]:
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != name]
    hints = get_type_hints(kind)
    fields = [f for f in dataclasses.fields(kind) if f.name not in {p.name for p in own}]
    added = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_annotation(f, hints[f.name], helps.get(f.name, ""), panel),
        )
        for f in fields
    ]

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        given = {f.name: kwargs.pop(f.name) for f in fields}
        return function(*args, **kwargs, **{name: {k: v for k, v in given.items() if v is not None}})

    kinds = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    command.__signature__ = inspect.Signature([*kinds, *added])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
    del command.__wrapped__  # typer would look through it, at the signature without the added options
    return command


def _annotation(field: Any, hint: Any, text: str, panel: str) -> Any:
    if field.default is not None:
        words = {"True": "on", "False": "off"}
        text = f"{text} ({words.get(str(field.default), field.default)})"
    text = text.replace("[", "(").replace("]", ")")  # rich takes brackets for markup
    return Annotated[hint | None, typer.Option(help=text, rich_help_panel=panel)]


def made(kind: Any, given: dict[str, Any]) -> Any:
    """The dataclass with the fields given; a value that it refuses is wrong usage."""
    try:
        return kind(**given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def writable(context: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    """The path of a file to write, checked before the work begins. RecordError when it cannot be written, or when
    another option of the same command writes it too."""
    if path is not None:
        name = option.opts[0]
        if path.is_dir():
            raise RecordError(f"{path}: is a directory; give the name of a file for {name}")
        if path.exists() and not path.is_file():
            raise RecordError(f"{path}: is not a regular file; choose another {name}")
        if not path.resolve().parent.is_dir():
            raise RecordError(f"{path}: its directory does not exist; make it or choose another {name}")
        try:
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
        except OSError as error:
            raise RecordError(f"{path}: cannot be written ({error.strerror}); choose another {name}") from error
        taken = context.meta.setdefault("workbench.files", {})
        if taken.setdefault(path.resolve(), name) != name:
            raise RecordError(f"{path}: {taken[path.resolve()]} writes this file; choose another {name}")
    return path


def numbers(text: str, kind: type[Number], of: str) -> list[Number]:
    """'1,2' as numbers of that type. BadParameter, saying a list `of` what is wanted, for anything else."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of {of}") from None


def png(context: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    """As `writable`, of a picture. RecordError when the name ends as that of another kind of picture does."""
    if path is not None and path.suffix.lower() != ".png":
        raise RecordError(f"{path}: figures are PNG; give {option.opts[0]} a name that ends in .png")
    return writable(context, option, path)


def directory(path: Path) -> Path:
    """A directory for results, made before the work begins. RecordError when it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror}); choose another --out") from error
    return path


def console() -> Console:
    """Where tables go."""
    return Console()


@contextmanager
def progress_bar(title: str, shown: bool = True) -> Iterator[ProgressFunction]:
    """A bar on standard error with rate and time left, fed by (what, done, total), if `shown`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    screen = Console(file=sys.stderr)
    # Not a terminal: no bar, so that a failure is the only line there.
    with Progress(*columns, console=screen, disable=not (shown and screen.is_terminal)) as bar:
        task = bar.add_task(title, total=None, rate="")

        def show(what: str, done: int, total: int) -> None:
            speed = bar.tasks[0].speed or 0.0
            unit = f"{speed / 1e6:.0f} MB/s" if total > BYTES_FROM else f"{speed:.0f}/s" if speed else ""
            bar.update(task, description=f"{title}: {what}", completed=done, total=total, rate=unit)

        try:
            yield show
        except BaseException:
            bar.live.transient = True  # the failure's own line is what stays
            raise


class Stages:
    """Progress bars of a job with several steps, one after the other."""

    def __init__(self) -> None:
        self._open: Any = None

    def __call__(self, title: str) -> ProgressFunction:
        self.close()
        self._open = progress_bar(title)
        return self._open.__enter__()

    def close(self) -> None:
        """End the last bar."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
