"""The view of `llmrun serve`: a start page, one live line, or a log."""

from __future__ import annotations

import io
import json
from typing import get_args

import pytest
from support.streams import Terminal

from llmrun.errors import UsageError
from llmrun.protocol.messages import Rewriting
from llmrun.server.app import AccessRecord
from llmrun.server.metrics import Figures
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.serve import ServeView, TimedLines, live_line, log_line

ANSWERED = AccessRecord(
    "127.0.0.1",
    "POST",
    "/v1/chat/completions",
    200,
    1.2,
    {"model": "tiny", "prompt_tokens": 32, "cached_tokens": 31, "completion_tokens": 10, "reason": "stop"},
)
FIGURES = Figures(2, 1, 131.24, (0.058, 0.12), (0.0089, 0.0121), 0.814, 12, 100)


def view(
    stderr: io.StringIO, *, log_json: bool = False, times: tuple[float, ...] = (0.0,), columns: int = 80
) -> ServeView:
    clock = iter(times)
    output = Output(stderr=stderr, environment={"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": str(columns)})
    return ServeView(output, log_json=log_json, clock=lambda: next(clock), wall_clock=lambda: 1.5)


def test_the_live_line_says_how_the_server_does() -> None:
    expected = "2 running, 1 waiting · 131 tokens/s · TTFT 58/120 ms · inter-token 8.9/12 ms · acceptance 81% · KV 12%"
    assert live_line(FIGURES) == expected
    assert live_line(Figures(0, 0, 0.0, (None, None), (None, None))) == "0 running, 0 waiting · 0.0 tokens/s"


def test_a_figure_of_the_live_line_is_there_as_a_whole_or_not_at_all() -> None:
    stderr = Terminal()
    view(stderr, columns=80).show(FIGURES._replace(cells_used=100))
    assert stderr.getvalue().endswith("inter-token 8.9/12 ms")


def test_the_log_line_says_what_was_answered() -> None:
    expected = "127.0.0.1 POST /v1/chat/completions 200 in 1.20 s: tiny, 32 + 10 tokens, 31 cached, stop"
    assert log_line(ANSWERED) == expected
    timed = ANSWERED._replace(facts={**ANSWERED.facts, "ttft_seconds": 0.31})
    assert log_line(timed) == expected.replace("cached,", "cached, TTFT 0.31 s,")
    assert log_line(AccessRecord("::1", "GET", "/\x1b[31m", 404, 0.0, {})) == "::1 GET / 404 in 0.00 s"
    for history, expected in (
        ({"answers": 1, "tokens": 20, "is_shortened": False}, "31 cached, 1 answer as generated, stop"),
        ({"answers": 0, "tokens": 0, "is_shortened": True}, "31 cached, earlier reasoning left out, stop"),
    ):
        line = log_line(ANSWERED._replace(facts={**ANSWERED.facts, "history": history}))
        assert line.endswith(expected)


@pytest.mark.parametrize("log_json", [False, True])
def test_polls_that_succeed_are_not_logged(log_json: bool) -> None:
    """A page that is open makes 43,200 a day."""
    stderr = io.StringIO()
    shown = view(stderr, log_json=log_json)
    for path in ("/ui/chats/1/head", "/ui/files/page.js", "/", "/health", "/metrics"):
        shown.served(AccessRecord("::1", "GET", path, 200, 0.0, {}))
    shown.served(AccessRecord("::1", "GET", "/health", 503, 0.5, {}))  # while a model is loaded
    assert stderr.getvalue() == ""
    shown.served(AccessRecord("::1", "GET", "/ui/chats/1/head", 404, 0.0, {}))
    shown.served(AccessRecord("::1", "POST", "/ui/answer", 200, 1.0, {"model": "tiny"}))
    shown.served(AccessRecord("::1", "GET", "/v1/models", 200, 0.0, {}))
    assert len(stderr.getvalue().splitlines()) == 3


def test_each_line_of_a_log_begins_with_its_time() -> None:
    log, times = io.StringIO(), iter("1234")
    lines = TimedLines(log, lambda: next(times))
    lines.write("a")
    lines.write("b\n\nc\n")
    lines.write("")
    lines.write("d\n")
    assert log.getvalue() == "1 ab\n\n2 c\n3 d\n"


