"""An answer explained on a terminal: the story of an inference in about two screens, a sentence to each part.

Owns the words and the drawing; must not know where the figures come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from llmrun.bench.results import Limit
from llmrun.insight.explain import AnswerExplained, CacheUse
from llmrun.insight.tokens import Token
from llmrun.protocol.ended import Choice
from llmrun.protocol.jobs.explain import HeadPicture, LensColumn, RunCollected, WatchedLayer
from llmrun.ui.terminal.format import counted, milliseconds, rate, size
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, show_table
from llmrun.ui.views.sampling import percent, show_choice
from llmrun.ui.views.tokens import pieces_text

if TYPE_CHECKING:
    from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_SHADES = " ░▒▓█"
_LENS_ROWS = 8  # layers of the lens, the last one among them
_LENS_CANDIDATES = 3
_HEAD_CELLS = 24  # tokens of an attention picture, in each direction
_WHOLE = 0.99  # what a row of attention sums to at least, unless some goes to a sink
_MOST_ROWS = 12  # of the answer's tokens
_PREFERRED = ("sharp", "previous", "spread", "first")  # whose picture is drawn, the first that there is
_ROLES = {
    "previous": "looks at the token before",
    "first": "rests on the first token",
    "spread": "looks at everything alike",
    "sharp": "looks at few, chosen tokens",
}
_REFUSED = {
    "names": "the model's tensors have no names that it knows",
    "norm": "the model's last norm is of a kind that it doesn't know",
    "differs": "it does not give this model's own logits behind the last layer",
}


def show_explained(output: Output, found: AnswerExplained) -> None:
    """The whole story, on stdout."""
    run = found.run
    tokens = {each.token: Token(each.token, bytes.fromhex(each.data), each.is_control) for each in run.pieces}
    _show_tokens(output, run, tokens)
    _show_layers(output, run)
    _show_lens(output, run, tokens)
    _show_attention(output, run, tokens)
    _show_experts(output, run)
    _show_cache(output, found.cache, len(run.tokens))
    _show_time(output, found)
    _show_choices(output, found, tokens)


def _heading(output: Output, title: str, text: str) -> None:
    from rich.text import Text

    output.text("")
    output.console().print(Text(title, style="bold cyan"))
    output.sentence(text)


def _show_tokens(output: Output, run: RunCollected, tokens: Mapping[int, Token]) -> None:
    """The prompt, and the answer below it."""
    color, console = output.stdout_has_color, output.console()
    n_answer = len(run.tokens) - run.n_prompt
    text = f"The prompt, as the chat template writes it, is {counted(run.n_prompt, 'token')} of the vocabulary."
    if run.first:
        text += f" What follows is of the last {len(run.tokens) - run.first}, prompt and answer together."
    _heading(output, "Tokens", text)
    shown = [tokens[token] for token in run.tokens[run.first : run.n_prompt]]
    console.print(pieces_text(shown, color=color))
    output.sentence(f"The answer, {counted(n_answer, 'token')}, each chosen from what the model made of all before it:")
    console.print(pieces_text([tokens[token] for token in run.tokens[run.n_prompt :]], color=color))


def _show_layers(output: Output, run: RunCollected) -> None:
    """How long the last prompt token's vector is behind each layer, and what was added to it."""
    if not run.layers or not run.layers[-1].residual:
        return
    at, where = _looked_at(run)
    _heading(
        output,
        "Layers",
        f"Each of {counted(len(run.layers), 'layer')} adds to the token's vector, the residual stream. Below, from the "
        f"first layer to the last, is its length (norm) at {where}, and that of what each part added.",
    )
    rows = [
        ("residual stream", [layer.residual[at] for layer in run.layers]),
        ("attention added", _at(run.layers, "attention", at)),
        ("feed-forward added", _at(run.layers, "feed_forward", at)),
    ]
    columns = (
        Column("", style="bold"),
        Column("", style="cyan"),
        Column("FIRST", right=True),
        Column("LAST", right=True),
    )
    drawn = [(name, sparkline(values), f"{values[0]:.1f}", f"{values[-1]:.1f}") for name, values in rows if values]
    show_table(output, columns, drawn)


def _looked_at(run: RunCollected) -> tuple[int, str]:
    """The place among the watched positions that the story is about, and what it is."""
    at = run.n_prompt - 1 - run.first
    return (at, "the prompt's last token") if at >= 0 else (0, "the first token that was watched")


