"""Everything that crosses the pipe between front and engine: frozen dataclasses <-> length-prefixed JSON.

Owns the wire format; must not know processes or llama.cpp. A frame is a 4-byte big-endian length and
that many bytes of UTF-8 JSON with a "kind"; never pickle, so that a hijacked engine can't run code in the front.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from llmrun.errors import BY_CODE, LlmrunError, UsageError
from llmrun.params import Limits, SamplingParams

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")
PREFIX_BYTES = _LENGTH.size
ROLES = ("system", "user", "assistant")


class FrameError(Exception):
    """The other side sent bytes that are no frame of ours."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. role is "system", "user" or "assistant"."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UsageError(f"there is no role {self.role!r}", why=f"a message is of one of {', '.join(ROLES)}")


# ---- front -> engine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """A guess, sent before the plan is made: begin to load these weights. Not answered; Load repeats what it meant.

    Attributes:
        path: of the GGUF file, absolute.
        gpu_layers: how many layers go to the GPU; -1 is all.
    """

    path: str
    gpu_layers: int = -1


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model and make its context; answered by LoadProgress*, then Loaded or Failed.

    Attributes:
        path: of the GGUF file, absolute.
        n_ctx: context window of each sequence, in tokens.
        n_ctx_start: for how many of them to have memory at first; it grows when a sequence does.
        n_batch: most tokens of one decode call.
        n_seq_max: most sequences at the same time.
        threads: for decode and for prefill.
        gpu_layers: how many layers go to the GPU; -1 is all.
        warm_up: run one empty decode before saying Loaded.
        verbose: llama.cpp's whole log goes to stderr, not only its warnings.
    """

    path: str
    n_ctx: int
    n_ctx_start: int
    n_batch: int = 512
    n_seq_max: int = 1
    threads: int = 1
    gpu_layers: int = -1
    warm_up: bool = False
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class Generate:
    """Answer a conversation, or continue a plain text; answered by Rendering .. Finished, or Failed.

    Attributes:
        request: number chosen by the front; events name it.
        messages: the whole conversation; empty when `prompt` is used.
        prompt: plain text to continue, without a chat template.
        template: Jinja text, or "chatml", in place of the model's own chat template.
    """

    request: int
    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    template: str | None = None
    sampling: SamplingParams = SamplingParams()
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a request as soon as possible; it still ends with Finished."""

    request: int


# ---- engine -> front -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How much of the weights is loaded, 0 to 1."""

    fraction: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model is ready.

    Attributes:
        n_ctx: context window in tokens, as llama.cpp made it.
        n_ctx_train: context window the model was trained on.
        n_vocab: tokens in the vocabulary.
        description: llama.cpp's, e.g. "llama 135M Q4_1".
        has_template: whether the file carries a chat template.
        devices: names of the devices ggml can compute on.
        load_seconds: for the weights and the context together.
    """

    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    description: str
    has_template: bool
    devices: tuple[str, ...]
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Rendering:
    """The chat template is being rendered; the front's clock for it starts now."""

    request: int


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is tokens now, and prefill begins.

    Attributes:
        prompt_tokens: tokens of the whole prompt.
        reused_tokens: how many of them were in the KV cache already and need no prefill.
        seed: of this answer's random generator.
    """

    request: int
    prompt_tokens: int
    reused_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens prefilled so far in this request, reused ones not counted."""

    request: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer: whole characters, at least one of them. tokens is how many it took."""

    request: int
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Stats:
    """What one answer cost. Seconds are wall clock.

    Attributes:
        prompt_tokens: tokens of the whole prompt.
        reused_tokens: of these, found in the KV cache.
        prefill_seconds: for prompt_tokens - reused_tokens.
        completion_tokens: sampled tokens, the end token included.
        decode_seconds: from the first sampled token to the last.
        ttft_seconds: time to first token, from the request's arrival in the engine.
        itl_p50_seconds: inter-token latency, median.
        itl_p95_seconds: inter-token latency, 95th percentile.
        context_used: tokens in the KV cache afterwards.
        n_ctx: context window in tokens.
        overhead_seconds: part of decode_seconds spent outside llama_decode, per token.
        seed: of this answer's random generator.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_seconds: float = 0.0
    completion_tokens: int = 0
    decode_seconds: float = 0.0
    ttft_seconds: float = 0.0
    itl_p50_seconds: float = 0.0
    itl_p95_seconds: float = 0.0
    context_used: int = 0
    n_ctx: int = 0
    overhead_seconds: float = 0.0
    seed: int = 0

    @property
    def prefill_rate(self) -> float:
        """Prefill speed in tokens/s; 0 when nothing was prefilled."""
        tokens = self.prompt_tokens - self.reused_tokens
        return tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """Decode speed in tokens/s; 0 with fewer than two tokens."""
        tokens = self.completion_tokens - 1
        return tokens / self.decode_seconds if tokens > 0 and self.decode_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer ended. reason: "stop" (end token or stop string), "length" (max tokens or context), "cancelled"."""

    request: int
    reason: str
    stats: Stats


@dataclass(frozen=True, slots=True)
class Failed:
    """A request (or, without one, the load) ended in an error that the engine could explain."""

    code: str
    what: str
    why: str = ""
    hint: str = ""
    request: int | None = None

    @classmethod
    def of(cls, error: LlmrunError, request: int | None = None) -> Failed:
        """The frame for an error."""
        return cls(error.code, error.what, error.why, error.hint, request)

    def error(self) -> LlmrunError:
        """The error again, of its own class."""
        return BY_CODE.get(self.code, LlmrunError)(self.what, why=self.why, hint=self.hint)


Command = Open | Load | Generate | Cancel
Event = LoadProgress | Loaded | Rendering | Started | PrefillProgress | TextDelta | Finished | Failed
Frame = Command | Event

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Open, Load, Generate, Cancel, LoadProgress, Loaded, Rendering,
        Started, PrefillProgress, TextDelta, Finished, Failed,
    )
}  # fmt: skip


def _sampling(value: Mapping[str, Any]) -> SamplingParams:
    pairs = tuple((int(token), float(bias)) for token, bias in value["logit_bias"])
    return SamplingParams(**{**value, "dry_breakers": tuple(value["dry_breakers"]), "logit_bias": pairs})


# Fields that JSON can't give back as they were.
_FROM_JSON: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("Generate", "messages"): lambda value: tuple(Message(**item) for item in value),
    ("Generate", "sampling"): _sampling,
    ("Generate", "limits"): lambda value: Limits(value["max_tokens"], tuple(value["stop"])),
    ("Loaded", "devices"): tuple,
    ("Finished", "stats"): lambda value: Stats(**value),
}


def as_dict(value: Any) -> dict[str, Any]:
    """A dataclass as plain JSON data, nested ones included."""
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return as_dict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def encode(frame: Frame) -> bytes:
    """The frame's bytes, length prefix included.

    Raises:
        FrameError: it is larger than MAX_FRAME_BYTES.
    """
    body = json.dumps({"kind": type(frame).__name__, **as_dict(frame)}).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Frame:
    """The frame in a body (without the length prefix).

    Raises:
        FrameError: it is no frame of ours.
    """
    try:
        data = json.loads(body)
        kind = data.pop("kind")
        for name in data:
            convert = _FROM_JSON.get((kind, name))
            if convert:
                data[name] = convert(data[name])
        frame: Frame = _KINDS[kind](**data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, LlmrunError) as error:
        raise FrameError(f"not a frame: {error!r}") from error
    return frame


def frame_length(data: bytes | bytearray) -> int | None:
    """Length of the frame that data begins with, prefix included; None if too little of it is there.

    Raises:
        FrameError: the frame is larger than MAX_FRAME_BYTES.
    """
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.size + int(length)


def read_frame(read: Callable[[int], bytes]) -> Frame | None:
    """The next frame from a blocking stream; None at its end.

    Args:
        read: read(n) gives n bytes, fewer only at the end of the stream.

    Raises:
        FrameError: the stream ended inside a frame, or holds something else.
    """
    prefix = read(_LENGTH.size)
    if not prefix:
        return None
    length = frame_length(prefix)
    body = read(length - _LENGTH.size) if length else b""
    if length is None or len(body) < length - _LENGTH.size:
        raise FrameError("the stream ended inside a frame")
    return decode(body)
