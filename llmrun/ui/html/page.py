"""One HTML page that needs nothing else: no network, no fonts, no libraries; light, dark, on paper, without scripts.

Owns the page's look and its parts; must not know what it says. All text is untrusted and escaped; only Markup, which
this room's other files make, is taken as it is.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from llmrun.ui.html.markup import Markup, element, joined
from llmrun.ui.html.plot_frame import STYLE as PLOT_STYLE


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a table.

    Attributes:
        text: as it is shown.
        value: what the column is sorted by; None sorts by the text, after all numbers.
        share: 0 to 1 draws a faint bar behind the text.
        strong: bold.
    """

    text: str
    value: float | None = None
    share: float | None = None
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below headings; a click on a heading sorts them.

    Attributes:
        headings: of the columns.
        rows: of a cell for each heading.
        numbers: which columns are set to the right, counted from 0.
        words: which columns hold sentences, and want room.
        marked: which row stands out, if any.
        note: below it.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numbers: frozenset[int] = frozenset()
    words: frozenset[int] = frozenset()
    marked: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart, and what to see in it."""

    svg: Markup
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text; small is for what only some readers want."""

    text: str
    small: bool = False


@dataclass(frozen=True, slots=True)
class FactList:
    """Names and their values."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """The few numbers that matter most, large: (number, what it is)."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """What only one kind of page has."""

    markup: Markup


@dataclass(frozen=True, slots=True)
class Details:
    """What only some readers want, behind a line that opens it."""

    summary: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """What makes a page live.

    Attributes:
        code: JavaScript of ours; nothing untrusted is ever part of it.
        data: what it finds as JSON in the element "data"; may hold untrusted text.
        style: CSS for what it draws.
    """

    code: str
    data: object
    style: str


Part: TypeAlias = "Table | Figure | Paragraph | FactList | Tiles | Block | Details"


@dataclass(frozen=True, slots=True)
class Section:
    """A heading ("" for none) and what stands below it."""

    heading: str
    parts: tuple[Part, ...]


def page(title: str, sections: Sequence[Section], *, lead: str = "", script: Script | None = None) -> str:
    """The whole page.

    Args:
        title: of the page and over it.
        sections: from top to bottom.
        lead: the one sentence that says what came out.
        script: what makes it live.
    """
    codes = [_SORT] if any(_has_table(section.parts) for section in sections) else []
    codes += [script.code] if script else []
    scripts = [element("script", Markup(code)) for code in codes]
    data = [element("script", _json(script.data), type="application/json", id="data")] if script else []
    body = element(
        "main",
        element("header", element("h1", title), element("p", lead, class_="lead") if lead else Markup()),
        *(_section(section) for section in sections),
    )
    head = joined(
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width,initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(codes)),
        element("title", title),
        element("style", Markup(f"\n{PLOT_STYLE}\n{_STYLE}\n{script.style if script else ''}\n")),
    )
    whole = joined(body, *data, *scripts)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>{whole}</body>\n</html>\n'


def _has_table(parts: Sequence[Part]) -> bool:
    return any(isinstance(part, Table) or (isinstance(part, Details) and _has_table(part.parts)) for part in parts)


def _json(data: object) -> Markup:
    """As the text of a script element, which ends at "</script" whatever that stands in."""
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _section(section: Section) -> Markup:
    heading = element("h2", section.heading) if section.heading else Markup()
    return element("section", heading, *(_part(part) for part in section.parts))


def _part(part: Part) -> Markup:
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Block):
        return part.markup
    if isinstance(part, Details):
        return element("details", element("summary", part.summary), *map(_part, part.parts))
    if isinstance(part, Figure):
        caption = element("figcaption", part.caption) if part.caption else Markup()
        return element("figure", element("div", part.svg, class_="wide", tabindex=0), caption)
    if isinstance(part, Paragraph):
        return element("p", part.text, class_="small" if part.small else None)
    if isinstance(part, Tiles):
        tiles = (element("div", element("b", number), element("span", what)) for number, what in part.pairs)
        return element("div", *tiles, class_="tiles")
    pairs = (joined(element("dt", name), element("dd", value)) for name, value in part.pairs)
    return element("dl", *pairs)


def _table(table: Table) -> Markup:
    columns = range(len(table.headings))
    side = ["n" if index in table.numbers else "w" if index in table.words else None for index in columns]
    heads = [element("th", heading, class_=side[i], scope="col") for i, heading in enumerate(table.headings)]
    rows = [
        element(
            "tr",
            *(_cell(cell, side[i], first=i == 0) for i, cell in enumerate(row)),
            class_="marked" if number == table.marked else None,
        )
        for number, row in enumerate(table.rows)
    ]
    whole = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    note = element("p", table.note, class_="small") if table.note else Markup()
    return joined(element("div", whole, class_="wide", tabindex=0), note)


def _cell(cell: Cell, side: str | None, *, first: bool) -> Markup:
    text = element("b", cell.text) if cell.strong else joined(cell.text)
    share = None if cell.share is None else f"--share:{min(max(cell.share, 0.0), 1.0):.1%}"
    classes = " ".join(filter(None, (side, "share" if share else None))) or None
    value = None if cell.value is None else repr(float(cell.value))
    scope = "row" if first else None
    return element("th" if first else "td", text, class_=classes, style=share, data_v=value, scope=scope)


def _policy(codes: Sequence[str]) -> str:
    """Nothing but this page's own style and scripts: not even a mistake of ours could load or run anything else."""
    digests = (base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in codes)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"


