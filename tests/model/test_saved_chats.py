"""Chats that are left and come back, in a terminal with the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.installed import WITHOUT_END, Installed, Terminal, summary
from support.plain_llama import assert_greedy, smollm2_prompt

GREEDY = ("chat", "smollm2", "--stats", "--temp", "0", "--max-tokens", "12", *WITHOUT_END)


def opened(llmrun: Installed, *options: str, env: dict[str, str] | None = None) -> Terminal:
    terminal = llmrun.terminal(*GREEDY, *options, env=env)
    terminal.wait(terminal.at_prompt)
    return terminal


def left(chat: Terminal) -> None:
    chat.press("d")
    assert chat.end() == 0
    assert chat.modes() == chat.modes_before


def test_a_chat_goes_on_as_if_it_had_not_been_left(llmrun: Installed, model_path: Path) -> None:
    question = "Why is the sky blue" + ", so very blue" * 12
    first = opened(llmrun)
    used = summary(first.ask(question))["used"]
    left(first)
    second = llmrun.terminal("chat", "--continue", *GREEDY[2:])
    second.wait(second.at_prompt)
    assert any("Resuming" in line and "1 turn" in line for line in second.lines)
    again = second.ask("And at night?")
    assert summary(again)["reused"] >= used - 1, "the KV cache was read from the disk"
    left(second)
    (line,) = llmrun.run("sessions", "export", "1", "--format", "openai").stdout.splitlines()
    asked, answered, *last, answer = (message["content"] for message in json.loads(line)["messages"])
    turns = (smollm2_prompt(asked), answered), (smollm2_prompt(asked, answered, *last), answer)
    assert_greedy(model_path, *turns, ends=False)


def test_a_named_chat_and_a_private_one(llmrun: Installed) -> None:
    named = opened(llmrun, "--session", "rivers")
    named.ask("Name a river")
    left(named)
    private = opened(llmrun, "--private")
    private.ask("A secret")
    left(private)
    listed = json.loads(llmrun.run("sessions", "list", "--json").stdout)
    assert [facts["name"] for facts in listed] == ["rivers"]
    exported = llmrun.run("sessions", "export", "rivers", "--format", "openai").stdout.decode()
    assert [message["role"] for message in json.loads(exported)["messages"]] == ["user", "assistant"]
    assert b"secret" not in b"".join(
        path.read_bytes() for path in Path(llmrun.environment()["LLMRUN_HOME"]).rglob("*sessions*") if path.is_file()
    )


def test_context_why_stats_and_values(llmrun: Installed) -> None:
    chat = opened(llmrun)
    used = summary(chat.ask("Name a river"))["used"]
    filled = chat.ask("/context")
    assert any(line.startswith("free") for line in filled)
    assert filled[-1] == f"{used:,} of 8,192 tokens."
    why = chat.ask("/why 2")
    assert sum("chosen" in line for line in why) == 2
    assert any("ctx" in line for line in chat.ask("/stats"))
    assert chat.ask("/set top-k 5") == ["--top-k is now 5."]
    assert any("--top-k" in line and "session" in line for line in chat.ask("/set"))
    assert any("invalid" in line for line in chat.ask("/set top-k -2"))
    assert any("there is no sampling parameter" in line for line in chat.ask("/set nonsense 1"))
    assert any("architecture" in line and "llama" in line for line in chat.ask("/show"))
    left(chat)


@pytest.mark.slow
def test_a_full_window_asks_what_to_drop(llmrun: Installed) -> None:
    chat = llmrun.terminal(*GREEDY, "--ctx", "256", "--overflow", "ask")
    chat.wait(chat.at_prompt)

    def is_asked() -> bool:
        return chat.lines[-1].endswith("[r/m/s/n]")

    def is_answered(number: int) -> bool:
        return chat.at_prompt() and sum(" · ctx " in line for line in chat.lines) == number

    for number in range(1, 9):
        chat.type(f"Tell me about the number {number}, please" + ", and take your time" * 6)
        chat.wait(lambda: is_asked() or is_answered(number))  # noqa: B023 - it is called in this round only
        if is_asked():
            break
    chat.press("c")
    chat.wait(lambda: chat.at_prompt() and any("does not fit" in line for line in chat.lines))
    chat.type("/retry")
    chat.wait(is_asked)
    chat.type("r")
    chat.wait(chat.at_prompt)
    answered = chat.lines.index("Which turns should be dropped? [r/m/s/n] r")
    assert chat.lines[answered + 1].startswith("Turn 1 left the context window"), "in a row of its own"
    left(chat)


def test_a_message_that_does_not_fit_is_not_sent(llmrun: Installed) -> None:
    chat = llmrun.terminal(*GREEDY, "--ctx", "256", "--overflow", "stop")
    chat.wait(chat.at_prompt)
    chat.type("word " * 300)
    chat.wait(lambda: chat.at_prompt() and any("does not fit" in line for line in chat.lines))
    assert summary(chat.ask("Hello"))["used"] < 100
    left(chat)


def test_a_file_goes_along(llmrun: Installed, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("The meeting is on Tuesday. " * 20)
    chat = opened(llmrun, "-f", str(file))
    assert any("notes.txt" in line and "tokens" in line for line in chat.lines)
    assert summary(chat.ask("When is the meeting?"))["prefilled"] > 100
    lines = _image(chat, tmp_path)
    assert any("can't read images" in line for line in lines), lines
    left(chat)


def _image(chat: Terminal, folder: Path) -> list[str]:
    image = folder / "i.png"
    image.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    return chat.ask(f"/file {image}")


@pytest.mark.slow
def test_another_model_goes_on_with_the_conversation(llmrun: Installed, tmp_path: Path) -> None:
    file = json.loads(llmrun.run("show", "smollm2", "--json").stdout)["path"]
    other = tmp_path / "other.gguf"
    other.symlink_to(file)
    chat = opened(llmrun)
    used = summary(chat.ask("Name a river"))["used"]
    first = chat.engine.pid
    assert any("Switched to" in line for line in chat.ask(f"/model {other}"))
    assert chat.engine.pid != first, "the first engine is gone"
    assert summary(chat.ask("And a mountain"))["prefilled"] > used
    assert any("error:" in line for line in chat.ask("/model nonsense-model"))
    chat.ask("Still there")
    left(chat)
