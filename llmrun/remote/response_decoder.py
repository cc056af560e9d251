"""A remote answer as the engine's events: bytes of a stream in, events out. Pure.

Knows server-sent events, OpenAI's chunks, and the counts and times measured on this side; must not know connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise, starmap
from typing import Any

from llmrun.errors import LlmrunError, NetworkError, UnavailableError, brief
from llmrun.protocol.answer import AnswerSplitter
from llmrun.protocol.messages import AnswerPart, Event, Finished, Generate, Started, Stats, TextDelta, TokenLogprob
from llmrun.protocol.toolcalls import TOOL_NAME, TOOL_NAME_RULE
from llmrun.remote.answer_shapes import REASONING_TAGS, EndKind, RemoteCalls, end_kind, text_of, texts_of
from llmrun.remote.server import Server
from llmrun.remote.transport import LONGEST_BODY, endless, error_in, not_compatible, read_json, refusal, require_short
from llmrun.statistics import quantile

_TAGS = ("<think>", "</think>")  # around reasoning, if it is shown as text
_DONE = b"[DONE]"
_LARGEST_COUNT = 2**40
_MOST_CALLS = 1000
_BYTES_A_TOKEN = 4


class EventReader:
    """The data of server-sent events, from the bytes of a stream."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._held, self._data = bytearray(), bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of events completed by this piece.

        Raises:
            NetworkError: one is too long.
        """
        self._held += piece
        require_short(self._server, self._held)
        if b"\n" not in piece:
            return
        *lines, self._held = self._held.split(b"\n")
        for line in lines:
            yield from self._line(line.rstrip(b"\r"))

    def flush(self) -> Iterator[bytes]:
        """Yield the data of the last event, whose final blank line some servers leave out."""
        yield from self._line(self._held)
        yield from self._line(b"")

    def _line(self, line: bytes | bytearray) -> Iterator[bytes]:
        if line.startswith(b"data:"):
            self._data += (b"\n" if self._data else b"") + line[5:].removeprefix(b" ")
            require_short(self._server, self._data)
        elif not line and self._data:
            data, self._data = bytes(self._data), bytearray()
            yield data


class AnswerDecoder:
    """The decoder of one answer.

    Args:
        server: named in errors.
        command: the request.
        model: the server's name for it.
        clock: seconds, monotonic.

    Attributes:
        is_done: the server has announced the end.
        reasoning_name: the place of its reasoning, see answer_shapes.texts_of(), or REASONING_TAGS; "" without one.
        has_usage: the server counted tokens; otherwise pieces of text are counted, which are tokens with most servers.
        is_cut: the server ignores the limit of tokens: the rest of its answer is dropped.
    """

    def __init__(
        self, server: Server, command: Generate, model: str = "", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._server, self._command, self._model, self._clock = server, command, model, clock
        self._began = command.asked.arrived or clock()
        self._times: list[float] = []
        self._reason, self._detail, self._refusal = "", "", ""
        self._usage: dict[str, Any] = {}
        self._calls = RemoteCalls()
        self._is_reasoning = self._has_answered = False
        self._tags = _TAGS if command.asked.prompt is None else ()
        self._splitter = AnswerSplitter(self._tags)  # some servers leave reasoning in the content
        self.is_done = self.has_usage = self.is_cut = False
        self.reasoning_name = ""
        self._n_bytes = 0  # of text, reasoning and calls

    @property
    def progress(self) -> int:
        """A number that grows with the answer, but not with comments and empty events."""
        return len(self._times) + bool(self._reason) + self.has_usage

    @property
    def note(self) -> str:
        """Message about an ignored limit of tokens, or an unknown reason of the end, to follow the server's name."""
        limit = self._command.asked.limits.max_tokens
        counted = _count(self._usage, "completion_tokens")
        if self.is_cut:
            return f"ignores max_tokens {limit:,}: its answer was cut here"
        if limit is not None and counted > limit:
            return f"ignores max_tokens {limit:,}: its answer has {counted:,} tokens"
        return f"ended the answer with the unknown reason {brief(self._reason)}" if self._end is EndKind.UNKNOWN else ""

    @property
    def _end(self) -> EndKind:
        return end_kind(self._reason) if self._reason else EndKind.WHOLE

    def started(self) -> Started:
        """Return the first event. A server reports the length of the prompt at the end."""
        return Started(self._command.request, 0, 0, self._command.asked.sampling.seed or 0, False, self._tags)

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events of a server-sent event.

        Raises:
            LlmrunError: it reports an error.
            NetworkError: it can't be read.
        """
        if data.strip() == _DONE:
            self.is_done = True
            return
        yield from self.take(read_json(self._server, data))

    def take(self, chunk: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a chunk, or of a whole answer that is not streamed; raises as feed()."""
        if (error := error_in(chunk)) is not None:
            raise refusal(self._server, _status(error), error, self._model)
        if isinstance(chunk.get("usage"), dict):
            self._usage, self.has_usage = chunk["usage"], True
        choices = chunk.get("choices")
        if choices is not None and not isinstance(choices, list):
            raise not_compatible(self._server, "its answer has another shape")
        for choice in choices or ():
            if isinstance(choice, dict) and choice.get("index") in (0, None) and not self.is_cut:
                yield from self._choice(choice)

    def ended(self) -> Iterator[Event]:
        """Yield the last events, at the end of the stream.

        Raises:
            UnavailableError: the answer broke off.
            LlmrunError: the server did not let the model end it, or the model refused to follow a schema.
        """
        if not self._reason and not (self.is_done and self._times):
            raise UnavailableError(
                f"the answer of {self._server.host} broke off",
                why="it ended the connection in the middle" if self._times else "it ended without an answer",
                hint="try again",
            )
        end = self._end
        calls = self._call_parts() if end is not EndKind.FAILED else ()
        if rest := (*self._splitter.flush(is_cut_off=end is EndKind.LENGTH), *calls):
            yield TextDelta(self._command.request, "", 0, parts=rest)
        host, why = self._server.host, f"it ended with the reason {brief(self._reason)}"
        if end is EndKind.WITHHELD:
            raise LlmrunError(f"{host} withheld the rest of the answer", why="its content filter said so")
        if end is EndKind.FAILED:
            raise UnavailableError(f"{host} did not complete the answer", why=why, hint="try again")
        if self._refusal and self._command.asked.grammar is not None:
            raise LlmrunError(f"{host} refused to answer", why=" ".join(self._refusal.split()))
        yield self.finished("length" if end is EndKind.LENGTH else "stop")

    def finished(self, reason: str) -> Finished:
        """Return the last event, with the statistics up to here."""
        return Finished(self._command.request, reason, self._stats(), self._detail)

    # ---- chunks ----------------------------------------------------------------------------------

    def _choice(self, choice: dict[str, Any]) -> Iterator[Event]:
        delta = next((choice[key] for key in ("delta", "message") if choice.get(key) is not None), choice)
        if not isinstance(delta, dict):
            raise not_compatible(self._server, "its answer has another shape")
        if (error := error_in({"error": choice.get("error")})) is not None:
            raise refusal(self._server, _status(error), error, self._model)
        found = texts_of(delta)
        content = found.text + found.refusal
        self._refusal += found.refusal
        text = ("" if self._has_answered else found.reasoning) + content
        parts = tuple(self._parts(found.reasoning, content, found.reasoning_name))
        n_pieces = len(self._times)
        for _ in self._calls.add(delta.get("tool_calls")):
            self._times.append(self._clock())
        logprobs = _logprobs(choice.get("logprobs"))
        if text or logprobs:
            self._times.append(self._clock())
        self._measure(text)
        if self.is_cut:
            self._reason = "length"
            return
        if text:
            tokens = max(len(logprobs), len(self._times) - n_pieces)
            yield TextDelta(self._command.request, text, tokens, logprobs, parts=parts)
        self._reason = text_of(choice.get("finish_reason")) or self._reason
        if self._reason == "stop":
            self._detail = text_of(choice.get("stop_reason")) or self._detail  # vLLM's: the stop string

    def _measure(self, text: str) -> None:
        """Count the received text, and cut an answer that is longer than its limit.

        A piece is a token with most servers, but some send single characters: a token counts as at least four bytes.

        Raises:
            NetworkError: the answer has no end.
        """
        self._n_bytes += len(text.encode())
        calls = sum(len(call.arguments) for call in self._calls.all)
        if self._n_bytes + calls > LONGEST_BODY or len(self._calls.all) > _MOST_CALLS:
            raise endless(self._server)
        limit = self._command.asked.limits.max_tokens
        if limit is not None and min(len(self._times), (self._n_bytes + calls) // _BYTES_A_TOKEN) > limit:
            self.is_cut = True

    def _parts(self, reasoning: str, content: str, name: str) -> Iterator[AnswerPart]:
        """Yield the parts of a chunk; reasoning after the beginning of the answer is dropped."""
        if reasoning and not self._has_answered:
            self._is_reasoning, self.reasoning_name = True, name
            yield AnswerPart("reasoning", reasoning)
        if self._is_reasoning and (content := content.lstrip()):
            self._is_reasoning, self._splitter = False, AnswerSplitter(())
            yield AnswerPart("reasoning_end")
        if content:
            self._has_answered = True
            for part in self._splitter.feed(content):
                if part.kind == "reasoning":
                    self.reasoning_name = REASONING_TAGS
                yield part

    def _call_parts(self) -> Iterator[AnswerPart]:
        """Yield the tool calls; the last one of an answer that was cut off may be incomplete.

        Raises:
            NetworkError: a call can't be read.
        """
        taken: set[str] = set()
        for call in self._calls.all if self._command.asked.tools else ():
            arguments = call.arguments.strip() or "{}"
            yield AnswerPart("call", call.name, "" if call.id in taken else call.id)
            taken.add(call.id)
            yield AnswerPart("arguments", arguments)
            try:
                self._check_call(call.name, arguments)
            except NetworkError:
                if self._end is not EndKind.LENGTH:
                    raise
                return
            yield AnswerPart("call_end")

    def _check_call(self, name: str, arguments: str) -> None:
        if not TOOL_NAME.fullmatch(name):
            raise not_compatible(self._server, f"it calls a tool with an invalid name, which {TOOL_NAME_RULE}")
        read_json(self._server, arguments.encode())

    # ---- statistics ------------------------------------------------------------------------------

    def _stats(self) -> Stats:
        details = self._usage.get("prompt_tokens_details")
        prompt_tokens = _count(self._usage, "prompt_tokens")
        completion_tokens = _count(self._usage, "completion_tokens") if self.has_usage else len(self._times)
        gaps = sorted(after - before for before, after in pairwise(self._times))
        return Stats(
            prompt_tokens=prompt_tokens,
            reused_tokens=min(_count(details, "cached_tokens"), prompt_tokens),
            completion_tokens=completion_tokens,
            decode_seconds=self._times[-1] - self._times[0] if self._times else 0.0,
            ttft_seconds=self._times[0] - self._began if self._times else 0.0,
            itl_p50_seconds=quantile(gaps, 0.5) if gaps else 0.0,
            itl_p95_seconds=quantile(gaps, 0.95) if gaps else 0.0,
            context_used=prompt_tokens + completion_tokens if self.has_usage else 0,
            seed=self._command.asked.sampling.seed or 0,
        )


def _count(counts: Any, name: str) -> int:
    value = counts.get(name) if isinstance(counts, dict) else None
    return value if isinstance(value, int) and 0 <= value <= _LARGEST_COUNT else 0


def _status(error: dict[str, Any]) -> int:
    """Return the HTTP status for an error in a stream."""
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code <= 599 else 500


def _logprobs(value: Any) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities in the shape of chat or text completions; none in another shape."""
    if not isinstance(value, dict):
        return ()
    try:
        if "content" in value:
            return tuple(
                TokenLogprob(*_token(entry), tuple(map(_token, entry.get("top_logprobs") or ())))
                for entry in value["content"] or ()
            )
        rows = zip(value["tokens"], value["token_logprobs"], value["top_logprobs"], strict=True)
        return tuple(
            TokenLogprob(*_old_token(text, logprob), tuple(starmap(_old_token, (top or {}).items())))
            for text, logprob, top in rows
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return ()


def _token(entry: Any) -> tuple[str, tuple[int, ...], float]:
    text = text_of(entry["token"])
    data = entry.get("bytes")
    return text, tuple(map(int, data if data is not None else text.encode())), float(entry["logprob"])


def _old_token(value: Any, logprob: Any) -> tuple[str, tuple[int, ...], float]:
    text = text_of(value)
    return text, tuple(text.encode()), float(logprob)
