"""What only the page of an explained answer has: tokens to choose from, the lens, pictures of attention, sliders.

Owns their markup, their look and the script explain.js, which fills what live() leaves open; must not know what
anything means. Texts are untrusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llmrun.ui.html.markup import Markup, element, joined
from llmrun.ui.html.page import Block, Script

_LEVELS = 6  # shades of attention


class TokenSpan(NamedTuple):
    """A token to choose, and what it belongs to: "prompt", "answer" or "control"."""

    text: str
    kind: str


class HeatCell(NamedTuple):
    """What stands in a cell, and how strongly it is shaded: 0 to 1."""

    text: str
    share: float


class Slider(NamedTuple):
    """A number to try: its name in the script's data and for people, its value, and how far it goes in which steps."""

    name: str
    label: str
    value: float
    most: float
    step: float


def script(data: object) -> Script:
    """What makes the page live."""
    return Script(Path(__file__).with_name("explain.js").read_text(encoding="utf-8"), data, _STYLE)


def live(name: str) -> Block:
    """A place that the script fills, with what it shows under this name."""
    return Block(element("div", data_view=name))


def chips(tokens: Sequence[TokenSpan]) -> Block:
    """Tokens in a row that stays on the screen."""
    buttons = (
        element("button", token.text, type="button", class_=token.kind, data_at=at, aria_pressed="false")
        for at, token in enumerate(tokens)
    )
    without = element(
        "noscript", element("p", "Without JavaScript this page can't show what belongs to a single token.")
    )
    label = "Tokens; left and right arrows choose one"
    return Block(joined(element("nav", *buttons, class_="tokens", aria_label=label), without))


def lens_grid(names: Sequence[str], rows: Sequence[Sequence[HeatCell]]) -> Block:
    """A cell for each layer and token, the last layer on top.

    Args:
        names: of the tokens.
        rows: of the layers, from the first on.
    """
    head = element("tr", element("th", "layer"), *(element("th", name, scope="col") for name in names))
    lines = [
        element(
            "tr",
            element("th", str(layer + 1), scope="row"),
            *(element("td", cell.text, style=f"--s:{cell.share:.2f}", data_layer=layer) for cell in row),
        )
        for layer, row in reversed([*enumerate(rows)])
    ]
    table = element("table", element("tbody", head, *lines), class_="lens")
    label = "Logit lens; arrows choose a token and a layer"
    return Block(element("div", table, class_="wide", tabindex=0, role="region", aria_label=label))


def heads(pictures: Sequence[tuple[str, Sequence[Sequence[float]]]]) -> Block:
    """Attention as squares: a row for each token, a column for each that it looks at, the darker the more.

    Args:
        pictures: a caption, and rows of shares of 1, each as long as its own place.
    """
    figures = (element("figure", _shaded(caption, rows), element("figcaption", caption)) for caption, rows in pictures)
    return Block(element("div", *figures, class_="heads"))


def _shaded(caption: str, rows: Sequence[Sequence[float]]) -> Markup:
    """One path for each shade, so that a picture of thousands of cells stays small."""
    levels: list[list[str]] = [[] for _ in range(_LEVELS)]
    for y, row in enumerate(rows):
        for x, share in enumerate(row):
            level = min(int(max(share, 0.0) ** 0.5 * _LEVELS), _LEVELS - 1)  # even a little can be seen
            levels[level].append(f"M{x} {y}h1v1h-1z")
    paths = [
        element("path", d="".join(cells), fill_opacity=level / (_LEVELS - 1))
        for level, cells in enumerate(levels)
        if level and cells
    ]
    size, diagonal = len(rows), element("path", d=f"M0 0L{len(rows)} {len(rows)}", class_="diagonal")
    frame = element("rect", x=0, y=0, width=size, height=1, class_="row")
    label = f"Attention of {caption}. The table below has its numbers."
    return element("svg", diagonal, *paths, frame, viewBox=f"0 0 {size} {size}", role="img", aria_label=label)


def strip(rows: Sequence[Sequence[int]], label: str) -> Block:
    """A cell for each layer and token, the last layer on top, in the colour of its number.

    Args:
        rows: of the layers, from the first on.
        label: for those who can't see it.
    """
    cells: dict[int, list[str]] = {}
    for y, row in enumerate(reversed(rows)):
        for x, number in enumerate(row):
            cells.setdefault(number, []).append(f"M{x} {y}h1v1h-1z")
    paths = [
        element("path", element("title", f"{number}"), d="".join(found), fill=_color(number))
        for number, found in sorted(cells.items())
    ]
    frame = element("rect", x=0, y=0, width=1, height=len(rows), class_="column")
    size = f"0 0 {max(map(len, rows))} {len(rows)}"
    shape = {"viewBox": size, "preserveAspectRatio": "none", "style": f"height:{len(rows) * 0.45 + 1:.1f}rem"}
    return Block(element("svg", *paths, frame, class_="strip", role="img", aria_label=label, **shape))


def _color(number: int) -> str:
    """Far from that of the numbers beside it: the golden angle lies between them."""
    return f"hsl({number * 137.5 % 360:.0f} 55% 58%)"


def sliders(wanted: Sequence[Slider]) -> Block:
    """Numbers that a reader can change, and a way back."""
    labels = [
        element(
            "label",
            element("span", each.label),
            element(
                "input",
                type="range",
                name=each.name,
                min=0,
                max=f"{each.most:g}",
                step=f"{each.step:g}",
                value=f"{each.value:g}",
            ),
            element("output", f"{each.value:g}"),
        )
        for each in wanted
    ]
    return Block(element("div", *labels, element("button", "As it was", type="button"), class_="sliders"))


