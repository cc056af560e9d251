"""The Python API over the fake engine: what may be given, what comes, and that nothing hangs."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import re
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
from support.answers import sent
from support.engines import fake_client
from support.gguf_writer import tiny_model, write
from support.installed import children_of

import llmrun
from llmrun.errors import CutOffError, EngineCrashedError, UsageError
from llmrun.model.embeddings import RankedDocument, TextVectors
from llmrun.model.loading import prepare
from llmrun.models.registry import ModelSpec
from llmrun.protocol.jobs.beams import BeamSettings, SearchBeams
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
from llmrun.protocol.questions import Compare
from llmrun.protocol.speculation import AttentionTime, ComparisonTimes
from llmrun.reply import Reply, as_grammar, as_messages, sort_options

HI = Message("user", "hi")

pytestmark = pytest.mark.usefixtures("package_on_path")
Load = Callable[[str], llmrun.Model]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """load(mode): a model that a fake engine answers for, closed in the end."""
    path = write(tmp_path / "tiny.gguf", tiny_model())
    models: list[llmrun.Model] = []

    def make(mode: str = "normal") -> llmrun.Model:
        models.append(started(path, mode))
        return models[-1]

    yield make
    for model in models:
        model.close()


def reply_of(*events: Event, schema: Any = None) -> Reply:
    return Reply(iter(events), lambda: None, schema)


# ---- drafts ----------------------------------------------------------------------------------------


def test_the_first_answer_drafts_by_default(load: Load) -> None:
    assert load("long").chat("hi").stats.drafted_tokens


def test_an_engine_compares_ways_to_compute_while_somebody_waits(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    model = load("normal")
    found = list[ComparisonTimes]()
    monkeypatch.setattr(model.comparisons, "missing", lambda: Compare(attention=True))
    monkeypatch.setattr(model.comparisons, "remember", found.append)
    with model.while_idle():
        model.tokenize("x")  # answered behind it, so it has been compared
    assert found == [ComparisonTimes((AttentionTime(0, 0.01, 0.02),))]
    model.close()
    with model.while_idle():  # needs no engine
        pass


# ---- how it ends --------------------------------------------------------------------------------------


def started(path: Path, mode: str = "normal") -> llmrun.Model:
    model = prepare(ModelSpec("tiny", path=path), path)
    model.start(fake_client(mode))
    return model


def engines() -> list[int]:
    return [child.pid for child in children_of(None, "fake_engine.py")]


def test_a_model_that_is_dropped_ends_its_engine(tmp_path: Path) -> None:
    """Whatever was asked of it. Without the garbage collector: nothing may refer to it in a circle."""
    path = write(tmp_path / "tiny.gguf", tiny_model())
    before = engines()
    gc.disable()
    try:
        for _ in range(2):
            model = started(path)
            assert len(engines()) == len(before) + 1
            assert model.chat("hi").text == "Hello"
            assert list(model.generate("hi").pieces())
            unread, halfway = model.chat("hi"), model.chat("hi")
            next(halfway)
            with pytest.raises(UsageError):
                model.chat(5)  # type: ignore[arg-type]
            del model
            assert unread.text == "Hello", "an answer still needs it"
            del unread, halfway
            assert engines() == before
    finally:
        gc.enable()


def test_a_model_that_is_closed_says_so(load: Load) -> None:
    model = load("obedient")  # which goes on until it is stopped
    unread, halfway = model.chat("hi"), model.generate("hi")
    assert next(halfway)
    before = engines()
    model.close()
    model.close()
    model.cancel()
    calls: list[Callable[[], object]] = [
        lambda: unread.text,
        lambda: halfway.text,
        lambda: model.chat("hi"),
        lambda: model.generate("hi"),
        lambda: model.answer(AnswerRequest(prompt="hi")),
        lambda: model.embed("hi"),
        lambda: model.rerank("q", ["hi"]),
        lambda: model.tokenize("hi"),
        lambda: model.count("hi"),
        lambda: model.explain(1),
        lambda: model.beams(SearchBeams(AnswerRequest(prompt="hi"), BeamSettings())),
        lambda: model.save_state(),
        lambda: model.last_answer(),
        lambda: model.__enter__(),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="the model is closed") as caught:
            call()
        assert "load" in caught.value.hint
    assert len(engines()) == len(before) - 1, "and no new engine was started"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_can_drop_the_model_and_the_parent_goes_on(load: Load) -> None:
    model = load("normal")
    child = os.fork()
    if not child:
        model.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert model.chat("hi").text == "Hello"


def test_two_models_side_by_side(load: Load) -> None:
    one, other = load("normal"), load("normal")
    halfway = one.chat("hi")
    next(halfway)
    other.close()
    assert halfway.text == "Hello"
    assert one.chat("hi").text == "Hello"


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
        ("h", "i"),
        [("user", "hi")],
        {"role": "user", "content": "hi", "name": "x"},
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": 1, "content": "hi"}],
    ],
    ids=repr,
)
def test_anything_else_is_refused_at_once(load: Load, said: Any) -> None:
    model = load("normal")
    with pytest.raises(UsageError, match=r"message|role"):
        model.chat(said)
    with pytest.raises(UsageError):
        model.count(said)
    assert model.chat("hi").text == "Hello", "and the engine lives"


def test_options_are_fields_of_sampling_and_limits() -> None:
    options = {"temperature": 0, "max_tokens": 5, "stop": "x", "ban": ["y"], "logit_bias": {3: -1.0}}
    assert sort_options({**options, "remember": 3}, ["remember"]) == (
        {"temperature": 0, "logit_bias": ((3, -1.0),)},
        {"max_tokens": 5, "stop": ("x",), "ban": ("y",)},
        {"remember": 3},
    )


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
    events = TextDelta(1, '{"name": "Rome"}', 3), Finished(1, "stop", Stats())
    assert reply_of(*events, schema=City).parsed == City("Rome")
    assert reply_of(*events, schema=City.model_json_schema()).parsed == {"name": "Rome"}
    with pytest.raises(UsageError, match="nothing to parse"):
        _ = reply_of(*events).parsed


@pytest.mark.parametrize(
    ("reason", "stats", "why", "hint"),
    [
        ("length", Stats(completion_tokens=3), "max_tokens=3", "max_tokens"),
        ("length", Stats(context_used=8, n_ctx=8), "the context window of 8 tokens is full", "n_ctx"),
        ("cancelled", Stats(), "it was cancelled", ""),
        ("repeats", Stats(), "it repeats itself", ""),
    ],
)
def test_an_answer_that_was_cut_says_so_when_it_is_parsed(reason: str, stats: Stats, why: str, hint: str) -> None:
    reply = reply_of(TextDelta(1, '{"name": "Ro', 3), Finished(1, reason, stats), schema={})
    with pytest.raises(CutOffError, match="cut off and incomplete") as caught:
        _ = reply.parsed
    assert caught.value.why == why
    assert hint in caught.value.hint
    assert reply.text == '{"name": "Ro'


# ---- what comes ---------------------------------------------------------------------------------------


def test_a_reply_gives_text_figures_and_events(load: Load) -> None:
    model = load("normal")
    reply = model.chat("hi")
    assert (reply.text, str(reply), reply.reason, reply.stats.completion_tokens) == ("Hello", "Hello", "stop", 2)
    assert list(model.chat("hi").pieces()) == list(model.chat("hi", stream=True)) == ["Hel", "lo"]
    assert model.detokenize(model.tokenize("hi")) == "hi"
    assert [type(event) for event in model.chat([HI]).events()] == [
        Started,
        PrefillProgress,
        TextDelta,
        TextDelta,
        Finished,
    ]
    assert model.generate("hi").text == "Hello"
    assert model.tokenize("hi") == [104, 105]
    assert model.count("hi").total == 7


def test_a_system_prompt_comes_first(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("normal")
    seen: list[AnswerRequest] = []
    engine, _ = model._next(AnswerRequest(prompt="hi"))
    monkeypatch.setattr(model, "_next", lambda asked: (seen.append(asked), (engine, [Generate(1, asked)]))[1])
    model.chat("hi", system="Be brief.")
    model.generate("hi", system="Be brief.")
    assert seen[0].messages == (Message("system", "Be brief."), HI)
    assert seen[1].prompt == "Be brief.\n\nhi"
    with pytest.raises(UsageError, match="template"):
        model.generate("hi", template="chatml")


def test_names_are_the_public_ones(load: Load) -> None:
    assert dir(llmrun) == sorted(llmrun.__all__)
    model = load("normal")
    assert {"chat", "generate", "embed", "detokenize", "n_ctx", "name", "close"} <= set(dir(model))
    assert not {name for name in dir(model) if name.startswith("_") or name in {"load_for", "start", "new_engine"}}
    assert all(hasattr(model, name) for name in dir(model))
    assert repr(model) == "<Model tiny, Q4_1, 128 tokens of context>"


def examples() -> Iterator[Any]:
    """The code in the docstrings of the Python API: indented lines before the arguments, or below the first line."""
    for thing in (llmrun, llmrun.Model, Reply, llmrun.load, *(getattr(llmrun.Model, name) for name in EXAMPLES)):
        text = inspect.getdoc(thing) or ""
        blocks = re.findall(
            r"(?:^ {4}.*\n?|^\n(?= {4}))+", re.split(r"\n(?:Args|Attributes|Raises):", text)[0], re.MULTILINE
        )
        code = "\n".join(map(textwrap.dedent, blocks)) or text.rpartition("\n\n")[2]
        yield pytest.param(code, id=getattr(thing, "__name__", ""))


EXAMPLES = ("chat", "generate", "tokenize", "detokenize", "count", "embed", "rerank")


@pytest.mark.parametrize("code", list(examples()))
def test_an_example_runs(code: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("normal")
    monkeypatch.setattr("llmrun.load", lambda *_, **__: load("normal"), raising=False)
    for method in ("embed", "rerank"):  # the fake engine has no vectors
        result = TextVectors(np.ones((1, 1), np.float32), (1,))
        monkeypatch.setattr(llmrun.Model, method, create_autospec(getattr(llmrun.Model, method), return_value=result))
    monkeypatch.setattr(llmrun.Model.rerank, "return_value", [RankedDocument(0, 0.9)], raising=False)
    values = {"model": model, "llmrun": llmrun}
    assert "model" in code
    exec(compile(code, "example", "exec"), values)
    if "ask" in values:
        assert asyncio.run(values["ask"]()) == "Hello"  # type: ignore[operator]


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
        assert [piece async for piece in model.chat("hi", stream=True)] == ["Hel", "lo"]
        assert [type(event) async for event in model.chat("hi").events()][-1] is Finished
        async with model as same:
            assert same is model
        assert repr(model).endswith("closed>")

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


def test_a_reply_that_a_cancelled_task_left_can_be_read(load: Load) -> None:
    model = load("obedient")

    async def given_up() -> Reply:
        reply = model.chat("hi")
        task = asyncio.create_task(_drained(reply, first := asyncio.Event()))
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reply.text == "Hel", "while the task's thread still waits for the next piece"
        return reply

    assert asyncio.run(given_up()).reason == "cancelled"


def test_a_reply_that_is_cancelled_before_it_begins_is_not_computed(load: Load) -> None:
    reply = load("obedient").chat("hi")
    reply.cancel()
    assert reply.reason == "cancelled"


def test_threads_share_the_pieces_of_a_reply() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def events() -> Iterator[Event]:
        begun.set()
        goes_on.wait()
        started = Started(1, 1, 0, 0)
        yield from [started, *sent(started, ["Hel", "lo"])]

    reply = Reply(events(), lambda: None)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(list, reply)
        begun.wait()
        second = pool.submit(list, reply)
        wait([second], timeout=0.05)  # it fails at once where it can't wait
        goes_on.set()
    assert sorted(first.result() + second.result()) == ["Hel", "lo"]
    assert reply.text == "Hello"


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
