"""Pictures through libmtmd and the loop, on tiny random models: batches, prefixes, eviction, and what is refused."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hf_writer import WIDTH
from support.tiny_projector import TILE_TOKENS, png, projector, text_model

from llmrun import _native
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.loaded import LoadedModel
from llmrun.engine.prompt.media import MAX_PIXELS
from llmrun.engine.service import Preparer
from llmrun.errors import BadModelError, BadTemplateError, LlmrunError, UsageError
from llmrun.protocol.adapters import Adapter, AdapterScale
from llmrun.protocol.loading import Load
from llmrun.protocol.media import Media
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Failed,
    Finished,
    Generate,
    MediaAccepted,
    Message,
    PromptHistory,
    Started,
    Stats,
    TextDelta,
)
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.questions import SaveState
from llmrun.protocol.speculation import Speculation

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}so"
LIST_TEMPLATE = (
    "{% for part in messages[0]['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %} so"
)
KINDS = ("gemma3", "idefics3", "qwen2vl_merger")
LARGE_TOKENS = {
    "gemma3": TILE_TOKENS,
    "idefics3": (1 + 2 * 2) * TILE_TOKENS,  # an overview, and tiles of the longest edge of two
    "qwen2vl_merger": 19 * 13,  # patches of 16 pixels
}
EXACT = {"kv_type_k": "f32", "kv_type_v": "f32", "flash_attention": "off"}
TOLERANCE = 1e-4  # of log-probabilities: another width of batch adds up in another order
RED, BLUE, LARGE = png(100, 60, 1), png(100, 60, 2), png(300, 200, 3)

Open = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LlamaModel]]:
    """A model for each kind of projector, which lies beside it."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        projector(folder / "mmproj.gguf", WIDTH, kind)
        found[kind] = LlamaModel(str(text_model(folder / "tiny.gguf", kind)), 0, _native.CancelFlag())
    yield found
    for model in found.values():
        model.close()


@pytest.fixture
def opened(weights: dict[str, LlamaModel]) -> Iterator[Open]:
    contexts: list[LlamaContext] = []

    def open_model(kind: str = "gemma3", n_ctx: int = 1024, **settings: Any) -> LoadedModel:
        model = weights[kind]
        beside = str(Path(model.path).parent / "mmproj.gguf")
        usual = {"n_batch": 64, "n_ubatch": 64, "gpu_layers": 0, "projector": beside}
        load = Load(model.path, n_ctx, n_ctx, **{**usual, **EXACT, **settings})
        contexts.append(LlamaContext(model, load))
        return LoadedModel(model, contexts[-1], load)

    yield open_model
    for context in contexts:
        context.close()


def sent(data: bytes, at: int = 0) -> Media:
    return Media(base64.b64encode(data).decode(), "a.png", at)


def asked(*images: bytes, text: str = "What is it?", **more: Any) -> AnswerRequest:
    message = Message("user", text, media=tuple(map(sent, images)))
    usual = {"sampling": SamplingParams(temperature=0), "limits": Limits(6), "template": TEMPLATE, "logprobs": 3}
    return AnswerRequest((message,), **{**usual, **more})


def run(model: LoadedModel, *requests: AnswerRequest) -> tuple[list[list[float]], list[Stats], list[Event]]:
    """The log-probabilities of each answer's likeliest tokens, what it cost, and all events."""
    events: list[Event] = []
    for number, request in enumerate(requests, 1):
        model.engine.add(model.preparer.prepare(Generate(number, request), events.append))
    while model.engine.busy:
        events += model.engine.step()
    failed = [event for event in events if isinstance(event, Failed)]
    assert not failed
    told: dict[int, list[float]] = {number: [] for number in range(1, len(requests) + 1)}
    for event in events:
        if isinstance(event, TextDelta):
            told[event.request] += [one[2] for each in event.logprobs for one in each.top]
    ended = {event.request: event.stats for event in events if isinstance(event, Finished)}
    return list(told.values()), [ended[number] for number in told], events


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_image_takes_is_told(opened: Open, kind: str) -> None:
    _, [stats], events = run(opened(kind), asked(LARGE))
    [pictured] = [event for event in events if isinstance(event, MediaAccepted)]
    assert (pictured.name, pictured.width, pictured.height) == ("a.png", 300, 200)
    assert stats.media_tokens == LARGE_TOKENS[kind] < pictured.tokens < stats.prompt_tokens
    assert 0 < stats.media_seconds < stats.prefill_seconds


def test_prompts_with_images_are_reused_with_the_same_adapters_only(opened: Open) -> None:
    model = opened()
    adapters = (Adapter("a", "/a", 1.0),)
    preparer = Preparer(model.weights.vocabulary, None, 1024, projector=model._projector, adapters=adapters)
    plain, other = (
        preparer.prepare(Generate(1, asked(BLUE, salt="x", adapters=each)), lambda event: None) for each in (None, ())
    )
    assert (plain.adapters, other.adapters) == ((AdapterScale(0, 1.0),), ())
    assert plain.salt != other.salt


