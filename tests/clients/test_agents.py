"""Coding agents, started by `llmrun launch`: each calls its tools for real, and its session ends well."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from forcing_proxy import DONE, PROTOCOLS, Call, Seen, forcing
from support.real_server import RealServer
from support.tiny_projector import png
from table import ROWS, Row

from llmrun.cli.agents import AGENTS
from llmrun.server.registry import ServedRequest

SECONDS = 300
REGISTRY_SECONDS = 1.0  # a server writes its last requests every half second
SAID = "llmrun-ran-this"
SESSION = "11111111-2222-4333-8444-555555555555"
ECHO = {"command": f"echo {SAID}", "description": "Say it"}
SUB_AGENT = {"description": "Look", "prompt": "Say what you see", "subagent_type": "general-purpose"}


class Case(NamedTuple):
    """One run of an agent."""

    agent: str
    done: str
    script: Sequence[Sequence[Call]]
    arguments: Sequence[str]
    result: str  # a part of the call's result


CODEX = ("exec", "--skip-git-repo-check", "-s", "danger-full-access", "Do it")
MCP_SERVER = f"""
from mcp.server.mcpserver import MCPServer
server = MCPServer("said")
@server.tool()
def say(word: str) -> str:
    "Say a word."
    return word + " in {SAID}"
