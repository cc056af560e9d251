"""An answer explained on a terminal, in about two screens: one section for each part of inference.

Owns the drawing; explain_words.py has the words. Must not know the source of the figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmrun.insight.explain import ExplainedAnswer
from llmrun.insight.tokens import Token
from llmrun.protocol.jobs.explain import HeadAttention, LensColumn, Neighbour, RunCollected, WatchedLayer
from llmrun.protocol.questions import Choice
from llmrun.ui.terminal.format import counted, milliseconds, percent, rate
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, right, show_table
from llmrun.ui.views.explain_words import (
    EXPERTS,
    NO_ATTENTION,
    ROLES,
    SAMPLING,
    TIME,
    about_attention,
    about_cache,
    about_embeddings,
    about_layers,
    about_lens,
    about_tokens,
    decided,
    head_name,
    known_tokens,
    looked_at,
    phases,
    quoted,
)
from llmrun.ui.views.sampling import draft_cell, show_choice
from llmrun.ui.views.tokens import pieces_text

if TYPE_CHECKING:
    from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_SHADES = " ░▒▓█"
_LATE_TOKENS = 24  # last ones of the prompt, whose neighbours may be shown
_SHORT = 2  # bytes; a longer token is a word
_EMBEDDED_ROWS, _NEAREST = 6, 3
_LENS_ROWS = 8  # layers of the lens, the last one among them
_LENS_CANDIDATES = 3
_HEAD_CELLS = 24  # rows and columns of an attention map
_MAX_ROWS = 12  # of the answer's tokens
_PREFERRED = ("sharp", "previous", "spread", "first")  # roles; the map of the first one found is drawn


def show_explained(output: Output, found: ExplainedAnswer) -> None:
    """Print all sections on stdout."""
    run = found.run
    tokens = known_tokens(run)
    _show_tokens(output, run, tokens)
    _show_embeddings(output, run, tokens)
    _show_layers(output, run)
    _show_lens(output, run, tokens)
    _show_attention(output, run, tokens)
    _show_experts(output, run)
    _heading(output, "KV cache", about_cache(found.cache, len(run.tokens)))
    _show_time(output, found)
    _show_choices(output, found, tokens)


def _heading(output: Output, title: str, text: str) -> None:
    from rich.text import Text

    output.text("")
    output.console().print(Text(title, style="bold cyan"))
    output.sentence(text)


def _show_tokens(output: Output, run: RunCollected, tokens: Mapping[int, Token]) -> None:
    """Print the tokens of the prompt, and below them those of the answer."""
    color, console = output.stdout_has_color, output.console()
    n_answer = len(run.tokens) - run.n_prompt
    _heading(output, "Tokens", about_tokens(run))
    shown = [tokens[token] for token in run.tokens[run.first : run.n_prompt]]
    console.print(pieces_text(shown, color=color))
    output.sentence(
        f"The answer, {counted(n_answer, 'token')}, each chosen from the model's prediction after all tokens before it:"
    )
    console.print(pieces_text([tokens[token] for token in run.tokens[run.n_prompt :]], color=color))


def _show_embeddings(output: Output, run: RunCollected, tokens: Mapping[int, Token]) -> None:
    """Print the neighbours of the rarest of the prompt's last words: ids grow from frequent to rare tokens."""
    _heading(output, "Embeddings", about_embeddings(run.embeddings))
    if run.embeddings is None:
        return
    late = set(run.tokens[run.first : run.n_prompt][-_LATE_TOKENS:])
    found = [each for each in run.embeddings.tokens if each.token in late and each.neighbours]
    words = [each.token for each in found if len(tokens[each.token].data.strip()) > _SHORT]
    rarest = sorted(words)[-_EMBEDDED_ROWS:]
    rows = [(quoted(tokens[each.token]), *_near(each.neighbours, tokens)) for each in found if each.token in rarest]
    if rows:
        columns = (Column("TOKEN", style="bold"), Column("NEAREST"), *[Column("")] * (_NEAREST - 1))
        show_table(output, columns, rows)


def _near(neighbours: Sequence[Neighbour], tokens: Mapping[int, Token]) -> list[str]:
    shown = [f"{quoted(tokens[near.token])} {near.similarity:.2f}" for near in neighbours[:_NEAREST]]
    return shown + [""] * (_NEAREST - len(shown))


