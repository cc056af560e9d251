"""`llmrun run` and `llmrun chat` with --at: a server answers, and no engine is started here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import app_of
from support.gguf_writer import tiny_model, write
from support.installed import Terminal, only_error_line
from support.remote_server import (
    CHAT,
    DONE,
    FINE,
    KEY,
    MODEL,
    STREAM,
    TEXT,
    Act,
    Endless,
    FarServer,
    Reply,
    chunk,
    listed,
    response,
    told,
)
from typer.testing import CliRunner

from llmrun import __main__
from llmrun.errors import UsageError

FRONT = Path(__file__).parents[1] / "support/front.py"
Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., Terminal]
on_a_terminal = pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")


@pytest.fixture
def environment(server: FarServer, tmp_path: Path, package_on_path: None) -> dict[str, str]:
    path = os.environ["PYTHONPATH"] + os.pathsep + str(FRONT.parents[1])
    ours = {"LLMRUN_HOME": str(tmp_path), "LLMRUN_SERVER": server.url, "LLMRUN_SERVER_KEY": KEY}
    return {**os.environ, **ours, "TERM": "xterm-256color", "PYTHONPATH": path}


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    """run(word, ...): llmrun with these arguments in pipes, the server being named by LLMRUN_SERVER."""

    def make(*words: str, stdin: str = "", engine: str = "none", **changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(FRONT), engine, *words]
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, env={**environment, **changes}, timeout=300
        )

    return make


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """start(option, ...): a chat in a pseudo-terminal, at its first prompt."""
    opened: list[Terminal] = []

    def make(*options: str) -> Terminal:
        opened.append(Terminal([sys.executable, str(FRONT), "none", "chat", *options], environment))
        opened[-1].wait(opened[-1].at_prompt)
        return opened[-1]

    yield make
    for each in opened:
        each.close()


# All of them are in tests/remote/test_client.py.
HOSTILE = ("is silent within an event", "streams a line without end", "sends a gzip bomb", "resets the connection")
IMPATIENT = """
import runpy, sys
from dataclasses import replace
import llmrun.remote.client as client
client.PATIENT = replace(client.PATIENT, stall_seconds=float(sys.argv[1]), backoff_seconds=0.0)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_ends_in_one_line(server: FarServer, environment: dict[str, str], name: str) -> None:
    way = server.behave(name)
    seconds = "0.3" if "silent" in name else "60"
    command = [sys.executable, "-c", IMPATIENT, seconds, str(FRONT), "none", "run", MODEL, "Why?"]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=300)
    said = done.stderr.decode()
    assert way.error is not None
    assert done.returncode == way.error.exit_status
    assert [line.startswith("error:") for line in said.splitlines()].count(True) == 1
    assert way.says in " ".join(said.split())
    assert "Traceback" not in said
    assert KEY not in said


def test_a_limit_that_a_server_ignores_is_kept_here(server: FarServer, run: Run) -> None:
    server.replies = [(STREAM, Endless(chunk(" word")))]
    done = run("run", "-n", "3", MODEL, "Why?")
    assert (done.returncode, done.stdout) == (0, " word word word\n")
    assert "ignores max_tokens 3: its answer was cut here" in done.stderr


def test_an_answer_in_a_pipe(server: FarServer, run: Run) -> None:
    done = run("run", "--at", server.url, MODEL, "Why?", LLMRUN_SERVER="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello there\n", "")
    (asked,) = server.answered()
    assert asked.body["messages"] == [{"role": "user", "content": "Why?"}]
    assert asked.headers["authorization"] == f"Bearer {KEY}"


def test_default_is_the_only_model_there_is(server: FarServer, run: Run) -> None:
    assert run("run", "default", "--raw", "Once").stdout == "Hello there"
    (asked,) = server.answered()
    assert (asked.path, asked.body["model"], asked.body["prompt"]) == (TEXT, MODEL, "Once")
    server.models = listed("first", "second")
    several = run("run", "default", "Hi")
    assert several.returncode == 2
    assert "first, second" in several.stderr
    forgotten = run("run", "Why is the sky blue?", stdin="x")
    assert (forgotten.returncode, "first, second" in forgotten.stderr) == (2, True)
    missing = run("run", "third", "Hi")
    assert missing.returncode == 3
    assert "first, second" in missing.stderr


