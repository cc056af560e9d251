"""Downloads: a bar on a terminal, few plain lines elsewhere, nothing on stdout."""

from __future__ import annotations

import io
import itertools
import random

import pytest
from support.clock import Clock
from support.streams import Terminal

from llmrun.ui.terminal.activity import Activity, Pace, download_progress, rounded_seconds
from llmrun.ui.terminal.output import Output


def make(stream: io.StringIO, **environment: str) -> tuple[Output, io.StringIO]:
    output = Output(stdin=io.StringIO(), stdout=io.StringIO(), stderr=stream, environment=environment)
    return output, stream


def test_plain_lines_at_start_every_ten_seconds_and_end() -> None:
    output, stderr = make(io.StringIO())
    clock = Clock(0)
    with download_progress(output, "model\x1b[2J.gguf", clock=clock) as on_progress:
        for second in range(26):
            clock.now = float(second)
            on_progress(second * 4_000_000, 100_000_000)
    assert stderr.getvalue().splitlines() == [
        "model.gguf: 0 B of 100.0 MB",
        "model.gguf: 40.0 MB of 100.0 MB, 40%, 4.0 MB/s, 15 s left",
        "model.gguf: 80.0 MB of 100.0 MB, 80%, 4.0 MB/s, 5 s left",
        "model.gguf: 100.0 MB in 25.00 s, 4.0 MB/s",
    ]


def test_resumed_bytes_do_not_count_for_the_speed() -> None:
    output, stderr = make(io.StringIO())
    clock = Clock(0)
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
    assert stderr.getvalue().splitlines() == ["m: 1 B of 2 B"]


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
    assert "100.0 MB of 100.0 MB" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert isinstance(output.stdout, io.StringIO)
    assert output.stdout.getvalue() == ""
    assert screen(text)[0].startswith("[bold]model[/foo]: 100.0 MB in "), "what is left says all of interest"


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
    assert stderr.getvalue().startswith("m: 1 B of 2 B\n")


def test_note_stands_on_a_line_of_its_own() -> None:
    output, stderr = make(Terminal(), TERM="xterm-256color")
    with download_progress(output, "m") as shown:
        shown.note("before the bar")
        shown(10_000_000, 100_000_000)
        shown.note("beside the bar")
        shown(20_000_000, 100_000_000)
    lines = [line.strip() for line in screen(stderr.getvalue()) if line.strip()]
    assert lines[:2] == ["before the bar", "beside the bar"]
    assert lines[2].startswith("m: 20.0 MB in ")
    assert "m: 20.0 MB of 100.0 MB" in stderr.getvalue()


def screen(text: str) -> list[str]:
    """What a terminal shows after this text."""
    import pyte

    terminal = pyte.Screen(100, 20)
    pyte.Stream(terminal).feed(text.replace("\n", "\r\n"))
    return list(terminal.display)


def test_bar_says_when_nothing_arrives() -> None:
    output, stderr = make(Terminal(), TERM="xterm-256color")
    clock = Clock(0)
    with download_progress(output, "m", clock=clock) as shown:
        for second in range(6):
            clock.now = float(second)
            shown(min(second, 2) * 10_000_000, 100_000_000)
        shown.note("a look")
    assert "waiting for the server" in stderr.getvalue()


def test_bar_after_the_last_byte_says_what_is_still_done() -> None:
    output, stderr = make(Terminal(), TERM="xterm-256color")
    with download_progress(output, "m") as shown:
        shown(100, 100)
    assert "checking" in stderr.getvalue()
    assert "checking" not in "".join(screen(stderr.getvalue()))


def test_transfer_that_begins_again() -> None:
    output, stderr = make(io.StringIO())
    clock = Clock(0)
    with download_progress(output, "m", clock=clock) as shown:
        for second, done in enumerate([50, 60, 0, 10, 20]):
            clock.now = float(second)
            shown(done * 1_000_000, 100_000_000)
    assert stderr.getvalue().splitlines()[-1] == "m: 20.0 MB in 4.00 s, 5.0 MB/s"


# ---- speed and time left


def test_steady_transfer_is_told_right_at_once() -> None:
    pace = Pace()
    for tick in range(21):
        pace.update(tick * 1000, tick / 10)
    assert pace.bytes_per_second == pytest.approx(10_000)
    assert pace.seconds_left(120_000) == pytest.approx(10)


def test_resumed_bytes_are_no_speed() -> None:
    pace = Pace()
    pace.update(10**9, 5.0)
    pace.update(10**9 + 1000, 6.0)
    assert pace.bytes_per_second == pytest.approx(1000)


def test_time_left_does_not_jump() -> None:
    """Bytes that come in bursts, as they do: from one tick to the next the guess changes by a few percent."""
    dice = random.Random(1)
    pace = Pace()
    done, guesses = 0, []
    for tick in range(400):
        pace.update(done, tick / 10)
        done += dice.choice([0, 0, 0, 400_000, 1_600_000])
        left = pace.seconds_left(4_000_000_000)
        if left is not None and tick > 100:
            guesses.append(left)
    steps = [abs(b - a) / a for a, b in itertools.pairwise(guesses)]
    assert max(steps) < 0.06
    assert len(guesses) > 250


def test_nothing_is_guessed_too_early_or_while_nothing_comes() -> None:
    pace = Pace()
    assert pace.bytes_per_second == 0
    pace.update(0, 0.0)
    pace.update(1000, 0.5)
    assert pace.seconds_left(2000) is None
    pace.update(1500, 1.5)
    assert pace.seconds_left(2000) is not None
    pace.update(1500, 5.0)
    assert pace.is_waiting
    assert pace.seconds_left(2000) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.2, "1 s"), (12.4, "12 s"), (33, "35 s"), (83, "1 min 20 s"), (1000, "17 min 0 s"), (7500, "2 h 5 min")],
)
def test_guesses_are_coarse(value: float, text: str) -> None:
    assert rounded_seconds(value) == text


def test_a_task_that_begins_twice_has_one_line_off_a_terminal() -> None:
    output, stderr = make(io.StringIO())
    with Activity(output) as activity:
        for words in ("measuring", "measuring", "reading"):
            activity.show(words, 0.0, begins=True)
    assert stderr.getvalue() == "measuring\nreading\n"
