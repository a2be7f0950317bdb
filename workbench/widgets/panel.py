"""The live panel: text as it is made, its latency by token, and every technique to be switched while it runs.

    wb.panel("store", "predictors", prompt="Once upon a time")

Plain ipywidgets, so that it works where they do (JupyterLab, VS Code). The engine runs in a thread of its own; the view
is drawn from copies at most `1 / REFRESH_SECONDS` times a second, and only when something has changed.
"""

from __future__ import annotations

import asyncio
import base64
import html
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from workbench.ablation import Ablation
from workbench.errors import BudgetError, WorkbenchError
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec
from workbench.widgets import readout
from workbench.widgets.chart import latency_chart
from workbench.widgets.controls import HELP, Controls, refusal
from workbench.widgets.errors import widgets_module
from workbench.widgets.export import KINDS, Kind, export, session_record, table_text
from workbench.widgets.session import Session, Snapshot

REFRESH_SECONDS = 0.25
CHART_EVERY = 2
SLOW_EVERY = 4
"""Refreshes between two drawings of the chart, and of what changes slowly: medians, marks, DRAM."""
PROMPT = "Once upon a time"
_OPEN: dict[str, Panel] = {}


def panel(
    store: str | Path,
    predictors: Predictors | str | Path | None = None,
    *,
    prompt: str = PROMPT,
    ablation: Ablation | None = None,
    run: RunSpec | None = None,
    backend: str = "torch-cpu",
    name: str = "panel",
) -> Panel:
    """A live panel on a flash store. One of the same `name` that is open is closed first, so that running the cell
    again frees what it held.

    Without predictors and without an ablation, the oracle says which neurons to load. What cannot be (no store, no
    predictors, no direct I/O, too little DRAM) is one line in the panel; using the panel then raises it.
    """
    former = _OPEN.pop(name, None)
    if former is not None:
        former.close()
    try:
        session = Session.open(store, predictors, ablation=ablation, run=run, backend=backend)
    except WorkbenchError as error:
        return Panel(None, prompt=prompt, failure=error)
    _OPEN[name] = Panel(session, prompt=prompt)
    return _OPEN[name]


