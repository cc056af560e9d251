"""The report card of `llmrun quantize --report`: several types of one model, made, measured side by side, and judged.

Owns what is measured in which order and what is said about it; making, timing and comparing are quantize's, bench's
and evaluate's. Shown by llmrun.ui.views.report.
"""

from llmrun.quantize.report.card import Card
from llmrun.quantize.report.job import ReportUpdate, make_report

__all__ = ["Card", "ReportUpdate", "make_report"]
