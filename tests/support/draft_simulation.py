"""What drafts gain and cost: the loop answers with texts of twelve kinds, and a machine's table says how long it takes.

The drafts are planned by llmrun's own table for such a machine, and by what their steps take on it.

Everything is llmrun's own but the model, which follows a text, and the prediction heads, which are right as often as
such heads are. The time is the sum of the steps' by the table, so it is the same on each machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from llmrun._native import CancelFlag
from llmrun.engine.core.draft_source import Draft, DraftedSequence
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.mtp_model import HeadModel
from llmrun.engine.core.steps import ON_DEVICE, ON_PROCESSOR, StepCost, StepCosts, cost_of
from llmrun.engine.llama.base import Entry, RunLimit
from llmrun.protocol.messages import Finished, Stats
from llmrun.protocol.speculation import Speculation
from support.conversation import Conversation
from support.fake_context import Model, favouring

_N_WORDS = 230  # tokens of the texts; the last of a vocabulary's bytes name the text
_N_PROMPT = 200


class Machine(NamedTuple):
    """The times of steps by their rows, relative to a step of one row."""

    name: str
    steps: dict[int, float]
    head: float  # a step of the prediction heads
    begins: tuple[StepCost, ...] = ON_PROCESSOR  # what its steps are expected to cost

    def seconds(self, rows: int) -> float:
        """Return the time of a step."""
        return cost_of(self.measured, rows)

    @property
    def measured(self) -> tuple[StepCost, ...]:
        """Its own table."""
        return tuple(self.steps.items())


MACHINES = (
    # Measured for 1, 4, 8 and 16 rows, with an 8B model of random weights; others between them, the heads assumed.
    Machine("H200, 8B Q4_K", {1: 1.0, 2: 1.10, 3: 1.20, 4: 1.30, 8: 1.81, 16: 1.89}, 0.12, ON_DEVICE),
    # Measured on Zen 4 with ggml's kernels, but for 16 rows; the heads assumed.
    Machine("2 cores, ggml", {1: 1.0, 2: 1.70, 4: 2.18, 8: 3.42, 16: 6.0}, 0.15),
    # Measured on Zen 5 with our own kernels, one thread; the heads assumed.
    Machine("135M Q4_0", {1: 1.0, 2: 1.12, 3: 1.36, 4: 1.63, 8: 2.51, 16: 3.47}, 0.3),
    Machine("memory-bound", {width: width**0.2 for width in (1, 2, 3, 4, 8, 16)}, 0.04),  # assumed
)


# ---- texts: prompt and answer in one, of random words ---------------------------------------------------


def _prose(draws: random.Random, length: int) -> list[int]:
    """Words follow some others more often, as in a language."""
    successors = [draws.choices(range(_N_WORDS), k=12) for _ in range(_N_WORDS)]
    text = [0]
    while len(text) < length:
        text.append(draws.choice(successors[text[-1]]) if draws.random() < 0.6 else draws.randrange(_N_WORDS))
    return text


def _random(draws: random.Random, length: int) -> list[int]:
    return [draws.randrange(_N_WORDS) for _ in range(length)]


def _filled(template: Sequence[int | None], draws: random.Random, length: int) -> list[int]:
    """Repeat a template with other words in its gaps."""
    text = list[int]()
    while len(text) < length:
        text += [draws.randrange(_N_WORDS) if each is None else each for each in template]
    return text


def _code(draws: random.Random, length: int) -> list[int]:
    """Lines of some shapes, whose names come back."""
    names = _random(draws, 12)
    shapes = [[draws.randrange(_N_WORDS) if draws.random() < 0.6 else -1 for _ in range(12)] for _ in range(8)]
    text = list[int]()
    while len(text) < length:
        text += [draws.choice(names) if each < 0 else each for each in draws.choice(shapes)]
    return text


def _json(draws: random.Random, length: int) -> list[int]:
    return _filled([1, 2, 3, None, 4, 5, 6, None, None, 7, 8, 9, 10, None, 11], draws, length)


def _list(draws: random.Random, length: int) -> list[int]:
    return _filled([20, 21, None, None, None, None, None, 22], draws, length)


def _table(draws: random.Random, length: int) -> list[int]:
    return _filled([None, 30, None, 30, None, 30, None, 31], draws, length)


def _log(draws: random.Random, length: int) -> list[int]:
    return _filled([40, 41, 42, 43, None, 44, 45, 46, 47, 48, None, 49], draws, length)


def _edit(draws: random.Random, length: int) -> list[int]:
    """The prompt again, with a change now and then."""
    prompt = _prose(draws, _N_PROMPT)
    again = [draws.randrange(_N_WORDS) if draws.random() < 0.03 else word for word in prompt]
    return (prompt + again * (length // _N_PROMPT))[:length]


def _quotes(draws: random.Random, length: int) -> list[int]:
    text = _prose(draws, _N_PROMPT)
    while len(text) < length:
        start = draws.randrange(_N_PROMPT - 10)
        text += [*text[start : start + draws.randint(3, 10)], *_random(draws, 15)]
    return text


def _loop(draws: random.Random, length: int) -> list[int]:
    return _prose(draws, 30) * (length // 30 + 1)


def _traps(draws: random.Random, length: int) -> list[int]:
    """Phrases come back, and go on in another way each time."""
    phrases = [_random(draws, draws.randint(1, 6)) for _ in range(30)]
    text = list[int]()
    while len(text) < length:
        text += [*draws.choice(phrases), draws.randrange(_N_WORDS)]
    return text


def _changing(draws: random.Random, length: int) -> list[int]:
    """A table that invites drafts, then traps."""
    text = _filled(range(60, 72), draws, _N_PROMPT + 60)
    return text + _traps(draws, length - len(text))


TEXTS: dict[str, tuple[Callable[[random.Random, int], list[int]], float]] = {
    "prose": (_prose, 0.5),
    "random": (_random, 0.0),
    "code": (_code, 0.75),
    "JSON": (_json, 0.8),
    "list": (_list, 0.6),
    "table": (_table, 0.6),
    "log": (_log, 0.8),
    "edit": (_edit, 0.8),
    "quotes": (_quotes, 0.55),
    "loop": (_loop, 0.95),
    "traps": (_traps, 0.2),
    "changing": (_changing, 0.1),
}
"""Kinds of text, and the share of tokens that heads foresee if those before are right."""


# ---- the loop -------------------------------------------------------------------------------------------


class _Heads(HeadModel):
    """Heads that know the texts, and are wrong as often as asked."""

    n_most = 7

    def __init__(self, texts: Sequence[Sequence[int]], share: float, seed: int) -> None:
        self._texts, self._share, self._draws = texts, share, random.Random(seed)
        self.drafting = list[int]()

    def switch_on(self) -> None: ...

    def count_missing(self, sequence: DraftedSequence) -> int | None:
        return 0 if sequence.n_waiting == 1 else None

    def propose(self, asked: Mapping[DraftedSequence, int]) -> dict[DraftedSequence, Draft]:
        drafts = {sequence: Draft("heads") for sequence in asked}
        asking, rows = [*asked], 2
        while asking:
            self.drafting.append(rows * len(asking))
            for sequence in asking:
                drafts[sequence].tokens.append(self._next([*sequence.tokens, *drafts[sequence].tokens]))
            rows, asking = 1, [each for each in asking if len(drafts[each].tokens) < asked[each]]
        return drafts

    def _next(self, tokens: Sequence[int]) -> int:
        right = self._texts[tokens[0] - _N_WORDS][len(tokens)]
        return right if self._draws.random() < self._share else (right + 1) % _N_WORDS


@dataclass
class Outcome:
    """The time of some answers, relative to plain decoding, and what was drafted."""

    speed: float
    n_drafted: int
    n_accepted: int


def simulate(
    kind: str, machine: Machine, *, n_tokens: int, clients: int = 1, heads: bool = False, seed: int = 1,
    begins: tuple[StepCost, ...] | None = None,
) -> Outcome:  # fmt: skip
    """Answer with texts of one kind, all at the same time.

    Args:
        heads: the model has prediction heads.
        begins: what steps are expected to cost; None for the machine's.
    """
    write, share = TEXTS[kind]
    texts = list[list[int]]()
    for number in range(clients):
        text = write(random.Random(f"{kind} {seed} {number}"), _N_PROMPT + n_tokens + 20)
        texts.append([_N_WORDS + number, *text])

    def model(tokens: Sequence[int]) -> Sequence[float]:
        return favouring(texts[tokens[0] - _N_WORDS][len(tokens)])

    speculation = Speculation(15, only_if_it_pays=True, draft_cost=machine.head if heads else 0.0)
    found = _Heads(texts, share, seed) if heads else None
    costs = StepCosts(begins or machine.begins)
    talk, stats = _answer(model, texts, n_tokens, machine, speculation, found, costs)
    plain, _ = _answer(model, texts, n_tokens, machine, None, None, costs)
    spent = machine.head * len(found.drafting) if found is not None else 0.0
    spent += sum(machine.seconds(len(call)) for call in _decoding(talk.context.calls))
    counted = (sum(map(attrgetter(name), stats)) for name in ("drafted_tokens", "accepted_tokens"))
    return Outcome(sum(machine.seconds(len(call)) for call in _decoding(plain.context.calls)) / spent, *counted)


def _answer(
    model: Model,
    texts: Sequence[list[int]],
    n_tokens: int,
    machine: Machine,
    speculation: Speculation | None,
    heads: _Heads | None,
    costs: StepCosts,
) -> tuple[Conversation, list[Stats]]:
    """Answer with drafts, or without."""
    talk = Conversation(
        model,
        draft_model=heads,
        n_ctx=_N_PROMPT + n_tokens + 40,
        n_batch=256,
        n_seq_max=len(texts),
    )
    talk.context.step_seconds = machine.seconds

    def clock() -> float:
        drafting = machine.head * len(heads.drafting) if heads is not None else 0.0
        return drafting + sum(machine.seconds(len(call)) for call in talk.context.calls)

    talk.engine._clock = clock
    for number, text in enumerate(texts):
        prompt, drafting = text[:_N_PROMPT], None
        if speculation is not None:
            drafting = Drafting(speculation, prompt, heads, costs)
        talk.ask(prompt, most=n_tokens, request=number, drafting=drafting)
    stats, limit = list[Stats](), RunLimit(64, 0.0, CancelFlag(), None)
    while talk.engine.busy:
        stats += [event.stats for event in talk.engine.step(limit, lambda events: 0.0) if isinstance(event, Finished)]
    return talk, stats


def _decoding(calls: Iterable[list[Entry]]) -> Iterator[list[Entry]]:
    """Yield the batches after the prompts."""
    return (call for call in calls if all(entry.position >= _N_PROMPT for entry in call))
