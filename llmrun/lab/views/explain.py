"""An answer explained: its sentences, on a terminal in about two screens, and as a page.

explain.html.jinja has the layout of the page, explain.js what changes with the chosen token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rich.text import Text

from llmrun.lab.bench.results import Limit
from llmrun.lab.html.render import render
from llmrun.lab.insight.explain import CacheUse, ExplainedAnswer
from llmrun.lab.insight.merges import MergeNode, MergeRule
from llmrun.lab.insight.tokens import Token
from llmrun.lab.views.tokens import bytes_shown, pieces_text
from llmrun.protocol.jobs.explain import (
    EmbeddedToken,
    EmbeddingPlane,
    HeadAttention,
    LensCell,
    LensColumn,
    Neighbour,
    RunCollected,
    WatchedLayer,
)
from llmrun.protocol.params import PARAMETERS, STEPS, SamplingParams
from llmrun.protocol.questions import Choice
from llmrun.protocol.sizes import readable_size
from llmrun.server.page.files import FOLDER
from llmrun.ui.terminal.cells import cut, width
from llmrun.ui.terminal.format import counted, milliseconds, percent, rate
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, right, show_table
from llmrun.ui.views.chat import about_draft, draft_cell, show_choice

ROLES = {
    "previous": "attends to the previous token",
    "first": "rests on the first token",
    "spread": "attends to all tokens alike",
    "sharp": "attends to a few tokens",
}
_REFUSED = {
    "names": "the model's tensors have unknown names",
    "norm": "the kind of the model's last norm is unknown",
    "differs": "after the last layer it does not reproduce the model's logits",
}
_WHOLE = 0.99  # minimum sum of a row of attention without an attention sink

NO_ATTENTION = "This model computes no attention weights that could be shown."
EXPERTS = "In a mixture of experts each token activates a few of them in each layer."
TIME = (
    "Prefill reads the weights once for all tokens of a prompt, so arithmetic is the limit; decode reads them again "
    "for each token of the answer, so memory bandwidth is the limit."
)
SAMPLING = "The logits become probabilities, each step of the sampler removes or changes some, and one token is drawn."


def known_tokens(run: RunCollected) -> Mapping[int, Token]:
    """Return all tokens that are shown, by id."""
    return {piece.token: Token(piece.token, bytes.fromhex(piece.data), piece.is_control) for piece in run.pieces}


def quoted(token: Token) -> str:
    """Return a token in quotes, with visible line ends."""
    return clean(repr(token.data.decode("utf-8", "replace")))


def looked_at(run: RunCollected) -> tuple[int, str]:
    """Return the index of the watched position that the terminal explains, and its description."""
    at = run.n_prompt - 1 - run.first
    return (at, "the prompt's last token") if at >= 0 else (0, "the first watched token")


def about_tokens(run: RunCollected) -> str:
    """Return the lengths of the prompt, of prompt and answer, and of the watched part."""
    text = f"The whole prompt has {counted(run.n_prompt, 'token')}."
    if len(run.tokens) > run.n_prompt:
        text += f" With the answer's {len(run.tokens) - run.n_prompt} they are {len(run.tokens):,}, computed at once."
    if run.first:
        text += f" The following is about the last {len(run.tokens) - run.first}, prompt and answer together."
    return text


def about_embeddings(embeddings: EmbeddingPlane | None) -> str:
    """Return an explanation of embeddings and their neighbours."""
    if embeddings is None:
        return "This model's file has no input embeddings to show."
    return (
        f"Each token of the vocabulary has a vector of {embeddings.width:,} numbers, its embedding, which the first "
        "layer reads. In training, tokens that are used alike get similar vectors; the nearest in the whole vocabulary "
        "have the smallest angle between them, given as its cosine. Tokens that training hardly touched, which are "
        "nearer to control tokens, are left out."
    )


def about_layers(run: RunCollected) -> str:
    """Return an explanation of layers."""
    return f"Each of {counted(len(run.layers), 'layer')} adds to the token's vector, the residual stream."


def about_lens(run: RunCollected, where: str) -> str:
    """Return an explanation of the logit lens and its error, or the reason for its absence.

    Args:
        where: the position, in words.
    """
    if run.lens_refused:
        return f"The logit lens, the model's prediction after each layer, is not shown: {_REFUSED[run.lens_refused]}."
    return (
        f"The prediction after {where} if the model ended after a layer: the residual stream there, through the last "
        "norm and the output matrix. After the last layer this must give the model's own logits, and does, within "
        f"{run.lens_difference:.1%}."
    )


def about_attention(run: RunCollected) -> str:
    """Return an explanation of attention heads, for a run with attention maps."""
    n_heads = sum(len(layer.heads) for layer in run.layers)
    minimum = min(sum(row) for head in run.pictures for row in head.rows)
    sums = "; what a row lacks to 1 goes to the head's attention sink" if minimum < _WHOLE else "; every row sums to 1"
    flash = (
        " The weights were computed without flash attention, which the answer may have used: this rounds differently, "
        "so probabilities may differ a little from those of the answer."
    )
    return (
        f"For each token, each of {n_heads:,} heads distributes its attention over the tokens up to it{sums}."
        f"{flash if run.flash_attention else ''} The clearest examples of roles of heads:"
    )


def head_name(head: HeadAttention) -> str:
    """Return a head's layer and number, counted from 1."""
    return f"layer {head.layer + 1}, head {head.head + 1}"


