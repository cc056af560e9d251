"""Coding agents in context windows of several sizes, to two summaries of their session each: prints a table.

    PATH=.../node_modules/.bin:$PATH unshare -rn sh -c \\
        'ip link set lo up; exec python tests/clients/windows.py --templates .../llama.cpp/models/templates'

An agent that is not on PATH is left out. Each is started by `llmrun launch` in an empty home, and reads one file after
the other, until its session was summarized twice. The answers are from a script, see scripted_serve.py; everything else
is the product's and the agent's own. The table says whether the session ended well, how full the window was
when it was summarized, and how many of the prompts' tokens were computed: how Needs in llmrun/cli/agents.py is renewed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.agent_session import WORDS
from forcing_proxy import Seen, changing
from scripted_serve import FAMILIES, FAMILY, FOLDER, Answer, Call
from support.real_server import RealServer
from support.tiny_projector import png
from wide_model import write_wide_model

from llmrun.cli.agents import AGENTS

WINDOWS = (32_768, 49_152, 65_536, 131_072)
SUMMARIES, MOST_READS, MOST_FILES = 2, 80, 80
IMAGE_AT = 2  # the file that is an image, for agents that read them
FEWEST_TURNS = 4  # between two summaries, for a session that does not only summarize
COLUMNS = (
    "agent", "window", "family", "result", "first prompt", "requests", "turns between", "summarized at", "computed",
    "by summaries", "next day",
)  # fmt: skip
QUESTION = "Read the text files one after the other, each as a whole, and say what is in them."
THOUGHT = "The user wants all files. I have read some of them; the next one is still missing, so I read it as a whole."
SUMMARY = "The user wants to know what is in the text files. " + " ".join(
    f"The file f{number:02}.txt was read: it has words in no order, as all others." for number in range(20)
)
ASKS_FOR_SUMMARY = re.compile(
    r"detailed summary|context checkpoint|state_snapshot|(summary of|summarize) (the|this|our) (conversation|session)"
    r"|anchored summary|existing summary|handoff|summarize this partial conversation|PREFIX of a turn",
    re.IGNORECASE,
)
READERS = re.compile(r"^(read|read_file|read_files|view|cat)$", re.IGNORECASE)
SHELLS = re.compile(r"^(exec_command|shell_command|shell|bash|run_commands|execute_command)$", re.IGNORECASE)
ARGUMENTS = {
    "claude": ("-p", QUESTION, "--allowedTools", "Bash,Read"),
    "codex": ("exec", "--skip-git-repo-check", "-s", "danger-full-access", QUESTION),
    "opencode": ("run", QUESTION),
    "qwen": ("--yolo", "-p", QUESTION),
    "continue": ("--auto", "-p", QUESTION),
    "pi": ("--offline", "--mode", "rpc"),  # with -p its extensions end at the first summary
    "crush": ("run", QUESTION),
    "cline": (QUESTION,),
    "copilot": ("--allow-all", "--no-auto-update", "-p", QUESTION),
    "goose": ("run", "--text", QUESTION),
    "aider": (
        "--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-pretty", "--no-fancy-input",
        "--no-gitignore", "--no-suggest-shell-commands", "--no-show-release-notes",
    ),
}  # fmt: skip
NEXT_DAY = {
    "claude": ("--continue", *ARGUMENTS["claude"]),
    "codex": (*ARGUMENTS["codex"][:-1], "resume", "--last", QUESTION),
    "opencode": ("run", "--continue", QUESTION),
    "qwen": ("--continue", *ARGUMENTS["qwen"]),
    "continue": ("--resume", *ARGUMENTS["continue"]),
    "pi": ("--continue", *ARGUMENTS["pi"]),
}
TALKERS = {"aider"}  # agents without tools: the user shows them the files
INPUT = {
    "pi": json.dumps({"type": "prompt", "message": QUESTION}) + "\n",
    "aider": "What can you do?\n"
    + "".join(f"/add f{number:02}.txt\nSay what is in it. {SUMMARY}\n/drop\n" for number in range(30))
    + "/exit\n",
}
IDLE_SECONDS = 8  # the server saves conversations when it is idle


class Request(NamedTuple):
    """A request for an answer, as it was answered."""

    kind: str  # "read", "summary", "end" or "other"
    prompt: int  # tokens
    computed: int  # of them
    status: int


class Player:
    """Chooses the answer of each request, and notes what the server's log says of it."""

    def __init__(self, script: Path, work: Path, log: Path, before: Player | None, *, talks: bool = False) -> None:
        self._script, self._work, self._log, self._talks = script, work, log, talks
        self._lock, self._own, self._offset = threading.Lock(), threading.local(), 0
        self._n_asked = self._n_read = 0
        self.requests: list[Request] = []
        self.before = before  # of the session, before the server's restart
        self.status = 0  # of the agent

    @property
    def has_ended(self) -> bool:
        """The last answer was given."""
        return any(each.kind == "end" for each in self.requests)

    @property
    def n_summaries(self) -> int:
        """How often the session was summarized: requests one after the other are of one summary."""
        kinds = [each.kind for each in self.requests if each.kind in ("read", "summary")]
        return sum(kind == "summary" and before == "read" for before, kind in pairwise(kinds))

    def change(self, protocol: str, body: dict[str, Any]) -> None:
        """Give the request the seed of its answer."""
        with self._lock:
            self._n_asked += 1
            self._own.kind, answer = self._answer(protocol, body)
            if answer is not None:
                self._script.joinpath(f"{self._n_asked}.json").write_text(json.dumps(answer))
                body["seed"] = self._n_asked

    def _answer(self, protocol: str, body: Mapping[str, Any]) -> tuple[str, Answer | None]:
        asked, tools = last_text(protocol, body), dict(tools_of(body))
        if self._talks:
            asked = body["messages"][0]["content"]  # the instructions of a summary are in the system's message
        if ASKS_FOR_SUMMARY.search(asked):
            state = f"<state_snapshot>\n{SUMMARY}\n</state_snapshot>" if "state_snapshot" in asked else SUMMARY
            return "summary", Answer(f"<summary>\n{state}\n</summary>" if "<summary>" in asked else state)
        call = self._call(tools)
        if call is None and not self._talks:
            schema = schema_of(body)
            return "other", Answer(json.dumps(instance(schema)) if schema else "Words in files")
        if self.before or self.n_summaries >= SUMMARIES or self._n_read >= MOST_READS:
            return "end", Answer("All files have words in no order.", THOUGHT)
        self._n_read += 1
        # Aider keeps an exchange in its history when a file was edited, here in the format "whole".
        said = f"It has words.\n\nsaid{self._n_read}.txt\n```\n{SUMMARY[:600]}\n```" if self._talks else ""
        return "read", Answer(said or "I read the next file.", THOUGHT, call)

    def _call(self, tools: Mapping[str, Mapping[str, Any]]) -> Call | None:
        """Return the call that reads the next file."""
        path = str(self._work / f"f{self._n_read % MOST_FILES:02}.txt")
        image = str(self._work / "image.png")
        for name, schema in tools.items():
            if READERS.match(name):
                return Call(name, dict(arguments(schema, image if self._n_read == IMAGE_AT else path)))
        for name, schema in tools.items():
            if SHELLS.match(name):
                return Call(name, dict(arguments(schema, f"cat {path}")))
        return None

    def answered(self, seen: Seen) -> None:
        """Note a response, with the log's figures."""
        kind = self._own.__dict__.pop("kind", "")
        if not kind:
            return
        facts = self._next_facts(seen.path.partition("?")[0])
        with self._lock:
            prompt, cached = facts.get("prompt_tokens", 0), facts.get("cached_tokens", 0)
            self.requests.append(Request(kind, prompt, prompt - cached, seen.status))
            result = seen.results[-1] if seen.results else ""
            told = result if len(result) < 1000 else ""  # an error of a tool
            said = f"{kind:8} {seen.status} {prompt:>7,} tokens, {prompt - cached:>7,} computed {facts.get('reason')}"
            print(f"    {said} {told}", file=sys.stderr)

    def _next_facts(self, path: str) -> Mapping[str, Any]:
        """Return the next line of the server's log about a path."""
        for _ in range(100):
            with self._log.open(encoding="utf-8") as log:
                log.seek(self._offset)
                while (line := log.readline()).endswith("\n"):
                    self._offset = log.tell()
                    with_facts: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
                    if with_facts.get("path") == path:
                        return with_facts
            time.sleep(0.05)
        return {}


