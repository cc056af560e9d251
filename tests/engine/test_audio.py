"""Audio through libmtmd and the loop, on tiny random models: formats, prefixes, positions, and what is refused."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hf_writer import WIDTH
from support.tiny_projector import (
    AUDIO_TOKENS,
    FRAMES,
    MP3,
    RATE,
    audio_projector,
    flac,
    png,
    projector,
    text_model,
    tone,
    wav,
)

from llmrun import _native
from llmrun.engine.llama.base import MAX_SECONDS
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.loaded import LoadedModel
from llmrun.errors import BadModelError, LlmrunError, UsageError
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
    Stats,
    TextDelta,
)
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.questions import SaveState

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}so"
TOKENS = {"ultravox": AUDIO_TOKENS, "qwen2a": FRAMES // 2}  # the second takes the mean of two frames
EXACT = {"kv_type_k": "f32", "kv_type_v": "f32", "flash_attention": "off"}
TOLERANCE = 1e-4  # of log-probabilities: another width of batch adds up in another order
LOW, HIGH, LONG = wav(tone(1.0, 220)), wav(tone(1.0, 880)), wav(tone(31.0))

Open = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LlamaModel]]:
    """A model for each kind of projector, which lies beside it."""
    found = {}
    for kind in TOKENS:
        folder = tmp_path_factory.mktemp(kind)
        audio_projector(folder / "mmproj.gguf", WIDTH, kind)
        found[kind] = LlamaModel(str(text_model(folder / "tiny.gguf", kind)), 0, _native.CancelFlag())
    yield found
    for model in found.values():
        model.close()


@pytest.fixture
def opened(weights: dict[str, LlamaModel]) -> Iterator[Open]:
    contexts: list[LlamaContext] = []

    def open_model(kind: str = "ultravox", n_ctx: int = 2048, **settings: Any) -> LoadedModel:
        model = weights[kind]
        beside = str(Path(model.path).parent / "mmproj.gguf")
        usual = {"n_batch": 64, "n_ubatch": 64, "gpu_layers": 0, "projector": beside}
        load = Load(model.path, n_ctx, n_ctx, **{**usual, **EXACT, **settings})
        contexts.append(LlamaContext(model, load))
        return LoadedModel(model, contexts[-1], load)

    yield open_model
    for context in contexts:
        context.close()


def asked(*files: bytes, text: str = "What is it?", at: int = 0, **more: Any) -> AnswerRequest:
    media = tuple(Media(base64.b64encode(file).decode(), "a.wav", at) for file in files)
    usual = {"sampling": SamplingParams(temperature=0), "limits": Limits(6), "template": TEMPLATE, "logprobs": 3}
    return AnswerRequest((Message("user", text, media=media),), **{**usual, **more})


def run(model: LoadedModel, *requests: AnswerRequest) -> tuple[list[list[float]], list[Stats], list[MediaAccepted]]:
    """The log-probabilities of each answer's likeliest tokens, what it cost, and the audio that was accepted."""
    events: list[Event] = []
    for number, request in enumerate(requests, 1):
        model.engine.add(model.preparer.prepare(Generate(number, request), events.append))
    while model.engine.busy:
        events += model.engine.step()
    assert not [event for event in events if isinstance(event, Failed)]
    told: dict[int, list[float]] = {number: [] for number in range(1, len(requests) + 1)}
    for event in events:
        if isinstance(event, TextDelta):
            told[event.request] += [one[2] for each in event.logprobs for one in each.top]
    ended = {event.request: event.stats for event in events if isinstance(event, Finished)}
    accepted = [event for event in events if isinstance(event, MediaAccepted)]
    return list(told.values()), [ended[number] for number in told], accepted


@pytest.mark.parametrize("kind", TOKENS)
def test_length_and_tokens_are_told(opened: Open, kind: str) -> None:
    model = opened(kind)
    counted = model.preparer.prompts.count(asked(LOW), 1, lambda event: None)
    _, [stats], [accepted] = run(model, asked(LOW))
    assert (accepted.name, accepted.seconds, accepted.width) == ("a.wav", 1.0, 0)
    assert stats.media_tokens == TOKENS[kind] <= accepted.tokens < stats.prompt_tokens == counted.total
    assert 0 < stats.media_seconds < stats.prefill_seconds


