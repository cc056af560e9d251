"""The wire format: every frame comes back as it was, and nothing else comes in."""

from __future__ import annotations

import ast
import io
import json
import math
import pickle
import struct
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args

import pytest

from llmrun.errors import BY_CODE, BadLogitsError, ContextOverflowError, LlmrunError
from llmrun.grammar import Grammar
from llmrun.protocol import frames, messages
from llmrun.protocol.frames import (
    MAX_FRAME_BYTES,
    PREFIX_BYTES,
    FrameError,
    TextDeltas,
    decode,
    encode,
    encode_text,
    frame_length,
    read_frame,
)
from llmrun.protocol.loading import Load, Loaded, LoadProgress
from llmrun.protocol.messages import (
    AnswerPart,
    AnswerRequest,
    Cancel,
    Command,
    Event,
    Failed,
    Finished,
    Frame,
    Generate,
    Job,
    JobDone,
    JobUpdate,
    MediaAccepted,
    Message,
    PrefillProgress,
    Rendered,
    Rendering,
    Started,
    Stats,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCall,
)
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.questions import TOKENIZE_LOADED
from llmrun.protocol.speculation import Speculation

REQUEST = Generate(
    2**40, AnswerRequest(prompt="", sampling=SamplingParams(seed=2**32 - 1, logit_bias=((0, -math.inf), (7, 1.5))))
)
FRAMES: list[Frame] = [
    Finished(5, "stop", Stats(drafted_tokens=3, draft_gain=1.2), "", ((1, (7, 8)), (9, (3,)))),
    Load("/m.gguf", n_ctx=4096),
    Load(
        "/\udcff\udc80.gguf",
        1,
        warm_up=True,
        verbose=True,
        states="/kv",
        states_bytes=2**32,
        n_batch=3,
        n_seq_max=4,
        threads=5,
        gpu_layers=6,
        threads_batch=7,
        n_ubatch=8,
        flash_attention="on",
        kv_type_k="q8_0",
        repack=False,
        mmap=False,
        cpu_experts=(0, 1),
    ),
    Load("/m.gguf", 4096, n_seq_max=8, n_cells=9000, n_parked=16),
    Job(8, "quantize", {"path": "/m.gguf", "types": {"a": ["Q8_0", 1.5, None, True]}}),
    JobUpdate(8, {"done": 0.5}),
    JobDone(8, {}),
    Generate(1, AnswerRequest()),
    Generate(2, AnswerRequest(messages=(Message("system", ""), Message("user", "Hi\n\0\u2028")), template="chatml")),
    Generate(3, AnswerRequest(prompt="both \U0001f600 surrogates", limits=Limits(5, ("\n", "</s>")))),
    REQUEST,
    Generate(4, AnswerRequest(sampling=SamplingParams(dry_breakers=()), limits=Limits(None, ()))),
    Generate(5, AnswerRequest(limits=Limits(ban=("as an AI",)), grammar=Grammar("gbnf", 'root ::= "a"'), remember=16)),
    Generate(6, AnswerRequest(thinking=False, thinking_tokens=100, stops_repeats=True, moves=True)),
    Generate(6, AnswerRequest(sampling=SamplingParams(order=("temperature", "top_k")))),
    Generate(7, AnswerRequest(logprobs=0, salt="mine")),
    Generate(
        7,
        AnswerRequest(
            (
                Message("assistant", "", (ToolCall("call_1", "add", '{"a": 1}'), ToolCall("", "now", "{}"))),
                Message("tool", "2", tool_call_id="call_1", name="add"),
            ),
            tools=(Tool("add", "Adds.", '{"type": "object"}'), Tool("now")),
            tool_choice="=add",
            parallel_calls=False,
        ),
    ),
    Generate(8, AnswerRequest(prompt="", prompt_tokens=(5, "a", 6), sampling=SamplingParams(logit_bias=(("a", 1.0),)))),
    Generate(8, AnswerRequest(speculation=Speculation(7))),
    Generate(
        8, AnswerRequest(speculation=Speculation(15, only_if_it_pays=True, draft_cost=0.1, recorded=((1, (7, 8)),)))
    ),
    Cancel(0),
    LoadProgress(0.1 + 0.2),
    Loaded(4096, 8192, 49152, "llama 135M Q4_1", False, ("CUDA0", "CPU"), 0.5, ("<think>", "</think>")),
    Rendering(1),
    Rendered(1),
    Started(1, 10, 5, 2**32 - 1),
    PrefillProgress(1, 3, 0.25),
    TextDelta(1, "", 0),
    TextDelta(1, "a", 1, drafted=True, ids=(5,)),
    TextDelta(1, "💚" * 200_000, 1),
    TextDelta(
        1,
        "é!",
        3,
        (TokenLogprob("\ufffd", (195,), -0.5, (("a", (97,), -math.inf),)), TokenLogprob("!", (), 0, (), ids=(5,))),
    ),
    Finished(1, "stop", Stats(1, 2, 0.3, 4, 0.5, 0.6, 0.7, 0.8, 9, 10, 0.11, 12)),
    Finished(1, "length", Stats()),
    MediaAccepted(1, "cat.png", 640, 480, 64),
    Finished(1, "repeats", Stats(), "again and again"),
    Started(1, 10, 5, 0, thinking=True, thinking_tags=("<think>", "</think>")),
    Failed(3, "bad-model", "it broke", "it was old", "buy one"),
    Failed(0, "internal", ""),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_round_trip(frame: Frame) -> None:
    data = encode(frame)
    assert frame_length(data) == len(data)
    assert decode(data[PREFIX_BYTES:]) == frame
    assert read_frame(io.BytesIO(data + b"more").read) == frame


def test_texts_for_the_model_lose_lone_surrogates_and_paths_keep_them() -> None:
    asked = AnswerRequest(prompt="a\ud83d", messages=(Message("user", "\udc00😀"),), limits=Limits(5, ("\ud800",)))
    frame = decode(encode(Generate(3, asked))[PREFIX_BYTES:])
    assert isinstance(frame, Generate)
    assert (frame.asked.prompt, frame.asked.messages[0].content) == ("a\ufffd", "\ufffd😀")
    assert frame.asked.limits.stop == ("\ufffd",)
    job = decode(encode(Job(1, "beams", {"stop": ["\ud800"]}))[PREFIX_BYTES:])
    assert isinstance(job, Job)
    assert job.arguments == {"stop": ["\ud800"]}, "it may be a path, as far as the pipe knows"
    assert TOKENIZE_LOADED.read({"model": "", "text": "\ud800", "special": True}).text == "\ufffd"


@pytest.mark.parametrize("number", ["9" * 5000, "1e999", "-" + "9" * 400])
def test_a_number_that_no_field_holds_is_answered(number: str) -> None:
    body = b'{"kind":"Generate","request":7,"asked":{"sampling":{"temperature":%s}}}' % number.encode()
    with pytest.raises(FrameError) as refused:
        decode(body)
    assert refused.value.failed is None or refused.value.failed.code == "usage"


def test_every_kind_of_frame_is_tried() -> None:
    assert {type(frame) for frame in FRAMES} == set(get_args(messages.Command)) | set(get_args(messages.Event))


def test_nested_values_come_back_as_tuples_and_dataclasses() -> None:
    frame = decode(encode(REQUEST)[PREFIX_BYTES:])
    assert isinstance(frame, Generate)
    assert isinstance(frame.asked.sampling.logit_bias[0], tuple)
    assert hash(frame) == hash(REQUEST)


def test_a_stream_of_frames() -> None:
    stream = io.BytesIO(b"".join(map(encode, FRAMES)))
    assert [read_frame(stream.read) for _ in FRAMES] == FRAMES
    assert read_frame(stream.read) is None


def test_the_text_of_several_answers_has_one_frame() -> None:
    reasoning = (AnswerPart("reasoning", "b"), AnswerPart("reasoning_end"))
    rows = (
        TextDelta(1, "a\ud800💚\n", 1),
        TextDelta(2, "b</think>", 3, (), True, reasoning),
        TextDelta(1, "", 0, parts=(), ids=(5, 0)),
    )
    data = encode_text(rows)
    assert frame_length(data) == len(data)
    frame = decode(data[PREFIX_BYTES:])
    assert frame == TextDeltas(rows)
    assert [type(part) for part in frame.rows[1].answer_parts] == [AnswerPart, AnswerPart]


@pytest.mark.parametrize("length", range(1, len(encode(Cancel(1)))))
def test_a_stream_that_ends_inside_a_frame(length: int) -> None:
    with pytest.raises(FrameError, match="ended inside"):
        read_frame(io.BytesIO(encode(Cancel(1))[:length]).read)


@pytest.mark.parametrize("length", range(PREFIX_BYTES))
def test_too_little_to_know_the_length(length: int) -> None:
    assert frame_length(encode(Cancel(1))[:length]) is None


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 3 * 2**30, 2**32 - 1])
def test_a_frame_that_claims_too_much_is_not_waited_for(size: int) -> None:
    prefix = struct.pack(">I", size)
    with pytest.raises(FrameError, match="limit"):
        frame_length(prefix)
    with pytest.raises(FrameError, match="limit"):
        read_frame(io.BytesIO(prefix).read)


