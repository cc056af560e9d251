"""A coding agent's session as requests to /v1/messages. Not a benchmark itself.

The main conversation grows by a call and its result; between its turns come title requests and the turns of two
sub-agents. As in Claude Code, the first line of the system prompt differs in every request, an old result is cleared,
and the date in the first message changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

SYSTEM, SUB_SYSTEM, TOOL, RESULT, TASK = 8000, 2000, 220, 700, 300  # tokens, of a vocabulary of bytes
WORDS = (
    "file",
    "test",
    "line",
    "read",
    "write",
    "error",
    "value",
    "return",
    "import",
    "class",
    "the",
    "a",
    "of",
    "that",
)
TOOLS = ("Bash", "Read", "Edit", "Write", "Grep", "Glob", "Task", "WebFetch", "TodoWrite")
SUB_TOOLS = TOOLS[:5]
CLEARED = "[Old tool result content cleared]"
ORDER = ("main", "title", *["main"] * 3, *["a", "b"] * 2, "a", "main", "b", "main", "title", *["main"] * 6)
CLEARED_AT, NEXT_DAY_AT = 7, 9  # turns of the main conversation


class AgentRequest(NamedTuple):
    """A request, and which conversation it belongs to."""

    conversation: str  # "main", "title", "a" or "b"
    body: dict[str, Any]


def text(seed: str, n_tokens: int) -> str:
    """Return words of about n_tokens bytes, the same for the same seed."""
    draw, words, length = random.Random(seed), [], 0
    while length < n_tokens:
        words.append(draw.choice(WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)


def session(agent: str = "") -> Iterator[AgentRequest]:
    """Yield the 20 requests of an agent, whose name makes its texts different from those of others."""
    turns = dict.fromkeys(ORDER, 0)
    for number, name in enumerate(ORDER):
        turns[name] += 1
        yield AgentRequest(name, _request(name, turns[name], number, agent))


def sessions(*agents: str) -> Iterator[tuple[str, AgentRequest]]:
    """Yield the requests of several agents in random turns, each with the name of its agent."""
    draw, running = random.Random(1), {agent: session(agent) for agent in agents}
    while running:
        agent = draw.choice([*running])
        request = next(running[agent], None)
        if request is None:
            del running[agent]
        else:
            yield agent, request


def next_turn() -> AgentRequest:
    """Return the request that continues the main conversation after the session."""
    return AgentRequest("main", _request("main", ORDER.count("main") + 1, len(ORDER)))


def _request(name: str, turn: int, number: int, agent: str = "") -> dict[str, Any]:
    header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"}
    common = {"max_tokens": 8, "temperature": 0, "stream": True}
    if name == "title":
        prompt = {"role": "user", "content": text(f"{agent}title {turn}", TASK)}
        return {**common, "system": [header, _block("Write a title of this conversation.")], "messages": [prompt]}
    is_main = name == "main"
    system = text(f"{agent}system", SYSTEM) if is_main else text(f"{agent}sub-agent", SUB_SYSTEM)
    names = TOOLS if is_main else SUB_TOOLS
    messages = [{"role": "user", "content": [_block(_date(is_main, turn)), _block(text(f"{agent}{name} task", TASK))]}]
    for earlier in range(1, turn):
        identity, cleared = f"toolu_{agent}{name}_{earlier}", is_main and turn >= CLEARED_AT and earlier == 1
        call = {"type": "tool_use", "id": identity, "name": "Bash", "input": {"command": text(f"{identity}", 40)}}
        result = CLEARED if cleared else text(f"result {identity}", RESULT)
        messages.append({"role": "assistant", "content": [_block(text(f"answer {identity}", 60)), call]})
        messages.append({"role": "user", "content": [_result(identity, result)]})
    return {**common, "system": [header, _block(system)], "tools": list(map(_tool, names)), "messages": messages}


def _date(is_main: bool, turn: int) -> str:
    day = 24 if is_main and turn >= NEXT_DAY_AT else 23
    return f"<system-reminder>Today's date is 2026-11-{day}.</system-reminder>"


def _block(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def _result(identity: str, content: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": identity, "content": content}


def _tool(name: str) -> dict[str, Any]:
    command = {"type": "string", "description": text(f"argument of {name}", 40)}
    schema = {"type": "object", "properties": {"command": command}, "required": ["command"]}
    return {"name": name, "description": text(name, TOOL), "input_schema": schema}
