"""Wrong arguments of the Python API: refused before anything is sent, by name and value; nothing dies of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import fake_client
from support.gguf_writer import tiny_model, write

import llmrun
from llmrun import Limits, Message, Model, SamplingParams, errors
from llmrun.errors import LlmrunError, UsageError
from llmrun.model import loading
from llmrun.model.embeddings import EmbedOptions
from llmrun.model.loading import prepare
from llmrun.models.registry import ModelSpec
from llmrun.protocol.arguments import FLAGS, KINDS, in_python
from llmrun.protocol.jobs.beams import BeamSettings
from llmrun.protocol.messages import AnswerRequest

CHAT: dict[str, tuple[Any, ...]] = {
    "temperature": ("hot", None, True, [0.5], -1, math.nan, 1j),
    "top_k": (2.5,),
    "top_p": ("0.9",),
    "seed": ("random", -1),
    "mirostat": (3,),
    "dry_breakers": (5,),
    "logit_bias": (((5, "a"),), 7),
    "order": ("temperature",),
    "watermark": (5,),
    "watermark_key": (5,),
    "max_tokens": (2.5, "5", 0, True),
    "stop": (5, (5,), ("",)),
    "ban": ({"a": 1},),
    "ignores_end": ("no",),
    "thinking": ("yes",),
    "thinking_tokens": (-1, 2.5),
    "stops_repeats": (1,),
    "remember": (-1,),
    "logprobs": (1000, "all"),
    "template": (5,),
    "grammar": ("root ::= 'x'",),
    "schema": (5, {"a": {5}}),
    "sampling": ({"temperature": 0},),
    "limits": (5,),
}
"""Argument of chat() -> wrong values."""
LOAD: dict[str, tuple[Any, ...]] = {
    "n_ctx": ("512", 5, 512.5),
    "threads": (0, "all"),
    "gpu_layers": (-5,),
    "parallel": (None, 0),
    "speculate": (2.5,),
    "draft": (5,),
    "lora": ("adapter.gguf",),
    "on_progress": (5,),
}
"""The same of load()."""
CALLS: tuple[tuple[str, Callable[[Model], Any]], ...] = (
    ("temperature 1000", lambda model: model.chat("hi", temperature=10**400)),
    ("seed int", lambda model: model.chat("hi", seed=10**5000)),
    ("logit_bias 1000", lambda model: model.chat("hi", logit_bias={1: 10**400})),
    ("logit_bias -1 0.5", lambda model: model.chat("hi", logit_bias={-1: 0.5})),
    ("order 'heat'", lambda model: model.chat("hi", order=["heat"])),
    ("tempratur temperature", lambda model: model.chat("hi", tempratur=1)),
    ("messages 5", lambda model: model.chat(5)),
    ("messages b'hi'", lambda model: model.chat(b"hi")),
    ("message 'hi'", lambda model: model.chat(["hi"])),
    ("message {'role':", lambda model: model.chat({"role": "user"})),
    ("content None", lambda model: model.chat({"role": "user", "content": None})),
    ("role 'robot'", lambda model: model.chat({"role": "robot", "content": "hi"})),
    ("content 5", lambda model: model.chat(Message("user", 5))),
    ("messages empty", lambda model: model.chat([])),
    ("prompt 5", lambda model: model.generate(5)),
    ("prompt None", lambda model: model.generate(None)),
    ("top_k 'x'", lambda model: model.generate("hi", top_k="x")),
    ("temperature 'hot'", lambda _: SamplingParams(temperature="hot")),
    ("temperature 'hot'", lambda model: model.sampling({"temperature": "hot"})),
    ("flags 5", lambda model: model.sampling(5)),
    ("stop 'x'", lambda _: Limits(stop="x")),
    ("thinking_tokens 2.5", lambda model: model.answer(AnswerRequest(prompt="hi", thinking_tokens=2.5))),
    ("asked 'hi'", lambda model: model.answer("hi")),
    ("answer() request", lambda model: model.answer()),
    ("messages 5", lambda model: model.count(5)),
    ("template 5", lambda model: model.count("hi", template=5)),
    ("tools 5", lambda model: model.count("hi", tools=5)),
    ("text 5", lambda model: model.tokenize(5)),
    ("special 'yes'", lambda model: model.tokenize("hi", special="yes")),
    ("texts 5", lambda model: model.embed(5)),
    ("text 2 5", lambda model: model.embed(["a", 5])),
    ("role 'question'", lambda model: model.embed("a", role="question")),
    ("rol role", lambda model: model.embed("a", rol="query")),
    ("dimensions '8'", lambda model: model.embed("a", dimensions="8")),
    ("pooling 'max'", lambda model: model.embed("a", pooling="max")),
    ("truncate 1", lambda _: EmbedOptions(truncate=1)),
    ("options {}", lambda model: model.embed_each(["a"], {})),
    ("query 5", lambda model: model.rerank(5, ["a"])),
    ("documents 'a'", lambda model: model.rerank("q", "a")),
    ("text 1 5", lambda model: model.rerank("q", [5])),
    ("last 0", lambda model: model.explain(0)),
    ("candidates 2.5", lambda model: model.explain(1, candidates=2.5)),
    ("search 'hi'", lambda model: model.beams("hi")),
    ("beams 2.5", lambda _: BeamSettings(beams=2.5)),
    ("beams 1", lambda _: BeamSettings(beams=1)),
    ("length_penalty 'x'", lambda _: BeamSettings(length_penalty="x")),
    ("prompt_only 1", lambda model: model.save_state(prompt_only=1)),
    ("text 5", lambda _: llmrun.read_grammar(5)),
    ("text {}", lambda _: llmrun.read_json_schema({})),
    ("name 5", lambda _: llmrun.load(5)),
    ("n_ctx 1000", lambda _: llmrun.load("smollm2", n_ctx=10**400)),
    ("speculate always", lambda _: llmrun.load("smollm2", speculate="always")),
    ("pull 'no'", lambda _: llmrun.load("smollm2", pull="no")),
)
"""Words of the error, and a wrong call."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llmrun.Model]:
    """One model for all: what one call did wrong must not matter to the next, nor to the engine."""
    path = write(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_model())
    with prepare(ModelSpec("tiny", path=path), path) as model, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(llmrun.__file__).parents[1]))
        model.start(fake_client())
        engine = model.chat("hi") and model.last_answer()[0].pid
        yield model
        assert model.chat("hi").text == "Hello"
        assert model.last_answer()[0].pid == engine, "and it is the same engine"


