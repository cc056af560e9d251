"""`run --logprobs`: an answer shaded by the probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.errors import UsageError, require_within
from llmrun.protocol.logprobs import MOST_TOP_LOGPROBS
from llmrun.protocol.messages import TextDelta
from llmrun.ui.terminal.output import Output


def check_logprobs(output: Output, count: int, answers: int) -> None:
    """Raise UsageError if log-probabilities can't be shown."""
    require_within("--logprobs", count, (0, MOST_TOP_LOGPROBS))
    if output.json:
        return
    if answers > 1:
        why = "only one answer can be shaded"
        raise UsageError("--logprobs and --answers can't be used together", why=why, hint="--json has both")
    if not (output.cursor_moves and output.stdout_has_color):
        why = "it colours the text, and there are no colours here"
        raise UsageError("--logprobs needs colours", why=why, hint="--json prints them for each token")


def show_logprobs(output: Output, deltas: Sequence[TextDelta], count: int) -> None:
    """Print the legend of the colours, and the N likeliest tokens where the answer's token was unlikely."""
    from llmrun.ui.answer.surprise import show_legend, show_surprises

    tokens = [token for delta in deltas for token in delta.logprobs]
    show_legend(output, stderr=True)
    if count and tokens:
        show_surprises(output, tokens, stderr=True)
