"""Answers as an engine sends them: texts cut into deltas with their parts, and a whole text as its parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmrun.protocol.answer import AnswerSplitter, ResponseAccumulator
from llmrun.protocol.messages import AnswerPart, Event, Finished, Started, Stats, TextDelta, TokenLogprob, Tool
from llmrun.protocol.toolcalls import HERMES, CallSyntax

STATS = Stats(
    prompt_tokens=31, reused_tokens=0, prefill_seconds=31 / 412, completion_tokens=128,
    decode_seconds=127 / 131.2, ttft_seconds=0.21, itl_p50_seconds=0.0075, itl_p95_seconds=0.0081,
    context_used=159, n_ctx=8192, seed=1234,
)  # fmt: skip
SUMMARY = (
    "prefill 31 tokens 412 tokens/s · decode 128 tokens 131.2 tokens/s · TTFT 0.21 s · "
    "inter-token p50 7.5 ms p95 8.1 ms · ctx 159/8,192 · seed 1234"
)
"""The figures of STATS, as an answer ends with them."""


def splitter_of(started: Started, tools: Sequence[Tool] = (), syntax: CallSyntax = HERMES) -> AnswerSplitter:
    """The splitter that the engine makes for an answer that starts so."""
    tags, inside = started.thinking_tags, started.thinking
    return AnswerSplitter(tags, inside=inside, syntax=syntax if started.tool_syntax else None, tools=tools)


def split(
    started: Started, text: str, tools: Sequence[Tool] = (), reason: str = "stop", syntax: CallSyntax = HERMES
) -> ResponseAccumulator:
    """A whole answer."""
    return accumulated([started, *sent(started, [text], tools, reason, syntax)])


def accumulated(events: Iterable[Event]) -> ResponseAccumulator:
    """All events in one answer."""
    received = ResponseAccumulator()
    for event in events:
        received.take(event)
    return received


def sent(
    started: Started,
    texts: Iterable[str],
    tools: Sequence[Tool] = (),
    reason: str = "stop",
    syntax: CallSyntax = HERMES,
) -> list[Event]:
    """What follows Started: the texts, one token each, and the end."""
    splitter = splitter_of(started, tools, syntax)
    deltas = [TextDelta(started.request, text, 1, parts=splitter.feed(text)) for text in texts]
    rest = splitter.flush(is_cut_off=reason != "stop")
    last = [TextDelta(started.request, "", 0, parts=rest)] if rest else []
    return [*deltas, *last, Finished(started.request, reason, Stats())]


def joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Parts, neighbours of one kind as one."""
    found: list[AnswerPart] = []
    for part in parts:
        if found and part.text and found[-1].kind == part.kind:
            found[-1] = AnswerPart(part.kind, found[-1].text + part.text)
        else:
            found.append(part)
    return found


# ---- single events of request 1


def started(prompt_tokens: int, reused_tokens: int) -> Started:
    return Started(1, prompt_tokens, reused_tokens, 0)


def text(said: str, logprobs: tuple[TokenLogprob, ...] = ()) -> TextDelta:
    return TextDelta(1, said, 1, logprobs)


def reasoning(said: str, tokens: int = 1) -> TextDelta:
    return TextDelta(1, said, tokens, parts=(AnswerPart("reasoning", said),))


def call(call_id: str, name: str) -> TextDelta:
    """The beginning of a call."""
    return TextDelta(1, name, 1, parts=(AnswerPart("call", name, call_id),))


def arguments(json: str, *, ends: bool = False) -> TextDelta:
    """A piece of a call's arguments, the last one if the call ends with it."""
    return TextDelta(1, json, 1, parts=(AnswerPart("arguments", json), *((AnswerPart("call_end"),) if ends else ())))


def finished(reason: str, stats: Stats | None = None, stop: str = "") -> Finished:
    return Finished(1, reason, stats or Stats(), stop)