def _at(layers: Sequence[WatchedLayer], name: str, place: int) -> list[float]:
    """A figure of each layer at one place; none where a layer lacks it."""
    found: list[tuple[float, ...]] = [getattr(layer, name) for layer in layers]
    return [values[place] for values in found] if all(found) else []


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value, as high as it is beside the largest."""
    most = max(values, default=0.0) or 1.0
    return "".join(_BARS[min(int(value / most * len(_BARS)), len(_BARS) - 1)] for value in values)


def _show_lens(output: Output, run: RunCollected, tokens: Mapping[int, Token]) -> None:
    """What the model would have said behind some of its layers, at the prompt's last token."""
    if run.lens_refused:
        why = _REFUSED[run.lens_refused]
        _heading(output, "Logit lens", f"The lens, what the model would say behind each layer, is not shown: {why}.")
        return
    at, where = _looked_at(run)
    column = next(each for each in run.lens if each.position == run.first + at)
    _heading(
        output,
        "Logit lens",
        f"What the model would say after {where} if it ended behind a layer: the residual stream there, through the "
        "last norm and the output matrix. Behind the last layer that has to give the model's own logits, and does, "
        f"within {run.lens_difference:.1%}.",
    )
    names = (*(f"CANDIDATE {number + 1}" for number in range(_LENS_CANDIDATES)),)
    columns = (Column("LAYER", right=True, style="bold"), *map(Column, names), Column("THE NEXT TOKEN IS"))
    show_table(output, columns, [_lens_row(column, number, tokens) for number in _some(len(column.cells))])


def _some(count: int) -> list[int]:
    """A few places from the first to the last, closer together towards the end, where most is decided."""
    found = {count - 1 - round((count - 1) * (step / (_LENS_ROWS - 1)) ** 1.5) for step in range(_LENS_ROWS)}
    return sorted(found) if count else []


def _lens_row(column: LensColumn, number: int, tokens: Mapping[int, Token]) -> tuple[str, ...]:
    cell = column.cells[number]
    pairs = list(zip(cell.candidates, cell.probabilities, strict=True))[:_LENS_CANDIDATES]
    shown = [f"{_quoted(tokens[token])} {percent(share)}" for token, share in pairs]
    rank = "" if cell.rank < 0 else f"number {cell.rank + 1:,}, {percent(cell.next)}"
    return str(cell.layer + 1), *shown, *[""] * (_LENS_CANDIDATES - len(shown)), rank


def _quoted(token: Token) -> str:
    return clean(repr(token.data.decode("utf-8", "replace")))


def _show_attention(output: Output, run: RunCollected, tokens: Mapping[int, Token]) -> None:
    """What heads do, and the picture of one."""
    if not run.pictures:
        _heading(output, "Attention", "This model computes no attention weights that could be shown.")
        return
    pictures = {picture.role: picture for picture in run.pictures}
    n_heads = sum(len(layer.heads) for layer in run.layers)
    least = min(sum(row) for picture in run.pictures for row in picture.rows)
    sums = "; what a row lacks to 1 goes to the head's attention sink" if least < _WHOLE else "; every row sums to 1"
    _heading(
        output,
        "Attention",
        f"For each token, each of {n_heads:,} heads shares out its attention among the tokens up to it{sums}. The best "
        "examples of what heads do:",
    )
    rows = []
    for role, picture in pictures.items():
        figures = run.layers[picture.layer].heads[picture.head]
        name = f"layer {picture.layer + 1}, head {picture.head + 1}"
        shares = (percent(figures.previous), percent(figures.first), f"{figures.spread:.2f}")
        rows.append((name, _ROLES[role], *shares))
    columns = (Column("HEAD", style="bold"), Column(""), *(Column(name, right=True) for name in _FIGURES))
    show_table(output, columns, rows)
    chosen = pictures[next(role for role in _PREFERRED if role in pictures)]
    output.text("")
    output.sentence(
        f"Layer {chosen.layer + 1}, head {chosen.head + 1}: each row is a token, each column one that it looks at, the "
        "darker the more:"
    )
    output.console().print(_picture(run, chosen, tokens))


_FIGURES = ("TOKEN BEFORE", "FIRST TOKEN", "SPREAD")


def _picture(run: RunCollected, picture: HeadPicture, tokens: Mapping[int, Token]) -> Text:
    """The last rows and columns of a head's attention, as shaded cells; two characters are about a square."""
    from rich.text import Text

    from llmrun.ui.terminal.cells import cut, width

    end = len(run.tokens)
    start = max(end - _HEAD_CELLS, 0)
    text = Text()
    for position in range(max(start, run.first), end):
        row = picture.rows[position - run.first]
        name = cut(_quoted(tokens[run.tokens[position]]), 14)
        text.append(" " * (14 - width(name)) + name + " ", "bold")
        text.append("".join(_shade(share) * 2 for share in row[start:]) + "\n", "cyan")
    text.right_crop(1)
    return text


def _shade(share: float) -> str:
    """A share of attention; even a little can be seen."""
    return _SHADES[min(int(share**0.5 * len(_SHADES)), len(_SHADES) - 1)]


def _show_experts(output: Output, run: RunCollected) -> None:
    """Which experts a token woke, layer by layer."""
    at, where = _looked_at(run)
    woken = [(number, layer.experts[at]) for number, layer in enumerate(run.layers) if len(layer.experts) > at]
    if not woken:
        return
    _heading(output, "Experts", f"In a mixture of experts each token wakes a few in each layer. Those of {where}:")
    rows = [(str(number + 1), " ".join(map(str, experts))) for number, experts in woken]
    show_table(output, (Column("LAYER", right=True, style="bold"), Column("EXPERTS, THE HEAVIEST FIRST")), rows)