server.run()
"""
WITH_MCP = (
    "-c", f"mcp_servers.said.command={json.dumps(sys.executable)}",
    "-c", f"mcp_servers.said.args={json.dumps(['-c', MCP_SERVER])}",
    "-c", "mcp_servers.said.required=true",
)  # fmt: skip
AIDER = (
    "--message", "Do it", "--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-stream",
    "--no-pretty", "--no-gitignore", "--no-suggest-shell-commands", "--no-show-release-notes",
)  # fmt: skip
CLAUDE = ("-p", "Do it", "--allowedTools", "Bash,Read,Task,Agent")
CASES = (
    Case("claude", "Bash", [[Call("Bash", ECHO)]], CLAUDE, SAID),
    Case("claude", "Read of a PNG", [[Call("Read", {"file_path": "PNG"})]], CLAUDE, "image"),
    Case("claude", "a sub-agent", [[Call("Task", SUB_AGENT), Call("Agent", SUB_AGENT)]], CLAUDE, DONE["done"]),
    Case(
        "codex",
        "exec, a shell command",
        [
            [
                Call("exec_command", {"cmd": f"echo {SAID}"}),
                Call("shell_command", {"command": f"echo {SAID}"}),
                Call("shell", {"command": ["echo", SAID]}),
            ]
        ],
        CODEX,
        SAID,
    ),
    Case(
        "codex", "a tool of an MCP server", [[Call("say", {"word": "a word"})]], (*WITH_MCP, *CODEX), f"word in {SAID}"
    ),
    Case("codex", "a sub-agent", [[Call("spawn_agent", {"message": "Say what you see"})]], CODEX, "agent_id"),
    Case("opencode", "run, bash", [[Call("bash", ECHO)]], ("run", "Do it"), SAID),
    Case(
        "qwen",
        "a shell command",
        [[Call("run_shell_command", {"command": f"echo {SAID}", "is_background": False})]],
        ("--yolo", "-p", "Do it"),
        SAID,
    ),
    Case("aider", "a message", [], AIDER, ""),
    Case("crush", "run, bash", [[Call("bash", ECHO)]], ("run", "Do it"), SAID),
    Case("pi", "bash", [[Call("bash", {"command": f"echo {SAID}"})]], ("--offline", "-p", "Do it"), SAID),
    Case("continue", "Bash", [[Call("Bash", {"command": f"echo {SAID}"})]], ("--auto", "-p", "Do it"), SAID),
    Case("cline", "run_commands", [[Call("run_commands", {"commands": [f"echo {SAID}"]})]], ("Do it",), SAID),
    Case("cline", "read_files of a PNG", [[Call("read_files", {"files": [{"path": "PNG"}]})]], ("Do it",), "image"),
    Case("copilot", "bash", [[Call("bash", ECHO)]], ("--allow-all", "--no-auto-update", "-p", "Do it"), SAID),
    Case(
        "goose",
        "shell",
        [[Call("shell", {"command": f"echo {SAID}"}), Call("developer__shell", {"command": f"echo {SAID}"})]],
        ("run", "--text", "Do it"),
        SAID,
    ),
)


def version(agent: str, environment: dict[str, str]) -> str:
    command = [AGENTS[agent].executable, "--version"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    said = found.stdout.strip() or found.stderr.strip()  # pi says it on stderr
    return said.splitlines()[-1] if said else "?"


class Agents:
    """Runs agents in an empty folder."""

    def __init__(self, command: str, server: RealServer, environment: dict[str, str], folder: Path) -> None:
        self._command, self._server, self._environment, self._folder = command, server, environment, folder

    def run(self, case: Case, *more: str) -> tuple[subprocess.CompletedProcess[str], list[Seen]]:
        """Run a case; skip where the agent is not installed."""
        if shutil.which(AGENTS[case.agent].executable) is None:
            ROWS.append(Row(case.agent, "-", case.done, "skipped: not installed"))
            pytest.skip(f"{case.agent} is not installed")
        path = self._folder / "image.png"
        path.write_bytes(png(8, 8))
        image = json.dumps(str(path))
        script = [
            [call._replace(arguments=json.loads(json.dumps(call.arguments).replace('"PNG"', image))) for call in calls]
            for calls in case.script
        ]
        with forcing(self._server.port, script) as (address, seen):
            arguments = [self._command, "launch", case.agent, "wide", "--at", address, "--", *case.arguments, *more]
            done = subprocess.run(
                arguments,
                env=self._environment,
                cwd=self._folder,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=SECONDS,
                check=False,
            )
        return done, seen

    def note(self, case: Case, seen: Sequence[Seen], done: str = "") -> None:
        """Add a row of the table."""
        ignored = ", ".join(sorted({each.ignored for each in seen if each.ignored}))
        answered = sum(each.path.partition("?")[0] in PROTOCOLS for each in seen)
        result = f"{len(seen)} requests, the longest prompt {self.longest_prompt(answered):,} tokens"
        result += f" (first prompt in agents.py: {AGENTS[case.agent].needs.first_prompt:,})"
        result += f", ignored: {ignored}" if ignored else ""
        ROWS.append(Row(case.agent, version(case.agent, self._environment), done or case.done, result))

    def longest_prompt(self, count: int) -> int:
        """Return the tokens of the longest of the last prompts: about the first one's, as a case is short."""
        time.sleep(REGISTRY_SECONDS)
        command = [self._command, "ps", "--json"]
        done = subprocess.run(command, env=self._environment, stdout=subprocess.PIPE, timeout=60, check=True)
        [server] = [each for each in json.loads(done.stdout) if each["port"] == self._server.port]
        return max((ServedRequest(*each).prompt_tokens for each in server["requests"][-count:]), default=0)


@pytest.fixture
def agents(command: str, server: RealServer, clean_environment: dict[str, str], tmp_path: Path) -> Agents:
    folder = tmp_path / "work"
    folder.mkdir()
    return Agents(command, server, clean_environment, folder)


def check(done: subprocess.CompletedProcess[str], seen: Sequence[Seen], case: Case) -> None:
    """Check that the call ran, its result came back, and every answer was taken."""
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    assert DONE["done"] in done.stdout
    refused = [each for each in seen if each.method == "POST" and each.status != 200]
    assert not refused
    found = [result for each in seen for result in each.results]
    assert not case.script or any(case.result in result for result in found), found


@pytest.mark.parametrize("case", CASES, ids=[f"{case.agent}, {case.done}" for case in CASES])
def test_an_agent_calls_a_tool(agents: Agents, case: Case) -> None:
    done, seen = agents.run(case)
    check(done, seen, case)
    agents.note(case, seen)


def test_claude_resumes(agents: Agents) -> None:
    case = CASES[0]
    check(*agents.run(case, "--session-id", SESSION), case)
    done, seen = agents.run(case, "--resume", SESSION)
    check(done, seen, case)
    agents.note(case, seen, "resume")
