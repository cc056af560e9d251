"""The output of `llmrun serve` and `ps`: a start page, one live line on a terminal, a log anywhere else."""

from __future__ import annotations

import io
import json
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from llmrun.errors import LlmrunError
from llmrun.protocol.sizes import readable_size
from llmrun.server.registry import ServedRequest
from llmrun.ui.terminal.activity import StatusLine
from llmrun.ui.terminal.cells import cut
from llmrun.ui.terminal.format import counted, rate, seconds
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, right, show_table

if TYPE_CHECKING:
    from llmrun.protocol.messages import Rewriting
    from llmrun.server.app import AccessRecord
    from llmrun.server.metrics import Figures
    from llmrun.server.registry import RunningServer, ServedDrafts

_REWRITINGS: dict[Rewriting, str] = {
    "system": "system text that it does not take is joined, or sent as the user's",
    "calls": "a tool call without a result, or a result without a call, is sent as text",
    "reasoning": "text between reasoning and a tool call is sent as reasoning",
    "neighbours": "messages of one role in a row are joined",
    "question": "a question after the result of a tool is joined to it",
    "opening": 'the message "..." is put before an answer without a question',
    "tools": "it has no known syntax of tool calls, so tools, calls and results are sent as text",
}
_INDEX = re.compile(r"\[\d+\]")
_MOST_IGNORED = 100  # kinds that are named
_REDRAW_SECONDS = 0.5
_SHOWN_REQUESTS = 8  # by `llmrun ps`
_HEALTH = frozenset({"/health", "/v1/health"})
_POLLED = _HEALTH | {"/", "/metrics"}
_PAGE = "/ui/"
_HALVES = {"00": "█", "01": "▀", "10": "▄", "11": " "}  # light squares of two rows, which dark terminals show as light
_CODE_BORDER = 2  # light squares around a code, of the four that it has
_unwritten = suppress(OSError)  # the disk is full, or the log's reader has ended: the server continues


def show_phone(output: Output, address: str, code: Sequence[str]) -> None:
    """Print the code that opens the page on a phone: rows of "1", dark, and "0". A log does not get it."""
    if not output.stderr_is_terminal:
        output.note('The code for a phone is in the settings of the page, "Use on your phone".')
        return
    from rich.text import Text

    trim = slice(4 - _CODE_BORDER, len(code) - 4 + _CODE_BORDER)
    rows = [row[trim] for row in code[trim]]
    console = output.console(stderr=True)
    if console.width > len(rows):
        for top, bottom in zip(rows[::2], [*rows[1::2], "1" * len(rows)], strict=False):
            squares = "".join(_HALVES[pair[0] + pair[1]] for pair in zip(top, bottom, strict=True))
            console.print(Text(squares, style="bright_white on black"), no_wrap=True)
    output.note("Photograph the code on a phone in the same network, or open this address there:")
    output.note(address, is_command=True)
    output.note(
        "Whoever has it can read your chats and use your models here, until this command ends. The connection is not "
        "encrypted."
    )


class TimedLines(io.TextIOBase):
    """A log: a stream whose lines begin with the local time at which they were begun.

    Args:
        now: returns that time.
    """

    def __init__(self, stream: TextIO, now: Callable[[], str] = lambda: time.strftime("%Y-%m-%d %H:%M:%S")) -> None:
        self._stream, self._now = stream, now
        self._is_at_start = True

    def write(self, text: str) -> int:
        lines = text.split("\n")
        begun = [bool(line) and (number > 0 or self._is_at_start) for number, line in enumerate(lines)]
        timed = (f"{self._now()} {line}" if begins else line for line, begins in zip(lines, begun, strict=True))
        self._stream.write("\n".join(timed))
        self._is_at_start = not lines[-1] and (len(lines) > 1 or self._is_at_start)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