def refused(call: Callable[[Model], Any], model: Model) -> str:
    _ = llmrun.load  # as every program does; from then on, messages name arguments
    with pytest.raises(UsageError) as caught:
        call(model)
    said = f"{caught.value} {caught.value.hint}"
    assert "--" not in said
    return said


@pytest.mark.parametrize(("argument", "value"), [(name, value) for name in CHAT for value in CHAT[name]])
def test_a_wrong_argument_of_chat_is_named_with_its_value(model: Model, argument: str, value: Any) -> None:
    said = refused(lambda model: model.chat("hi", **{argument: value}), model)
    assert argument in said
    assert repr(value) in said


@pytest.mark.parametrize(("argument", "value"), [(name, value) for name in LOAD for value in LOAD[name]])
def test_a_wrong_argument_of_load_is_named_with_its_value(model: Model, argument: str, value: Any) -> None:
    said = refused(lambda _: llmrun.load("smollm2", pull=False, **{argument: value}), model)
    assert argument in said
    assert repr(value) in said


@pytest.mark.parametrize(("words", "call"), CALLS)
def test_a_wrong_call_is_refused(model: Model, words: str, call: Callable[[Model], Any]) -> None:
    said = refused(call, model)
    assert all(word in said for word in words.split()), said


def test_every_argument_of_every_public_function_has_a_kind() -> None:
    methods = [value for name, value in vars(llmrun.Model).items() if inspect.isfunction(value) and name[0] != "_"]
    unchecked = {
        function.__name__: name
        for function in (loading.load, *methods)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", "takes", "start") and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        if not hasattr(function, "__wrapped__") or name not in KINDS
    }
    # What a Python program does not call: it asks load() for a model that is started.
    assert unchecked.keys() == {"start", "takes"}


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("invalid --ctx 5", "invalid n_ctx 5"),
        ("ask for a larger one with --ctx", "ask for a larger one with n_ctx"),
        ("llmrun run 'a b' --ctx 512, the largest that fits", "load('a b', n_ctx=512), the largest that fits"),
        ("llmrun run MODEL --lora '/a b.gguf'", "load('MODEL', lora=['/a b.gguf'])"),
        ("use --raw, --template chatml or --template FILE", "use generate(), template=chatml or template=FILE"),
        ("llmrun run x --verbose on; see `llmrun list --all`", "llmrun run x --verbose on; see `llmrun list --all`"),
    ],
)
def test_messages_name_the_argument_of_whoever_called(flags: str, arguments: str) -> None:
    assert UsageError(flags).what == flags, "the commands'"
    assert in_python(flags) == arguments
    _ = llmrun.load
    assert UsageError("x", why=flags, hint=flags).why == arguments
    assert str(LlmrunError(flags)) == arguments


def test_the_arguments_that_messages_name_exist() -> None:
    known = {*KINDS, *llmrun.SamplingParams.__dataclass_fields__, *vars(llmrun.Model)}
    known |= {*llmrun.Message.__dataclass_fields__, *BeamSettings.__dataclass_fields__}
    assert {name.removesuffix("()") for name in FLAGS.values()} <= known


def test_an_engine_names_flags_and_the_program_hears_of_arguments(model: llmrun.Model) -> None:
    from llmrun.protocol.messages import Failed

    assert errors.rephrase is str
    _ = llmrun.load
    assert Failed(1, "usage", "too long", "", "a larger --ctx").error().hint == "a larger n_ctx"