def about_cache(cache: CacheUse, n_tokens: int) -> str:
    """Return the memory use of the KV cache, and the savings by GQA and sliding windows."""
    if not cache.layers:
        return "This model stores no keys and values: its state has the same size for any text."
    per_layer = cache.bytes_per_token / cache.layers
    parts = [
        "Keys and values of every token are stored, so none is computed twice: "
        f"{readable_size(cache.bytes_per_token)} a token, {readable_size(per_layer)} in each of {cache.layers} layers. "
        f"That is {readable_size(cache.bytes_per_token * n_tokens)} for the {counted(n_tokens, 'token')} here, "
        f"prompt and answer, {readable_size(cache.full_bytes)} for the whole context window of {cache.n_ctx:,}."
    ]
    if cache.unshared_bytes_per_token > cache.bytes_per_token:
        times = cache.unshared_bytes_per_token / cache.bytes_per_token
        parts.append(f"Heads share keys and values (GQA): without that it would be {times:.3g} times as much.")
    full = cache.bytes_per_token * cache.n_ctx
    if cache.window_layers:
        window = f"A sliding window of {cache.window:,} tokens in {counted(cache.window_layers, 'layer')}"
        saved = (
            f"saves {1 - cache.full_bytes / full:.0%} of a full window" if cache.full_bytes < full else "saves nothing"
        )
        parts.append(f"{window} {saved}.")
    return " ".join(parts)


class TimedPhase(NamedTuple):
    """The time of prefill or decode."""

    name: str
    tokens: int  # computed at once
    seconds: float
    layers: tuple[float, ...]  # seconds of each; zeros if unknown
    limit: Limit | None  # of the machine; None if unknown

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def of_limit(self) -> str:
        """Share of the machine's limit, and the resource that sets this limit."""
        return f"{self.speed / self.limit.tokens_per_second:.0%} of {self.limit.binds}" if self.limit else ""


def phases(found: ExplainedAnswer) -> tuple[TimedPhase, ...]:
    """Return prefill and decode if they were timed."""
    run = found.run
    prefill = tuple(layer.prefill_seconds for layer in run.layers)
    decode = tuple(layer.decode_seconds for layer in run.layers)
    both = (
        TimedPhase("prefill", len(run.tokens) - run.first, run.prefill_seconds, prefill, found.prefill_limit),
        TimedPhase("decode", 1, run.decode_seconds, decode, found.decode_limit),
    )
    return tuple(phase for phase in both if phase.seconds)


def decided(column: LensColumn | None) -> str:
    """Return the layer from which on the lens ranks the actual next token first; "" if it never does."""
    if column is None or column.cells[-1].rank:
        return ""
    since = column.cells[-1].layer
    for cell, after in pairwise(reversed([*column.cells])):
        if after.rank:
            return str(cell.layer + 1)
        since = after.layer
    return str(since + 1)


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
    found = [token for token in run.embeddings.tokens if token.token in late and token.neighbours]
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


_SLIDERS = {name: (row.label, row.slider) for name, row in PARAMETERS.items() if row.slider}
_MAX_CANDIDATES = 12  # of a choice that are shown
_MAX_LOOKS = 3  # tokens of a row of attention in the table
_MAX_LEVEL = 5  # of attention: levels are 0 to this
_DIGITS = 6  # of probabilities