class ServeView:
    """The view of a server on stderr.

    Args:
        log_json: one JSON object for each request, and nothing else.
        clock: monotonic seconds.
        wall_clock: Unix time.
    """

    def __init__(
        self,
        output: Output,
        *,
        log_json: bool,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._output, self._log_json, self._clock, self._wall_clock = output, log_json, clock, wall_clock
        self.is_live = output.stderr_cursor_moves and not log_json
        self._drawn_at = -_REDRAW_SECONDS
        self._status = StatusLine(output)
        self.requests = deque[ServedRequest](maxlen=_SHOWN_REQUESTS)
        self._ignored: set[str] = set()  # kinds of fields that were named

    def begin(self, address: str, models: Sequence[str], *, has_keys: bool) -> None:
        """Print the start page."""
        if self._log_json:
            return
        key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
        request = {"messages": [{"role": "user", "content": "Hi"}]}
        body = json.dumps(request if models else {"model": "MODEL", **request})
        page = "" if has_keys else "chat in a browser; "
        end = " Press Ctrl-C to stop." if self._output.stderr_is_terminal else ""  # in a log nobody presses keys
        self.note(f"Serving at {address} ({page}OpenAI: {address}/v1).{end}")
        self.note("Models: " + (", ".join(models) if models else "all of llmrun list, loaded on demand"))
        with _unwritten:
            self._output.note(f"curl {address}/v1/chat/completions{key} --json '{body}'", is_command=True)

    def loaded(self, name: str, n_ctx: int, parallel: int, load_seconds: float) -> None:
        """Print that a model is in memory."""
        clients = f" for each of {parallel} clients" if parallel > 1 else ""
        self.note(f"{name} is loaded in {seconds(load_seconds)}: context {n_ctx:,} tokens{clients}")

    def failed(self, error: LlmrunError) -> None:
        """Print that a model can't be loaded; the server continues."""
        with _unwritten:
            self._status.clear()
            self._output.error(error)

    def note(self, text: str) -> None:
        """Print a line above the live line."""
        if not self._log_json:
            with _unwritten:
                self._status.clear()
                self._output.note(text)

    def served(self, request: AccessRecord) -> None:
        """Log an answered request, unless it is a poll that succeeded; beside the live line only an error."""
        if "prompt_tokens" in request.facts:
            self.requests.append(ServedRequest.of(request.path, request.facts))
        if _is_poll(request):
            return
        if self._log_json:
            facts = {"time": round(self._wall_clock(), 3), **request._asdict(), **request.facts}
            del facts["facts"]
            facts.pop("difference", None)  # has text of prompts
            with _unwritten:
                self._output.stderr.write(json.dumps(facts) + "\n")
                self._output.stderr.flush()
            return
        self._note_ignored(request)
        for each in request.facts.get("rewritten", ()):
            self.note(f"Chat template of {request.facts['model']}: {_REWRITINGS[each]}")
        if not self.is_live or request.status >= 500 or "error" in request.facts:
            self.note(log_line(request))

    def _note_ignored(self, request: AccessRecord) -> None:
        """Print what a request has that is not honoured, once per kind."""
        kinds = {_INDEX.sub("[]", each) for each in request.facts.get("ignored", ())} - self._ignored
        if kinds and len(self._ignored) < _MOST_IGNORED:
            self._ignored |= kinds
            self.note(f"{request.path} ignores {clean(', '.join(sorted(kinds)))}")

    def show(self, figures: Figures) -> None:
        """Redraw the live line, at most twice a second."""
        now = self._clock()
        if not self.is_live or now - self._drawn_at < _REDRAW_SECONDS:
            return
        self._drawn_at = now
        self._status.show(_fitting(live_line(figures), self._status.columns))

    def end(self) -> None:
        """Remove the live line."""
        self._status.clear()


def _is_poll(request: AccessRecord) -> bool:
    """Return whether a request is one of thousands of a day that found nothing wrong: of the page, or a monitor.

    Answers are none: they have facts.
    """
    is_regular = request.path in _POLLED or request.path.startswith(_PAGE)
    is_loading = request.path in _HEALTH and request.status == 503
    return is_regular and (request.status < 400 or is_loading) and not request.facts


def live_line(figures: Figures) -> str:
    """Return e.g. "2 running, 0 waiting · 131.2 tokens/s · TTFT 58/120 ms · inter-token 8.9/12 ms": medians/p95."""
    parts = [f"{figures.running} running, {figures.waiting} waiting", rate(figures.rate, whole=True)]
    parts += [
        f"{name} {_short(middle)}/{_short(late)} ms"
        for name, (middle, late) in (("TTFT", figures.ttft), ("inter-token", figures.itl))
        if middle is not None and late is not None
    ]
    if figures.acceptance is not None:
        parts.append(f"acceptance {figures.acceptance:.0%}")
    if figures.cells:
        parts.append(f"KV {figures.cells_used / figures.cells:.0%}")
    return " · ".join(parts)


def _fitting(line: str, columns: int) -> str:
    """Return the parts of a line that fit: half of a number would read as another number."""
    while cut(line, columns) != line and " · " in line:
        line = line.rpartition(" · ")[0]
    return cut(line, columns)


def _short(seconds: float) -> str:
    """Return milliseconds, with a decimal below 10."""
    return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f}"


