"""Batches of the real SmolLM2: killed, stopped and resumed, every row has one line."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryFile
from typing import Any

import pytest
from support.installed import SECONDS, Installed, children_of, eventually

N_ROWS = 40


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.csv"
    lines = [f"{number},{number * 7}" for number in range(N_ROWS)]
    path.write_text("a,b\n" + "\n".join(lines) + "\n")
    return path


def command(rows: Path) -> tuple[str, ...]:
    prompt = "Here are two numbers, {a} and {b}. Say something about both of them."
    return ("batch", "smollm2", str(rows), "--prompt", prompt, "--temp", "0", "--max-tokens", "8", "-np", "4")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


@pytest.mark.slow
def test_killed_again_and_again_every_row_has_one_line(llmrun: Installed, rows: Path) -> None:
    out = rows.with_name("in.answers.jsonl")
    for wanted in (1, 9, 22):
        running = llmrun.start(*command(rows))
        assert eventually(lambda least=wanted: out.exists() and out.read_bytes().count(b"\n") >= least, SECONDS)
        running.process.kill()
        running.end()
    done = llmrun.run(*command(rows))
    assert done.returncode == 0
    found = lines(out)
    assert Counter(line["row"] for line in found) == Counter(range(1, N_ROWS + 1))
    assert all(line["answer"] and line["error"] is None for line in found)
    assert b"are already answered" in done.stderr
    before = out.read_bytes()
    assert llmrun.run(*command(rows)).returncode == 0
    assert out.read_bytes() == before


def test_ctrl_c_says_that_it_can_go_on(llmrun: Installed, rows: Path) -> None:
    out = rows.with_name("in.answers.jsonl")
    running = llmrun.start(*command(rows))
    assert eventually(lambda: out.exists() and out.read_bytes().count(b"\n") >= 3, SECONDS)
    running.process.send_signal(signal.SIGINT)
    status, stderr = running.end()
    assert status == -signal.SIGINT
    assert "run the same command again to continue" in stderr
    assert len(lines(out)) >= 3


def test_lines_of_an_openai_batch(llmrun: Installed, tmp_path: Path) -> None:
    body = {"model": "x", "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4, "temperature": 0}
    asked = {"custom_id": "first", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(asked) + "\n")
    summary = json.loads(llmrun.run("batch", "smollm2", str(tmp_path / "in.jsonl"), "--json").stdout)
    (line,) = lines(tmp_path / "in.answers.jsonl")
    assert (summary["done"], summary["failed"]) == (1, 0)
    assert (line["custom_id"], line["response"]["status_code"], line["error"]) == ("first", 200, None)
    assert line["response"]["body"]["choices"][0]["message"]["content"]
    assert line["response"]["body"]["usage"]["completion_tokens"] == summary["completion_tokens"]


@pytest.mark.slow
def test_a_ray_cluster_whose_engine_process_is_killed(llmrun: Installed, rows: Path) -> None:
    pytest.importorskip("ray")
    out = rows.with_name("in.answers.jsonl")
    with (
        TemporaryFile() as stderr,
        Popen([llmrun.command, *command(rows), "--ray", "local"], stderr=stderr, env=llmrun.environment()) as running,
    ):
        assert eventually(lambda: out.exists() and out.read_bytes().count(b"\n") >= 5, SECONDS)
        (actor,) = children_of(running.pid, "ray::NodeEngine", recursive=True)
        actor.kill()
        assert running.wait(SECONDS) == 0
    assert Counter(line["row"] for line in lines(out)) == Counter(range(1, N_ROWS + 1))
    assert all(line["answer"] and line["error"] is None for line in lines(out))
