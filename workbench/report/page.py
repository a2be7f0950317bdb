"""The frame of the HTML report: one page with its style inside, no script, nothing fetched."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable

# Figures keep a white ground in the dark, since their type is dark.
_CSS = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #5a5a5a; --line: #d9d9d9; --ground: #fff; --raised: #f5f6f7;
  --accent: #0072b2; --warn: #fff3bf; --warn-ink: #1a1a1a; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --soft: #a9adb2; --line: #3d4146; --ground: #16181b;
  --raised: #202327; --accent: #56b4e9; --warn: #f0e442; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 80rem; padding: 2.5rem 1.5rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.1rem; font-weight: 600; color: var(--soft); margin: 0 0 .75rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 .75rem; }
p, li { max-width: 52rem; }
.headline { font-size: 1.55rem; line-height: 1.35; font-weight: 600; margin: 0 0 .75rem; max-width: 58rem; }
a { color: var(--accent); }
.meta, figcaption, .notes, .unit { color: var(--soft); }
.meta { font-size: .9rem; margin: .25rem 0; max-width: none; }
.badge { display: inline-block; background: var(--warn); color: var(--warn-ink); font-weight: 700; border-radius: .3rem;
  padding: .1rem .55rem; margin-bottom: .75rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: 1rem;
  margin: 1.75rem 0 0; padding: 0; }
.tiles li { list-style: none; background: var(--raised); border-radius: .5rem; padding: .9rem 1.1rem; }
.tiles b { display: block; font-size: 1.7rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tiles span { display: block; font-size: .9rem; } .tiles .paper { color: var(--soft); font-style: italic; }
figure { margin: 1.25rem 0 2rem; }
figure.table figcaption { font-weight: 600; color: var(--ink); margin-bottom: .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { text-align: right; padding: .14rem .42rem; } th:first-child { text-align: left; padding-left: 0; }
thead th { vertical-align: bottom; border-bottom: 2px solid var(--line); font-weight: 600; padding-bottom: .35rem; }
.unit { display: block; font-weight: 400; font-size: .8rem; }
tbody { border-bottom: 1px solid var(--line); } tr.measured:not(:only-child) { font-weight: 600; }
tbody tr:first-child > * { padding-top: .35rem; } tbody tr:last-child > * { padding-bottom: .35rem; }
tr.p95 { color: var(--soft); } tr.paper { color: var(--accent); font-style: italic; }
tbody th { font-weight: 400; } tr.measured th { font-weight: 600; }
tr.p95 th, tr.paper th { padding-left: 1rem; }
.notes { font-size: .85rem; padding-left: 1.1rem; margin: .6rem 0 0; }
img { display: block; width: 100%; max-width: 62rem; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: .5rem; padding: .4rem; }
.drawn figcaption { margin-top: .6rem; font-size: .92rem; max-width: 52rem; } .drawn b { color: var(--ink); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.25rem; }
dt { color: var(--soft); } dd { margin: 0; }
pre { background: var(--raised); border-radius: .5rem; padding: .9rem 1.1rem; overflow-x: auto; font-size: .88rem; }
@media print { body { max-width: none; padding: 0; } h2 { break-after: avoid; } figure { break-inside: avoid; } }
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole document. Its policy forbids every request, so that it shows alike offline."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
            "style-src 'unsafe-inline'\">",
            f"<title>{html.escape(title)}</title>",
            f"<style>{_CSS}</style>",
            "</head>",
            "<body>",
            *body,
            "</body>",
            "</html>",
            "",
        ]
    )


def element(tag: str, text: str, css: str = "") -> str:
    """One element with escaped text."""
    return f'<{tag} class="{css}">{html.escape(text)}</{tag}>' if css else f"<{tag}>{html.escape(text)}</{tag}>"


def bullets(items: Iterable[str]) -> str:
    """A list of escaped sentences."""
    return "<ul>" + "".join(element("li", item) for item in items) + "</ul>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of names and values, those without a value left out."""
    return "<dl>" + "".join(element("dt", name) + element("dd", value) for name, value in pairs if value) + "</dl>"


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """Large figures: value, what it is, and the paper's."""
    cells = (
        f"<li>{element('b', value)}{element('span', what)}{element('span', theirs, 'paper')}</li>"
        for value, what, theirs in items
    )
    return '<ul class="tiles">' + "".join(cells) + "</ul>"


def drawing(png: bytes, alt: str, here: str, theirs: str, how: str) -> str:
    """A figure inside the page, with what was found here, what the paper has and how it is measured."""
    data = base64.b64encode(png).decode("ascii")
    words = f"<b>Here:</b> {html.escape(here)} <b>Paper:</b> {html.escape(theirs)} <b>Measured:</b> {html.escape(how)}"
    return (
        f'<figure class="drawn"><img alt="{html.escape(alt, quote=True)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{words}</figcaption></figure>"
    )
