"""Small PDFs."""

from __future__ import annotations

from fpdf import FPDF


def pdf(*pages: str) -> bytes:
    """Return a PDF; a page without a text has a line drawn on it."""
    made = FPDF()
    made.set_font("helvetica", size=12)
    for text in pages:
        made.add_page()
        if text:
            made.multi_cell(0, 6, text)
        else:
            made.line(1, 1, 100, 100)
    return bytes(made.output())
