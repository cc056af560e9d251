"""Calls of the Python API with wrong arguments, and what their errors name: the argument and its value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import llmrun
from llmrun import Limits, Message, Model, SamplingParams
from llmrun.model.embeddings import EmbedOptions
from llmrun.protocol.jobs.beams import BeamSettings
from llmrun.protocol.messages import AnswerRequest


class Misuse(NamedTuple):
    """A wrong call; the words stand in its error."""

    words: tuple[str, ...]
    call: Callable[[Model], Any]


def _chat(argument: str, value: Any) -> Misuse:
    return Misuse((argument, repr(value)), lambda model: model.chat("hi", **{argument: value}))


def _load(argument: str, value: Any) -> Misuse:
    return Misuse((argument, repr(value)), lambda _: llmrun.load("smollm2", pull=False, **{argument: value}))


MISUSES = (
    _chat("temperature", "hot"),
    _chat("temperature", None),
    _chat("temperature", True),
    _chat("temperature", [0.5]),
    _chat("temperature", -1),
    _chat("temperature", math.nan),
    _chat("temperature", 1j),
    Misuse(("temperature", "1000"), lambda model: model.chat("hi", temperature=10**400)),
    Misuse(("seed", "int"), lambda model: model.chat("hi", seed=10**5000)),
    Misuse(("logit_bias", "1000"), lambda model: model.chat("hi", logit_bias={1: 10**400})),
    _chat("top_k", 2.5),
    _chat("top_p", "0.9"),
    _chat("seed", "random"),
    _chat("seed", -1),
    _chat("mirostat", 3),
    _chat("dry_breakers", 5),
    _chat("logit_bias", ((5, "a"),)),
    _chat("logit_bias", 7),
    Misuse(("logit_bias", "-1", "0.5"), lambda model: model.chat("hi", logit_bias={-1: 0.5})),
    _chat("order", "temperature"),
    Misuse(("order", "'heat'"), lambda model: model.chat("hi", order=["heat"])),
    _chat("watermark", 5),
    _chat("watermark_key", 5),
    _chat("max_tokens", 2.5),
    _chat("max_tokens", "5"),
    _chat("max_tokens", 0),
    _chat("max_tokens", True),
    _chat("stop", 5),
    _chat("stop", (5,)),
    _chat("stop", ("",)),
    _chat("ban", {"a": 1}),
    _chat("ignores_end", "no"),
    _chat("thinking", "yes"),
    _chat("thinking_tokens", -1),
    _chat("thinking_tokens", 2.5),
    _chat("stops_repeats", 1),
    _chat("remember", -1),
    _chat("logprobs", 1000),
    _chat("logprobs", "all"),
    _chat("template", 5),
    _chat("grammar", "root ::= 'x'"),
    _chat("schema", 5),
    _chat("schema", {"a": {5}}),
    _chat("sampling", {"temperature": 0}),
    _chat("limits", 5),
    Misuse(("tempratur", "temperature"), lambda model: model.chat("hi", tempratur=1)),
    Misuse(("messages", "5"), lambda model: model.chat(5)),
    Misuse(("messages", "b'hi'"), lambda model: model.chat(b"hi")),
    Misuse(("message", "'hi'"), lambda model: model.chat(["hi"])),
    Misuse(("message", "{'role': 'user'}"), lambda model: model.chat({"role": "user"})),
    Misuse(("content", "None"), lambda model: model.chat({"role": "user", "content": None})),
    Misuse(("role", "'robot'"), lambda model: model.chat({"role": "robot", "content": "hi"})),
    Misuse(("content", "5"), lambda model: model.chat(Message("user", 5))),
    Misuse(("messages", "empty"), lambda model: model.chat([])),
    Misuse(("prompt", "5"), lambda model: model.generate(5)),
    Misuse(("prompt", "None"), lambda model: model.generate(None)),
    Misuse(("top_k", "'x'"), lambda model: model.generate("hi", top_k="x")),
    Misuse(("temperature", "'hot'"), lambda _: SamplingParams(temperature="hot")),
    Misuse(("temperature", "'hot'"), lambda model: model.sampling({"temperature": "hot"})),
    Misuse(("flags", "5"), lambda model: model.sampling(5)),
    Misuse(("stop", "'x'"), lambda _: Limits(stop="x")),
    Misuse(("thinking_tokens", "2.5"), lambda model: model.answer(AnswerRequest(prompt="hi", thinking_tokens=2.5))),
    Misuse(("asked", "'hi'"), lambda model: model.answer("hi")),
    Misuse(("answer()", "no request"), lambda model: model.answer()),
    Misuse(("messages", "5"), lambda model: model.count(5)),
    Misuse(("template", "5"), lambda model: model.count("hi", template=5)),
    Misuse(("tools", "5"), lambda model: model.count("hi", tools=5)),
    Misuse(("text", "5"), lambda model: model.tokenize(5)),
    Misuse(("special", "'yes'"), lambda model: model.tokenize("hi", special="yes")),
    Misuse(("texts", "5"), lambda model: model.embed(5)),
    Misuse(("text 2", "5"), lambda model: model.embed(["a", 5])),
    Misuse(("role", "'question'"), lambda model: model.embed("a", role="question")),
    Misuse(("rol", "role"), lambda model: model.embed("a", rol="query")),
    Misuse(("dimensions", "'8'"), lambda model: model.embed("a", dimensions="8")),
    Misuse(("pooling", "'max'"), lambda model: model.embed("a", pooling="max")),
    Misuse(("truncate", "1"), lambda _: EmbedOptions(truncate=1)),
    Misuse(("options", "{}"), lambda model: model.embed_each(["a"], {})),
    Misuse(("query", "5"), lambda model: model.rerank(5, ["a"])),
    Misuse(("documents", "'a'"), lambda model: model.rerank("q", "a")),
    Misuse(("text 1", "5"), lambda model: model.rerank("q", [5])),
    Misuse(("last", "0"), lambda model: model.explain(0)),
    Misuse(("candidates", "2.5"), lambda model: model.explain(1, candidates=2.5)),
    Misuse(("search", "'hi'"), lambda model: model.beams("hi")),
    Misuse(("beams", "2.5"), lambda _: BeamSettings(beams=2.5)),
    Misuse(("beams", "1"), lambda _: BeamSettings(beams=1)),
    Misuse(("length_penalty", "'x'"), lambda _: BeamSettings(length_penalty="x")),
    Misuse(("prompt_only", "1"), lambda model: model.save_state(prompt_only=1)),
    Misuse(("text", "5"), lambda _: llmrun.read_grammar(5)),
    Misuse(("text", "{}"), lambda _: llmrun.read_json_schema({})),
    Misuse(("name", "5"), lambda _: llmrun.load(5)),
    _load("n_ctx", "512"),
    _load("n_ctx", 5),
    _load("n_ctx", 512.5),
    Misuse(("n_ctx", "1000"), lambda _: llmrun.load("smollm2", n_ctx=10**400)),
    _load("threads", 0),
    _load("threads", "all"),
    _load("gpu_layers", -5),
    _load("parallel", None),
    _load("parallel", 0),
    _load("speculate", 2.5),
    Misuse(("speculate", "always"), lambda _: llmrun.load("smollm2", speculate="always")),
    _load("draft", 5),
    _load("lora", "adapter.gguf"),
    _load("on_progress", 5),
    Misuse(("pull", "'no'"), lambda _: llmrun.load("smollm2", pull="no")),
)
