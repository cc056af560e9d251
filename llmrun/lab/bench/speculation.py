"""The benchmark of speculation, `llmrun bench --speculate`: prompts of named kinds, with and without drafts in turns.

Answers are drawn with the same seed on both sides, so they are the same text but for roundings. Rows measured before an
interrupt or an engine's crash are returned beside the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from llmrun.errors import LlmrunError
from llmrun.lab.bench.machine import DisturbanceMonitor
from llmrun.lab.bench.results import BenchWarning
from llmrun.lab.bench.run import Progress
from llmrun.model import Model
from llmrun.planning.speculation import AUTO, OFF
from llmrun.protocol.messages import AnswerRequest, Finished, Message, Stats, TextDelta
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.runner.client import EngineClient
from llmrun.statistics import Verdict, compare

_WARM_UP_TOKENS = 8
_SEED = 7

_LETTER = """\
Dear neighbours,

On Saturday the fourteenth of June the summer fair of Alder Street takes place again. As in the years before, the \
street is closed to cars from eight in the morning until ten at night. Please park your cars somewhere else on Friday \
evening, because the tables and benches are brought very early on Saturday, at about half past six.

The programme begins at eleven with the brass band of the fire brigade. At noon Mrs Okafor and her sisters serve the \
pepper soup that was gone within an hour last year; this time they cook three pots of it. In the afternoon there are \
games for children in the yard of number twelve, a bicycle repair stand in front of number nineteen, and a flea market \
along the garden wall. Whoever wants to sell something needs no permission, but please bring a table of your own and \
take home in the evening whatever was not sold.

At six the street choir sings. It has rehearsed since March, and it still looks for a bass. After that there is \
dancing until nine. The last hour is for tidying up together, and it is much shorter when everybody helps.

We need help in three places. First, somebody with a trailer has to fetch the benches from the school in Mill Lane on \
Friday at five. Second, the cake table needs eight more cakes; please write on the list in the bakery which one you \
are going to bring. Third, two people have to stay at each end of the street between eight and eleven, so that nobody \
drives into it by mistake.

If it rains, we meet in the hall of the old tram depot, and only the flea market is cancelled. Questions are answered \
by Mr Lindqvist in number seven, every evening after six.

With kind regards,
the committee of the Alder Street fair"""

_RECORDS = """\
[
 {"station": "Harbour Bridge", "line": 4, "opened": 1931, "lift": true, "passengers": 18250},
 {"station": "Old Town Hall", "line": 1, "opened": 1927, "lift": false, "passengers": 40110},
 {"station": "Museum Island", "line": 1, "opened": 1930, "lift": true, "passengers": 22480},
 {"station": "Botanical Garden", "line": 2, "opened": 1956, "lift": true, "passengers": 9730},
 {"station": "North Cemetery", "line": 2, "opened": 1958, "lift": false, "passengers": 3120},
 {"station": "University Clinic", "line": 3, "opened": 1974, "lift": true, "passengers": 27660},
 {"station": "Exhibition Centre", "line": 3, "opened": 1975, "lift": true, "passengers": 15040},
 {"station": "Airport Terminal", "line": 4, "opened": 1998, "lift": true, "passengers": 31890}
]"""

_TABLE = """\
date,product,shop,sold,price
2024-03-01,rye bread,Alder Street,41,3.80
2024-03-01,rye bread,Mill Lane,28,3.80
2024-03-01,seed rolls,Alder Street,96,0.90
2024-03-01,seed rolls,Mill Lane,75,0.90
2024-03-02,rye bread,Alder Street,52,3.80
2024-03-02,rye bread,Mill Lane,33,3.80
2024-03-02,seed rolls,Alder Street,120,0.90
2024-03-02,seed rolls,Mill Lane,88,0.90"""

_CODE = """\
class Thermostat:
    def __init__(self, heater, sensor):
        self.heater = heater
        self.sensor = sensor
        self.log = []

    def set_morning(self, degrees):
        if not 5 <= degrees <= 30:
            raise ValueError("morning temperature out of range")
        self.heater.schedule("morning", degrees)
        self.log.append(("morning", degrees, self.sensor.read()))

    def set_day(self, degrees):
        if not 5 <= degrees <= 30:
            raise ValueError("day temperature out of range")
        self.heater.schedule("day", degrees)
        self.log.append(("day", degrees, self.sensor.read()))

    def set_evening(self, degrees):
        if not 5 <= degrees <= 30:
            raise ValueError("evening temperature out of range")
        self.heater.schedule("evening", degrees)
        self.log.append(("evening", degrees, self.sensor.read()))"""


class SpeculationPrompt(NamedTuple):
    """A prompt of some kind."""

    question: str  # of the user
    temperature: float = 0.0  # of the answer
    repeats: bool = True  # the answer probably repeats much of the prompt, or of itself


PROMPTS = {
    "edit": SpeculationPrompt(
        f"{_LETTER}\n\nRepeat this letter word for word, but write Sunday instead of Saturday everywhere."
    ),
    "summarise": SpeculationPrompt(
        f"{_LETTER}\n\nSummarise this letter in a few sentences. Quote whole sentences of it wherever you can."
    ),
    "quote": SpeculationPrompt(f"{_LETTER}\n\nQuote the paragraph of this letter that says where help is needed."),
    "json": SpeculationPrompt(f"{_RECORDS}\n\nWrite the same data as CSV, with a header."),
    "csv": SpeculationPrompt(f"{_TABLE}\n\nWrite the same data as a JSON list of objects, one object a line."),
    "code": SpeculationPrompt(
        f"```python\n{_CODE}\n```\n\nRepeat this class, with a method set_night that does the same for the night."
    ),
    "free text": SpeculationPrompt(
        "Tell a story about a lighthouse keeper who finds a letter.", temperature=0.8, repeats=False
    ),
}
"""Kind -> prompt."""


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    """The gain of drafts on prompts of one kind."""

    kind: str  # of PROMPTS
    tokens: int  # of the answer
    # Decode rates without and with drafts, measured in turns.
    plain_ts: tuple[float, ...]
    drafted_ts: tuple[float, ...]
    verdict: Verdict  # of their comparison
    acceptance: float | None  # share of drafted tokens that were accepted; None where none were drafted
    tokens_a_step: float  # with drafts
    expected: float | None  # the gain by the costs of steps; None where none were drafted
    is_same: bool  # the answers were the same text


class SpeculationOutcome(NamedTuple):
    """The rows, the disturbances, and the error that ended the bench early."""

    rows: tuple[SpeculationRow, ...]
    warnings: tuple[BenchWarning, ...]
    error: LlmrunError | None

    @property
    def mean_gain(self) -> float | None:
        """Geometric mean of the gain over the kinds whose answers repeat something; None without such rows."""
        ratios = [row.verdict.ratio for row in self.rows if PROMPTS[row.kind].repeats]
        return math.exp(fmean(map(math.log, ratios))) if ratios else None


class _TimedAnswer(NamedTuple):
    """An answer's text and figures."""

    text: str
    stats: Stats