_STYLE = """
:root{--c1:#b35900;--c2:#00805e;--prompt:#e4edf7;--answer:#d9f0e3;--control:#eceef1}
@media screen and (prefers-color-scheme:dark){:root{--c1:#f0a050;--c2:#4cc9a0;--prompt:#1d3145;--answer:#173a2a;
--control:#262a31}}
section:has(>.tokens){display:contents}
.tokens{position:sticky;top:0;z-index:2;max-height:8.2rem;overflow:auto;padding:.6rem 0;background:var(--paper);
border-bottom:1px solid var(--rule)}
.tokens button{font:14px/1.3 ui-monospace,Menlo,Consolas,monospace;color:var(--ink);border:0;border-radius:.25rem;
margin:1px;padding:.2rem .3rem;white-space:pre;cursor:pointer;max-width:100%;overflow:hidden;text-overflow:ellipsis}
.prompt{background:var(--prompt)}.answer{background:var(--answer)}.tokens .control{background:var(--control);
color:var(--soft)}
.tokens [aria-pressed=true]{outline:2px solid var(--c0);outline-offset:-1px;font-weight:700;color:var(--ink)}
section{scroll-margin-top:9rem}
.lens{width:auto;font:12px/1.2 ui-monospace,Menlo,Consolas,monospace;border-collapse:separate;border-spacing:1px}
.lens td,.lens th{padding:.25rem .35rem;border:0;max-width:5.5rem;overflow:hidden;text-overflow:ellipsis;
white-space:pre;font-weight:400}
.lens td{cursor:pointer;background:color-mix(in srgb,var(--c0) calc(var(--s)*50%),var(--tint))}
.lens th:first-child{position:sticky;left:0;background:var(--paper);color:var(--soft);text-align:right}
.lens .here{box-shadow:inset 2px 0 var(--c0),inset -2px 0 var(--c0)}.lens th.here{font-weight:700}
.lens td[aria-current]{box-shadow:inset 0 0 0 2px var(--ink);font-weight:700}
.heads{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr));gap:1.5rem;margin:1rem 0}
.heads figure{margin:0}.heads svg{display:block;width:100%;border:1px solid var(--rule);fill:var(--c0);cursor:pointer;
shape-rendering:crispEdges}
.heads .row{fill:none;stroke:var(--ink);stroke-width:1.5px;vector-effect:non-scaling-stroke}
.heads .diagonal{stroke:var(--rule);stroke-width:1px;vector-effect:non-scaling-stroke}
.plot .k1,.k1{--c:var(--c1)}.plot .k2,.k2{--c:var(--c2)}.plot .k0,.k0{--c:var(--c0)}
.lines{height:11rem}.lines path{vector-effect:non-scaling-stroke}
.ends{display:flex;justify-content:space-between;max-width:none;margin:0}
.key{margin-right:1.2rem;white-space:nowrap}
.key::before{content:"";display:inline-block;width:1.1rem;height:3px;margin-right:.4rem;vertical-align:middle;
background:var(--c)}
.strip{display:block;width:100%;cursor:pointer;shape-rendering:crispEdges}
.strip .column{fill:none;stroke:var(--ink);stroke-width:1.5px;vector-effect:non-scaling-stroke}
.plane{font-family:ui-monospace,Menlo,Consolas,monospace}.plane g{--c:var(--dull)}.plane .chosen{--c:var(--c0)}
.plane .near{--c:var(--c1)}.plane circle{fill:var(--c);stroke:var(--c);stroke-width:1.5}
.plane .near circle{fill:var(--paper)}.plane .chosen text,.plane .near text{fill:var(--ink)}
.plane .own,.plane .chosen{cursor:pointer}.plane .chosen text{font-weight:700}
.sliders{display:grid;gap:.4rem;max-width:34rem;margin:1rem 0}.sliders[hidden]{display:none}
.sliders label{display:grid;grid-template-columns:6.5rem 1fr 3rem;gap:.8rem;align-items:center}
.sliders output{text-align:right;font-variant-numeric:tabular-nums}.sliders input{width:100%;accent-color:var(--c0)}
.sliders button{justify-self:start;font:inherit;padding:.2rem .7rem;color:var(--ink);background:var(--tint);
border:1px solid var(--axis);border-radius:.3rem;cursor:pointer}
button:focus-visible,summary:focus-visible,.wide:focus-visible{outline:2px solid var(--c0);outline-offset:1px}
details{margin:.6rem 0}summary{cursor:pointer;color:var(--soft);font-size:.875rem}
.tree,.tree ul{list-style:none;padding-left:1.1rem;margin:.2rem 0;font-size:.875rem}
.tree ul{border-left:1px solid var(--rule)}.tree code{white-space:pre-wrap;overflow-wrap:anywhere}
@media print{.heads{grid-template-columns:1fr 1fr}.tokens{position:static;max-height:none}.sliders button{display:none}
.lens{table-layout:fixed;width:100%;font-size:5pt}
.lens td,.lens th{padding:1px;max-width:none;white-space:pre-wrap;word-break:break-all}
section:has(.lens){page:lens}}
@page lens{size:landscape;margin:8mm}
""".strip()