def test_more_than_half_a_minute_has_several_chunks(opened: Open) -> None:
    _, [stats], [accepted] = run(opened(), asked(LONG))
    assert (accepted.seconds, accepted.tokens, stats.media_tokens) == (31.0, 2 * AUDIO_TOKENS, 2 * AUDIO_TOKENS)


@pytest.mark.parametrize("kind", TOKENS)
def test_the_model_hears_which_audio_it_is_and_where(opened: Open, kind: str) -> None:
    model = opened(kind, n_ctx=4096)
    requests = asked(LOW), asked(HIGH), asked(LOW, HIGH), asked(HIGH, LOW), asked(LOW, at=4), asked()
    answers = [run(model, request)[0][0] for request in requests]
    assert len({tuple(round(one, 3) for one in answer) for answer in answers}) == len(answers)


@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize("size", [7, 512])
def test_the_batch_size_changes_nothing(opened: Open, kind: str, size: int) -> None:
    wanted, _, _ = run(opened(kind), asked(LOW))
    found, _, _ = run(opened(kind, n_batch=size, n_ubatch=size), asked(LOW))
    assert found[0] == pytest.approx(wanted[0], abs=TOLERANCE)


@pytest.mark.parametrize("kind", TOKENS)
def test_audio_that_was_heard_is_not_computed_again(opened: Open, kind: str) -> None:
    model = opened(kind)
    first, [stats], _ = run(model, asked(LOW))
    again, [reused], _ = run(model, asked(LOW))
    assert again[0] == pytest.approx(first[0], abs=TOLERANCE)
    assert (reused.reused_tokens, reused.media_seconds) == (stats.prompt_tokens - 1, 0)
    other, [computed], _ = run(model, asked(HIGH))
    assert computed.reused_tokens < stats.prompt_tokens - stats.media_tokens
    assert other[0] == pytest.approx(run(opened(kind), asked(HIGH))[0][0], abs=TOLERANCE)


def test_requests_with_and_without_audio_share_the_model(opened: Open) -> None:
    requests = [asked(LOW), asked(text="Hello, who are you?"), asked(LONG, text="And this?"), asked(HIGH, LOW)]
    alone = [run(opened(), request)[0][0] for request in requests]
    together, _, _ = run(opened(n_seq_max=4, n_parked=2), *requests)
    for one, other in zip(alone, together, strict=True):
        assert other == pytest.approx(one, abs=TOLERANCE)


def test_a_saved_state_names_its_audio(opened: Open, tmp_path: Path) -> None:
    """Audio takes as many positions as tokens, also with M-RoPE."""
    kind = "qwen2a"
    settings = {"states": str(tmp_path), "states_bytes": 1 << 30}
    model = opened(kind, **settings)
    run(model, asked(LOW))
    assert model.save(SaveState(1)).tokens
    _, [same], _ = run(opened(kind, **settings), asked(LOW))
    _, [other], _ = run(opened(kind, **settings), asked(HIGH))
    assert (same.media_seconds, other.reused_tokens) == (0, 0)


def test_formats_of_one_recording_are_heard_alike(opened: Open) -> None:
    samples = tone(0.7)
    floats = wav((samples / 32768).astype("<f4"), tag=3)
    answers = [run(opened(), asked(file)) for file in (wav(samples), wav(samples, n_channels=2), floats, flac(samples))]
    assert {round(accepted[0].seconds, 3) for _, _, accepted in answers} == {0.7}
    for told, _, _ in answers[1:]:
        assert told[0] == pytest.approx(answers[0][0][0], abs=1e-2)
    _, [stats], [compressed] = run(opened(), asked(MP3))
    assert (compressed.seconds, stats.media_tokens) == (pytest.approx(0.4, abs=0.15), AUDIO_TOKENS)
    _, _, [tagged] = run(opened(), asked(b"ID3\4\0\0\0\0\0\x0a" + bytes(10) + MP3))
    assert tagged.seconds == compressed.seconds
    _, _, [slow] = run(opened(), asked(wav(tone(0.5, rate=8000), 8000)))
    assert slow.seconds == pytest.approx(0.5, abs=1e-3)


# ---- what is refused -----------------------------------------------------------------------------------------