def test_what_came_is_printed_before_the_error(server: FarServer, run: Run) -> None:
    server.behave("hangs up in the middle")
    done = run("run", "default", "Hi")
    assert done.stdout.startswith("Hello there")
    assert done.returncode == 5
    assert "broke off" in only_error_line(done.stderr)
    assert KEY not in done.stderr


@pytest.mark.parametrize(
    ("reply", "note"),
    [
        (told(), "The answer is empty."),
        (told(chunk(" \n")), "The answer is empty."),
        (told(chunk(content=None, reasoning="Hm.")), "The answer is empty: there is nothing after the reasoning."),
        (
            (STREAM, chunk(content=None, reasoning="Hm."), chunk(finish="length"), DONE),
            "The answer is empty: the tokens ran out in the reasoning.",
        ),
        (told(chunk(content=None, refusal="No.")), ""),
        (told(chunk(content=[{"type": "text", "text": "Yes."}])), ""),
    ],
    ids=["nothing", "blanks", "reasoning", "reasoning that was cut", "refusal", "blocks"],
)
def test_an_empty_answer_is_said(server: FarServer, run: Run, reply: Reply, note: str) -> None:
    server.replies = [reply]
    done = run("run", "default", "Hi")
    assert (done.returncode, done.stderr.strip()) == (0, note)
    assert bool(done.stdout.strip()) == (not note)


def test_one_of_several_answers_may_be_empty(server: FarServer, run: Run) -> None:
    server.replies = [told(), FINE]
    assert run("run", "default", "Hi", "-N", "2", "--seed", "5").stderr.count("The answer is empty.") == 1


