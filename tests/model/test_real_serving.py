"""One engine for several clients, with the real model: prefixes computed once, also after a restart; exact answers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.protocol.jobs import Empty
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Generate, Message, Started, TextDelta
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.questions import STATUS
from llmrun.runner.client import EngineClient

GREEDY = SamplingParams(temperature=0.0)
SYSTEM = " ".join(f"The square of {number} is {number * number}." for number in range(40))
QUESTIONS = ["What is the square of 7?", "Say hello.", "Which number is the largest?", "And the square of 50?"]


@contextmanager
def engine(path: Path, **load: object) -> Iterator[EngineClient]:
    client = EngineClient()
    try:
        shared = Load(str(path), n_ctx=2048, n_seq_max=4, n_parked=8, threads=2)
        list(client.submit(replace(shared, **load)))  # type: ignore[arg-type]
        yield client
    finally:
        client.close()


def ask(client: EngineClient, questions: list[str], most: int, **more: object) -> list[list[Event]]:
    """All at once; the events of each."""
    answers: list[list[Event]] = [[] for _ in questions]

    def answer(index: int) -> None:
        messages = (Message("system", SYSTEM), Message("user", questions[index]))
        asked = AnswerRequest(messages, sampling=GREEDY, limits=Limits(most), **more)  # type: ignore[arg-type]
        answers[index] += client.submit(Generate(client.next_request(), asked))

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def started(events: list[Event]) -> Started:
    return next(event for event in events if isinstance(event, Started))


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.parametrize("n_cells", [4 * 2048, 4 * 1024])
def test_a_common_prompt_is_computed_once_and_not_again_after_a_restart(
    model_path: Path, tmp_path: Path, n_cells: int
) -> None:
    with engine(model_path, states=str(tmp_path), states_bytes=1 << 30, n_cells=n_cells) as client:
        answers = ask(client, QUESTIONS, 4)
        reused = sorted(started(events).reused_tokens for events in answers)
        assert reused[0] == 0
        assert min(reused[1:]) > 400, "all of the system prompt"
        told = client.do(STATUS, Empty())
        prompts = [started(events).prompt_tokens for events in answers]
        assert (told.running, told.waiting) == (0, 0)
        assert (told.prefix_queries, told.prefix_hits) == (sum(prompts), sum(reused))
        assert told.prefilled == sum(prompts) - sum(reused)
        assert told.decoded == sum(events[-1].stats.completion_tokens for events in answers)  # type: ignore[union-attr]
        assert told.cells_used < told.cells
        assert told.cells_shared >= min(reused[1:]) * (n_cells < 4 * 2048), "streams have copies"
        salted = ask(client, QUESTIONS[:1], 1, salt="mine")[0]
        assert started(salted).reused_tokens == 0
        # While it rests; the model's hash is written first.
        wait_until(lambda: any(file.parent.name != "hashes" for file in tmp_path.rglob("*.kv")))
    with engine(model_path, states=str(tmp_path), states_bytes=1 << 30) as client:
        answers = ask(client, ["A new question?", "Another one?"], 1)
        assert min(started(events).reused_tokens for events in answers) > 400


def logprobs(events: list[Event]) -> list[tuple[str, float]]:
    deltas = [event for event in events if isinstance(event, TextDelta)]
    return [(token.text, token.logprob) for delta in deltas for token in delta.logprobs]


def test_the_likeliest_token_is_the_greedy_one(model_path: Path) -> None:
    with engine(model_path) as client:
        (events,) = ask(client, QUESTIONS[:1], 8, logprobs=3)
    assert isinstance(events[-1], Finished)
    tokens = [token for event in events if isinstance(event, TextDelta) for token in event.logprobs]
    assert "".join(token.text for token in tokens) == text(events)
    for token in tokens:
        assert token.top[0] == (token.text, token.bytes, token.logprob)
        values = [value for _, _, value in token.top]
        assert values == sorted(values, reverse=True)
        assert 0 < sum(map(math.exp, values)) <= 1 + 1e-5
