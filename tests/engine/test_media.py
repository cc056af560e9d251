"""Images and audio through libmtmd and the loop, on tiny random models: batches, prefixes, eviction, refusals."""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hf_writer import WIDTH
from support.tiny_projector import (
    AUDIO_TOKENS,
    FRAMES,
    MP3,
    RATE,
    TILE_TOKENS,
    audio_projector,
    flac,
    png,
    png_of,
    projector,
    text_model,
    tone,
    wav,
)

from llmrun import _native
from llmrun.engine.llama.base import MAX_SECONDS, RunLimit
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.media import as_shown
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
    PrefillProgress,
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
IMAGE_TOKENS = {  # of LARGE
    "gemma3": TILE_TOKENS,
    "idefics3": (1 + 2 * 2) * TILE_TOKENS,  # an overview, and tiles of the longest edge of two
    "qwen2vl_merger": 19 * 13,  # patches of 16 pixels
}
AUDIO_KINDS = {"ultravox": AUDIO_TOKENS, "qwen2a": FRAMES // 2}  # the second takes the mean of two frames
KINDS = (*IMAGE_TOKENS, *AUDIO_KINDS)
EXACT = {"kv_type_k": "f32", "kv_type_v": "f32", "flash_attention": "off"}
TOLERANCE = 1e-4  # of log-probabilities: another width of batch adds up in another order
RED, BLUE, LARGE, LARGE_TOO = png(100, 60, 1), png(100, 60, 2), png(300, 200, 3), png(300, 200, 4)
LOW, HIGH, LONG = wav(tone(1.0, 220)), wav(tone(1.0, 880)), wav(tone(31.0))
FILES = {kind: (LARGE, LARGE_TOO, RED) if kind in IMAGE_TOKENS else (LOW, HIGH, LONG) for kind in KINDS}
"""Two files that take equally many tokens, and one that does not."""

Open = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LlamaModel]]:
    """A model for each kind of projector, which lies beside it."""
    models = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        (projector if kind in IMAGE_TOKENS else audio_projector)(folder / "mmproj.gguf", WIDTH, kind)
        models[kind] = LlamaModel(str(text_model(folder / "tiny.gguf", kind)), 0, _native.CancelFlag())
    yield models
    for model in models.values():
        model.close()


@pytest.fixture
def opened(weights: dict[str, LlamaModel]) -> Iterator[Open]:
    contexts: list[LlamaContext] = []

    def open_model(kind: str = "gemma3", n_ctx: int = 0, **settings: Any) -> LoadedModel:
        model = weights[kind]
        n_ctx = n_ctx or (1024 if kind in IMAGE_TOKENS else 4096)
        beside = str(Path(model.path).parent / "mmproj.gguf")
        usual = {"n_batch": 64, "n_ubatch": 64, "gpu_layers": 0, "projector": beside}
        load = Load(model.path, n_ctx, **{**usual, **EXACT, **settings})
        contexts.append(LlamaContext(model, load))
        return LoadedModel(model, contexts[-1], load)

    yield open_model
    for context in contexts:
        context.close()


def sent(data: bytes, at: int = 0, name: str = "a.png") -> Media:
    return Media(base64.b64encode(data).decode(), name, at)


def asked(*files: bytes, text: str = "What is it?", at: int = 0, name: str = "a.png", **more: Any) -> AnswerRequest:
    message = Message("user", text, media=tuple(sent(file, at, name) for file in files))
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


@pytest.mark.parametrize("kind", IMAGE_TOKENS)
def test_what_an_image_takes_is_told(opened: Open, kind: str) -> None:
    _, [stats], events = run(opened(kind), asked(LARGE))
    [pictured] = accepted_by(events)
    assert (pictured.name, pictured.width, pictured.height) == ("a.png", 300, 200)
    assert stats.media_tokens == IMAGE_TOKENS[kind] < pictured.tokens < stats.prompt_tokens
    assert 0 < stats.media_seconds < stats.prefill_seconds


@pytest.mark.parametrize("kind", ["gemma3", "ultravox"])
def test_encoding_is_stopped_and_begins_again(opened: Open, kind: str) -> None:
    """The cancel of one request may stop a step that others share, which decode it again."""
    file = FILES[kind][0]
    (expected,), _, _ = run(opened(kind), asked(file))
    model = opened(kind)
    model.engine.add(model.preparer.prepare(Generate(1, asked(file)), lambda event: None))
    model.engine.step()  # decodes the text before the file
    flag = model.weights.flag
    flag.set()
    model.engine.step()
    flag.clear()
    model.engine.cancel(1)
    (ended,) = model.engine.step()
    assert isinstance(ended, Finished)
    assert (ended.reason, ended.stats.media_seconds) == ("cancelled", 0.0), "nothing is encoded to the end"
    (told,), _, _ = run(model, asked(file))
    assert told == expected