@pytest.mark.parametrize("kind", ["idefics3", "qwen2vl_merger"])
@pytest.mark.parametrize("size", [7, 16, 512])
def test_the_batch_size_changes_nothing(opened: Open, kind: str, size: int) -> None:
    wanted, _, _ = run(opened(kind), asked(LARGE, BLUE))
    found, _, _ = run(opened(kind, n_batch=size, n_ubatch=size), asked(LARGE, BLUE))
    assert found[0] == pytest.approx(wanted[0], abs=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_sees_which_image_it_is_and_where(opened: Open, kind: str) -> None:
    model = opened(kind)
    answers = [
        run(model, request)[0][0]
        for request in (
            asked(RED),
            asked(BLUE),
            asked(RED, BLUE),
            asked(BLUE, RED),
            AnswerRequest(**{**_fields(asked()), "messages": (Message("user", "What is it?", media=(sent(RED, 4),)),)}),
            asked(),
        )
    ]
    assert len({tuple(round(one, 3) for one in answer) for answer in answers}) == len(answers)


def _fields(request: AnswerRequest) -> dict[str, Any]:
    return {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_that_was_seen_is_not_computed_again(opened: Open, kind: str) -> None:
    model = opened(kind)
    first, [stats], _ = run(model, asked(LARGE))
    again, [reused], _ = run(model, asked(LARGE))
    assert again[0] == pytest.approx(first[0], abs=TOLERANCE)
    assert (reused.reused_tokens, reused.media_seconds) == (stats.prompt_tokens - 1, 0)
    other, [computed], _ = run(model, asked(png(300, 200, 4)))
    assert computed.reused_tokens < stats.prompt_tokens - stats.media_tokens
    assert other[0] == pytest.approx(run(opened(kind), asked(png(300, 200, 4)))[0][0], abs=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"n_cells": 2048}])
def test_requests_with_and_without_images_share_the_model(opened: Open, kind: str, settings: dict[str, int]) -> None:
    requests = [asked(RED), asked(text="Hello, who are you?"), asked(LARGE, text="And this?"), asked(BLUE, RED)]
    alone = [run(opened(kind), request)[0][0] for request in requests]
    together, _, _ = run(opened(kind, n_seq_max=4, n_parked=2, **settings), *requests)
    for one, other in zip(alone, together, strict=True):
        assert other == pytest.approx(one, abs=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_had_to_give_way_sees_its_image_again(opened: Open, kind: str) -> None:
    limits = Limits(120)
    requests = [asked(png(300, 200, 20 + number), text=f"{number}?", limits=limits) for number in range(3)]
    alone = [run(opened(kind), request)[0][0] for request in requests]
    n_cells = {"gemma3": 256, "idefics3": 512, "qwen2vl_merger": 640}[kind]
    model = opened(kind, n_ctx=512, n_seq_max=3, n_cells=n_cells)
    together, stats, _ = run(model, *requests)
    assert model.engine.status(0).prefilled > sum(each.prompt_tokens - each.reused_tokens for each in stats)
    for one, other in zip(alone, together, strict=True):
        assert other[:30] == pytest.approx(one[:30], abs=TOLERANCE)


def test_a_saved_state_names_its_image(opened: Open, tmp_path: Path) -> None:
    settings = {"states": str(tmp_path), "states_bytes": 1 << 30}
    model = opened("idefics3", **settings)
    run(model, asked(LARGE))
    assert model.save(SaveState(1)).tokens
    _, [same], _ = run(opened("idefics3", **settings), asked(LARGE))
    _, [other], _ = run(opened("idefics3", **settings), asked(png(300, 200, 4)))
    assert (same.media_seconds, other.reused_tokens) == (0, 0)


def test_a_state_that_lacks_the_positions_is_not_saved(opened: Open, tmp_path: Path) -> None:
    settings = {"states": str(tmp_path), "states_bytes": 1 << 30}
    model = opened("qwen2vl_merger", **settings)
    run(model, asked(LARGE))
    assert not model.save(SaveState(1)).tokens
    run(model, asked())
    assert model.save(SaveState(1)).tokens


def test_nothing_is_drafted_after_an_image(opened: Open) -> None:
    _, [stats], _ = run(opened(), asked(RED, speculation=Speculation(most=4)))
    assert stats.drafted_tokens == 0 < stats.completion_tokens


def test_a_count_knows_images(opened: Open) -> None:
    model = opened()
    request = asked(RED)
    counted = model.preparer.prompts.count(request, 1, lambda event: None)
    _, [stats], events = run(model, request)
    [pictured] = [event for event in events if isinstance(event, MediaAccepted)]
    text = model.preparer.prompts.count(asked(), 1, lambda event: None)
    assert counted.total == stats.prompt_tokens
    assert counted.each[0] == text.each[0] + pictured.tokens


def test_a_template_that_takes_lists_gets_one(opened: Open) -> None:
    model = opened()
    listed, plain = (
        model.preparer.prompts.prompt(Generate(1, asked(RED, template=template)))
        for template in (LIST_TEMPLATE, "{{ messages[0].content }} so")
    )
    assert (listed.text, listed.tokens) == (plain.text, plain.tokens)


# ---- what is refused -----------------------------------------------------------------------------------------

TRUNCATED = RED[:60]
HUGE = RED[:16] + (60_000).to_bytes(4, "big") * 2 + RED[24:]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "images must be PNG"),
        (b"hello", "images must be PNG"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "can't be read"),
        (b"\x89PNG\r\n\x1a\n", "beginning is damaged"),
        (b"\xff\xd8\xff\xe0\xff\xff", "beginning is damaged"),
        (b"\xff\xd8\xff" + b"\xff" * 50, "beginning is damaged"),
        (TRUNCATED, "it is damaged"),
        (RED[:16] + bytes(8) + RED[24:], "it has no pixels"),
        (HUGE, f"the maximum is {MAX_PIXELS:,}"),
        (b"GIF89a" + b"\1\0\1\0" + b"\xff" * 40, "it is damaged"),
        (b"BM" + bytes(16) + b"\4\0\0\0\4\0\0\0" + b"\xff" * 40, "it is damaged"),
    ],
    ids=range(11),
)
def test_a_hostile_image_is_refused_and_the_model_goes_on(opened: Open, data: bytes, what: str) -> None:
    model = opened()
    with pytest.raises(UsageError) as raised:
        run(model, asked(data))
    assert what in f"{raised.value.what} {raised.value.why}"
    assert run(model, asked(RED))[1][0].media_tokens == TILE_TOKENS