def test_a_frame_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 150)
    encode(TextDelta(1, "x" * 30, 1))
    with pytest.raises(FrameError, match="limit"):
        encode(TextDelta(1, "x" * 150, 1))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"\xff\xfe\xfd",
        b"null",
        b"5",
        b'"Cancel"',
        b"[]",
        b'["kind"]',
        b"{}",
        b'{"kind": null}',
        b'{"kind": []}',
        b'{"kind": "Nothing"}',
        b'{"kind": "Message", "role": "user", "content": "Hi"}',
        b'{"kind": "Cancel"}',
        b'{"kind": "Cancel", "request": 1, "extra": 2}',
        b'{"kind": "Finished", "request": 1, "reason": "stop", "stats": 5}',
        b'{"kind": "Finished", "request": 1, "reason": "stop", "stats": {"no": 1}}',
        b'{"kind": "Generate", "request": 1, "asked": {"messages": [{"role": "user"}]}}',
        b'{"kind": "Generate", "request": 1, "asked": {"sampling": []}}',
        b'{"kind": "Generate", "request": 1, "asked": {"limits": {"max_tokens": 0, "stop": []}}}',
        b'{"kind": "Cancel", "request": ' + b"1" * 5000 + b"}",
        b'{"kind": "TextDelta", "request": 1, "text": 5, "tokens": 1}',
        b'{"kind": "TextDelta", "request": true, "text": "", "tokens": 1}',
        b'{"kind": "TextDelta", "request": 1, "text": {"kind": "Cancel"}, "tokens": 1}',
        b'{"kind": "TextDeltas"}',
        b'{"kind":"TextDeltas","rows":[],"more":1}',
        b'{"kind":"TextDeltas","rows":[[1,"a",1,0,null]]',
        b'{"kind":"TextDeltas","rows":' + b"[" * 100_000,
        b'{"kind":"TextDeltas","rows":5}',
        b'{"kind":"TextDeltas","rows":[[1, "a", 1]]}',
        b'{"kind":"TextDeltas","rows":[[true, "a", 1, 0, null, []]]}',
        b'{"kind":"TextDeltas","rows":[[1, 5, 1, 0, null, []]]}',
        b'{"kind":"TextDeltas","rows":[[1, "a", 1, false, null, []]]}',
        b'{"kind":"TextDeltas","rows":[[1, "a", 1, 0, null, [true]]]}',
        b'{"kind":"TextDeltas","rows":[[1, "a", 1, 0, null, "a"]]}',
        b'{"kind": "Generate", "request": 1, "asked": {"prompt": "", "prompt_tokens": [1.5]}}',
        b'{"kind": "Generate", "request": 1, "asked": {"prompt": "", "prompt_tokens": [null]}}',
        b'{"kind":"TextDeltas","rows":[[1, "a", 1, 0, [["shell", "a", ""]], []]]}',
        b'{"kind":"TextDeltas","rows":[[1, "a", 1, 0, [[[], "a", ""]], []]]}',
        b'{"kind":"TextDeltas","rows":[[1, "a", 1, 0, [["text", 5, ""]], []]]}',
        b'{"kind": "LoadProgress", "fraction": "0.5"}',
        b'{"kind": "Counted", "request": 1, "each": [1, null], "total": 2}',
        b'{"kind": "Counted", "request": 1, "each": "12", "total": 2}',
        b"[" * 100_000,
        pickle.dumps(Cancel(1)),
    ],
    ids=lambda body: repr(body[:40]),
)
def test_garbage_is_no_frame(body: bytes) -> None:
    with pytest.raises(FrameError):
        decode(body)


