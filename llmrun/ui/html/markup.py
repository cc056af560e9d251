"""HTML and SVG elements as text. Owns escaping: nothing untrusted becomes markup. Pure; must not know what is drawn."""

from __future__ import annotations

from html import escape

from llmrun.ui.terminal.sanitize import clean


class Markup(str):
    """Text that is markup already; any other text is escaped where it is put into an element."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: object) -> Markup:
    """One element.

    Args:
        name: e.g. "text". What is inside is in Markup, or is untrusted text.
        attributes: None leaves one out; `class_` is class, `stroke_width` is stroke-width, `viewBox` stays as it is.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = joined(*children)
    if not inner and name in _EMPTY:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{inner}</{name}>")


def joined(*children: str) -> Markup:
    """Markup as it is, other text escaped, one after the other."""
    return Markup("".join(child if isinstance(child, Markup) else text(child) for child in children))


def text(untrusted: str) -> Markup:
    """Untrusted text, shown as it is: no markup, no control or invisible characters."""
    return Markup(escape(clean(untrusted)))


_EMPTY = frozenset({"line", "path", "rect", "circle", "meta", "br", "input"})


def _value(value: object) -> str:
    if isinstance(value, float):
        written = f"{value:.2f}".rstrip("0").rstrip(".")
        return "0" if written == "-0" else written
    return escape(clean(str(value)))
