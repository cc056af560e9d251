"""The report card of `llmrun quantize --report`: several types of one model, quantized, measured and rated.

Owns the order of the measurements and the verdicts; quantize, bench and evaluate do the work. Shown by
llmrun.ui.views.report.
"""

from llmrun.quantize.report.card import Card
from llmrun.quantize.report.job import ReportUpdate, make_report

__all__ = ["Card", "ReportUpdate", "make_report"]
