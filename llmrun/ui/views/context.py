"""What fills the context window, drawn: `/context` in a chat.

Owns the drawing; must not know where the counts come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.protocol.messages import Counted, Message
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, show_table

_CELLS = 16
_TEXT = 32


def show_context(output: Output, messages: Sequence[Message], counted: Counted, n_ctx: int) -> None:
    """One line for each message, for what the chat template writes around them, and for what is free; on stderr.

    Args:
        messages: as they are sent.
        counted: their tokens.
        n_ctx: tokens of the context window.
    """
    template = max(0, counted.total - sum(counted.each))
    rows = [
        (message.role, _beginning(message.content), *_share(tokens, n_ctx))
        for message, tokens in zip(messages, counted.each, strict=True)
    ]
    rows.append(("template", "what the template adds", *_share(template, n_ctx)))
    rows.append(("free", "", *_share(max(0, n_ctx - counted.total), n_ctx)))
    columns = (
        Column("", style="bold"),
        Column("", style="dim"),
        Column("TOKENS", right=True),
        Column("SHARE", right=True),
        Column("", style="cyan"),
    )
    show_table(output, columns, rows, stderr=True)
    output.note(f"{counted.total:,} of {n_ctx:,} tokens.")


def _share(tokens: int, n_ctx: int) -> tuple[str, str, str]:
    share = tokens / n_ctx
    return f"{tokens:,}", f"{share:.1%}", "█" * max(round(share * _CELLS), tokens > 0)


def _beginning(text: str) -> str:
    line = " ".join(text[: 4 * _TEXT].split())
    return line if len(line) <= _TEXT else line[: _TEXT - 1].rstrip() + "…"