def test_events_and_figures(server: FarServer, run: Run) -> None:
    done = run("run", "default", "Hi", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["Started", "TextDelta", "TextDelta", "Finished"]
    assert events[-1]["stats"]["over_network"]
    line = run("run", "default", "Hi", "--stats").stderr
    assert line.startswith("prompt 7 tokens · decode 2 tokens")
    assert "ctx 9 ·" in line
    assert "timed over the network" in line


def test_several_answers(server: FarServer, run: Run) -> None:
    done = run("run", "default", "Hi", "-N", "2", "--seed", "5")
    assert done.stdout.count("Hello there") == 2
    assert sorted(request.body["seed"] for request in server.answered()) == [5, 6]


def test_pictures_go_along_unless_the_server_says_that_it_is_blind(server: FarServer, run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n and so on")
    assert run("run", "default", "What is this?", "--image", str(picture)).returncode == 0
    (content,) = (message["content"] for message in server.answered()[0].body["messages"])
    assert content[0]["image_url"]["url"].startswith("data:image/png;base64,")
    server.models = listed(MODEL, owned_by="llamacpp")
    server.others = {f"/props?model={MODEL}": (response(200, b'{"modalities": {"vision": false}}'),)}
    blind = run("run", "default", "What is this?", "--image", str(picture))
    assert blind.returncode == 2
    assert "can't read images" in blind.stderr
    assert len(server.answered()) == 1
    (tmp_path / "a.wav").write_bytes(b"RIFF\x24\0\0\0WAVEfmt ")
    assert run("run", "default", "What is this?", "-f", str(tmp_path / "a.wav")).returncode == 0
    (content,) = (message["content"] for message in server.answered()[1].body["messages"])
    assert content[0]["input_audio"]["format"] == "wav"


def test_a_chat_goes_on_with_the_server_that_answered_if_it_is_named_again(server: FarServer, run: Run) -> None:
    assert run("chat", "--session", "talk", stdin="Hi\n").stdout == "Hello there\n"
    forgotten = run("chat", "--continue", stdin="Again\n", engine="normal", LLMRUN_SERVER="")
    assert forgotten.returncode == 2
    assert f"llmrun chat --session talk --at {server.url}/v1" in forgotten.stderr
    server.models = listed("other", MODEL)
    assert run("chat", "--continue", stdin="Again\n").returncode == 0
    assert server.answered()[-1].body["model"] == MODEL
    assert len(server.answered()[-1].body["messages"]) == 3


ONLY_HERE = {
    "run": (
        ("--record", "x.json"), ("--prompt-cache",), ("--beams", "4"), ("--ctx", "512"), ("--threads", "1"),
        ("--gpu-layers", "0"), ("--n-cpu-moe", "1"), ("--cache-type-k", "q8_0"), ("--cache-type-v", "q8_0"),
        ("--flash-attention", "on"), ("--speculate", "4"), ("--draft", "x"), ("--mmproj", "x"), ("--verbose",),
        ("--rpc", "127.0.0.1:50052"), ("--split-mode", "none"), ("--main-gpu", "1"), ("--tensor-split", "3/1"),
        ("--device", "none"), ("--override-tensor", "x=CPU"), ("--batch-size", "64"), ("--ubatch-size", "64"),
    ),
    "chat": (("--ctx", "512"), ("--draft", "x")),
}  # fmt: skip


@pytest.mark.parametrize("command", ONLY_HERE)
def test_what_only_an_engine_here_can_do_is_refused(
    server: FarServer, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for option in ONLY_HERE[command]:
        done: Any = CliRunner().invoke(app_of(command), ["--at", server.url, "m", *option], input="hi")
        assert isinstance(done.exception, UsageError), option
        assert f"--at and {option[0]} can't be used together" in str(done.exception)
    assert not server.asked


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (["run", "smollm2", "hi"], True),
        (["run", "--at", "http://x", "m", "hi"], False),
        (["chat", "--at=http://x"], False),
        (["explain", "smollm2", "--attention"], True),
    ],
)
def test_an_engine_is_started_ahead_only_where_one_will_answer(
    words: list[str], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLMRUN_SERVER", raising=False)
    assert __main__._needs_engine(words) is starts
    monkeypatch.setenv("LLMRUN_SERVER", "http://x")
    assert __main__._needs_engine(words) is (words[0] == "explain")


def test_an_engine_here_loads_nothing_of_far_servers(environment: dict[str, str], tmp_path: Path) -> None:
    model = write(tmp_path / "tiny.gguf", tiny_model())
    words = [sys.executable, "-X", "importtime", str(FRONT), "normal", "run", str(model), "hi"]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**environment, "LLMRUN_SERVER": ""}, timeout=300, input=""
    )
    assert done.stdout == "Hello\n"
    assert "llmrun.model" in done.stderr
    assert "llmrun.remote" not in done.stderr


@on_a_terminal
def test_a_server_is_asked_for_several_answers_at_once(server: FarServer, start: Start) -> None:
    chat = start()
    chat.ask("Hi")
    server.replies = [(STREAM, chunk("The Seine flows"), Act.SILENCE)]
    chat.type("/retry 2")
    chat.wait(lambda: any(line.count("Seine") == 2 for line in chat.lines))  # before either has ended
    assert any("1. seed" in line and "2. seed" in line for line in chat.lines)
    chat.press("c")
    chat.wait(lambda: any(line.startswith("Which answer to keep?") for line in chat.lines))


@on_a_terminal
def test_a_server_that_breaks_off_leaves_the_chat_as_it_is(server: FarServer, start: Start) -> None:
    chat = start()
    assert any(f"{MODEL} at {server.url}/v1: unknown context window" in line for line in chat.lines)
    server.behave("hangs up in the middle")
    said = chat.ask("Hi")
    assert "Hello there" in said
    assert any("broke off" in line for line in said)
    assert any("/retry" in line for line in said)
    server.behave("is fine")
    assert "Hello there" in chat.ask("/retry")
    assert len(server.answered()[-1].body["messages"]) == 1


