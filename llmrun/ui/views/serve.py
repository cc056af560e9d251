"""What `llmrun serve`, `ps` and `stop` show: a start page, one live line on a terminal, a log anywhere else.

Owns the words; must not know how the server does what it tells.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from llmrun.errors import LlmrunError
from llmrun.ui.terminal.cells import cut
from llmrun.ui.terminal.format import rate, seconds
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, show_table

if TYPE_CHECKING:
    from llmrun.server.app import AccessRecord

_CLEAR = "\r\x1b[K"
_REDRAW_SECONDS = 0.5


class ServeFigures(NamedTuple):
    """How the server does; seconds, None where nothing was measured yet.

    Attributes:
        running, waiting: answers.
        rate: tokens/s of all together.
        ttft, itl: time to first token and inter-token latency, median and 95th percentile.
        acceptance: share of drafted tokens that were accepted; None where none were drafted.
        cells_used, cells: of the KV cache; 0 of 0 where no model is loaded.
    """

    running: int
    waiting: int
    rate: float
    ttft: tuple[float | None, float | None]
    itl: tuple[float | None, float | None]
    acceptance: float | None = None
    cells_used: int = 0
    cells: int = 0


class ServeView:
    """Shows a server on stderr.

    Args:
        log_json: one JSON object a request, and nothing else.
        clock: seconds, monotonic.
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
        self._is_drawn = False

    def begin(self, address: str, models: Sequence[str], *, has_keys: bool) -> None:
        """The start page."""
        if self._log_json:
            return
        key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
        question = {"messages": [{"role": "user", "content": "Hi"}]}
        body = json.dumps(question if models else {"model": "MODEL", **question})
        self.note(f"Serving at {address} (OpenAI: {address}/v1). Ctrl-C ends it.")
        self.note("Models: " + (", ".join(models) if models else "those of llmrun list, loaded when asked for"))
        self._output.note(f"curl {address}/v1/chat/completions{key} --json '{body}'", is_command=True)

    def loaded(self, name: str, n_ctx: int, parallel: int, load_seconds: float) -> None:
        """A model is in memory."""
        clients = f" for each of {parallel} clients" if parallel > 1 else ""
        self.note(f"{name} is loaded in {seconds(load_seconds)}: context {n_ctx:,} tokens{clients}")

    def failed(self, error: LlmrunError) -> None:
        """A model can't be loaded; the server goes on."""
        self._clear()
        self._output.error(error)

    def note(self, text: str) -> None:
        """A line of its own."""
        if not self._log_json:
            self._clear()
            self._output.note(text)

    def served(self, request: AccessRecord) -> None:
        """A request was answered: a line of the log; beside the live line only what went wrong."""
        if self._log_json:
            facts = {"time": round(self._wall_clock(), 3), **request._asdict(), **request.facts}
            del facts["facts"]
            self._output.stderr.write(json.dumps(facts) + "\n")
            self._output.stderr.flush()
        elif not self.is_live or request.status >= 500 or "error" in request.facts:
            self.note(log_line(request))

    def show(self, figures: ServeFigures) -> None:
        """How the server does, redrawn at most twice a second."""
        now = self._clock()
        if not self.is_live or now - self._drawn_at < _REDRAW_SECONDS:
            return
        self._drawn_at, self._is_drawn = now, True
        columns = max(self._output.columns(stderr=True) - len("^C"), 20)  # which the terminal writes behind it
        self._output.stderr.write(_CLEAR + _fitting(live_line(figures), columns))
        self._output.stderr.flush()

    def end(self) -> None:
        """Nothing more is drawn."""
        self._clear()

    def _clear(self) -> None:
        if self._is_drawn:
            self._output.stderr.write(_CLEAR)
            self._is_drawn = False


def live_line(figures: ServeFigures) -> str:
    """E.g. "2 running, 0 waiting · 131.2 t/s · TTFT 58/120 ms · inter-token 8.9/12 ms · KV 12%": medians/p95."""
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
    """As many of a line's parts as fit: half a figure reads as another one."""
    while cut(line, columns) != line and " · " in line:
        line = line.rpartition(" · ")[0]
    return cut(line, columns)


def _short(seconds: float) -> str:
    """In milliseconds, without decimals where there are more telling digits."""
    return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f}"


def log_line(request: AccessRecord) -> str:
    """E.g. "127.0.0.1 POST /v1/chat/completions 200 in 1.20 s: smollm2, 32 + 10 tokens, 31 cached, stop"."""
    facts = request.facts
    told = [str(facts["model"])] if "model" in facts else []
    if "prompt_tokens" in facts:
        told.append(f"{facts['prompt_tokens']:,} + {facts.get('completion_tokens', 0):,} tokens")
        told.append(f"{facts.get('cached_tokens', 0):,} cached")
    why = facts.get("error", facts.get("reason"))
    told += [str(why)] if why else []
    line = f"{request.client} {request.method} {request.path} {request.status} in {seconds(request.seconds)}"
    return clean(f"{line}: {', '.join(told)}" if told else line)


def show_servers(output: Output, servers: Sequence[tuple[str, int, float, Sequence[str]]]) -> None:
    """A table of (address, process id, seconds since the start, models in memory)."""
    if not servers:
        output.note("No server runs. `llmrun serve smollm2` starts one.")
        return
    columns = [
        Column("ADDRESS", style="bold"),
        Column("PROCESS", right=True),
        Column("RUNS FOR", right=True),
        Column("IN MEMORY"),
    ]
    rows = [
        (address, str(pid), seconds(age, brief=True), ", ".join(models) or "-") for address, pid, age, models in servers
    ]
    show_table(output, columns, rows)
