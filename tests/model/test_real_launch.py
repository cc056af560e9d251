"""`llmrun launch` with a stand-in agent: a server comes up for it, answers it, and ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.installed import SECONDS, Installed, eventually, gone

AGENT = """#!{python}
import json, os, sys, time, urllib.request
body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 3, "messages": [{{"role": "user", "content": "Hi"}}]}}
headers = {{"content-type": "application/json", "x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"]}}
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=600) as answer:
    model = json.load(answer)["model"]
print(json.dumps({{"model": model, "arguments": sys.argv[1:], "url": url}}), flush=True)
time.sleep(600 if sys.argv[1:] == ["wait"] else 0)
sys.exit(7)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with an agent called claude."""
    agent = tmp_path / "claude"
    agent.write_text(AGENT.format(python=sys.executable))
    agent.chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def servers_of(llmrun: Installed) -> list[dict[str, Any]]:
    servers: list[dict[str, Any]] = json.loads(llmrun.run("ps", "--json").stdout)
    return servers


def test_a_server_comes_up_for_an_agent_and_ends_with_it(llmrun: Installed, path: str) -> None:
    done = llmrun.run(
        "launch", "claude", "smollm2", "--any-window", "--ctx", "2048", "--", "-p", "hi", env={"PATH": path}
    )
    assert done.returncode == 7, done.stderr
    shown = json.loads(done.stdout)
    assert shown["model"] == "smollm2"
    assert shown["arguments"] == ["-p", "hi"]
    assert b"2,048 tokens, too small. Claude Code needs" in done.stderr
    assert servers_of(llmrun) == []


def test_a_path_is_the_model_that_its_server_has(llmrun: Installed, path: str) -> None:
    """The server calls it by the file's name, which the agent has to send."""
    file = json.loads(llmrun.run("show", "smollm2", "--json").stdout)["path"]
    done = llmrun.run("launch", "claude", file, "--any-window", "--ctx", "2048", "--", "-p", "hi", env={"PATH": path})
    assert done.returncode == 7, done.stderr
    assert b"No running server has" in done.stderr


def test_a_window_that_is_too_small_is_refused(llmrun: Installed, path: str) -> None:
    done = llmrun.run("launch", "claude", "smollm2", env={"PATH": path})
    assert done.returncode == 2
    assert b"long sessions need 49,152" in done.stderr
    assert b"--any-window" in done.stderr


def test_a_killed_launch_leaves_no_server(llmrun: Installed, path: str) -> None:
    command = [llmrun.command, "launch", "claude", "smollm2", "--any-window", "--ctx", "2048", "--", "wait"]
    process = subprocess.Popen(command, env=llmrun.environment({"PATH": path}), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["model"] == "smollm2"
        servers = servers_of(llmrun)
        assert len(servers) == 1
        server = psutil.Process(servers[0]["pid"])
        agents = [each for each in psutil.Process(process.pid).children() if each.pid != server.pid]
        process.send_signal(signal.SIGKILL)
        assert eventually(lambda: gone(server), SECONDS)
    finally:
        process.kill()
        process.wait()
    for agent in agents:
        agent.kill()
