"""Views of a chat on demand: the context window, passages of documents, tools, and the choices of the sampler."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import DraftedToken, DraftSource, Message, Tool, ToolCall
from llmrun.protocol.questions import Choice, TokenCount
from llmrun.ui.terminal.format import bar, counted, percent, short
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, right, show_facts, show_table

if TYPE_CHECKING:
    from llmrun.chat.passages import Passage
    from llmrun.chat.store.turns import ToolOutput
    from llmrun.chat.tools.source import Offer

_CELLS = 16
_TEXT = 100  # characters; the table cuts them to the terminal


def show_context(
    output: Output,
    messages: Sequence[Message],
    counted: TokenCount,
    n_ctx: int,
    *,
    about: bool = False,
    typed: Mapping[str, str] = {},
) -> None:
    """Print a line for each message, for the chat template, and for free space, on stderr.

    Args:
        messages: as they are sent.
        counted: their tokens.
        n_ctx: tokens of the context window; 0 if unknown.
        about: the counts are an estimate.
        typed: what the user typed of a message, by its content, where that begins with passages or files.
    """
    template = max(0, counted.total - sum(counted.each))
    rows = [
        (message.role, short(typed.get(message.content, message.content), _TEXT), *_share(tokens, n_ctx))
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
    elif history is not None and history.tokens:
        output.note(f"The first {history.tokens:,} tokens stand as they were computed and generated.")


def _share(tokens: int, n_ctx: int) -> tuple[str, str, str]:
    if not n_ctx:
        return f"{tokens:,}", "", ""
    share = tokens / n_ctx
    return f"{tokens:,}", f"{share:.1%}", bar(share, _CELLS)


_MAX_RESULT = 160  # characters


def show_call(output: Output, call: ToolCall) -> None:
    """Print a call's name and arguments on stderr."""
    output.note(f"● {call.name}", dim=False)
    try:
        arguments = load_json(call.arguments).items()
    except (ValueError, AttributeError):  # a model may write anything
        arguments = [("arguments", call.arguments)]
    for name, value in arguments:
        first, *more = _shown(value).splitlines() or [""]
        output.note(f"    {_visible(name)}: {first}", dim=False)
        for line in more:
            output.note(f"      {line}", dim=False)


def show_result(output: Output, result: ToolOutput) -> None:
    """Print the beginning of a call's result on stderr, and what files are in it."""
    files = " ".join(f"[{each.modality or 'file'}]" for each in result.media)
    line = " ".join([*clean(result.text[: 4 * _MAX_RESULT]).split(), *([files] if files else [])])
    output.note(f"  → {line if len(line) <= _MAX_RESULT else line[: _MAX_RESULT - 1] + '…'}")


def show_tools(
    output: Output, tools: Sequence[Tool], offers: Sequence[Offer] = (), switched_off: Sequence[str] = ()
) -> None:
    """Print a line for each tool: its arguments and the first line of its description; then the other offers."""
    rows = []
    for tool in tools:
        arguments = ", ".join(load_json(tool.parameters).get("properties", {}))
        rows.append((f"  {tool.name}({arguments})", tool.description.strip().partition("\n")[0]))
    rows += [(f"  {name}", "is off") for name in switched_off]
    rows += [(f"  {offer.kind} {offer.name}", offer.about.partition("\n")[0]) for offer in offers]
    show_facts(output, rows, stderr=True)


def _shown(value: Any) -> str:
    return _visible(value) if isinstance(value, str) else _visible(json.dumps(value, ensure_ascii=False))


def _visible(text: str) -> str:
    """Return the text as it is, or as JSON if a terminal would not show all of it."""
    return text if clean(text, newlines=True) == text else json.dumps(text)


_BAR_CELLS = 8
_DRAFTED: dict[DraftSource, str] = {
    "prompt": "copied from the prompt",
    "answer": "copied from the answer itself",
    "model": "by the draft model",
    "heads": "by the model's heads",
    "probe": "to measure a step",
}
_SHORTLY: dict[DraftSource, str] = {
    "prompt": "prompt", "answer": "answer", "model": "draft model", "heads": "heads", "probe": "measurement",
}  # fmt: skip


def show_sampling(output: Output, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the sampling parameters.

    Args:
        rows: (flag, value, origin) of each.
    """
    columns = (Column("SAMPLING", style="bold"), Column("VALUE"), Column("FROM", style="dim"))
    show_table(output, columns, rows, stderr=True)


def least_certain(choices: Sequence[Choice]) -> Choice:
    """Return the choice with the least model probability; a token that a grammar forced only if all were forced."""
    free = [choice for choice in choices if not choice.forced]
    return min(free, key=lambda choice: choice.steps[0].probabilities[choice.chosen], default=choices[-1])


def about_draft(draft: DraftedToken) -> str:
    """Return a sentence about what was drafted in the place of a token."""
    what = "" if draft.accepted else f" {draft.text!r}, which was refused"
    likely = f", with {percent(draft.probability)}" if draft.probability is not None else ""
    return f"Drafted{what}: {_DRAFTED[draft.source]}{likely}, as token {draft.depth} of the draft."


def draft_cell(draft: DraftedToken | None) -> str:
    """Return source and depth of a draft, its probability, and the drafted token if it was refused."""
    if draft is None:
        return ""
    likely = f" {percent(draft.probability)}" if draft.probability is not None else ""
    return f"{_SHORTLY[draft.source]} {draft.depth}{likely}{'' if draft.accepted else f', not {draft.text!r}'}"


def show_choice(output: Output, choice: Choice, *, stderr: bool = True) -> None:
    """Print the candidates of one token, with their probabilities after each step or the step that cut them."""
    say = output.note if stderr else output.sentence
    about = f" {about_draft(choice.draft)}" if choice.draft is not None else ""
    if choice.forced:
        say(f"{choice.text!r}: the grammar left no choice.{about}")
        return
    first, last = choice.steps[0], choice.steps[-1]
    say(
        f"{choice.text!r}: the model gave it {percent(first.probabilities[choice.chosen])}; "
        f"drawn with {percent(last.probabilities[choice.chosen])} from {counted(last.remaining, 'candidate')}.{about}"
    )
    columns = (Column("TOKEN", style="bold"), *right(*(step.name for step in choice.steps)), Column("", style="cyan"))
    rows = [_row(choice, index) for index in range(len(choice.candidates))]
    left = ("left", *(f"{step.remaining:,}" for step in choice.steps), "")
    show_table(output, columns, [*rows, left], stderr=stderr)


def _row(choice: Choice, index: int) -> tuple[str, ...]:
    cells = []
    for before, step in zip((None, *choice.steps), choice.steps, strict=False):
        if step.probabilities[index] > 0:
            cells.append(percent(step.probabilities[index]))
        else:
            was_there = before is None or before.probabilities[index] > 0
            cells.append("cut" if was_there else "")
    shown = bar(choice.steps[-1].probabilities[index], _BAR_CELLS)
    return repr(choice.candidates[index]), *cells, f"{shown} ◀ chosen".strip() if index == choice.chosen else shown


_EXCERPT = 160  # characters


def show_passages(output: Output, passages: Sequence[Passage]) -> None:
    """Print the number, place and score of each passage on stderr, and the beginning of its text."""
    for number, passage in enumerate(passages, 1):
        heading = f" ({passage.heading})" if passage.heading else ""
        output.note(f"[{number}] {passage.place}{heading}, score {passage.score:.2f}", dim=False)
        output.note(f"    {short(passage.text, _EXCERPT)}")
