"""The use of the context window: `/context` in a chat.

Owns the drawing; must not know the source of the counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.protocol.messages import Message
from llmrun.protocol.questions import TokenCount
from llmrun.ui.terminal.format import bar, short
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, right, show_table

_CELLS = 16
_TEXT = 32


def show_context(
    output: Output, messages: Sequence[Message], counted: TokenCount, n_ctx: int, *, about: bool = False
) -> None:
    """Print a line for each message, for the chat template, and for free space, on stderr.

    Args:
        messages: as they are sent.
        counted: their tokens.
        n_ctx: tokens of the context window; 0 if unknown.
        about: the counts are an estimate.
    """
    template = max(0, counted.total - sum(counted.each))
    rows = [
        (message.role, short(message.content, _TEXT), *_share(tokens, n_ctx))
        for message, tokens in zip(messages, counted.each, strict=True)
    ]
    rows.append(("template", "what the template adds", *_share(template, n_ctx)))
    if n_ctx:
        rows.append(("free", "", *_share(max(0, n_ctx - counted.total), n_ctx)))
    columns = (
        Column("", style="bold"),
        Column("", style="dim", is_excerpt=True),
        *right("TOKENS", "SHARE"),
        Column("", style="cyan"),
    )
    show_table(output, columns, rows, stderr=True)
    of = f" of {n_ctx:,}" if n_ctx else ""
    output.note(f"{'About ' if about else ''}{counted.total:,}{of} tokens.")
    history = counted.history
    if history is not None and history.is_shortened:
        output.note("The window gets narrow: reasoning of earlier turns is left out.")
    elif history is not None:
        output.note(f"The first {history.tokens:,} tokens stand as they were computed and generated.")


def _share(tokens: int, n_ctx: int) -> tuple[str, str, str]:
    if not n_ctx:
        return f"{tokens:,}", "", ""
    share = tokens / n_ctx
    return f"{tokens:,}", f"{share:.1%}", bar(share, _CELLS)
