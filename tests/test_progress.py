"""Downloads: a bar on a terminal, few plain lines elsewhere, nothing on stdout."""

from __future__ import annotations

import io

import pytest

from llmrun.ui import progress
from llmrun.ui.output import Output
from llmrun.ui.progress import download_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(stream: io.StringIO, **environment: str) -> tuple[Output, io.StringIO]:
    output = Output(stdin=io.StringIO(), stdout=io.StringIO(), stderr=stream, environment=environment)
    return output, stream


def test_plain_lines_at_start_every_ten_seconds_and_end() -> None:
    output, stderr = make(io.StringIO())
    clock = Clock()
    with download_progress(output, "model\x1b[2J.gguf", clock=clock) as on_progress:
        for second in range(26):
            clock.now = float(second)
            on_progress(second * 4_000_000, 100_000_000)
    assert stderr.getvalue().splitlines() == [
        "model.gguf: 0 B of 100.0 MB (0%)",
        "model.gguf: 40.0 MB of 100.0 MB (40%)",
        "model.gguf: 80.0 MB of 100.0 MB (80%)",
        "model.gguf: 100.0 MB in 25.00 s, 4.0 MB/s",
    ]


def test_resumed_bytes_do_not_count_for_the_speed() -> None:
    output, stderr = make(io.StringIO())
    clock = Clock()
    with download_progress(output, "m", clock=clock) as on_progress:
        on_progress(90_000_000, None)
        clock.now = 2.0
        on_progress(100_000_000, None)
    assert stderr.getvalue().splitlines() == ["m: 90.0 MB", "m: 100.0 MB in 2.00 s, 5.0 MB/s"]


def test_failed_download_does_not_claim_an_end() -> None:
    output, stderr = make(io.StringIO())
    with pytest.raises(OSError, match="gone"), download_progress(output, "m") as on_progress:  # noqa: PT012
        on_progress(1, 2)
        raise OSError("gone")
    assert stderr.getvalue().splitlines() == ["m: 1 B of 2 B (50%)"]


def test_nothing_to_download_says_nothing() -> None:
    output, stderr = make(io.StringIO())
    with download_progress(output, "m"):
        pass
    assert stderr.getvalue() == ""


def test_bar_on_a_terminal() -> None:
    output, stderr = make(Terminal(), TERM="xterm-256color")
    with download_progress(output, "[bold]model[/foo]") as on_progress:
        on_progress(10_000_000, 100_000_000)
        on_progress(100_000_000, 100_000_000)
    text = stderr.getvalue()
    assert "[bold]model[/foo]" in text
    assert "100.0/100.0 MB" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert isinstance(output.stdout, io.StringIO)
    assert output.stdout.getvalue() == ""
    assert progress._BAR_HZ >= 4


def test_cursor_comes_back_when_the_download_fails() -> None:
    output, stderr = make(Terminal(), TERM="xterm-256color")
    with pytest.raises(KeyboardInterrupt), download_progress(output, "m") as on_progress:  # noqa: PT012
        on_progress(1, None)
        raise KeyboardInterrupt
    assert stderr.getvalue().rindex("\x1b[?25h") > stderr.getvalue().rindex("\x1b[?25l")


def test_dumb_terminal_gets_lines() -> None:
    output, stderr = make(Terminal(), TERM="dumb")
    with download_progress(output, "m") as on_progress:
        on_progress(1, 2)
    assert "\x1b" not in stderr.getvalue()
    assert stderr.getvalue().startswith("m: 1 B of 2 B (50%)\n")
