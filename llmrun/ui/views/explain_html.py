"""An answer explained as an HTML page: what the terminal shows of one token, for each token.

Owns the page's data; explain_words.py has the texts, explain.html.jinja the layout, explain.js what changes with the
chosen token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmrun.insight.explain import ExplainedAnswer
from llmrun.insight.merges import MergeNode, MergeRule
from llmrun.insight.tokens import Token
from llmrun.protocol.jobs.explain import EmbeddedToken, LensCell, RunCollected
from llmrun.protocol.params import PARAMETERS, STEPS, SamplingParams
from llmrun.protocol.questions import Choice
from llmrun.protocol.sizes import readable_size
from llmrun.server.page.files import FOLDER
from llmrun.ui.html.render import render
from llmrun.ui.terminal.format import counted, rate
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.views import explain_words as words
from llmrun.ui.views.explain_words import head_name, known_tokens, phases, quoted
from llmrun.ui.views.sampling import about_draft
from llmrun.ui.views.tokens import bytes_shown

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
        "tokens": words.about_tokens(run),
        "embeddings": words.about_embeddings(run.embeddings),
        "layers": words.about_layers(run),
        "lens": words.about_lens(run, "a token"),
        "attention": words.about_attention(run) if run.pictures else "",
        "no_attention": words.NO_ATTENTION,
        "experts": words.EXPERTS,
        "cache": words.about_cache(found.cache, len(run.tokens)),
        "time": words.TIME,
        "sampling": words.SAMPLING,
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
    for each in run.pictures:
        # The square root makes small shares visible.
        levels = [[min(int(max(s, 0.0) ** 0.5 * (_MAX_LEVEL + 1)), _MAX_LEVEL) for s in row] for row in each.rows]
        heads.append(
            {
                "name": head_name(each),
                "caption": f"{head_name(each)}: {words.ROLES[each.role]}",
                "size": len(each.rows),
                "paths": _squares([row[run.first :] for row in levels]),
                "looks": [[(at, row[at]) for at in _largest(row)] for row in each.rows],
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
        (readable_size(cache.bytes_per_token * n_tokens), f"for these {counted(n_tokens, 'token')}"),
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
        "places": run.embeddings and [_place(each) for each in run.embeddings.tokens],
        "lens": [[_lens_cell(cell) for cell in column.cells] for column in run.lens],
        "heads": [
            (head_name(each), [[(run.tokens[at], row[at]) for at in _largest(row)] for row in each.rows])
            for each in run.pictures
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