@pytest.mark.parametrize("kind", KINDS)
def test_progress_moves_while_a_file_is_encoded(opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    signature = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
    look, told = signature(_native.eval_callback_address), list[Event]()

    def watched(tensor: int, ask: bool, flag: int) -> bool:
        goes_on = bool(look(tensor, ask, flag))
        model.engine.watch.tell(lambda *events: told.extend(events))
        return goes_on

    watching = signature(watched)
    monkeypatch.setattr(_native, "eval_callback_address", ctypes.cast(watching, ctypes.c_void_p).value)
    model = opened(kind)
    file = FILES[kind][0]
    _, [stats], _ = run(model, asked(file, name="a.png" if kind in IMAGE_TOKENS else "a.wav"))
    tokens = [event.tokens for event in told if isinstance(event, PrefillProgress)]
    assert tokens == sorted(set(tokens))
    assert tokens, "at the second of two layers"
    assert tokens[-1] < stats.prompt_tokens


def accepted_by(events: list[Event]) -> list[MediaAccepted]:
    return [event for event in events if isinstance(event, MediaAccepted)]


@pytest.mark.parametrize("kind", AUDIO_KINDS)
def test_what_audio_takes_is_told(opened: Open, kind: str) -> None:
    model = opened(kind)
    request = asked(LOW, name="a.wav")
    counted = model.preparer.prompts.count(request, 1, lambda event: None)
    _, [stats], events = run(model, request)
    [accepted] = accepted_by(events)
    assert (accepted.name, accepted.seconds, accepted.width) == ("a.wav", 1.0, 0)
    assert stats.media_tokens == AUDIO_KINDS[kind] <= accepted.tokens < stats.prompt_tokens == counted.total
    assert 0 < stats.media_seconds < stats.prefill_seconds


def test_more_than_half_a_minute_has_several_chunks(opened: Open) -> None:
    _, [stats], events = run(opened("ultravox"), asked(LONG))
    [accepted] = accepted_by(events)
    assert (accepted.seconds, accepted.tokens, stats.media_tokens) == (31.0, 2 * AUDIO_TOKENS, 2 * AUDIO_TOKENS)


def test_prompts_with_images_are_reused_with_the_same_adapters_only(opened: Open) -> None:
    model = opened()
    adapters = (Adapter("a", "/a", 1.0),)
    preparer = Preparer(model.weights.vocabulary, None, 1024, projector=model._projector, adapters=adapters)
    plain, other = (
        preparer.prepare(Generate(1, asked(BLUE, salt="x", adapters=each)), lambda event: None) for each in (None, ())
    )
    assert (plain.adapters, other.adapters) == ((AdapterScale(0, 1.0),), ())
    assert plain.salt != other.salt


@pytest.mark.parametrize("kind", ["idefics3", "qwen2vl_merger", *AUDIO_KINDS])
@pytest.mark.parametrize("size", [7, 16, 512])
def test_the_batch_size_changes_nothing(opened: Open, kind: str, size: int) -> None:
    first, _, third = FILES[kind]
    wanted, _, _ = run(opened(kind), asked(first, third))
    found, _, _ = run(opened(kind, n_batch=size, n_ubatch=size), asked(first, third))
    assert found[0] == pytest.approx(wanted[0], abs=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_perceives_which_file_it_is_and_where(opened: Open, kind: str) -> None:
    model = opened(kind)
    first, second, _ = FILES[kind]
    files = asked(first), asked(second), asked(first, second), asked(second, first), asked(first, at=4), asked()
    answers = [run(model, request)[0][0] for request in files]
    assert len({tuple(round(one, 3) for one in answer) for answer in answers}) == len(answers)


def test_a_photo_is_seen_as_a_viewer_shows_it(opened: Open) -> None:
    """Every orientation of a stored picture, beside the picture that is stored as that one is shown."""
    model = opened("gemma3")
    stored = np.random.default_rng(0).integers(0, 256, (3, 2, 3), np.uint8).repeat(16, 0).repeat(16, 1)
    seen = set[str]()
    for orientation in range(1, 9):
        marked, upright = png_of(stored, orientation), png_of(as_shown(stored, orientation))
        (one, other), _, events = run(model, asked(marked, text="What?"), asked(upright, text="What?"))
        assert one == pytest.approx(other, abs=TOLERANCE), orientation
        sizes = [(each.width, each.height) for each in accepted_by(events)]
        assert sizes == [(32, 48) if orientation < 5 else (48, 32)] * 2
        seen.add(str([round(each, 3) for each in one]))
    assert len(seen) == 8, "the model tells them apart"


@pytest.mark.parametrize(
    ("orientation", "shown"),
    [
        (1, [[1, 2, 3], [4, 5, 6]]),
        (2, [[3, 2, 1], [6, 5, 4]]),
        (3, [[6, 5, 4], [3, 2, 1]]),
        (4, [[4, 5, 6], [1, 2, 3]]),
        (5, [[1, 4], [2, 5], [3, 6]]),
        (6, [[4, 1], [5, 2], [6, 3]]),
        (7, [[6, 3], [5, 2], [4, 1]]),
        (8, [[3, 6], [2, 5], [1, 4]]),
    ],
)
def test_pixels_are_turned_as_exif_says(orientation: int, shown: list[list[int]]) -> None:
    """Row 0 and column 0 of the stored image are where Exif 2.32, 4.6.5 says that they are seen."""
    stored = np.array([[1, 2, 3], [4, 5, 6]], np.uint8)[..., np.newaxis]
    assert as_shown(stored, orientation)[..., 0].tolist() == shown


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_encoded_is_not_encoded_again(opened: Open, kind: str) -> None:
    model = opened(kind)
    one, another, _ = FILES[kind]
    first, [stats], _ = run(model, asked(one))
    again, [reused], _ = run(model, asked(one))
    assert again[0] == pytest.approx(first[0], abs=TOLERANCE)
    assert (reused.reused_tokens, reused.media_seconds) == (stats.prompt_tokens - 1, 0)
    other, [computed], _ = run(model, asked(another))
    assert computed.reused_tokens < stats.prompt_tokens - stats.media_tokens
    assert other[0] == pytest.approx(run(opened(kind), asked(another))[0][0], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*((kind, settings) for kind in IMAGE_TOKENS for settings in ({}, {"n_cells": 2048})), ("ultravox", {})],
)
def test_requests_with_and_without_files_share_the_model(opened: Open, kind: str, settings: dict[str, int]) -> None:
    first, second, third = FILES[kind]
    requests = [asked(first), asked(text="Hello, who are you?"), asked(third, text="And this?"), asked(second, first)]
    alone = [run(opened(kind), request)[0][0] for request in requests]
    together, _, _ = run(opened(kind, n_seq_max=4, n_parked=2, **settings), *requests)
    for one, other in zip(alone, together, strict=True):
        assert other == pytest.approx(one, abs=TOLERANCE)


@pytest.mark.parametrize("kind", IMAGE_TOKENS)
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


@pytest.mark.parametrize("kind", ["idefics3", "qwen2a"])  # audio takes as many positions as tokens, also with M-RoPE
def test_a_saved_state_names_its_file(opened: Open, tmp_path: Path, kind: str) -> None:
    settings = {"states": str(tmp_path), "states_bytes": 1 << 30}
    first, second, _ = FILES[kind]
    model = opened(kind, **settings)
    run(model, asked(first))
    assert model.save(SaveState(1)).tokens
    _, [same], _ = run(opened(kind, **settings), asked(first))
    _, [other], _ = run(opened(kind, **settings), asked(second))
    assert (same.media_seconds, other.reused_tokens) == (0, 0)


def test_a_state_that_lacks_the_positions_is_not_saved(opened: Open, tmp_path: Path) -> None:
    settings = {"states": str(tmp_path), "states_bytes": 1 << 30}
    model = opened("qwen2vl_merger", **settings)
    run(model, asked(LARGE))
    assert not model.save(SaveState(1)).tokens
    run(model, asked())
    assert model.save(SaveState(1)).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_decoded_and_drafted_as_one_without_files(opened: Open, kind: str) -> None:
    request = asked(FILES[kind][0], text="What is it? It is it? What is", logprobs=None, limits=Limits(60))

    def answered(limit: RunLimit | None, **more: Any) -> tuple[str, Stats, int]:
        model, events, n_steps = opened(kind), list[Event](), 0
        model.engine.add(model.preparer.prepare(Generate(1, dataclasses.replace(request, **more)), events.append))
        while model.engine.busy:
            events += model.engine.step(limit)
            n_steps += 1
        finished = next(event for event in events if isinstance(event, Finished))
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        return text, finished.stats, n_steps

    run_limit = RunLimit(16, math.inf, _native.CancelFlag())
    text, _, n_steps = answered(None)
    natively, _, n_native_steps = answered(run_limit)
    assert natively == text
    assert n_native_steps < n_steps - 40
    drafted, stats, _ = answered(run_limit, speculation=Speculation(most=4))
    assert drafted == text
    assert stats.drafted_tokens > 0


def test_a_count_knows_images(opened: Open) -> None:
    model = opened()
    request = asked(RED)
    counted = model.preparer.prompts.count(request, 1, lambda event: None)
    _, [stats], events = run(model, request)
    [pictured] = accepted_by(events)
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


@pytest.mark.parametrize("kind", IMAGE_TOKENS)
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
    assert len(accepted_by(events)) == 2
    again = model.preparer.prepare(Generate(2, second), lambda event: None)
    assert again.tokens[: len(prepared.tokens)] == prepared.tokens
    fresh = opened(kind)
    fresh.preparer.prompts.history = model.preparer.prompts.history
    wanted, [stats], _ = run(fresh, second)
    assert stats.reused_tokens == 0
    assert told[0] == pytest.approx(wanted[0], abs=TOLERANCE)


def test_formats_of_one_recording_are_heard_alike(opened: Open) -> None:
    def heard(file: bytes) -> tuple[list[float], Stats, MediaAccepted]:
        told, stats, events = run(opened("ultravox"), asked(file))
        return told[0], stats[0], accepted_by(events)[0]

    samples = tone(0.7)
    floats = wav((samples / 32768).astype("<f4"), tag=3)
    answers = [heard(file) for file in (wav(samples), wav(samples, n_channels=2), floats, flac(samples))]
    assert {round(accepted.seconds, 3) for _, _, accepted in answers} == {0.7}
    for told, _, _ in answers[1:]:
        assert told == pytest.approx(answers[0][0], abs=1e-2)
    _, stats, compressed = heard(MP3)
    assert (compressed.seconds, stats.media_tokens) == (pytest.approx(0.4, abs=0.15), AUDIO_TOKENS)
    _, _, tagged = heard(b"ID3\4\0\0\0\0\0\x0a" + bytes(10) + MP3)
    assert tagged.seconds == compressed.seconds
    _, _, slow = heard(wav(tone(0.5, rate=8000), 8000))
    assert slow.seconds == pytest.approx(0.5, abs=1e-3)


# ---- what is refused -----------------------------------------------------------------------------------------

TRUNCATED = RED[:60]
HUGE = RED[:16] + (60_000).to_bytes(4, "big") * 2 + RED[24:]
FLAC = flac(tone(0.5))


def _numbers(samples: int, rate: int = RATE) -> bytes:
    """FLAC's rate and number of samples, for one channel of 16 bits."""
    return (rate << 44 | 15 << 36 | samples).to_bytes(8, "big")


def _mp3(n_frames: int) -> bytes:
    """The first frame of an MP3 file that says how many follow."""
    frame = b"\xff\xfb\x90\x00" + bytes(32) + b"Xing" + struct.pack(">II", 1, n_frames)
    return frame + bytes(417 - len(frame))


@pytest.mark.parametrize(
    ("kind", "data", "what"),
    [
        ("gemma3", b"", "images must be PNG"),
        ("gemma3", b"hello", "images must be PNG"),
        ("gemma3", b"RIFF\x10\0\0\0WEBPVP8 ", "can't be read"),
        ("gemma3", b"\x89PNG\r\n\x1a\n", "beginning is damaged"),
        ("gemma3", b"\xff\xd8\xff\xe0\xff\xff", "beginning is damaged"),
        ("gemma3", b"\xff\xd8\xff" + b"\xff" * 50, "beginning is damaged"),
        ("gemma3", TRUNCATED, "it is damaged"),
        ("gemma3", RED[:16] + bytes(8) + RED[24:], "it has no pixels"),
        ("gemma3", HUGE, f"the maximum is {MAX_PIXELS:,}"),
        ("gemma3", b"GIF89a" + b"\1\0\1\0" + b"\xff" * 40, "it is damaged"),
        ("gemma3", b"BM" + bytes(16) + b"\4\0\0\0\4\0\0\0" + b"\xff" * 40, "it is damaged"),
        ("ultravox", LOW[:30], "beginning is damaged"),
        ("ultravox", LOW[:12], "does not state its length"),
        ("ultravox", LOW[:44], "is too short"),
        ("ultravox", wav(tone(0.05)), "is too short: it takes less than 0.1 seconds"),
        ("ultravox", wav(tone(0.5), tag=2), "does not state its length"),
        ("ultravox", LOW[:20] + bytes(16) + LOW[36:], "does not state its length"),
        ("ultravox", wav(tone(0.5), 1), f"the maximum is {MAX_SECONDS:,}"),
        ("ultravox", FLAC[:20], "beginning is damaged"),
        ("ultravox", FLAC[:18] + _numbers(0) + FLAC[26:], "does not state its length"),
        ("ultravox", FLAC[:18] + _numbers((1 << 36) - 1) + FLAC[26:], "is too long"),
        ("ultravox", FLAC[:26], "can't be read as audio: it is damaged"),
        ("ultravox", b"\xff\xfb\x90\x00" * 500, "can't be read as audio: it is damaged"),
        ("ultravox", b"ID3\4\0\0\0\0\0\0" + bytes(500), "can't be read as audio: it is damaged"),
        ("ultravox", b"\0" * 100 + _mp3(1 << 31), "images must be"),
        ("ultravox", _mp3(1 << 31), "is too long"),
        ("ultravox", b"ID3\4\0\0\0\0\0\0" + bytes(100) + _mp3(1 << 31), "is too long"),
        ("ultravox", b"OggS" + bytes(100), "it is Ogg; audio must be WAV, MP3 or FLAC"),
        ("ultravox", b"\0\0\0\x20ftypM4A " + bytes(100), "it is MP4"),
    ],
    ids=range(29),
)
def test_a_hostile_file_is_refused_and_the_model_goes_on(opened: Open, kind: str, data: bytes, what: str) -> None:
    model = opened(kind)
    with pytest.raises(UsageError) as raised:
        run(model, asked(data))
    assert what in f"{raised.value.what}: {raised.value.why}"
    assert run(model, asked(FILES[kind][0]))[1][0].media_tokens == {**IMAGE_TOKENS, **AUDIO_KINDS}[kind]


def test_what_is_no_base64_is_refused(opened: Open) -> None:
    request = dataclasses.replace(asked(), messages=(Message("user", "?", media=(Media("%%%", "x"),)),))
    with pytest.raises(UsageError, match="x can't be read: its data are not base64"):
        run(opened(), request)


def test_the_error_says_how_to_convert(opened: Open) -> None:
    with pytest.raises(UsageError) as raised:
        run(opened("ultravox"), asked(b"OggS" + bytes(100), name="a.wav"))
    assert raised.value.hint == "ffmpeg -i a.wav -ac 1 -ar 16000 a-16k.flac"


def _refusal(model: LoadedModel, data: bytes = RED) -> LlmrunError:
    with pytest.raises(LlmrunError) as raised:
        run(model, asked(data))
    return raised.value


@pytest.mark.parametrize(("kind", "what"), [("gemma3", "can't read images"), ("ultravox", "can't read audio")])
def test_a_model_without_a_projector_says_so(opened: Open, kind: str, what: str) -> None:
    refused = _refusal(opened(kind, projector=""), FILES[kind][0])
    assert isinstance(refused, UsageError)
    assert what in refused.what


def test_a_projector_of_another_model_is_refused_by_name(opened: Open, tmp_path: Path) -> None:
    model = opened(projector=str(projector(tmp_path / "mmproj-other.gguf", 2 * WIDTH)))
    for _ in range(2):
        refused = _refusal(model)
        assert isinstance(refused, BadModelError)
        assert "mmproj-other.gguf" in refused.what
        assert f"n_embd = {WIDTH}) and mmproj (n_embd = {2 * WIDTH})" in refused.why
    assert run(model, asked())[1][0].completion_tokens


def test_a_projector_of_the_other_kind_is_refused_by_name(opened: Open, tmp_path: Path) -> None:
    refused = _refusal(opened("ultravox"), png(10, 10))
    assert isinstance(refused, BadModelError)
    assert refused.what == "mmproj.gguf can't encode images for tiny.gguf"
    refused = _refusal(
        opened("ultravox", projector=str(projector(tmp_path / "mmproj-eyes.gguf", WIDTH, "gemma3"))), LOW
    )
    assert isinstance(refused, BadModelError)
    assert "mmproj-eyes.gguf can't encode audio for" in refused.what
    assert "no encoder for audio" in refused.why


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


def test_results_of_tools_with_audio(opened: Open) -> None:
    """A model that can't hear gets a line instead; one that can hears it."""
    result = Message("tool", "it says", media=(sent(LOW, 7),))
    request = AnswerRequest((*asked().messages, result), limits=Limits(2), template=TEMPLATE)
    assert run(opened("ultravox"), request)[1][0].media_tokens == AUDIO_TOKENS
    text = opened("ultravox", projector="").preparer.prompts.prompt(Generate(1, request)).text
    assert "[audio omitted: this model can't hear]" in text