def _show_layers(output: Output, run: RunCollected) -> None:
    """Print the norm of the last prompt token's vector after each layer, and the norms of the additions."""
    if not run.layers or not run.layers[-1].residual:
        return
    at, where = looked_at(run)
    _heading(
        output,
        "Layers",
        f"{about_layers(run)} Below, from the first layer to the last, are its norm at {where}, and the norms of the "
        "two additions.",
    )
    rows = [
        ("residual stream", [layer.residual[at] for layer in run.layers]),
        ("attention added", _at(run.layers, "attention", at)),
        ("feed-forward added", _at(run.layers, "feed_forward", at)),
    ]
    columns = (Column("", style="bold"), Column("", style="cyan"), *right("FIRST", "LAST"))
    drawn = [(name, sparkline(values), f"{values[0]:.1f}", f"{values[-1]:.1f}") for name, values in rows if values]
    show_table(output, columns, drawn)


def _at(layers: Sequence[WatchedLayer], name: str, place: int) -> list[float]:
    """Return a figure of each layer at one place; none if a layer lacks it."""
    found: list[tuple[float, ...]] = [getattr(layer, name) for layer in layers]
    return [values[place] for values in found] if all(found) else []


def sparkline(values: Sequence[float]) -> str:
    """Return a bar for each value, relative to the largest one."""
    maximum = max(values, default=0.0) or 1.0
    return "".join(_BARS[min(int(value / maximum * len(_BARS)), len(_BARS) - 1)] for value in values)


def _show_lens(output: Output, run: RunCollected, tokens: Mapping[int, Token]) -> None:
    """Print the predictions after some of the layers, at the prompt's last token."""
    at, where = looked_at(run)
    _heading(output, "Logit lens", about_lens(run, where))
    if run.lens_refused:
        return
    column = next(each for each in run.lens if each.position == run.first + at)
    names = (*(f"CANDIDATE {number + 1}" for number in range(_LENS_CANDIDATES)),)
    columns = (Column("LAYER", right=True, style="bold"), *map(Column, names), Column("THE NEXT TOKEN IS"))
    show_table(output, columns, [_lens_row(column, number, tokens) for number in _some(len(column.cells))])


def _some(count: int) -> list[int]:
    """Return a few places from the first to the last, closer together towards the end, where most is decided."""
    found = {count - 1 - round((count - 1) * (step / (_LENS_ROWS - 1)) ** 1.5) for step in range(_LENS_ROWS)}
    return sorted(found) if count else []


def _lens_row(column: LensColumn, number: int, tokens: Mapping[int, Token]) -> tuple[str, ...]:
    cell = column.cells[number]
    pairs = list(zip(cell.candidates, cell.probabilities, strict=True))[:_LENS_CANDIDATES]
    shown = [f"{quoted(tokens[token])} {percent(share)}" for token, share in pairs]
    rank = "" if cell.rank < 0 else f"number {cell.rank + 1:,}, {percent(cell.next)}"
    return str(cell.layer + 1), *shown, *[""] * (_LENS_CANDIDATES - len(shown)), rank


def _show_attention(output: Output, run: RunCollected, tokens: Mapping[int, Token]) -> None:
    """Print a few heads with their roles, and the attention map of one."""
    if not run.pictures:
        _heading(output, "Attention", NO_ATTENTION)
        return
    heads = {head.role: head for head in run.pictures}
    _heading(output, "Attention", about_attention(run))
    rows = []
    for role, head in heads.items():
        figures = run.layers[head.layer].heads[head.head]
        shares = (percent(figures.previous), percent(figures.first), f"{figures.spread:.2f}")
        rows.append((head_name(head), ROLES[role], *shares))
    columns = (Column("HEAD", style="bold"), Column(""), *right("TOKEN BEFORE", "FIRST TOKEN", "SPREAD"))
    show_table(output, columns, rows)
    chosen = heads[next(role for role in _PREFERRED if role in heads)]
    output.text("")
    output.sentence(
        f"{head_name(chosen).capitalize()}: rows are tokens, columns the tokens that they attend to; darker is more:"
    )
    output.console().print(_attention_map(run, chosen, tokens))


