"""`llmrun chat` with the real model: in a terminal as a person sees it, and in a pipe."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.installed import SECONDS, WITHOUT_END, Installed, Terminal, eventually, gone, summary

import llmrun as library

GREEDY = ("chat", "smollm2", "--stats", "--temp", "0")


@pytest.fixture
def chat(llmrun: Installed) -> Terminal:
    """A greedy chat with short answers, at its first prompt."""
    terminal = llmrun.terminal(*GREEDY, "--max-tokens", "12")
    terminal.wait(terminal.at_prompt)
    return terminal


@pytest.fixture(scope="module")
def prompt_tokens(pulled: None) -> Iterator[Callable[..., int]]:
    """Length of the prompt for these turns of a conversation, the user's first."""

    def count(*turns: str) -> int:
        roles = ["user", "assistant"] * len(turns)
        messages = [library.Message(role, text) for role, text in zip(roles, turns, strict=False)]
        events = model.chat(messages, limits=library.Limits(max_tokens=1)).events()
        return next(event.prompt_tokens for event in [*events] if isinstance(event, library.Started))

    with library.load("smollm2", n_ctx=512) as model:
        yield count


def test_it_greets_answers_and_reuses_what_it_has_computed(chat: Terminal) -> None:
    assert "smollm2" in chat.lines[0]
    assert "/?" in chat.lines[0]
    first = summary(chat.ask("Why is the sky blue?"))
    second = summary(chat.ask("And at night?"))
    assert first["reused"] == 0
    assert second["reused"] >= first["used"] - 1
    assert second["prefilled"] + second["reused"] == second["prompt"]
    assert second["prefilled"] < first["prefilled"]
    assert b"\x1b]" not in chat.raw  # no title, no link: nothing but text, dim and cursor
    chat.press("d")
    assert chat.end() == 0
    assert chat.modes() == chat.modes_before


def test_slash_commands(chat: Terminal, prompt_tokens: Callable[..., int]) -> None:
    chat.ask("Why is the sky blue?")
    assert any("/clear" in line for line in chat.ask("/?"))
    assert chat.ask("/nonsense") == ["Unknown command /nonsense: /? lists all. To send it as a message: //nonsense"]
    chat.ask("/clear")
    after = summary(chat.ask("And at night?"))
    assert after["prefilled"] + after["reused"] == prompt_tokens("And at night?")
    chat.type("/bye")
    assert chat.end() == 0
    assert chat.modes() == chat.modes_before


def stopped_answer(chat: Terminal, question: str) -> dict[str, int]:
    """Ask, press Ctrl-C when a few tokens are there, and give the summary's figures."""
    chat.type(question)
    chat.wait(lambda: "decode" in chat.lines[-1])
    chat.press("c")
    chat.wait(chat.at_prompt)
    return summary(chat.between(question) or [])


def test_ctrl_c_stops_an_answer_and_keeps_it(llmrun: Installed) -> None:
    chat = llmrun.terminal(*GREEDY, *WITHOUT_END)
    chat.wait(chat.at_prompt)
    first = stopped_answer(chat, "Write the numbers from 1 to 1000, one a line.")
    second = stopped_answer(chat, "Now write them backwards, one a line.")
    assert first["cancelled"]
    assert second["cancelled"]
    # What was answered before Ctrl-C is part of the next prompt, and still in the KV cache.
    assert first["used"] > first["prefilled"]
    assert second["reused"] >= first["used"] - 2
    chat.press("d")
    assert chat.end() == 0
    assert chat.modes() == chat.modes_before


def test_ctrl_c_at_the_prompt_hints_and_then_leaves(chat: Terminal) -> None:
    chat.press("c")
    chat.wait(lambda: any("Ctrl-D" in line for line in chat.lines[1:]) and chat.at_prompt())
    chat.press("c")
    assert chat.end() == 0
    assert chat.modes() == chat.modes_before


def test_sigterm_puts_the_terminal_back(chat: Terminal) -> None:
    engine = chat.engine
    os.kill(chat.pid, signal.SIGTERM)
    assert chat.end() == 143
    assert chat.modes() == chat.modes_before
    assert eventually(lambda: gone(engine), SECONDS)


def test_a_closed_terminal_ends_both_processes(chat: Terminal) -> None:
    front, engine = psutil.Process(chat.pid), chat.engine
    chat.hang_up()
    assert eventually(lambda: gone(front) and gone(engine), SECONDS)


def test_the_engines_death_leaves_the_conversation(
    llmrun: Installed, tmp_path: Path, prompt_tokens: Callable[..., int]
) -> None:
    chat = llmrun.terminal(*GREEDY, *WITHOUT_END)
    chat.wait(chat.at_prompt)
    stopped_answer(chat, "Why is the sky blue?")
    chat.type("Write the numbers from 1 to 1000, one a line")
    chat.wait(lambda: "decode" in chat.lines[-1])
    chat.engine.send_signal(signal.SIGABRT)
    chat.wait(chat.at_prompt)
    said = "\n".join(chat.lines)
    assert said.count("error:") == 1
    assert "error: the engine died in decode" in said
    assert "SIGABRT" in said
    before = chat.exported(tmp_path)  # with the question that was not answered to its end, and what came of the answer
    assert "Write the numbers from 1 to 1000, one a line" in before
    after = stopped_answer(chat, "And at night?")
    assert after["prefilled"] == prompt_tokens(*before, "And at night?")
    chat.press("d")
    assert chat.end() == 0
    assert chat.modes() == chat.modes_before


def n_threads(process: psutil.Process) -> int:
    """Threads that a process has left; the first of them stays until somebody waits for it."""
    try:
        return process.num_threads()
    except psutil.Error:
        return 0


def test_the_engines_death_at_the_prompt_is_healed(
    chat: Terminal, tmp_path: Path, prompt_tokens: Callable[..., int]
) -> None:
    chat.ask("Why is the sky blue?")
    before = chat.exported(tmp_path)
    engine = chat.engine
    engine.kill()
    assert eventually(lambda: gone(engine), SECONDS)
    assert eventually(lambda: n_threads(engine) <= 1, SECONDS), "its pipe closes with its last thread"
    after = summary(chat.ask("And at night?"))
    assert after["prefilled"] == prompt_tokens(*before, "And at night?")
    assert "error" not in "\n".join(chat.lines)


def test_piped_lines_are_answered_one_by_one(llmrun: Installed) -> None:
    options = ("--temp", "0", "--max-tokens", "12")
    done = llmrun.run("chat", "smollm2", *options, stdin="Why is the sky blue?\n\nAnd at night?")
    assert (done.returncode, done.stderr) == (0, b"")
    first = llmrun.answer(*options, "Why is the sky blue?")
    assert done.stdout.decode().startswith(first + "\n")
    assert done.stdout.decode()[len(first) + 1 :].strip()


def test_nothing_piped_ends_at_once(llmrun: Installed) -> None:
    done = llmrun.run(*GREEDY)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