def log_line(request: AccessRecord) -> str:
    """Return e.g. "127.0.0.1 POST /v1/chat/completions 200 in 1.20 s: smollm2, 32 + 10 tokens, 31 cached, stop"."""
    facts = request.facts
    details = [str(facts["model"])] if "model" in facts else []
    if "prompt_tokens" in facts:
        details.append(f"{facts['prompt_tokens']:,} + {facts.get('completion_tokens', 0):,} tokens")
        details.append(f"{facts.get('cached_tokens', 0):,} cached")
    if facts.get("ttft_seconds"):
        details.append(f"TTFT {seconds(facts['ttft_seconds'])}")
    history = facts.get("history")
    if history is not None:
        as_generated = f"{counted(history['answers'], 'answer')} as generated"
        details.append("earlier reasoning left out" if history["is_shortened"] else as_generated)
    reason = facts.get("error", facts.get("reason"))
    details += [str(reason)] if reason else []
    line = f"{request.client} {request.method} {request.path} {request.status} in {seconds(request.seconds)}"
    return clean(f"{line}: {', '.join(details)}" if details else line)


def show_servers(output: Output, servers: Sequence[RunningServer], now: float) -> None:
    """Print a table.

    Args:
        now: Unix time.
    """
    if not servers:
        output.note("No server is running. Start one with `llmrun serve smollm2`.")
        return
    columns = [
        Column("ADDRESS", style="bold"),
        *right("PROCESS", "RUNS FOR"),
        Column("IN MEMORY"),
        *right("CHECKPOINTS", "THREADS"),
    ]
    rows = [
        (
            server.address,
            str(server.pid),
            seconds(now - server.since, brief=True),
            ", ".join(server.models) or "-",
            readable_size(server.checkpoint_bytes) if server.checkpoint_bytes else "-",
            _threads(*server.threads),
        )
        for server in servers
    ]
    show_table(output, columns, rows)


def _threads(used: int, most: int) -> str:
    if used < most:
        return f"{used} of {most}: busy machine"
    return str(most) if most else "-"


def show_drafts(output: Output, drafts: Sequence[ServedDrafts]) -> None:
    """Print a table of what drafts for the loaded models, if anything does."""
    if drafts:
        columns = [Column("DRAFTS FOR", style="bold"), Column("BY"), *right("MEMORY", "DRAFTED", "ACCEPTED")]
        show_table(output, columns, list(map(_drafts_row, drafts)))


def _drafts_row(drafts: ServedDrafts) -> tuple[str, ...]:
    size = readable_size(drafts.n_bytes) if drafts.n_bytes else "-"
    share = f"{drafts.accepted / drafts.drafted:.0%}" if drafts.drafted else "-"
    return drafts.model, drafts.source, size, f"{drafts.drafted:,}", share


def show_requests(output: Output, requests: Sequence[ServedRequest]) -> None:
    """Print a table of answered requests, if there are any."""
    if requests:
        columns = [Column("LAST REQUESTS"), *right("PROMPT", "REUSED", "TTFT", "RATE")]
        show_table(output, [*columns, Column("FIRST DIFFERENCE", is_excerpt=True)], list(map(_request_row, requests)))


def _request_row(request: ServedRequest) -> tuple[str, ...]:
    difference = ""
    if request.difference is not None:
        position, cached, prompt = request.difference
        difference = f"at {position:,}: {clean(repr(cached))} is now {clean(repr(prompt))}"
    speed = rate(request.rate, whole=True) if request.rate else "-"
    first = seconds(request.ttft) if request.ttft else "-"
    return request.path, f"{request.prompt_tokens:,}", f"{request.cached_tokens:,}", first, speed, difference