def _attention_map(run: RunCollected, head: HeadAttention, tokens: Mapping[int, Token]) -> Text:
    """Return the last rows and columns of a head's attention as shaded cells, two characters wide."""
    from rich.text import Text

    from llmrun.ui.terminal.cells import cut, width

    end = len(run.tokens)
    start = max(end - _HEAD_CELLS, 0)
    text = Text()
    for position in range(max(start, run.first), end):
        row = head.rows[position - run.first]
        name = cut(quoted(tokens[run.tokens[position]]), 14)
        text.append(" " * (14 - width(name)) + name + " ", "bold")
        text.append("".join(_shade(share) * 2 for share in row[start:]) + "\n", "cyan")
    text.right_crop(1)
    return text


def _shade(share: float) -> str:
    # The square root makes small shares visible.
    return _SHADES[min(int(share**0.5 * len(_SHADES)), len(_SHADES) - 1)]


def _show_experts(output: Output, run: RunCollected) -> None:
    """Print the active experts of the prompt's last token in each layer."""
    at, where = looked_at(run)
    active = [(number, layer.experts[at]) for number, layer in enumerate(run.layers) if len(layer.experts) > at]
    if not active:
        return
    _heading(output, "Experts", f"{EXPERTS} Those of {where}:")
    rows = [(str(number + 1), " ".join(map(str, experts))) for number, experts in active]
    show_table(output, (Column("LAYER", right=True, style="bold"), Column("EXPERTS, THE HEAVIEST FIRST")), rows)


def _show_time(output: Output, found: ExplainedAnswer) -> None:
    """Print the times of prefill and decode, in total and for each layer."""
    _heading(output, "Time", TIME)
    timed = phases(found)
    rows = [
        (phase.name, f"{phase.tokens}", milliseconds(phase.seconds), rate(phase.speed), phase.of_limit)
        for phase in timed
    ]
    show_table(output, (Column("", style="bold"), *right("TOKENS", "TIME", "SPEED"), Column("LIMIT")), rows)
    drawn = [
        (phase.name, sparkline(phase.layers), milliseconds(max(phase.layers))) for phase in timed if any(phase.layers)
    ]
    output.text("")
    columns = (Column("LAYER BY LAYER", style="bold"), Column("", style="cyan"), Column("LONGEST", right=True))
    show_table(output, columns, drawn)


def _show_choices(output: Output, found: ExplainedAnswer, tokens: Mapping[int, Token]) -> None:
    """Print the sampler's steps for the first token, and a row for each token."""
    if not found.choices:
        return
    run, choices = found.run, found.choices
    first = "The first" if len(choices) == len(run.tokens) - run.n_prompt else "The first one with stored logits"
    _heading(output, "Sampling", f"{SAMPLING} {first}:")
    show_choice(output, choices[0], stderr=False)
    lens = {column.position: column for column in run.lens}
    start = len(run.tokens) - len(choices)
    rows = [_choice_row(choice, lens.get(start + place - 1)) for place, choice in enumerate(choices[:_MAX_ROWS])]
    output.text("")
    output.sentence("All tokens of the answer, with the layer from which on the lens ranks the chosen token first:")
    columns = [Column("TOKEN", style="bold"), *right("MODEL", "DRAWN WITH", "OUT OF", "FIRST FROM LAYER")]
    if any(choice.draft is not None for choice in choices[:_MAX_ROWS]):
        columns.append(Column("DRAFTED"))
    show_table(output, columns, [row[: len(columns)] for row in rows])
    if len(choices) > _MAX_ROWS:
        output.note(f"{len(choices) - _MAX_ROWS:,} more: use --json for all of them")


def _choice_row(choice: Choice, column: LensColumn | None) -> tuple[str, ...]:
    if choice.forced:
        return repr(choice.text), "", "the grammar's", "1", "", draft_cell(choice.draft)
    first, last = choice.steps[0], choice.steps[-1]
    shares = (percent(step.probabilities[choice.chosen]) for step in (first, last))
    return repr(choice.text), *shares, f"{last.remaining:,}", decided(column), draft_cell(choice.draft)