def explain_page(found: ExplainedAnswer, sampling: SamplingParams, rule: MergeRule | None) -> str:
    """Return the page of an answer.

    Args:
        found: the answer, with the lens of every position.
        sampling: settings of the answer's sampler, at which the sliders start.
        rule: the tokenizer's merges, where known.
    """
    run, tokens, experts = found.run, known_tokens(found.run), _experts(found.run)
    return render(
        "explain",
        scripts=("sort.js", str(FOLDER / "sampler.js"), "explain.js"),
        title="Inference, token by token",
        lead=f"The computation of {found.model} between a prompt of {counted(run.n_prompt, 'token')} and its answer.",
        script_data=_script_data(found, sampling, tokens, _trees(run, rule)),
        about=_texts(found),
        names={number: quoted(token) for number, token in tokens.items()},
        tokens=run.tokens,
        first=run.first,
        numbers=_numbers(found),
        chips=_chips(run, tokens),
        rule=rule.words if rule else "",
        embeddings=run.embeddings,
        has_norms=bool(run.layers and run.layers[-1].residual),
        lens=run.lens,
        heads=_heads(run),
        max_level=_MAX_LEVEL,
        max_looks=_MAX_LOOKS,
        experts=_squares([[own[0] for own in active] for _, active in reversed(experts)]),
        n_expert_layers=len(experts),
        cache=_cache(found),
        phases=phases(found),
        sliders=_sliders(sampling),
    )


def _texts(found: ExplainedAnswer) -> dict[str, str]:
    run = found.run
    return {
        "tokens": about_tokens(run),
        "embeddings": about_embeddings(run.embeddings),
        "layers": about_layers(run),
        "lens": about_lens(run, "a token"),
        "attention": about_attention(run) if run.pictures else "",
        "no_attention": NO_ATTENTION,
        "experts": EXPERTS,
        "cache": about_cache(found.cache, len(run.tokens)),
        "time": TIME,
        "sampling": SAMPLING,
    }


def _numbers(found: ExplainedAnswer) -> list[tuple[str, str]]:
    run = found.run
    numbers = [(f"{len(run.tokens) - run.n_prompt:,}", "tokens of answer"), (f"{len(run.layers)}", "layers")]
    return numbers + [(rate(phase.speed), f"{phase.name}, while watched") for phase in phases(found)]


def _chips(run: RunCollected, tokens: Mapping[int, Token]) -> list[tuple[str, str]]:
    """Return each watched token's text and CSS class."""
    chips = []
    for at, number in enumerate(run.tokens[run.first :], run.first):
        token = tokens[number]
        text = clean(token.data.decode("utf-8", "replace").replace("\n", "↵").replace("\t", "⇥")) or "·"
        chips.append((text, "control" if token.is_control else "prompt" if at < run.n_prompt else "answer"))
    return chips


def _heads(run: RunCollected) -> list[dict[str, Any]]:
    heads = []
    for picture in run.pictures:
        # The square root makes small shares visible.
        levels = [[min(int(max(s, 0.0) ** 0.5 * (_MAX_LEVEL + 1)), _MAX_LEVEL) for s in row] for row in picture.rows]
        heads.append(
            {
                "name": head_name(picture),
                "caption": f"{head_name(picture)}: {ROLES[picture.role]}",
                "size": len(picture.rows),
                "paths": _squares([row[run.first :] for row in levels]),
                "looks": [[(at, row[at]) for at in _largest(row)] for row in picture.rows],
            }
        )
    return heads


def _squares(rows: Sequence[Sequence[int]]) -> list[tuple[int, str]]:
    """Return SVG path data for each number of a grid: one path for all its cells keeps large grids small."""
    cells: dict[int, list[str]] = {}
    for y, row in enumerate(rows):
        for x, number in enumerate(row):
            cells.setdefault(number, []).append(f"M{x} {y}h1v1h-1z")
    return [(number, "".join(parts)) for number, parts in sorted(cells.items())]


def _largest(row: Sequence[float]) -> list[int]:
    """Return the places of the largest shares."""
    return sorted(range(len(row)), key=lambda at: -row[at])[:_MAX_LOOKS]


def _experts(run: RunCollected) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    """Return the layers with experts, and the active experts of each watched position."""
    watched = len(run.tokens) - run.first
    return [(number, layer.experts) for number, layer in enumerate(run.layers) if len(layer.experts) == watched]


