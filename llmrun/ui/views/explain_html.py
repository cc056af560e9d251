"""An answer explained as one HTML page: the story that the terminal tells, for each token instead of one.

Owns which figures are on it; explain_words.py has the words. Must not know where the figures come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmrun.insight.explain import ExplainedAnswer
from llmrun.insight.merges import MergeNode, MergeRule
from llmrun.insight.tokens import Token
from llmrun.protocol.finished_answers import Choice
from llmrun.protocol.jobs.explain import EmbeddedToken, HeadAttention, LensCell, RunCollected
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.sizes import readable_size
from llmrun.ui.html.explain import HeatCell, Slider, TokenSpan, chips, heads, lens_grid, live, script, sliders, strip
from llmrun.ui.html.page import Cell, Details, Paragraph, Part, Section, Table, Tiles, page
from llmrun.ui.terminal.format import counted, milliseconds, percent, rate
from llmrun.ui.terminal.sanitize import clean
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
    head_name,
    known_tokens,
    phases,
    quoted,
)
from llmrun.ui.views.tokens import bytes_shown

_STEPS = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}  # that have sliders, and where each is off
_ROWS = 12  # candidates of a choice that are shown
_LOOKED_AT = 3  # tokens of a row of attention in the table
_DIGITS = 6  # of probabilities


def explain_page(found: ExplainedAnswer, sampling: SamplingParams, rule: MergeRule | None) -> str:
    """The whole page.

    Args:
        found: with the lens of every position.
        sampling: what the answer's tokens were chosen with; where the sliders start.
        rule: how the model's tokens come to be, where that is known.
    """
    run, tokens = found.run, known_tokens(found.run)
    has_norms = bool(run.layers and run.layers[-1].residual)
    sections = [
        Section("Tokens", (Paragraph(about_tokens(run)), Paragraph(_HOW), _tiles(found))),
        Section("", (chips(_chips(run, tokens)),)),
        Section(
            "The chosen token",
            (live("token"), *([Details("How tokens are made", (Paragraph(rule.words),))] if rule else [])),
        ),
        Section("Embeddings", _embeddings(run, tokens)),
        *([Section("Layers", (Paragraph(f"{about_layers(run)} {_NORMS}"), live("layers")))] if has_norms else []),
        Section("Logit lens", _lens(run, tokens)),
        Section("Attention", _attention(run, tokens)),
        *([Section("Experts", _woken(run))] if _experts(run) else []),
        Section("KV cache", _cache(found)),
        Section("Time", _time(found)),
        *([Section("Sampling", _sampling(sampling))] if found.choices else []),
    ]
    lead = f"What {found.model} did between a prompt of {counted(run.n_prompt, 'token')} and its answer."
    data = _data(found, sampling, tokens, _trees(run, rule))
    return page("Inference, token by token", sections, lead=lead, script=script(data))


_HOW = (
    "Choose a token, with a click or the left and right arrow keys: everything below shows what the model did at that "
    "token to predict the next one. Green is the answer, grey are control tokens."
)
_NORMS = "The longer the vector (norm), the less a single layer's addition can turn it."


def _tiles(found: ExplainedAnswer) -> Tiles:
    run = found.run
    pairs = [(f"{len(run.tokens) - run.n_prompt:,}", "tokens of answer"), (f"{len(run.layers)}", "layers")]
    pairs += [(rate(phase.speed), f"{phase.name}, while watched") for phase in phases(found)]
    return Tiles(tuple(pairs))


def _chips(run: RunCollected, tokens: Mapping[int, Token]) -> list[TokenSpan]:
    shown = []
    for at, number in enumerate(run.tokens[run.first :], run.first):
        token = tokens[number]
        text = clean(token.data.decode("utf-8", "replace").replace("\n", "↵").replace("\t", "⇥")) or "·"
        shown.append(TokenSpan(text, "control" if token.is_control else "prompt" if at < run.n_prompt else "answer"))
    return shown


def _embeddings(run: RunCollected, tokens: Mapping[int, Token]) -> tuple[Part, ...]:
    words, found = Paragraph(about_embeddings(run.embeddings)), run.embeddings
    if found is None:
        return (words,)
    note = (
        "Each dot is a token of this text; of the chosen one, the open dots are its nearest neighbours in the whole "
        f"vocabulary. A plane shows only {found.shown:.0%} of how the tokens differ, so that near ones may look far."
    )
    rows = [
        (
            Cell(quoted(tokens[each.token]), each.token),
            Cell(", ".join(f"{quoted(tokens[near.token])} {near.similarity:.2f}" for near in each.neighbours)),
        )
        for each in found.tokens
        if each.neighbours
    ]
    table = Table(("token", "nearest in the vocabulary"), tuple(rows), words=frozenset({1}))
    return words, Paragraph(note, small=True), live("embeddings"), Details("All tokens as a table", (table,))


def _lens(run: RunCollected, tokens: Mapping[int, Token]) -> tuple[Part, ...]:
    words = Paragraph(about_lens(run, "a token"))
    if not run.lens:
        return (words,)
    names = [quoted(tokens[run.tokens[column.position]]) for column in run.lens]
    layers = zip(*(column.cells for column in run.lens), strict=True)
    rows = [[HeatCell(quoted(tokens[cell.candidates[0]]), cell.probabilities[0]) for cell in cells] for cells in layers]
    note = "In each cell is the likeliest token, the stronger its colour the likelier. A click shows the others."
    return words, Paragraph(note, small=True), lens_grid(names, rows), live("lens")


def _attention(run: RunCollected, tokens: Mapping[int, Token]) -> tuple[Part, ...]:
    if not run.pictures:
        return (Paragraph(NO_ATTENTION),)
    drawn = [
        (f"{head_name(each)}: {ROLES[each.role]}", [row[run.first :] for row in each.rows]) for each in run.pictures
    ]
    note = (
        "A row is a token, a column one that it looks at, the stronger its colour the more; the frame is the chosen "
        "token's row."
    )
    if run.first:
        note += " Tokens before these have no column, only a place in the tables."
    tables = [
        Details(f"{head_name(each).capitalize()} as a table", (_looks(run, each, tokens),)) for each in run.pictures
    ]
    return Paragraph(about_attention(run)), heads(drawn), Paragraph(note, small=True), live("attention"), *tables


def _looks(run: RunCollected, picture: HeadAttention, tokens: Mapping[int, Token]) -> Table:
    def name(position: int) -> str:
        return quoted(tokens[run.tokens[position]])

    rows = []
    for position, row in enumerate(picture.rows, run.first):
        cells = [Cell(f"{name(at)} ({at + 1}) {percent(row[at])}", row[at]) for at in _most(row)]
        rows.append(
            (Cell(f"{name(position)} ({position + 1})", position), *cells, *[Cell("")] * (_LOOKED_AT - len(cells)))
        )
    return Table(("token", "looks most at", "then at", "and at"), tuple(rows))


def _most(row: Sequence[float]) -> list[int]:
    """Places of the largest shares."""
    return sorted(range(len(row)), key=lambda at: -row[at])[:_LOOKED_AT]


def _experts(run: RunCollected) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    """Layers that have experts, and which ones each watched position woke."""
    watched = len(run.tokens) - run.first
    return [(number, layer.experts) for number, layer in enumerate(run.layers) if len(layer.experts) == watched]


def _woken(run: RunCollected) -> tuple[Part, ...]:
    heaviest = [[own[0] for own in woken] for _, woken in _experts(run)]
    note = "A column is a token, a row a layer, the last on top; the colour is that of the heaviest expert."
    picture = strip(heaviest, "The heaviest expert of each token in each layer. The table below has all of a token's.")
    return Paragraph(EXPERTS), Paragraph(note, small=True), picture, live("experts")


def _cache(found: ExplainedAnswer) -> tuple[Part, ...]:
    cache, n_tokens = found.cache, len(found.run.tokens)
    words = Paragraph(about_cache(cache, n_tokens))
    if not cache.layers:
        return (words,)
    pairs = [
        (readable_size(cache.bytes_per_token), "for a token"),
        (readable_size(cache.bytes_per_token * n_tokens), f"for these {counted(n_tokens, 'token')}"),
        (readable_size(cache.full_bytes), f"for the whole context window of {cache.n_ctx:,}"),
    ]
    return words, Tiles(tuple(pairs))


def _time(found: ExplainedAnswer) -> tuple[Part, ...]:
    rows = tuple(
        (
            Cell(phase.name),
            Cell(f"{phase.tokens}", phase.tokens),
            Cell(milliseconds(phase.seconds), phase.seconds),
            Cell(rate(phase.speed), phase.speed),
            Cell(phase.of_limit),
        )
        for phase in phases(found)
    )
    table = Table(("", "tokens", "time", "speed", "of what the machine can do"), rows, frozenset({1, 2, 3}))
    drawn = [live("time")] if _layer_times(found) else []
    return Paragraph(TIME), table, *drawn


def _layer_times(found: ExplainedAnswer) -> list[tuple[str, Sequence[float]]]:
    return [(phase.name, phase.layers) for phase in phases(found) if any(phase.layers)]


def _sampling(sampling: SamplingParams) -> tuple[Part, ...]:
    labels = {"temperature": "temperature", "top_k": "top-k", "top_p": "top-p", "min_p": "min-p"}
    reach = {"temperature": (2.0, 0.01), "top_k": (200.0, 1.0), "top_p": (1.0, 0.001), "min_p": (1.0, 0.001)}
    wanted = []
    for name, label in labels.items():
        value = getattr(sampling, name) if name in sampling.order else _STEPS[name]
        most, step = reach[name]
        wanted.append(Slider(name, label, value, max(most, value), step))
    note = (
        "The sliders start at the settings of this answer. A step at 0, or top-p and temperature at 1, changes nothing."
    )
    return Paragraph(SAMPLING), sliders(wanted), live("sampling"), Paragraph(note, small=True)


# ---- what the script is given ----------------------------------------------------------------------


def _data(
    found: ExplainedAnswer, sampling: SamplingParams, tokens: Mapping[int, Token], trees: Sequence[Any]
) -> dict[str, Any]:
    """See explain.js, which shows it; places are those among the watched positions."""
    run = found.run
    norms = [("residual stream", "residual"), ("attention added", "attention"), ("feed-forward added", "feed_forward")]
    order = [step for step in sampling.order if step in _STEPS]
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
        "places": run.embeddings and [_place(each) for each in run.embeddings.tokens],
        "lens": [[_lens_cell(cell) for cell in column.cells] for column in run.lens],
        "heads": [
            (head_name(each), [[(run.tokens[at], row[at]) for at in _most(row)] for row in each.rows])
            for each in run.pictures
        ],
        "experts": _experts(run),
        "time": _layer_times(found),
        "order": [*order, *(step for step in _STEPS if step not in order)],
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
    """Of all candidates what the model gave them; of those that are shown every step."""
    if choice.forced:
        return {"forced": True}
    model = choice.steps[0]
    n_others = max(model.remaining - len(choice.candidates), 0)
    others = max(1 - sum(model.probabilities), 0.0) / n_others if n_others else 0.0
    shown = list(range(min(len(choice.candidates), _ROWS)))
    shown += [] if choice.chosen in shown else [choice.chosen]
    return {
        "forced": False,
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
    """How each watched token was made; a word's tokens have one tree where the rule makes them of the whole word."""
    if rule is None:
        return [None] * (len(run.tokens) - run.first)
    origins = rule.origins(run.tokens[run.first :])
    return [origin.node and _tree(origin.node) for origin in origins for _ in range(origin.n_tokens)]


def _tree(node: MergeNode) -> tuple[str, list[Any]]:
    return bytes_shown(node.data), [_tree(part) for part in node.parts]