def test_numbers_out_of_bounds_do_not_come_in() -> None:
    body = json.loads(encode(Generate(1, AnswerRequest()))[PREFIX_BYTES:])
    body["asked"]["sampling"]["top_p"] = 5
    with pytest.raises(FrameError, match="top_p"):
        decode(json.dumps(body).encode())


def test_pickle_is_never_used() -> None:
    """Nothing that runs code on reading is imported anywhere in the package."""
    for path in Path(messages.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            module = node.module if isinstance(node, ast.ImportFrom) else None
            assert not {"pickle", "marshal", "shelve", "dill"} & {*names, module}, path


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.__name__)
def test_errors_cross_the_pipe(kind: type[LlmrunError]) -> None:
    frame = decode(encode(Failed.of(kind("what", why="why", hint="hint"), 5))[PREFIX_BYTES:])
    assert isinstance(frame, Failed)
    assert frame.request == 5
    error = frame.error()
    assert (type(error), error.what, error.why, error.hint) == (kind, "what", "why", "hint")


def test_an_unknown_code_is_an_internal_error() -> None:
    assert type(Failed(1, "no-such-code", "what").error()) is LlmrunError


def test_error_keeps_its_class() -> None:
    assert isinstance(Failed.of(BadLogitsError("x"), 1).error(), BadLogitsError)
    assert Failed.of(ContextOverflowError("x"), 1).code == "context-overflow"


def test_rates() -> None:
    stats = Stats(prompt_tokens=12, reused_tokens=2, prefill_seconds=0.5, completion_tokens=5, decode_seconds=2.0)
    assert (stats.prefill_rate, stats.decode_rate) == (20.0, 2.0)
    assert (Stats().prefill_rate, Stats().decode_rate) == (0.0, 0.0)
    assert Stats(completion_tokens=1, decode_seconds=1.0).decode_rate == 0.0


def test_messages_are_named_tuples_but_for_what_is_changed_by_replace() -> None:
    """Front and engine make all these classes at every start."""
    kinds = {*get_args(Command), *get_args(Event)}
    assert {kind.__name__ for kind in kinds if is_dataclass(kind)} == {"Load"}