_SORT = """
for (const head of document.querySelectorAll("thead th")) {
  head.innerHTML = "<button>" + head.innerHTML + "</button>";
  head.firstChild.onclick = () => {
    const body = head.closest("table").tBodies[0], column = head.cellIndex;
    const down = head.ariaSort === "ascending" ? -1 : 1, key = row => row.cells[column];
    for (const other of head.parentNode.cells) other.ariaSort = "none";
    head.ariaSort = down > 0 ? "ascending" : "descending";
    const number = row => parseFloat(key(row).dataset.v ?? "Infinity");
    body.append(...[...body.rows].sort((a, b) =>
      down * (number(a) - number(b) || key(a).innerText.localeCompare(key(b).innerText))));
  };
}
"""

_STYLE = """
:root{color-scheme:light dark;--tint:#f3f6fa;--bar:#dbeaf6}
@media screen and (prefers-color-scheme:dark){:root{--tint:#1c2027;--bar:#1f3a52}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink)}
body{font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:64rem;margin:0 auto;padding:3.5rem 1.5rem 5rem}
header{border-bottom:1px solid var(--rule);padding-bottom:1.5rem;margin-bottom:2rem}
h1{font-size:1.9rem;line-height:1.2;letter-spacing:-.015em;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:3rem 0 .75rem;letter-spacing:-.005em}
p{margin:.5rem 0;max-width:44rem}.lead{font-size:1.15rem;color:var(--soft);margin:.75rem 0 0}
.small,figcaption{font-size:.875rem;color:var(--soft)}
figure{margin:1.5rem 0 2.25rem}figcaption{margin-top:.5rem;max-width:44rem}
.wide{overflow-x:auto}.wide>svg{min-width:34rem;max-width:50rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.8rem;margin:1.5rem 0}
.tiles div{background:var(--tint);border-radius:.5rem;padding:.9rem 1rem}
.tiles b{display:block;white-space:nowrap}
.tiles b{font-size:1.45rem;line-height:1.2;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:.875rem}
table{border-collapse:collapse;width:100%;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:.5rem .6rem;text-align:left;border-bottom:1px solid var(--rule);vertical-align:top}
.w{min-width:13rem}tbody th{font-weight:600;white-space:nowrap}
.n{text-align:right;white-space:nowrap}
thead th{font-weight:500;color:var(--soft);vertical-align:bottom;border-bottom-color:var(--axis)}
thead button{all:unset;cursor:pointer}thead button:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
thead button:hover{color:var(--ink)}
[aria-sort=ascending] button::after{content:" \\2191"}[aria-sort=descending] button::after{content:" \\2193"}
tbody tr:hover{background:var(--tint)}.marked{background:var(--tint)}
.marked>:first-child{box-shadow:inset 3px 0 var(--c0)}
.share{background-image:linear-gradient(to left,var(--bar) var(--share),transparent 0);background-repeat:no-repeat;
background-position:center .45rem;background-size:calc(100% - .5rem) 1.6em}
dl{display:grid;grid-template-columns:minmax(9rem,max-content) 1fr;gap:.35rem 1.5rem;font-size:.9rem;margin:.75rem 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
@media (max-width:36rem){main{padding:2rem 1rem}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.6rem}}
@media print{body{font-size:11pt}main{max-width:none;padding:0}figure,tr,.tiles{break-inside:avoid}h2{break-after:avoid}
.wide{overflow:visible}.wide>svg{min-width:0;max-width:none}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
""".strip()