def _cache(found: ExplainedAnswer) -> list[tuple[str, str]]:
    cache, n_tokens = found.cache, len(found.run.tokens)
    numbers = [
        (readable_size(cache.bytes_per_token), "for a token"),
        (
            readable_size(cache.bytes_per_token * n_tokens),
            f"for the {counted(n_tokens, 'token')} here, prompt and answer",
        ),
        (readable_size(cache.full_bytes), f"for the whole context window of {cache.n_ctx:,}"),
    ]
    return numbers if cache.layers else []


def _sliders(sampling: SamplingParams) -> list[dict[str, Any]]:
    sliders = []
    for name, (label, slider) in _SLIDERS.items():
        value = getattr(sampling, name) if name in sampling.order else slider.off
        maximum = max(slider.high, value)
        sliders.append({"name": name, "label": label, "value": value, "maximum": maximum, "step": slider.step})
    return sliders


# ---- data of explain.js


def _script_data(
    found: ExplainedAnswer, sampling: SamplingParams, tokens: Mapping[int, Token], trees: Sequence[Any]
) -> dict[str, Any]:
    """Return the data of explain.js; places are indices of the watched positions."""
    run = found.run
    norms = [("residual stream", "residual"), ("attention added", "attention"), ("feed-forward added", "feed_forward")]
    order = [step for step in sampling.order if step in _SLIDERS]
    return {
        "first": run.first,
        "prompt": run.n_prompt,
        "start": max(run.n_prompt - 1 - run.first, 0),
        "tokens": run.tokens[run.first :],
        "names": {number: quoted(token) for number, token in tokens.items()},
        "trees": trees,
        "norms": [
            (name, [_rounded(getattr(layer, field), 3) for layer in run.layers])
            for name, field in norms
            if all(getattr(layer, field) for layer in run.layers)
        ],
        "places": run.embeddings and [_place(token) for token in run.embeddings.tokens],
        "lens": [[_lens_cell(cell) for cell in column.cells] for column in run.lens],
        "heads": [
            (head_name(picture), [[(run.tokens[at], row[at]) for at in _largest(row)] for row in picture.rows])
            for picture in run.pictures
        ],
        "experts": _experts(run),
        "time": [(phase.name, phase.layers) for phase in phases(found) if any(phase.layers)],
        "order": [*order, *(step for step in STEPS if step in _SLIDERS and step not in order)],
        "choices": [_choice(choice) for choice in found.choices],
    }


def _place(each: EmbeddedToken) -> tuple[Any, ...]:
    near = [(near.token, *_rounded((near.x, near.y, near.similarity), 3)) for near in each.neighbours]
    return each.token, *_rounded((each.x, each.y), 3), near


def _lens_cell(cell: LensCell) -> tuple[Any, ...]:
    return cell.candidates, _rounded(cell.probabilities), round(cell.next, _DIGITS), cell.rank


def _rounded(values: Sequence[float], digits: int = _DIGITS) -> list[float]:
    return [round(value, digits) for value in values]


def _choice(choice: Choice) -> dict[str, Any]:
    """Return all candidates' probabilities by the model, and every step of the candidates that are shown."""
    drafted = clean(about_draft(choice.draft)) if choice.draft is not None else ""
    if choice.forced:
        return {"forced": True, "drafted": drafted}
    model = choice.steps[0]
    n_others = max(model.remaining - len(choice.candidates), 0)
    others = max(1 - sum(model.probabilities), 0.0) / n_others if n_others else 0.0
    shown = list(range(min(len(choice.candidates), _MAX_CANDIDATES)))
    shown += [] if choice.chosen in shown else [choice.chosen]
    return {
        "forced": False,
        "drafted": drafted,
        "text": clean(repr(choice.text)),
        "chosen": choice.chosen,
        "model": _rounded(model.probabilities),
        "others": (n_others, round(others, 2 * _DIGITS)),
        "shown": shown,
        "texts": [clean(repr(choice.candidates[index])) for index in shown],
        "steps": [
            (step.name, step.remaining, _rounded([step.probabilities[index] for index in shown]))
            for step in choice.steps
        ],
    }


def _trees(run: RunCollected, rule: MergeRule | None) -> list[Any]:
    """Return each watched token's merges; tokens that one merge of a whole word made share its tree."""
    if rule is None:
        return [None] * (len(run.tokens) - run.first)
    origins = rule.origins(run.tokens[run.first :])
    return [origin.node and _tree(origin.node) for origin in origins for _ in range(origin.n_tokens)]


def _tree(node: MergeNode) -> tuple[str, list[Any]]:
    return bytes_shown(node.data), [_tree(part) for part in node.parts]