def measure(
    model: Model,
    name: str,
    *,
    tokens: int,
    repetitions: int = 5,
    warm_up: bool = True,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    start: Callable[[Model], EngineClient] = Model.new_engine,
) -> SpeculationOutcome:
    """Measure all kinds, with and without drafts in turns.

    Args:
        model: prepared, not started; it is closed in the end.
        name: as the user typed it.
        tokens: of an answer, at most.
        repetitions: of each side of each kind.
        start: starts the model's engine.
    """
    bench = _Bench(model, name, tokens, repetitions, on_progress)
    watch, error = DisturbanceMonitor(), None
    try:
        bench.report("", "loading")
        model.start(start(model))
        with watch:
            for kind in PROMPTS:
                if warm_up:  # all measured answers then find the prompt in the KV cache
                    bench.report(kind, "warming up")
                    bench.answer(kind, OFF, _WARM_UP_TOKENS)
                bench.row(kind)
                watch.sample()
    except LlmrunError as stopped:  # Ctrl-C too
        error = stopped
    finally:
        model.close()
    return SpeculationOutcome(tuple(bench.rows), watch.warnings, error)


class _Bench:
    """The rows measured, and the progress."""

    def __init__(
        self, model: Model, name: str, tokens: int, repetitions: int, on_progress: Callable[[Progress], None]
    ) -> None:
        self._model, self._name, self._on_progress = model, name, on_progress
        self._tokens, self._repetitions = tokens, repetitions
        self.rows: list[SpeculationRow] = []

    def report(self, kind: str, phase: str, repetition: int = 0) -> None:
        """Report the progress."""
        done, total = len(self.rows) * self._repetitions + repetition, len(PROMPTS) * self._repetitions
        self._on_progress(Progress(self._name, kind, done, total, phase, repetition + 1, self._repetitions))

    def row(self, kind: str) -> None:
        """Measure one kind: A B B A A B ..., so that a steady drift favours neither side."""
        answers: dict[int, list[_TimedAnswer]] = {OFF: [], AUTO: []}
        for repetition in range(self._repetitions):
            self.report(kind, "measuring", repetition)
            for most in (OFF, AUTO) if repetition % 2 == 0 else (AUTO, OFF):
                answers[most].append(self.answer(kind, most, self._tokens))
        self.rows.append(_row(kind, answers[OFF], answers[AUTO]))

    def answer(self, kind: str, most: int, tokens: int) -> _TimedAnswer:
        """Answer a prompt once."""
        model, prompt = self._model, PROMPTS[kind]
        request = AnswerRequest(
            messages=(Message("user", prompt.question),) if model.loaded.has_template else (),
            prompt=None if model.loaded.has_template else f"{prompt.question}\n\n",
            sampling=SamplingParams(temperature=prompt.temperature, seed=_SEED),
            limits=Limits(max_tokens=tokens),
            thinking=False,
            speculation=model.drafting.speculation(most),
        )
        events = list(model.answer(request))
        *_, finished = events
        assert isinstance(finished, Finished)
        return _TimedAnswer("".join(event.text for event in events if isinstance(event, TextDelta)), finished.stats)


def _row(kind: str, plain: Sequence[_TimedAnswer], drafted: Sequence[_TimedAnswer]) -> SpeculationRow:
    rates = [tuple(max(answer.stats.decode_rate, 1e-9) for answer in answers) for answers in (plain, drafted)]
    stats = drafted[-1].stats  # equal in all repetitions: drafts are a function of the tokens
    return SpeculationRow(
        kind=kind,
        tokens=stats.completion_tokens,
        plain_ts=rates[0],
        drafted_ts=rates[1],
        verdict=compare(*rates, paired=True),
        acceptance=stats.accepted_tokens / stats.drafted_tokens if stats.drafted_tokens else None,
        tokens_a_step=stats.tokens_per_step,
        expected=stats.draft_gain or None,
        is_same=len({answer.text for answer in (*plain, *drafted)}) == 1,
    )