@on_a_terminal
def test_commands_work_or_say_why_not(server: FarServer, start: Start) -> None:
    server.models = listed(MODEL, "other", owned_by="openai")
    chat = start(MODEL)
    chat.ask("Hi")
    for command in ("/why", "/explain", "/beams", "/show", "/speculation"):
        assert any(f"{command} needs a model that is loaded here" in line for line in chat.ask(command)), command
    assert any("does not support --min-p" in line for line in chat.ask("/set min_p 0.1"))
    assert any("--temp is now 0.5" in line for line in chat.ask("/set temp 0.5"))
    assert any("server" in line for line in chat.ask("/set"))
    assert any("timed over the network" in line for line in chat.ask("/stats"))
    assert any("About" in line and "tokens." in line for line in chat.ask("/context"))
    assert any("Switched to other" in line for line in chat.ask("/model other"))
    assert "Hello there" in chat.ask("And now?")
    last = server.answered()[-1].body
    assert (last["model"], last["temperature"]) == ("other", 0.5)


@on_a_terminal
def test_ctrl_c_keeps_what_came(server: FarServer, start: Start) -> None:
    chat = start()
    server.replies = [(STREAM, chunk("Hello"), Act.SILENCE)]
    chat.type("Hi")
    chat.wait(lambda: any("TTFT" in line for line in chat.lines))  # its first text has come
    os.kill(chat.pid, signal.SIGINT)
    chat.wait(chat.at_prompt)
    server.replies = [FINE]
    chat.ask("Again")
    assert [message["content"] for message in server.answered()[-1].body["messages"]] == ["Hi", "Hello", "Again"]
    assert {request.path for request in server.answered()} == {CHAT}


@pytest.mark.parametrize("preset", ["top-k = 5", "keep-reasoning = true"])
def test_a_preset_yields_to_the_server_of_a_batch(server: FarServer, run: Run, tmp_path: Path, preset: str) -> None:
    rows, config = tmp_path / "rows.txt", tmp_path / "config.toml"
    rows.write_text("one\ntwo\n")
    config.write_text(f'[models."{MODEL}"]\n{preset}\ntemp = 0.5\n')
    server.models = listed(MODEL, owned_by="openai")
    done = run("batch", MODEL, str(rows), LLMRUN_CONFIG=str(config))
    assert done.returncode == 0, done.stderr
    bodies = [request.body for request in server.answered()]
    assert [body["temperature"] for body in bodies] == [0.5, 0.5]
    assert not any("top_k" in body or "chat_template_kwargs" in body for body in bodies)
    refused = run(
        "batch", MODEL, str(rows), "--top-k", "7", "-o", str(tmp_path / "out.jsonl"), LLMRUN_CONFIG=str(config)
    )
    assert "can't be told top_k" in refused.stderr, "it was typed"


def test_aliases_presets_and_the_variable_at_a_server(server: FarServer, run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[models."{MODEL}"]\nalias = "fast"\nmin-p = 0.2\ntemp = 0.5\n')
    server.models = listed(MODEL, owned_by="openai")
    done = run("run", "fast", "hi", LLMRUN_CONFIG=str(config))
    assert done.returncode == 0, "the server does not have min-p, and nobody typed it: " + done.stderr
    body = server.answered()[-1].body
    assert (body["model"], body["temperature"], "min_p" in body) == (MODEL, 0.5, False)
    assert "min_p" in run("run", MODEL, "hi", "--min-p", "0.2").stderr
    server.models = listed("fast", MODEL, owned_by="openai")
    assert run("run", "fast", "hi", LLMRUN_CONFIG=str(config)).returncode == 0
    assert server.answered()[-1].body["model"] == "fast", "the server's own name comes first"
    refused = run("run", MODEL, "hi", "--record", "answer.json").stderr
    assert "LLMRUN_SERVER and --record can't be used together" in refused
    assert "--at" not in refused