def test_the_live_line_is_redrawn_twice_a_second_at_most() -> None:
    stderr = Terminal()
    shown = view(stderr, times=(0.0, 0.1, 0.49, 0.5))
    for _ in range(4):
        shown.show(FIGURES)
    assert stderr.getvalue().count("running") == 2


def test_beside_the_live_line_only_failures_are_told() -> None:
    stderr = Terminal()
    shown = view(stderr)
    shown.served(ANSWERED)
    shown.served(ANSWERED._replace(status=400))
    assert stderr.getvalue() == ""
    shown.served(ANSWERED._replace(status=500))
    assert "POST" in stderr.getvalue()
    shown.served(ANSWERED._replace(facts={"reason": "engine-crashed", "error": "the engine died"}))
    assert stderr.getvalue().endswith(": the engine died\n")


def test_without_a_terminal_every_request_is_a_line_and_nothing_is_drawn() -> None:
    stderr = io.StringIO()
    shown = view(stderr)
    shown.show(FIGURES)
    shown.served(ANSWERED)
    assert stderr.getvalue() == log_line(ANSWERED) + "\n"


def test_a_request_for_vectors_is_logged_too() -> None:
    stderr = io.StringIO()
    shown = view(stderr)
    shown.served(ANSWERED._replace(path="/v1/embeddings", facts={"model": "tiny", "prompt_tokens": 7}))
    assert [tuple(each) for each in shown.requests] == [("/v1/embeddings", 7, 0, 0.0, None, 0.0)]
    assert "POST /v1/embeddings 200" in stderr.getvalue()


@pytest.mark.parametrize("log_json", [False, True])
def test_a_log_without_a_reader_stops_nothing(log_json: bool) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    shown = view(Broken(), log_json=log_json)
    shown.begin("http://127.0.0.1:8080", ["tiny"], has_keys=False)
    shown.loaded("tiny", 256, 1, 0.1)
    shown.failed(UsageError("no"))
    shown.served(ANSWERED)
    assert len(shown.requests) == 1


def test_each_kind_of_ignored_field_is_a_line_once() -> None:
    stderr = io.StringIO()
    shown = view(stderr)
    for number in (3, 5):
        ignored = (f"tools[{number}].type=web_search", "background")
        shown.served(ANSWERED._replace(facts={**ANSWERED.facts, "ignored": ignored}))
    assert stderr.getvalue().count("ignores background, tools[].type=web_search") == 1


@pytest.mark.parametrize("kind", get_args(Rewriting))
def test_what_was_rewritten_for_a_template_is_a_line(kind: str) -> None:
    stderr = io.StringIO()
    view(stderr).served(ANSWERED._replace(facts={**ANSWERED.facts, "rewritten": (kind,)}))
    assert stderr.getvalue().startswith("Chat template of tiny: ")


def test_the_log_as_json_is_nothing_but_json() -> None:
    stderr = io.StringIO()
    shown = view(stderr, log_json=True)
    shown.begin("http://127.0.0.1:8080", ["tiny"], has_keys=False)
    shown.served(ANSWERED)
    (line,) = stderr.getvalue().splitlines()
    told = json.loads(line)
    assert (told["time"], told["status"], told["model"], told["completion_tokens"]) == (1.5, 200, "tiny", 10)


def test_the_start_page_has_a_line_to_try() -> None:
    stderr = io.StringIO()
    view(stderr).begin("http://127.0.0.1:8080", ["tiny"], has_keys=True)
    page = stderr.getvalue()
    body = '{"messages": [{"role": "user", "content": "Hi"}]}'
    assert f"\ncurl http://127.0.0.1:8080/v1/chat/completions -H 'Authorization: Bearer KEY' --json '{body}'\n" in page


def test_the_line_to_try_is_whole_on_a_narrow_terminal() -> None:
    stderr = Terminal()
    view(stderr, columns=40).begin("http://127.0.0.1:8080", [], has_keys=False)
    body = '{"model": "MODEL", "messages": [{"role": "user", "content": "Hi"}]}'
    last = stderr.getvalue().splitlines()[-1]
    assert last.split() == f"curl http://127.0.0.1:8080/v1/chat/completions --json '{body}'".split()
