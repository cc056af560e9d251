"""The Python API over the fake engine: what may be given, what comes, and that nothing hangs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.answers import sent
from support.gguf_writer import tiny_model, write

import llmrun
from llmrun.errors import EngineCrashedError, UsageError
from llmrun.model.preparing import prepare
from llmrun.models.registry import ModelSpec
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Finished,
    Generate,
    Message,
    PrefillProgress,
    Started,
    Stats,
    TextDelta,
    TokenLogprob,
)
from llmrun.reply import Reply, as_grammar, as_messages, sort_options
from llmrun.runner.launch import launch
from llmrun.runner.runner import Runner

FAKE_ENGINE = Path(__file__).parent / "support/fake_engine.py"
HI = Message("user", "hi")

pytestmark = pytest.mark.usefixtures("package_on_path")
Load = Callable[[str], llmrun.Model]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """load(mode): a model that a fake engine answers for, closed in the end."""
    path = write(tmp_path / "tiny.gguf", tiny_model())
    models: list[llmrun.Model] = []

    def make(mode: str = "normal") -> llmrun.Model:
        models.append(prepare(ModelSpec("tiny", path=path), path))
        models[-1].start(Runner(launch((sys.executable, str(FAKE_ENGINE), mode))))
        return models[-1]

    yield make
    for model in models:
        model.close()


def reply_of(*events: Event, schema: Any = None) -> Reply:
    return Reply(iter(events), lambda: None, schema)


# ---- drafts ----------------------------------------------------------------------------------------


def test_auto_drafts_once_step_times_are_measured(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    model = load("normal")
    assert not model.chat("hi").stats.drafted_tokens
    assert model.measure_steps() == model.drafting.times != ()
    assert model.chat("hi").stats.drafted_tokens
    assert load("normal").generate("hi").stats.drafted_tokens, "and everybody who comes later"


def test_an_engine_that_is_never_idle_measures_nothing(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    model = load("never_idle")
    assert model.measure_steps() == ()
    assert model.drafting.lacks_times


def test_who_waits_for_something_else_measures_meanwhile(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    model = load("normal")
    with model.measuring_steps():
        model.tokenize("x")  # answered behind it, so it has been measured
    assert model.drafting.times
    drafted = load("normal")
    drafted.close()
    with drafted.measuring_steps():  # needs no engine
        pass


# ---- what may be given ------------------------------------------------------------------------------


def test_messages_may_be_texts_dicts_and_messages() -> None:
    plain = {"role": "user", "content": "hi"}
    for said in ("hi", plain, HI, [plain], [HI], (HI,), iter([plain])):
        assert as_messages(said) == (HI,)
    assert as_messages([{"role": "system", "content": "Be brief."}, HI])[0] == Message("system", "Be brief.")


@pytest.mark.parametrize(
    "said",
    [
        None,
        5,
        b"hi",
        ("h", "i"),
        ["hi"],
        [("user", "hi")],
        {"role": "user"},
        {"role": "user", "content": "hi", "name": "x"},
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": 1, "content": "hi"}],
        [Message("user", 5)],  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_anything_else_is_a_type_error_at_once(load: Load, said: Any) -> None:
    model = load("normal")
    with pytest.raises(TypeError, match=r"message"):
        model.chat(said)
    with pytest.raises(TypeError):
        model.count(said)
    assert model.chat("hi").text == "Hello", "and the engine lives"


def test_nothing_to_answer(load: Load) -> None:
    model = load("normal")
    with pytest.raises(UsageError, match="nothing to answer"):
        model.chat([])
    with pytest.raises(UsageError, match="no role"):
        model.chat({"role": "robot", "content": "hi"})
    for wrong in (model.generate, model.tokenize):
        with pytest.raises(TypeError):
            wrong(5)  # type: ignore[operator]


def test_options_are_fields_of_sampling_and_limits() -> None:
    options = {"temperature": 0, "max_tokens": 5, "stop": "x", "ban": ["y"], "logit_bias": {3: -1.0}}
    assert sort_options(options) == (
        {"temperature": 0, "logit_bias": ((3, -1.0),)},
        {"max_tokens": 5, "stop": ("x",), "ban": ("y",)},
    )
    with pytest.raises(TypeError, match="did you mean temperature"):
        sort_options({"tempratur": 1})


def test_options_reach_the_engine(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("normal")
    seen: list[Any] = []
    engine, _ = model._next(AnswerRequest(prompt="hi"))
    monkeypatch.setattr(model, "_next", lambda asked: (seen.append(asked), (engine, [Generate(1, asked)]))[1])
    model.chat("hi", temperature=0, max_tokens=5)
    model.generate("hi", top_k=3, sampling=llmrun.SamplingParams(seed=7), stop="x")
    assert (seen[0].sampling.temperature, seen[0].limits.max_tokens) == (0, 5)
    assert (seen[1].sampling.seed, seen[1].sampling.top_k, seen[1].limits.stop) == (7, 3, ("x",))
    model.chat("hi", logprobs=2)
    assert seen[2].logprobs == 2
    with pytest.raises(UsageError, match="temperature"):
        model.chat("hi", temperature=900)


def test_a_reply_collects_how_likely_its_tokens_were() -> None:
    tokens = [TokenLogprob(text, tuple(text.encode()), -0.5, ()) for text in ("Hel", "lo")]
    events = [*(TextDelta(1, token.text, 1, (token,)) for token in tokens), Finished(1, "stop", Stats())]
    assert Reply(iter(events), lambda: None).logprobs == tokens


@dataclass
class City:
    """As a Pydantic model looks from outside."""

    name: str

    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}

    @classmethod
    def model_validate_json(cls, text: str) -> City:
        return cls(**json.loads(text))


def test_a_schema_may_be_a_class_or_a_dict() -> None:
    assert as_grammar(City) == as_grammar(City.model_json_schema())
    with pytest.raises(TypeError, match="model_json_schema"):
        as_grammar(5)  # type: ignore[arg-type]
    events = TextDelta(1, '{"name": "Rome"}', 3), Finished(1, "stop", Stats())
    assert reply_of(*events, schema=City).parsed == City("Rome")
    assert reply_of(*events, schema=City.model_json_schema()).parsed == {"name": "Rome"}
    with pytest.raises(UsageError, match="nothing to parse"):
        _ = reply_of(*events).parsed
    with pytest.raises(ValueError, match="Unterminated"):
        _ = reply_of(TextDelta(1, '{"name": "Ro', 3), Finished(1, "length", Stats()), schema={}).parsed


# ---- what comes ---------------------------------------------------------------------------------------


def test_a_reply_gives_text_figures_and_events(load: Load) -> None:
    model = load("normal")
    reply = model.chat("hi")
    assert (reply.text, str(reply), reply.reason, reply.stats.completion_tokens) == ("Hello", "Hello", "stop", 2)
    assert list(model.chat("hi").pieces()) == ["Hel", "lo"]
    assert [type(event) for event in model.chat([HI])] == [Started, PrefillProgress, TextDelta, TextDelta, Finished]
    assert model.generate("hi").text == "Hello"
    assert model.tokenize("hi") == [104, 105]
    assert model.count("hi").total == 7


def test_thoughts_are_no_part_of_the_text() -> None:
    started = Started(1, 1, 0, 0, True, ("<think>", "</think>"))
    events = [started, *sent(started, ["hm</th", "ink>\n\nYes"])]
    reply = reply_of(*events)
    assert (reply.text, reply.thoughts) == ("Yes", "hm")
    assert list(reply_of(*events).pieces()) == ["Yes"]


def test_a_reply_can_be_awaited_and_iterated_in_asyncio(load: Load) -> None:
    model = load("normal")

    async def asked() -> None:
        async def text(question: str) -> str:
            return (await model.chat(question)).text

        assert await asyncio.gather(*map(text, "abc")) == ["Hello"] * 3
        assert [piece async for piece in model.chat("hi").pieces()] == ["Hel", "lo"]
        assert [type(event) async for event in model.chat("hi")][-1] is Finished

    asyncio.run(asked())


def test_a_task_that_is_cancelled_cancels_its_answer(load: Load) -> None:
    model = load("obedient")

    async def given_up() -> None:
        pieces = model.chat("hi").pieces()
        task = asyncio.create_task(_drained(pieces, first := asyncio.Event()))
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(given_up())
    reply = model.chat("hi")  # the fake engine asserts that the cancel came
    assert next(reply.pieces()) == "Hel"
    reply.cancel()
    assert reply.reason == "cancelled"


async def _drained(pieces: Any, first: asyncio.Event) -> None:
    async for _ in pieces:
        first.set()


# ---- nothing hangs ------------------------------------------------------------------------------------


def test_many_threads_ask_one_model(load: Load) -> None:
    model = load("normal")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: model.chat(f"hi {number}").text, range(200)))
    assert answers == ["Hello"] * 200


def test_threads_of_an_engine_that_dies_all_hear_of_it(load: Load) -> None:
    model = load("die:together:SIGSEGV")
    with ThreadPoolExecutor(2) as pool:
        for failed in [pool.submit(lambda: model.chat("hi").text) for _ in range(2)]:
            assert isinstance(failed.exception(), EngineCrashedError)


def test_a_reply_that_failed_says_so_again(load: Load) -> None:
    reply = load("die:decode:SIGSEGV").chat("hi")
    for _ in range(2):
        with pytest.raises(EngineCrashedError):
            _ = reply.text
