"""The gallery of docs/: every picture that the notebooks draw, from a run on the demo model.

    python -m workbench.experiments.gallery docs/gallery

runs the notebooks and writes the pictures into that folder and their page beside it (docs/gallery.md). A notebook of
widgets draws no picture: for it the page shows the screenshots NOTEBOOK-screen*.png that lie in the folder.
"""

from __future__ import annotations

import base64
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import DeviceError, WorkbenchError
from workbench.experiments.lab import shipped
from workbench.pictures import smaller

CELL_SECONDS = 900
_ABOUT = """# Gallery

What the notebooks in `notebooks/` draw, run on the demo model that comes with the package. `workbench lab` opens them;
`make gallery` draws this page again. Under each picture: model, machine, tokens and commit.
"""

_SCREEN = "A technique is switched off while text streams; the change is marked on the chart."


@dataclass(frozen=True)
class Picture:
    """A PNG of a notebook, with the heading that it stands under and the first sentence below that."""

    notebook: str
    heading: str
    png: bytes
    line: str = ""


def executed(path: Path, folder: Path) -> Any:
    """The notebook after a run in `folder`. DeviceError: nbclient is not installed; WorkbenchError: a cell failed."""
    try:
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError
    except ImportError as error:
        raise DeviceError("gallery: nbclient is not installed; pip install 'flash-workbench[notebooks]'") from error
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    try:
        client.execute()
    except CellExecutionError as error:
        last = [line for line in str(error).splitlines() if line.strip()][-1]
        raise WorkbenchError(f"{path.name}: a cell failed ({last}); run the notebook to see where") from error
    return notebook


def pictures(name: str, notebook: Any) -> Iterator[Picture]:
    """The PNG outputs of a notebook that was run, in order."""
    heading, line = name, ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            found = re.findall(r"^#+ +(.*)$", cell.source, re.MULTILINE)
            if found:
                heading, line = found[-1], _first_sentence(cell.source.rpartition(found[-1])[2])
            continue
        for out in cell.get("outputs", []):
            if png := out.get("data", {}).get("image/png"):
                yield Picture(name, heading, base64.b64decode(png), line)


def _first_sentence(text: str) -> str:
    words = " ".join(text.split())
    found = re.match(r".+?[.!?](?= |$)", words)
    return found[0] if found else words


def page(shown: Iterable[tuple[Picture, str]], title_of: dict[str, str]) -> str:
    """Markdown with each picture (and its path) under its notebook."""
    lines, notebook = [_ABOUT], ""
    for picture, path in shown:
        if picture.notebook != notebook:
            notebook = picture.notebook
            lines += [f"## {title_of[notebook]}", ""]
        lines += [f"**{picture.heading}.** {picture.line}".rstrip(), "", f"![{picture.heading}]({path})", ""]
    return "\n".join(lines).rstrip() + "\n"


def write_gallery(folder: str | Path) -> list[Path]:
    """Run all notebooks, write their pictures into `folder` and the page beside it; returns the paths, page last."""
    target = Path(folder)
    shown: list[tuple[Picture, str]] = []
    title_of: dict[str, str] = {}
    fresh: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as work:
        for path in shipped():
            print(path.name, file=sys.stderr)
            notebook = executed(path, Path(work))
            title_of[path.stem] = re.sub(r"^# +", "", notebook.cells[0].source.splitlines()[0])
            for number, picture in enumerate(pictures(path.stem, notebook), 1):
                name = f"{path.stem}-{number}.png"
                fresh[name] = smaller(picture.png)
                shown.append((picture, f"{target.name}/{name}"))
            for screen in sorted(target.glob(f"{path.stem}-screen*.png")):
                shown.append((Picture(path.stem, "In JupyterLab", b"", _SCREEN), f"{target.name}/{screen.name}"))
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.png"):
        if "-screen" not in old.name:
            old.unlink()
    written = [target / name for name in fresh]
    for path in written:
        path.write_bytes(fresh[path.name])
    index = target.with_suffix(".md")
    index.write_text(page(shown, title_of), encoding="utf-8")
    return [*written, index]


if __name__ == "__main__":
    for written_path in write_gallery(sys.argv[1] if len(sys.argv) > 1 else "docs/gallery"):
        print(f"{written_path}: {written_path.stat().st_size / 1000:.0f} kB")