def _show_cache(output: Output, cache: CacheUse, n_tokens: int) -> None:
    if not cache.layers:
        _heading(output, "KV cache", "This model keeps no keys and values: its state has the same size for any text.")
        return
    per_layer = cache.bytes_per_token / cache.layers
    parts = [
        "Keys and values of every token are kept, so that none is computed twice: "
        f"{size(cache.bytes_per_token)} a token, {size(per_layer)} in each of {cache.layers} layers. That is "
        f"{size(cache.bytes_per_token * n_tokens)} for these {counted(n_tokens, 'token')}, "
        f"{size(cache.full_bytes)} for the whole context window of {cache.n_ctx:,}."
    ]
    if cache.unshared_bytes_per_token > cache.bytes_per_token:
        times = cache.unshared_bytes_per_token / cache.bytes_per_token
        parts.append(f"Heads share keys and values (GQA): without that it would be {times:.3g} times as much.")
    if cache.window_layers:
        full = cache.bytes_per_token * cache.n_ctx
        saved = f", which saves {1 - cache.full_bytes / full:.0%} of a full window" if cache.full_bytes < full else ""
        parts.append(f"{cache.window_layers} layers look back only {cache.window:,} tokens{saved}.")
    _heading(output, "KV cache", " ".join(parts))


def _show_time(output: Output, found: AnswerExplained) -> None:
    """Prefill against decode, layer by layer."""
    run = found.run
    watched = len(run.tokens) - run.first
    _heading(
        output,
        "Time",
        "Prefill reads the weights once for all tokens of a prompt, so that arithmetic is the limit; decode reads them "
        "again for each token of the answer, so that memory is.",
    )
    layers = run.layers
    phases = (
        ("prefill", watched, run.prefill_seconds, [each.prefill_seconds for each in layers], found.prefill_limit),
        ("decode", 1, run.decode_seconds, [each.decode_seconds for each in layers], found.decode_limit),
    )
    rows = [
        (name, f"{tokens}", milliseconds(seconds), rate(tokens / seconds), _of(limit, tokens / seconds))
        for name, tokens, seconds, _, limit in phases
        if seconds
    ]
    right = [Column(name, right=True) for name in ("TOKENS", "TIME", "SPEED")]
    show_table(output, (Column("", style="bold"), *right, Column("LIMIT")), rows)
    drawn = [(name, sparkline(times), milliseconds(max(times))) for name, _, _, times, _ in phases if any(times)]
    output.text("")
    columns = (Column("LAYER BY LAYER", style="bold"), Column("", style="cyan"), Column("LONGEST", right=True))
    show_table(output, columns, drawn)


def _of(limit: Limit | None, speed: float) -> str:
    """Of what the machine could do at most, and what that is limited by."""
    return f"{speed / limit.tokens_per_second:.0%} of {limit.binds}" if limit is not None else ""


def _show_choices(output: Output, found: AnswerExplained, tokens: Mapping[int, Token]) -> None:
    """The sampler's steps for the first token, and a row for each."""
    if not found.choices:
        return
    run, choices = found.run, found.choices
    _heading(
        output,
        "Sampling",
        "The logits become probabilities, each step of the sampler cuts some or changes them, and one token is drawn. "
        f"{'The first' if len(choices) == len(run.tokens) - run.n_prompt else 'The first that is remembered'}:",
    )
    show_choice(output, choices[0], stderr=False)
    columns = {column.position: column for column in run.lens}
    start = len(run.tokens) - len(choices)
    rows = [_choice_row(choice, columns.get(start + place - 1)) for place, choice in enumerate(choices[:_MOST_ROWS])]
    output.text("")
    output.sentence("And all of the answer's tokens, with the layer from which on the lens has the chosen one first:")
    names = ("TOKEN", "MODEL", "DRAWN WITH", "OUT OF", "FIRST FROM LAYER")
    show_table(output, (Column(names[0], style="bold"), *(Column(name, right=True) for name in names[1:])), rows)
    if len(choices) > _MOST_ROWS:
        output.note(f"{len(choices) - _MOST_ROWS:,} more: --json has all of them")


def _choice_row(choice: Choice, column: LensColumn | None) -> tuple[str, ...]:
    if choice.forced:
        return repr(choice.text), "", "the grammar's", "1", ""
    first, last = choice.steps[0], choice.steps[-1]
    shares = (percent(step.probabilities[choice.chosen]) for step in (first, last))
    return repr(choice.text), *shares, f"{last.remaining:,}", _decided(column)


def _decided(column: LensColumn | None) -> str:
    """From which layer on the token that came was the lens's likeliest; "" where it never was."""
    if column is None or column.cells[-1].rank:
        return ""
    since = column.cells[-1].layer
    for cell, after in pairwise(reversed([*column.cells])):
        if after.rank:
            return str(cell.layer + 1)
        since = after.layer
    return str(since + 1)