class Panel:
    """The view of a session. `view` is the widget to show; a panel that is a cell's last expression shows itself.

    `session` does the same things from Python. `close()` gives DRAM, threads and files back.
    """

    def __init__(self, session: Session | None, *, prompt: str = PROMPT, failure: WorkbenchError | None = None):
        self._w = widgets_module()
        self._session, self.failure = session, failure
        self._task: asyncio.Task[None] | None = None
        self._shown, self._ticks, self._complaint = -1, 0, ""
        self._html = {
            name: self._w.HTML()
            for name in ("status", "refused", "text", "chart", "marks", "rolling", "gauge", "table")
        }
        if session is None:
            self._html["status"].value = readout.status(refusal(failure) if failure else "no session", True, "")
            self.view = self._w.VBox([self._html["status"]])
            return
        self.controls = Controls(session.setting, self._change)
        self._fields(prompt)
        self.view = self._laid_out()
        self.refresh(everything=True)

    @property
    def session(self) -> Session:
        """The running session. What hindered its opening is raised again where there is none."""
        if self._session is None:
            raise self.failure or BudgetError("panel: it is closed; run the cell that opened it again")
        return self._session

    def _ipython_display_(self) -> None:
        from IPython.display import display

        self._begin_refreshing()
        display(self.view)

    def close(self) -> None:
        """Give back DRAM, threads and files, and the widgets; a line stays where the panel was."""
        if self._task is not None:
            self._task.cancel()
        if self._session is None:
            return
        self._session.close()
        self._session = None
        for name in [name for name, opened in _OPEN.items() if opened is self]:
            del _OPEN[name]
        status = self._html["status"]
        status.value = readout.status("closed: DRAM, threads and files are given back; run the cell again", False, "")
        self.view.children = (status,)
        for widget in self._every:
            if widget is not status:
                widget.close()

    # the same from Python

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Until the text that is being made is done; the view keeps up meanwhile. A failure is raised, one line.

        The kernel of a notebook takes no control's change while a cell waits here: there, `await panel`.
        """
        return self._result(self.session.wait(timeout, self.refresh))

    def __await__(self) -> Generator[Any, None, Snapshot]:
        """As `wait()`, and what is pressed and changed meanwhile takes effect."""
        return self._awaited().__await__()

    async def _awaited(self) -> Snapshot:
        session = self.session
        while not session.idle:
            await asyncio.sleep(0.02)
        return self._result(session.snapshot())

    def _result(self, snapshot: Snapshot) -> Snapshot:
        self.refresh(everything=True)
        if snapshot.error:
            raise BudgetError(snapshot.line)
        return snapshot

    def table(self) -> Any:
        """The table of all settings that made tokens enough, to be shown by the notebook."""
        from IPython.display import Markdown

        return Markdown(table_text(session_record(self.session), "md"))

    # drawing

    def _begin_refreshing(self) -> None:
        """Draw now and then, from the notebook's own event loop, for as long as this panel lives."""
        if self._task is None and self._session is not None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return  # no notebook: who shows it calls refresh()
            self._task = loop.create_task(_keep_refreshing(weakref.ref(self)))

    def refresh(self, everything: bool = False) -> None:
        """Draw what has changed since the last time."""
        session = self._session
        if session is None or (session.version == self._shown and not everything):
            return
        slow = everything or not session.running or self._ticks % SLOW_EVERY == 0
        snapshot = session.snapshot(figures=slow)
        if snapshot.state != "running" and not slow:  # it has just ended: the last drawing is a whole one
            return self.refresh(everything=True)
        self._ticks, self._shown = self._ticks + 1, snapshot.version
        notice = self._complaint or (refusal_text(snapshot.notice) if snapshot.notice else "")
        self._put("status", readout.status(snapshot.line, snapshot.error, notice))
        self._put("refused", readout.status("", False, notice) if notice else "")
        self._put("text", readout.text_area(snapshot.text))
        if slow or self._ticks % CHART_EVERY == 0:
            self._put("chart", latency_chart(snapshot.rows, snapshot.marks, f"wb{id(self):x}"))
        self._put("rolling", readout.rolling(snapshot))
        if slow:
            waiting = f"{snapshot.stretch_tokens} tokens of this setting so far; medians follow after the first 12"
            self._put("table", readout.comparison(snapshot.now, snapshot.pinned, waiting))
            self._put("marks", readout.mark_list(snapshot.marks))
            self._put("gauge", readout.gauge(snapshot.plan, snapshot.rss_bytes, snapshot.setting.run.dram))
            self._enable(snapshot)
            if session.setting is snapshot.setting:  # nothing is on its way: what was refused snaps back
                self.controls.show(snapshot.setting)

    def _put(self, name: str, value: str) -> None:
        if self._html[name].value != value:
            self._html[name].value = value

    def _enable(self, snapshot: Snapshot) -> None:
        running = snapshot.state == "running"
        for name, usable in (
            ("stop", running), ("continue", not running and bool(snapshot.text)), ("start", True), ("reset", True),
            ("pin", snapshot.now is not None), ("unpin", snapshot.pinned is not None),
        ):  # fmt: skip
            if self.buttons[name].disabled == usable:
                self.buttons[name].disabled = not usable

    # what the user does

    def _try(self, action: Callable[[], Any]) -> None:
        """Do it, and show in one line why it could not be done."""
        try:
            action()
            self._complaint = ""
        except WorkbenchError as error:
            self._complaint = refusal(error)
        self.refresh(everything=True)

    def _change(self, name: str, value: Any) -> None:
        self._try(lambda: self.session.change(**{name: value}))
        self.controls.show(self.session.setting)

    def _start(self) -> None:
        self.session.start(
            self.prompt.value, self.tokens.value, temperature=self.temperature.value, past_end=self.past_end.value
        )

    def _export(self, kind: Kind) -> None:
        target = Path(self.path.value.strip() or "session").with_suffix(f".{kind}")
        written = export(self.session, target, kind)
        body = base64.b64encode(written.read_bytes()).decode()
        name = html.escape(str(written), quote=True)
        self.exported.value = (
            f"<div role='status' class='wb-exported' style='{readout.INK};font-size:13px'>{KINDS[kind]} written to "
            f"<a href='data:application/octet-stream;base64,{body}' download='{html.escape(written.name, quote=True)}' "
            f"style='text-decoration:underline'>{name}</a></div>"
        )

    # layout

    def _fields(self, prompt: str) -> None:
        w, layout = self._w, self._w.Layout
        self.prompt = w.Text(value=prompt, description="prompt", layout=layout(flex="1 1 320px", width="auto"))
        self.tokens = w.BoundedIntText(
            value=200, min=1, max=100_000, description="tokens", layout=layout(width="150px")
        )
        self.temperature = w.BoundedFloatText(
            value=0.0, min=0.0, max=5.0, step=0.1, description="temperature", layout=layout(width="166px"),
            tooltip="0 takes the likeliest token each time",
        )  # fmt: skip
        for field in (self.prompt, self.tokens, self.temperature):
            field.style.description_width = "initial"
        self.past_end = w.Checkbox(
            value=True, indent=False, description="go on past the end of a text", layout=layout(width="auto"),
            tooltip="off: an end-of-text token ends the text",
        )  # fmt: skip
        self.path = w.Text(
            value="session", description="file", layout=layout(width="150px"), tooltip="without its ending"
        )
        self.path.style.description_width = "initial"
        self.exported = w.HTML()
        session = self.session
        actions: dict[str, tuple[str, str, Callable[[], Any]]] = {
            "start": ("Start", "make text after the prompt, from an empty context", self._start),
            "stop": ("Stop", "after the present token", session.stop),
            "continue": ("Continue", "after the text so far", lambda: session.go_on(self.tokens.value)),
            "reset": ("Reset", "forget text, figures and marks; settings stay", session.reset),
            "pin": ("Pin as A", "keep the present setting's figures to compare with", session.pin),
            "unpin": ("Unpin", "forget A", session.unpin),
            "json": ("JSON", "an ablation record that the report reads", lambda: self._export("json")),
            "md": ("Markdown", "the table for a text", lambda: self._export("md")),
            "tex": ("LaTeX", "the table for a paper (booktabs)", lambda: self._export("tex")),
        }
        self.buttons: dict[str, Any] = {}
        for name, (words, tooltip, action) in actions.items():
            button = w.Button(description=words, tooltip=tooltip, layout=layout(width="auto", min_width="76px"))
            button.on_click(lambda _, action=action: self._try(action))
            self.buttons[name] = button
        self.buttons["start"].button_style = "primary"

    def _laid_out(self) -> Any:
        w, layout = self._w, self._w.Layout

        def row(*children: Any) -> Any:
            return w.HBox(children, layout=layout(flex_flow="row wrap", align_items="center", grid_gap="4px 6px"))

        def title(words: str) -> Any:
            return w.HTML(f"<div style='{readout.INK};font-weight:600;font-size:13px'>{words}</div>")

        def column(words: str, children: list[Any]) -> Any:
            return w.VBox([title(words), *children], layout=layout(flex="1 1 420px", min_width="0", overflow="hidden"))

        b, h = self.buttons, self._html
        techniques = column("Techniques", [self._explained(name) for name in self.controls.names(Ablation)])
        names = [*self.controls.names(RunSpec), *(["false_negative"] if self.controls.rates else [])]
        runs = column("Run", [self._run_row(name) for name in names])
        pin = w.VBox([title("Compare"), row(b["pin"], b["unpin"]), h["table"]], layout=layout(flex="1 1 420px"))
        files = w.VBox(
            [title("Export"), row(self.path, b["json"], b["md"], b["tex"]), self.exported],
            layout=layout(flex="1 1 420px"),
        )
        side = layout(flex_flow="row wrap", align_items="flex-start", grid_gap="8px 28px")
        parts = [
            row(self.prompt, self.tokens, self.temperature, self.past_end),
            row(b["start"], b["stop"], b["continue"], b["reset"], h["status"]),
            h["text"],
            h["rolling"],
            h["chart"],
            h["marks"],
            h["gauge"],
            h["refused"],  # beside the controls, too: the state's line may be out of sight
            w.HBox([techniques, runs], layout=side),
            w.HTML(self.controls.help_html()),
            w.HBox([pin, files], layout=side),
        ]
        view = w.VBox(parts, layout=layout(max_width="1000px", grid_gap="6px", overflow="hidden"))
        self._every = list(_walk(view))
        return view

    def _explained(self, name: str) -> Any:
        """A technique's control with what it does beside it."""
        control, layout = self.controls.widgets[name], self._w.Layout
        control.layout.width, control.layout.flex = "184px", "0 0 auto"
        if isinstance(control, self._w.Dropdown):
            control.style.description_width = "initial"
        words = self._w.HTML(
            f"<div style='{readout.INK};opacity:.72;font-size:12px;line-height:1.3'>{html.escape(HELP[name])}</div>",
            layout=self._w.Layout(flex="1 1 auto", min_width="0"),
        )
        return self._w.HBox([control, words], layout=layout(align_items="center", grid_gap="8px"))

    def _run_row(self, name: str) -> Any:
        control, layout = self.controls.widgets[name], self._w.Layout
        if name != "dram":
            return control
        control.layout = layout(flex="1 1 auto", width="auto")
        return self._w.HBox([control, self.controls.dram_text], layout=layout(align_items="center"))


def refusal_text(notice: str) -> str:
    """A refusal that the engine made later, in a panel's words."""
    return refusal(WorkbenchError(notice))


def _walk(widget: Any) -> list[Any]:
    """A widget and all that is in it."""
    return [widget, *(found for child in getattr(widget, "children", ()) for found in _walk(child))]


async def _keep_refreshing(ref: weakref.ref[Panel]) -> None:
    """Refresh until the panel is closed or gone; holds no reference to it while it sleeps."""
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        shown = ref()
        if shown is None or shown._session is None:
            return
        shown.refresh()
        del shown