def arguments(schema: Mapping[str, Any], value: str) -> Iterator[tuple[str, Any]]:
    """Yield the required arguments of a tool, the first text is the value."""
    properties, is_given = schema.get("properties", {}), False
    for name in schema.get("required") or list(properties)[:1]:
        facts = properties.get(name, {})
        kind = facts.get("type")
        if kind == "array" and not is_given:
            item = facts.get("items", {})
            yield name, [dict(arguments(item, value)) if item.get("type") == "object" else value]
            is_given = True
        elif kind in ("string", None):
            yield name, value if not is_given else "Read the next file"
            is_given = True
        else:
            yield name, instance(facts)


def instance(schema: Mapping[str, Any]) -> Any:
    """Return a value of a simple schema."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "string")
    if kind == "object":
        return {name: instance(each) for name, each in schema.get("properties", {}).items()}
    return {"string": "Words in files", "boolean": False, "integer": 1, "number": 1, "array": []}.get(kind)


def schema_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema of the answer in any protocol."""
    found = body.get("output_config", {}).get("format") or body.get("text", {}).get("format") or {}
    found = found or (body.get("response_format") or {}).get("json_schema") or {}
    return found.get("schema")


def tools_of(body: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield names and schemas."""
    for tool in body.get("tools") or ():
        facts = tool.get("function", tool)
        if "name" in facts:
            yield facts["name"], facts.get("input_schema") or facts.get("parameters") or {}


def last_text(protocol: str, body: Mapping[str, Any]) -> str:
    """Return the texts of the user's message after the last answer and the results of calls, if there is one."""
    items = body.get("input") if protocol == "responses" else body["messages"]
    if isinstance(items, str):
        return items
    for item in reversed(items or ()):
        content, role = item.get("content"), item.get("role")
        if role == "user":
            blocks = [{"text": content}] if isinstance(content, str) else content
            return "\n".join(block["text"] for block in blocks if isinstance(block.get("text"), str))
        if role not in ("system", "developer"):
            break
    return ""


def write_files(folder: Path, n_words: int) -> None:
    """Write files of different words."""
    folder.mkdir(parents=True)
    for number in range(MOST_FILES):
        draw = random.Random(number)
        lines = (" ".join(draw.choices(WORDS, k=12)) for _ in range(n_words // 12))
        folder.joinpath(f"f{number:02}.txt").write_text("\n".join(lines) + "\n")
    (folder / "image.png").write_bytes(png(8, 8))


@contextmanager
def serving(model: Path, family: str, window: int, home: Path, script: Path) -> Iterator[RealServer]:
    """Run the server, and print the end of its log if it fails."""
    os.environ.update({FOLDER: str(script), FAMILY: family})
    options = ("--ctx", str(window), "--grace", "0s", "--alias", f"wide={model}", "--log-json", "--keep", "forever")
    command = Path(__file__).parent / "scripted_serve.py"
    server = RealServer(str(command), home, *options, model=str(model))
    try:
        yield server
    finally:
        server.end()


def environment(home: Path, work: Path, hub: str) -> dict[str, str]:
    """Return an environment without accounts and configurations."""
    taken = ("ANTHROPIC", "OPENAI", "CLAUDE", "CODEX", "OLLAMA", "XDG", "LLMRUN", "NODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(taken)}
    home_is = {"HOME": str(home), "LLMRUN_HOME": str(home / "llmrun"), "HF_HOME": hub}
    return {**kept, **home_is, "PWD": str(work), "CI": "1"}


def run(agent: str, window: int, family: str, model: Path, command: str, share: int) -> str:
    """Run a session, and go on with it after a restart of the server; return the line of the table."""
    with tempfile.TemporaryDirectory(prefix="llmrun-windows-") as folder:
        home, work, script = (Path(folder) / name for name in ("home", "work", "script"))
        for each in (home, script):
            each.mkdir()
        write_files(work, window // share * 3 // 4)
        hub = os.environ.get("HF_HOME") or str(Path("~/.cache/huggingface").expanduser())
        player: Player | None = None
        for words in filter(None, (ARGUMENTS[agent], NEXT_DAY.get(agent))):
            with serving(model, family, window, home, script) as server:
                player = Player(script, work, server.log, player, talks=agent in TALKERS)
                with changing(server.port, player.change, player.answered) as (address, _):
                    launched = [command, "launch", agent, "wide", "--at", address, "--any-window", "--", *words]
                    player.status = run_agent(launched, environment(home, work, hub), work, INPUT.get(agent), player)
                time.sleep(IDLE_SECONDS)
        assert player is not None
        return line(agent, window, family, player)


def run_agent(command: list[str], variables: Mapping[str, str], work: Path, lines: str | None, player: Player) -> int:
    """Run an agent, and print the end of its output; return its exit status.

    Args:
        lines: for an agent that reads its questions from stdin until that ends.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env=variables, cwd=work, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(lines or "")
            process.stdin.flush()
            while lines and not player.has_ended and process.poll() is None:
                time.sleep(0.1)
        status = process.wait()
        output.seek(0)
        print(output.read().strip()[-1500:], file=sys.stderr)
        return status


def line(agent: str, window: int, family: str, last: Player) -> str:
    """Return the line of the table."""
    player = last.before or last
    requests, status = player.requests, player.status
    next_day = [each for each in last.requests if each.kind == "end"] if last.before else []
    kinds = [each.kind for each in requests if each.kind in ("read", "summary")]
    taken = [each for each in requests if each.prompt]  # not refused as too long
    fills = [each.prompt for each, after in pairwise(taken) if (each.kind, after.kind) == ("read", "summary")]
    ends = [number for number, (before, kind) in enumerate(pairwise(kinds)) if (before, kind) == ("read", "summary")]
    turns = kinds[ends[0] : ends[1]].count("read") if len(ends) > 1 else 0
    verdict = "ends" if status else "works" if turns >= FEWEST_TURNS else "thrashes" if turns else "summarized less"
    prompts, computed = sum(each.prompt for each in requests), sum(each.computed for each in requests)
    of_summaries = sum(each.computed for each in requests if each.kind == "summary")
    cells = (
        agent, f"{window:,}", family, f"{verdict}, rc {status}, {sum(each.status != 200 for each in requests)} refused",
        f"{next((each.prompt for each in requests if each.kind == 'read'), 0):,}", f"{len(requests)}", f"{turns}",
        f"{', '.join(f'{fill / 1000:.1f}k' for fill in fills)} ({max(fills, default=0) / window:.0%})",
        f"{computed / max(prompts, 1):.1%} ({computed / 1000:.0f}k of {prompts / 1000:.0f}k)",
        f"{of_summaries / 1000:.1f}k",
        f"{next_day[0].computed:,} of {next_day[0].prompt:,}, rc {last.status}" if next_day else "-",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Run the sessions and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=Path, required=True, help="folder of llama.cpp's chat templates")
    parser.add_argument("--agents", nargs="+", default=list(ARGUMENTS))
    parser.add_argument("--windows", nargs="+", type=int, default=list(WINDOWS))
    parser.add_argument("--families", nargs="+", default=["qwen3.5"], choices=list(FAMILIES))
    parser.add_argument("--share", type=int, default=26, help="one file takes about one so many-th of a window")
    options = parser.parse_args()
    command = shutil.which("llmrun", path=str(Path(sys.executable).parent)) or sys.exit("llmrun is not installed")
    shown = subprocess.run([command, "show", "smollm2", "--json"], stdout=subprocess.PIPE, text=True, check=True)
    vocabulary, lines = Path(json.loads(shown.stdout)["path"]), []
    with tempfile.TemporaryDirectory(prefix="llmrun-windows-") as folder:
        for name in options.families:
            family = FAMILIES[name]
            template = (options.templates / family.template).read_text(encoding="utf-8")
            model = write_wide_model(vocabulary, Path(folder) / f"{name}.gguf", template, family.controls)
            for agent, window in ((agent, window) for agent in options.agents for window in options.windows):
                if shutil.which(AGENTS[agent].executable) is None:
                    print(f"{agent} is not installed", file=sys.stderr)
                    continue
                print(f"{agent}, {window:,}, {name}", file=sys.stderr)
                lines.append(run(agent, window, name, model, command, options.share))
                print(lines[-1], file=sys.stderr, flush=True)
    print(f"| {' | '.join(COLUMNS)} |")
    print("\n".join(["|" + " --- |" * len(COLUMNS), *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
