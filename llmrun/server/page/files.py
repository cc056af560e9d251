"""The files of the page and the headers they are served with. One is made here: the table of sampling parameters.

Owns the Content-Security-Policy; must not know chats or models. Only the files listed here are served.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from llmrun.protocol.params import PARAMETERS, STEPS

FOLDER = Path(__file__).with_name("static")
INDEX, TABLE = "index.html", "parameters.js"
_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
MEDIA_TYPES = {
    INDEX: "text/html; charset=utf-8",
    "page.css": _STYLE,
    "icon.svg": "image/svg+xml",
    "page.js": _SCRIPT,
    "api.js": _SCRIPT,
    "attachments.js": _SCRIPT,
    "branches.js": _SCRIPT,
    "calls.js": _SCRIPT,
    "catalogue.js": _SCRIPT,
    "chats.js": _SCRIPT,
    "compare.js": _SCRIPT,
    "context.js": _SCRIPT,
    "dom.js": _SCRIPT,
    "downloads.js": _SCRIPT,
    "exports.js": _SCRIPT,
    "formulas.js": _SCRIPT,
    "highlight.js": _SCRIPT,
    "markdown.js": _SCRIPT,
    TABLE: _SCRIPT,
    "microphone.js": _SCRIPT,
    "phone.js": _SCRIPT,
    "sampler.js": _SCRIPT,
    "scroll.js": _SCRIPT,
    "servers.js": _SCRIPT,
    "settings.js": _SCRIPT,
    "steps.js": _SCRIPT,
    "tokens.js": _SCRIPT,
    "turns.js": _SCRIPT,
    "watch.js": _SCRIPT,
    "vendor/markdown-it.js": _SCRIPT,
    "vendor/prism.js": _SCRIPT,
    "vendor/temml.js": _SCRIPT,
}
"""Name of each file -> its media type."""
_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types markdown",
    )
)
HEADERS = {
    "content-security-policy": _CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-dns-prefetch-control": "off",
    "x-frame-options": "DENY",
}
"""Headers of every response of the page. Links in answers must not even be looked up before a click."""


@cache
def read_file(name: str) -> bytes:
    """Return the content of a file of MEDIA_TYPES."""
    return _table() if name == TABLE else (FOLDER / name).read_bytes()


def _table() -> bytes:
    """Return a module with the sampling parameters that the page shows, and the steps of the chain in their order."""
    rows = {
        name: {
            "label": row.label,
            "min": row.bounds[0],
            "max": row.bounds[1],
            "step": 1 if row.is_whole else "any",
            "slider": row.slider._asdict() if row.slider else None,
        }
        for name, row in PARAMETERS.items()
        if row.label and row.bounds
    }
    return f"export const PARAMETERS = {json.dumps(rows)};\nexport const STEPS = {json.dumps(STEPS)};\n".encode()
