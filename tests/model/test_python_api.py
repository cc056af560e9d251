"""`import llmrun` with the real model, as its documentation shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from support.installed import SECONDS, children_of, eventually, gone
from support.plain_llama import assert_greedy, smollm2_prompt

import llmrun
from llmrun.errors import CutOffError, EngineCrashedError, ModelNotFoundError, UsageError

GREEDY = llmrun.SamplingParams(temperature=0)
ENDLESS = llmrun.SamplingParams(temperature=0, logit_bias=((0, float("-inf")), (2, float("-inf"))))
SHORT = llmrun.Limits(max_tokens=8)
ASKED = llmrun.Message("user", "Why is the sky blue?")
LONG = llmrun.Message("user", "Write the numbers from 1 to 1000.")


@pytest.fixture
def model(pulled: None) -> Iterator[llmrun.Model]:
    with llmrun.load("smollm2", pull=False) as model:
        yield model


def text_of(events: Iterable[llmrun.Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, llmrun.TextDelta))


def assert_answers(model: llmrun.Model, path: Path, *before: llmrun.Message) -> str:
    """The model gives llama.cpp's own answer after this question; gives it."""
    answer = text_of(model.chat([ASKED], sampling=GREEDY, limits=SHORT).events())
    turns = [(smollm2_prompt(message.content), "") for message in before]
    assert_greedy(path, *turns, (smollm2_prompt(ASKED.content), answer))
    return answer


def engine_processes() -> list[psutil.Process]:
    return children_of(None, "llmrun.engine")


def test_two_chats_the_second_reuses_the_first(model: llmrun.Model, model_path: Path) -> None:
    answer = assert_answers(model, model_path)
    turns = [ASKED, llmrun.Message("assistant", answer), llmrun.Message("user", "And at night?")]
    started, *_, finished = model.chat(turns, sampling=GREEDY, limits=SHORT).events()
    assert isinstance(started, llmrun.Started)
    assert isinstance(finished, llmrun.Finished)
    assert started.reused_tokens > 36
    assert finished.stats.reused_tokens == started.reused_tokens
    assert finished.stats.completion_tokens <= 8


def test_plain_values(model: llmrun.Model, model_path: Path) -> None:
    reply = model.chat(ASKED.content, temperature=0, max_tokens=8)
    assert_greedy(model_path, (smollm2_prompt(ASKED.content), reply.text))
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    assert model.chat("Name a city.", schema=schema).parsed["city"] in ("Rome", "Oslo")
    tokens = model.tokenize("Hello, world")
    assert model.count("Hello, world").each == (len(tokens),)
    assert model.tokenize("<|im_end|>", special=True) == [2]


def test_generate_continues_a_text(model: llmrun.Model, model_path: Path) -> None:
    text = text_of(model.generate("One, two, three, four,", sampling=GREEDY, limits=SHORT).events())
    assert_greedy(model_path, ("One, two, three, four,", text))


def test_cancel_ends_the_answer(model: llmrun.Model, model_path: Path) -> None:
    last: llmrun.Event | None = None
    for last in model.chat([LONG], sampling=ENDLESS).events():
        if isinstance(last, llmrun.TextDelta):
            model.cancel()
    assert isinstance(last, llmrun.Finished)
    assert last.reason == "cancelled"
    assert_answers(model, model_path, LONG)


def test_an_answer_given_up_halfway_does_not_leak_into_the_next(model: llmrun.Model, model_path: Path) -> None:
    events = model.chat([LONG], sampling=ENDLESS).events()
    for event in events:
        if isinstance(event, llmrun.TextDelta):
            break
    del events, event
    assert_answers(model, model_path, LONG)


def test_close_ends_the_engine(pulled: None) -> None:
    before = {process.pid for process in engine_processes()}
    model = llmrun.load("smollm2", pull=False)
    (engine,) = [process for process in engine_processes() if process.pid not in before]
    model.close()
    model.close()
    assert gone(engine)


def test_models_that_are_dropped_end_their_engines(pulled: None) -> None:
    before = len(engine_processes())
    for _ in range(3):
        model = llmrun.load("smollm2", n_ctx=512, pull=False)
        assert model.chat(ASKED.content, max_tokens=2).text
        assert len(engine_processes()) == before + 1, "the one before has ended"
    del model
    assert len(engine_processes()) == before


def test_errors_of_the_engine_name_arguments(pulled: None) -> None:
    with llmrun.load("smollm2", n_ctx=512, pull=False) as model:
        with pytest.raises(UsageError) as caught:
            _ = model.chat("hello " * 2000).text
        assert "window with n_ctx" in caught.value.hint
        schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 50}}, "required": ["a"]}
        with pytest.raises(CutOffError, match="max_tokens=3"):
            _ = model.chat("Describe a city.", schema=schema, max_tokens=3).parsed


def test_the_next_call_after_a_crash_starts_a_new_engine(model: llmrun.Model, model_path: Path) -> None:
    assert_answers(model, model_path)
    engine = psutil.Process(model.last_answer()[0].pid)

    def answer_of_a_dying_engine() -> None:
        for event in model.chat([LONG], sampling=ENDLESS).events():
            if isinstance(event, llmrun.TextDelta):
                engine.kill()

    with pytest.raises(EngineCrashedError, match="in decode") as caught:
        answer_of_a_dying_engine()
    assert "SIGKILL" in caught.value.why
    assert eventually(lambda: gone(engine), SECONDS)
    assert_answers(model, model_path)


def test_errors(pulled: None, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="smolm2"):
        llmrun.load("smolm2", pull=False)
    with pytest.raises(ModelNotFoundError):
        llmrun.load(str(tmp_path / "missing.gguf"))
    with pytest.raises(UsageError):
        llmrun.load("smollm2", n_ctx=-1, pull=False)


def test_the_models_advice_on_sampling_has_an_origin(model: llmrun.Model) -> None:
    sampling, origins = model.sampling({"top_k": 7})
    assert sampling.top_k == 7
    assert origins["top_k"] == "flag"
    assert set(origins.values()) <= {"flag", "model", "catalogue", "default"}


def test_answers_at_the_same_time_share_their_prompt() -> None:
    async def asked(model: llmrun.Model) -> list[llmrun.Reply]:
        return await asyncio.gather(*(model.chat("Name a colour.", seed=seed, max_tokens=6) for seed in (1, 2, 3)))

    with llmrun.load("smollm2", n_ctx=512, parallel=3) as model:
        replies = asyncio.run(asked(model))
    assert [reply.stats.seed for reply in replies] == [1, 2, 3]
    computed = sorted(reply.stats.prompt_tokens - reply.stats.reused_tokens for reply in replies)
    assert computed == [1, 1, replies[0].stats.prompt_tokens]
