"""HTML pages from the Jinja2 templates of this folder: one file each, without network.

Owns escaping and the Content-Security-Policy; must not know what a page says. All data are untrusted: control and
invisible characters are removed from texts, everything else is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.format import counted, milliseconds, percent, rate
from llmrun.ui.terminal.sanitize import clean

if TYPE_CHECKING:
    from jinja2.environment import Environment

_FOLDER = Path(__file__).parent


def render(template: str, *, scripts: Sequence[str] = ("sort.js",), **data: object) -> str:
    """Return a whole page.

    Args:
        template: a file of this folder, without its ending.
        scripts: files of this folder, or absolute paths; the page's policy allows no other script.
        data: the template's variables.
    """
    codes = [(_FOLDER / name).read_text(encoding="utf-8") for name in scripts]
    digests = (base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in codes)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    page = _environment().get_template(f"{template}.html.jinja")
    return page.render(**data, scripts=codes, script_hashes=hashes)


def _environment() -> Environment:
    # From its submodules: a process that renders chat templates has an empty `jinja2` (engine/llama/library.py).
    from jinja2.environment import Environment
    from jinja2.loaders import FileSystemLoader
    from jinja2.runtime import StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters.update(
        counted=counted, digits=digits, milliseconds=milliseconds, percent=percent, rate=rate, size=readable_size,
        width_of=width_of,
    )  # fmt: skip
    return environment


def _printable(value: object) -> object:
    """Return a value as a template may print it; Markup has been cleaned where its parts were printed."""
    return clean(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def is_drawable(value: float | None) -> bool:
    """Return whether a value is a finite number of a size that any measurement has."""
    return value is not None and (value == 0 or 1e-30 < abs(value) < 1e30)


def width_of(value: float, maximum: float) -> str:
    """Return a value as a CSS percentage of a maximum, from 0% to 100%."""
    share = value / maximum if is_drawable(value) and is_drawable(maximum) and maximum > 0 else 0.0
    return f"{min(max(share, 0.0), 1.0):.1%}"


def digits(value: float) -> str:
    """Return a number with three significant digits or more, and thousands separated, e.g. "0.05", "1,024"."""
    if not math.isfinite(value):
        return "?"
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-4:
        return f"{value:.3g}"
    if size >= 100:
        return f"{value:,.0f}"
    decimals = 0 if size == 0 else max(0, 2 - math.floor(math.log10(size)))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
