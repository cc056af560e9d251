"""A text's tokens on a terminal: coloured pieces, ids and bytes, merge trees, and counts by script."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llmrun.lab.insight.merges import MergeNode, MergeRule
from llmrun.lab.insight.tokens import ScriptCount, Token, TokenGroup, groups
from llmrun.ui.terminal.format import counted
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, right, show_table

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

_SHADES = ("black on #a6dcef", "black on #f8c8a0", "black on #c3e6b5", "black on #e5c1e8", "black on #f5e79e")
_CONTROL = "bold white on #a03050"
_MAX_ROWS = 40  # of the table without --table
_VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍"})


def pieces_text(tokens: Sequence[Token], *, color: bool) -> Text:
    """Return a text with its tokens in colours; without colours, with bars between the tokens."""
    from rich.text import Text

    text = Text()
    for number, group in enumerate(groups(tokens)):
        shown = _visible(group)
        if not color:
            shown = f"|{shown}"
        text.append(shown, _CONTROL if group.tokens[0].is_control else _SHADES[number % len(_SHADES)])
        if group.text.endswith("\n"):
            text.append("\n")
    return text


def show_tokens(output: Output, tokens: Sequence[Token], *, table: bool) -> None:
    """Print the pieces, and a table of ids and bytes if `table` is set or the tokens are few."""
    output.console().print(pieces_text(tokens, color=output.stdout_has_color), soft_wrap=False)
    if not table and len(tokens) > _MAX_ROWS:
        return
    output.text("")
    columns = (Column("ID", right=True, style="cyan"), Column("TOKEN", style="bold"), Column("BYTES", style="dim"))
    show_table(output, columns, [row for group in groups(tokens) for row in _rows(group)])


def _rows(group: TokenGroup) -> Iterable[tuple[str, str, str]]:
    for place, token in enumerate(group.tokens):
        text = repr(group.text) if len(group.tokens) == 1 else f"{place + 1}/{len(group.tokens)} of {group.text!r}"
        if token.is_control:
            yield str(token.id), group.text, "control"
        else:
            is_plain = len(group.tokens) == 1 and group.text.isascii()
            yield str(token.id), text, "" if is_plain else token.data.hex(" ")


def show_scripts(
    output: Output, name: str, tokens: Sequence[Token], counts: Sequence[ScriptCount], n_vocab: int
) -> None:
    """Print the counts of each script, and the total number of tokens."""
    columns = (Column("SCRIPT", style="bold"), *right("CHARACTERS", "BYTES", "TOKENS", "CHARS/TOKEN", "TOKENS/WORD"))
    show_table(output, columns, [_script_row(count) for count in counts])
    n_control = sum(token.is_control for token in tokens)
    control = f", {n_control:,} of them control tokens" if n_control else ""
    output.note(f"{counted(len(tokens), 'token')}{control}, of the {n_vocab:,} of {name}.")


def _script_row(count: ScriptCount) -> tuple[str, ...]:
    return (
        count.script,
        f"{count.characters:,}",
        f"{count.n_bytes:,}",
        f"{count.tokens:,}",
        _ratio(count.characters, count.tokens),
        _ratio(count.tokens, count.words or 0),
    )


def _ratio(count: int, of: int) -> str:
    return f"{count / of:.2f}" if of else ""


def show_compared(output: Output, sides: Sequence[tuple[str, Sequence[Token], Sequence[ScriptCount]]]) -> None:
    """Print the same text as tokens of two models, and each script's number of tokens.

    Args:
        sides: name, tokens and counts of each model.
    """
    for name, tokens, _ in sides if output.stdout_is_terminal else ():
        output.sentence(f"{name}: {counted(len(tokens), 'token')}")
        output.console().print(pieces_text(tokens, color=output.stdout_has_color))
        output.text("")
    by_script = [{count.script: count for count in counts} for _, _, counts in sides]
    names = (os.path.basename(name).upper() for name, _, _ in sides)  # noqa: PTH119 - or a URL
    columns = [Column("SCRIPT", style="bold"), *right("CHARACTERS", *names)]
    rows = []
    for script in dict.fromkeys(script for counts in by_script for script in counts):
        cells = [counts.get(script) for counts in by_script]
        characters = max(cell.characters for cell in cells if cell)
        rows.append((script, f"{characters:,}", *(f"{cell.tokens:,}" if cell else "" for cell in cells)))
    rows.append(("control", "", *(f"{sum(token.is_control for token in tokens):,}" for _, tokens, _ in sides)))
    rows.append(("all", "", *(f"{len(tokens):,}" for _, tokens, _ in sides)))
    show_table(output, columns, rows)


def show_merges(output: Output, rule: MergeRule | None, tokens: Sequence[Token]) -> None:
    """Print the merge tree of each distinct token."""
    from rich.tree import Tree

    if rule is None:
        output.note("Can't show merges: this kind of vocabulary has none.")
        return
    output.sentence(rule.words)
    console, start, shown = output.console(), 0, set()
    for origin in rule.origins([token.id for token in tokens]):
        group = tokens[start : start + origin.n_tokens]
        ids, start = tuple(token.id for token in group), start + origin.n_tokens
        if ids in shown:
            continue
        shown.add(ids)
        label = f"token {' '.join(f'{each:,}' for each in ids)}"
        if origin.node is None:
            text = repr(group[0].data.decode("utf-8", "replace"))
            console.print(f"{clean(text)}  {label}: a whole token, without merges", style="dim")
        else:
            tree = Tree(_node_text(origin.node, label, rule.value_name))
            _grow(tree, origin.node, rule.value_name)
            console.print(tree)


def _grow(tree: Tree, node: MergeNode, value_name: str) -> None:
    for part in node.parts:
        _grow(tree.add(_node_text(part, "", value_name)), part, value_name)


def _node_text(node: MergeNode, ids: str, value_name: str) -> Text:
    from rich.text import Text

    text = Text(bytes_shown(node.data), style="bold")
    if ids:
        text.append(f"  {ids}", "cyan")
    if node.value is not None:
        text.append(f"  {value_name} {node.value:,.6g}", "dim")
    return text


def bytes_shown(data: bytes) -> str:
    """Return bytes as text in quotes, or in hex if they are no UTF-8."""
    try:
        return clean(repr(data.decode()))
    except UnicodeDecodeError:
        return data.hex(" ").upper()


def _visible(group: TokenGroup) -> str:
    """Return a group's text on one row, with the number of tokens if they share a character."""
    text = clean(group.text.translate(_VISIBLE)) or "·"
    return text if len(group.tokens) == 1 else f"{text}×{len(group.tokens)}"