FLAC = flac(tone(0.5))


def _numbers(samples: int, rate: int = RATE) -> bytes:
    """FLAC's rate and number of samples, for one channel of 16 bits."""
    return (rate << 44 | 15 << 36 | samples).to_bytes(8, "big")


def _mp3(n_frames: int) -> bytes:
    """The first frame of an MP3 file that says how many follow."""
    frame = b"\xff\xfb\x90\x00" + bytes(32) + b"Xing" + struct.pack(">II", 1, n_frames)
    return frame + bytes(417 - len(frame))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (LOW[:30], "beginning is damaged"),
        (LOW[:12], "does not state its length"),
        (LOW[:44], "is too short"),
        (wav(tone(0.05)), "is too short: it takes less than 0.1 seconds"),
        (wav(tone(0.5), tag=2), "does not state its length"),
        (LOW[:20] + bytes(16) + LOW[36:], "does not state its length"),
        (wav(tone(0.5), 1), f"the maximum is {MAX_SECONDS:,}"),
        (FLAC[:20], "beginning is damaged"),
        (FLAC[:18] + _numbers(0) + FLAC[26:], "does not state its length"),
        (FLAC[:18] + _numbers((1 << 36) - 1) + FLAC[26:], "is too long"),
        (FLAC[:26], "can't be read as audio: it is damaged"),
        (b"\xff\xfb\x90\x00" * 500, "can't be read as audio: it is damaged"),
        (b"ID3\4\0\0\0\0\0\0" + bytes(500), "can't be read as audio: it is damaged"),
        (b"\0" * 100 + _mp3(1 << 31), "images must be"),
        (_mp3(1 << 31), "is too long"),
        (b"ID3\4\0\0\0\0\0\0" + bytes(100) + _mp3(1 << 31), "is too long"),
        (b"OggS" + bytes(100), "it is Ogg; audio must be WAV, MP3 or FLAC"),
        (b"\0\0\0\x20ftypM4A " + bytes(100), "it is MP4"),
    ],
    ids=range(18),
)
def test_hostile_audio_is_refused_and_the_model_goes_on(opened: Open, data: bytes, what: str) -> None:
    model = opened()
    with pytest.raises(UsageError) as raised:
        run(model, asked(data))
    assert what in f"{raised.value.what}: {raised.value.why}"
    assert run(model, asked(LOW))[1][0].media_tokens == AUDIO_TOKENS


def test_the_error_says_how_to_convert(opened: Open) -> None:
    with pytest.raises(UsageError) as raised:
        run(opened(), asked(b"OggS" + bytes(100)))
    assert raised.value.hint == "ffmpeg -i a.wav -ac 1 -ar 16000 a-16k.flac"


def _refusal(model: LoadedModel, data: bytes) -> LlmrunError:
    with pytest.raises(LlmrunError) as raised:
        run(model, asked(data))
    return raised.value


def test_a_model_without_a_projector_says_so(opened: Open) -> None:
    refused = _refusal(opened(projector=""), LOW)
    assert isinstance(refused, UsageError)
    assert "can't read audio" in refused.what


def test_a_projector_of_the_other_kind_is_refused_by_name(opened: Open, tmp_path: Path) -> None:
    refused = _refusal(opened(), png(10, 10))
    assert isinstance(refused, BadModelError)
    assert refused.what == "mmproj.gguf can't encode images for tiny.gguf"
    refused = _refusal(opened(projector=str(projector(tmp_path / "mmproj-eyes.gguf", WIDTH, "gemma3"))), LOW)
    assert isinstance(refused, BadModelError)
    assert "mmproj-eyes.gguf can't encode audio for" in refused.what
    assert "no encoder for audio" in refused.why


def test_results_of_tools_with_audio(opened: Open) -> None:
    """A model that can't hear gets a line instead; one that can hears it."""
    result = Message("tool", "it says", media=(Media(base64.b64encode(LOW).decode(), "a.wav", 7),))
    request = AnswerRequest((*asked().messages, result), limits=Limits(2), template=TEMPLATE)
    assert run(opened(), request)[1][0].media_tokens == AUDIO_TOKENS
    text = opened(projector="").preparer.prompts.prompt(Generate(1, request)).text
    assert "[audio omitted: this model can't hear]" in text