def test_what_is_no_base64_is_refused(opened: Open) -> None:
    request = dataclasses.replace(asked(), messages=(Message("user", "?", media=(Media("%%%", "x"),)),))
    with pytest.raises(UsageError, match="x can't be read: its data are not base64"):
        run(opened(), request)


def _refusal(model: LoadedModel) -> LlmrunError:
    with pytest.raises(LlmrunError) as raised:
        run(model, asked(RED))
    return raised.value


def test_a_model_without_a_projector_says_so(opened: Open) -> None:
    refused = _refusal(opened(projector=""))
    assert isinstance(refused, UsageError)
    assert "can't read images" in refused.what


def test_a_projector_of_another_model_is_refused_by_name(opened: Open, tmp_path: Path) -> None:
    model = opened(projector=str(projector(tmp_path / "mmproj-other.gguf", 2 * WIDTH)))
    for _ in range(2):
        refused = _refusal(model)
        assert isinstance(refused, BadModelError)
        assert "mmproj-other.gguf" in refused.what
        assert f"n_embd = {WIDTH}) and mmproj (n_embd = {2 * WIDTH})" in refused.why
    assert run(model, asked())[1][0].completion_tokens


def test_a_vocabulary_without_the_tokens_around_images_is_refused(opened: Open, weights: Any) -> None:
    tiles = Path(weights["idefics3"].path).parent / "mmproj.gguf"
    refused = _refusal(opened("gemma3", projector=str(tiles)))
    assert isinstance(refused, BadModelError)
    assert "lacks" in refused.why


def test_an_image_larger_than_a_batch_that_has_to_hold_it_is_refused(opened: Open) -> None:
    refused = _refusal(opened(n_batch=8, n_ubatch=8))
    assert f"{TILE_TOKENS} tokens" in refused.why


def test_a_template_that_leaves_an_image_out_is_refused(opened: Open) -> None:
    with pytest.raises(BadTemplateError, match="omits an image or audio"):
        run(opened(), asked(RED, template="so"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_stands_in_the_prompt_with_the_answer_to_it(opened: Open, kind: str) -> None:
    template = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}so"
    model, first = opened(kind), asked(RED, template=template, limits=Limits(200))
    vocabulary = model.weights.vocabulary
    end = next(token for token in range(vocabulary.n_tokens) if vocabulary.is_end(token))
    first = dataclasses.replace(
        first, sampling=SamplingParams(temperature=0, logit_bias=((end, 100.0),)), logprobs=None
    )
    prepared = model.preparer.prepare(Generate(1, first), lambda event: None)
    run(model, first)
    messages = (*first.messages, Message("assistant", ""), Message("user", "And here?", media=(sent(BLUE),)))
    second = asked(template=template)
    second = dataclasses.replace(second, messages=messages)
    told, [stats], events = run(model, second)
    [started] = [event for event in events if isinstance(event, Started)]
    assert started.history == PromptHistory(1, len(prepared.tokens))
    assert stats.reused_tokens == len(prepared.tokens)
    assert len([event for event in events if isinstance(event, MediaAccepted)]) == 2
    again = model.preparer.prepare(Generate(2, second), lambda event: None)
    assert again.tokens[: len(prepared.tokens)] == prepared.tokens
    fresh = opened(kind)
    fresh.preparer.prompts.history = model.preparer.prompts.history
    wanted, [stats], _ = run(fresh, second)
    assert stats.reused_tokens == 0
    assert told[0] == pytest.approx(wanted[0], abs=TOLERANCE)
