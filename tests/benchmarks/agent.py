"""A coding agent's session on `llmrun serve` beside llama-server: prompt tokens computed, and seconds a turn.

    python tests/benchmarks/agent.py [--llama-server PATH | --alone] [--shapes llama gemma3 lfm2 qwen35]
        [--peer-shapes llama ...] [--turns]

Tiny models of random weights: a dense one, one with a sliding window, and two hybrids. Each side gets the 20 requests
of agent_session.py, one after the other, with its defaults; llama-server gets a fixed first line of the system prompt,
and by default only the dense model: the whole takes up to ten minutes on two busy cores. The server idles for some
seconds and restarts, and the main conversation goes on. The bounds are llmrun's: at most 22 % of the prompt tokens are
computed, in the session and after the restart; after a title request the main conversation computes what it computes
without one; and the time to the first token of a grown turn is at most 1.2x of the dense model's. Then two agents
with different prompts share a server with two slots, in random turns, and at once: with the dense model and lfm2 each
computes at most 1.1x of the share that one computes alone. The KV cache of the other tiny models, and with it the limit
of copies, is too small.

    python tests/benchmarks/agent.py --model FILE [--ctx N]

One agent alone, and two in turns and at once, with a model of your own.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import agent_session
import peers
import server
from agent_session import AgentRequest
from support.hybrid_models import WINDOWED, write_models

N_CTX = 65_536  # llama-server's slots share one cache of this size: all three conversations fit
LONGER = 48  # tokens of an answer, so that those of two agents overlap
IDLE_SECONDS = 8  # llmrun saves conversations when it is idle
SHAPES = ("llama", "gemma3", "lfm2", "qwen35")
BOUND_SHAPES = ("llama", "lfm2")  # of two agents
MOST_COMPUTED, MOST_TTFT, MOST_OF_TWO = 0.22, 1.2, 1.1
TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools></s>{% endif %}
{%- for message in messages %}[{{ message.role }}]{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


class Turn(NamedTuple):
    """The cost of one request."""

    conversation: str
    prompt: int  # tokens
    computed: int  # of them
    ttft: float  # seconds
    seconds: float


def ask(port: int, request: AgentRequest) -> Turn:
    """Stream one answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    began, first, usage = time.perf_counter(), 0.0, {}
    connection.request("POST", "/v1/messages", json.dumps(request.body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(f"HTTP {answer.status}: {answer.read()[:500]!r}")
    for line in answer:
        if line.startswith((b"data: {", b"{")):
            event = json.loads(line.removeprefix(b"data: "))
            if event["type"] == "content_block_delta" and not first:
                first = time.perf_counter() - began
            usage |= event.get("usage") or event.get("message", {}).get("usage") or {}
    seconds = time.perf_counter() - began
    computed, cached = usage["input_tokens"], usage["cache_read_input_tokens"]
    return Turn(request.conversation, computed + cached, computed, first or seconds, seconds)


def for_llama_server(request: AgentRequest) -> AgentRequest:
    """Return a request without the line that differs in each, and whose answer has its usage: a stream may lack it."""
    return request._replace(body={**request.body, "system": request.body["system"][1:], "stream": False})


def turns(port: int, *, fixed: bool) -> list[Turn]:
    """Send the session."""
    return [ask(port, for_llama_server(each) if fixed else each) for each in agent_session.session()]


@contextmanager
def home() -> Iterator[dict[str, str]]:
    """Yield an environment without saved states."""
    folder = tempfile.mkdtemp(prefix="llmrun-agent-")
    before = os.environ.get("LLMRUN_HOME")
    os.environ["LLMRUN_HOME"] = folder
    try:
        yield dict(os.environ)
    finally:
        os.environ.pop("LLMRUN_HOME")
        if before is not None:
            os.environ["LLMRUN_HOME"] = before
        shutil.rmtree(folder)


def measure(command: list[str], *, fixed: bool) -> tuple[list[Turn], Turn]:
    """Return the session's turns, and the next turn on a server that has restarted."""
    with home():
        with server.running(command) as port:
            found = turns(port, fixed=fixed)
            time.sleep(0 if fixed else IDLE_SECONDS)
        with server.running(command) as port:
            after = agent_session.next_turn()
            return found, ask(port, for_llama_server(after) if fixed else after)


def two_agents(command: list[str], *, at_once: bool = False) -> list[float]:
    """Return the share of its prompt tokens that each of two agents on one server computes.

    Args:
        at_once: each asks as soon as it has an answer, whatever the other one does; else they take random turns.
    """
    found: dict[str, list[Turn]] = {"one ": [], "two ": []}

    def send(agent: str) -> None:
        for request in agent_session.session(agent):
            found[agent].append(ask(port, request._replace(body={**request.body, "max_tokens": LONGER})))

    with home(), server.running([*command, "--parallel", "2"]) as port:
        if at_once:
            with ThreadPoolExecutor() as pool:
                list(pool.map(send, found))
        for agent, request in () if at_once else agent_session.sessions(*found):
            found[agent].append(ask(port, request))
    return list(map(share, found.values()))


def add_two(report: peers.Report, shape: str, command: list[str], alone: float, *, is_bound: bool) -> None:
    """Measure two agents, in turns and at once, against the share that one computes alone."""
    for how, at_once in (("in turns", False), ("at once", True)):
        shares = two_agents(command, at_once=at_once)
        name = f"{shape}: share computed by each of two agents {how}"
        report.add(name, [100 * each for each in shares], "%", "llmrun")
        if is_bound:
            report.bound(f"{name} / by one", max(shares) / alone, MOST_OF_TWO, at_most=True)


def measure_model(path: str, command: list[str]) -> int:
    """Measure agents with a real model."""
    report = peers.Report()
    with home(), server.running(command) as port:
        alone = share(turns(port, fixed=False))
    report.add("share computed alone", [100 * alone], "%", "llmrun")
    add_two(report, Path(path).name, command, alone, is_bound=True)
    return report.finish()


def grown(found: list[Turn]) -> list[Turn]:
    """Return the main conversation's turns that only append to the one before."""
    main = [turn for turn in found if turn.conversation == "main"]
    changed = {0, agent_session.CLEARED_AT - 1, agent_session.NEXT_DAY_AT - 1}
    return [turn for number, turn in enumerate(main) if number not in changed]


def after_title(found: list[Turn]) -> float:
    """Return the tokens computed by a grown turn after a title request, divided by those of other grown turns."""
    others = [turn.computed for turn in grown(found)]
    first = next(number for number, turn in enumerate(found) if turn.conversation == "title")
    return found[first + 1].computed / statistics.median(others)


def share(found: list[Turn]) -> float:
    """Return the share of all prompt tokens that were computed."""
    return sum(turn.computed for turn in found) / sum(turn.prompt for turn in found)


def add(report: peers.Report, side: str, shape: str, found: list[Turn], restarted: Turn) -> None:
    """Add the figures of one side."""
    report.add(f"{shape}: prompt tokens", [sum(turn.prompt for turn in found)], "tokens", side)
    report.add(f"{shape}: prompt tokens computed", [sum(turn.computed for turn in found)], "tokens", side)
    report.add(f"{shape}: share computed", [100 * share(found)], "%", side)
    report.add(f"{shape}: after a restart", [100 * share([restarted])], "%", side)
    report.add(f"{shape}: seconds a turn", [turn.seconds for turn in found], "s", side)
    if side == "llmrun":
        report.add(f"{shape}: TTFT of a grown turn", [1000 * turn.ttft for turn in grown(found)], "ms", side)


def main() -> int:
    """Measure and print."""
    parser = peers.parser(__doc__)
    parser.add_argument("--llama-server", metavar="PATH", help="default: on PATH; left out with --alone")
    parser.add_argument("--alone", action="store_true", help="without llama-server")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--peer-shapes", nargs="+", default=[SHAPES[0]], help="shapes for llama-server")
    parser.add_argument("--turns", action="store_true", help="print each turn")
    parser.set_defaults(model="")  # then tiny ones
    parser.add_argument("--ctx", default="8192", help="context window, for --model; default: 8192")
    options = parser.parse_args()
    llmrun, report = peers.find_llmrun(options.llmrun), peers.Report()
    threads = str(options.threads or peers.cores())
    if options.model:
        return measure_model(options.model, [llmrun, "serve", options.model, "-t", threads, "-c", options.ctx])
    theirs = None if options.alone else peers.find_tool("llama-server", options.llama_server)
    settings = {"context_length": N_CTX, "tokenizer.chat_template": TEMPLATE}
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Path] = {}
        for shape in options.shapes:  # with a window in all its layers, a hybrid would have next to no KV cache
            window = {} if shape in WINDOWED else {"attention.sliding_window": 0}
            files |= write_models(Path(folder), (shape,), **settings, **window)
        dense: list[float] = []
        for shape, path in files.items():
            found, restarted = measure([llmrun, "serve", str(path), "-t", threads], fixed=False)
            add(report, "llmrun", shape, found, restarted)
            report.bound(f"{shape}: share computed", share(found), MOST_COMPUTED, at_most=True)
            report.bound(f"{shape}: share computed after a restart", share([restarted]), MOST_COMPUTED, at_most=True)
            report.bound(f"{shape}: after a title request", after_title(found), 1.1, at_most=True)
            command = [llmrun, "serve", str(path), "-t", threads]
            add_two(report, shape, command, share(found), is_bound=shape in BOUND_SHAPES)
            ttft = [turn.ttft for turn in grown(found)]
            dense = dense or ttft
            if ttft is not dense:
                ratio = min(ttft) / min(dense)
                report.bound(f"{shape}: TTFT of a grown turn / {options.shapes[0]}'s", ratio, MOST_TTFT, at_most=True)
            if theirs and shape in options.peer_shapes:
                command = [theirs, "-m", str(path), "-t", threads, "-c", str(N_CTX), "--jinja", "--no-webui"]
                of_peer = measure(command, fixed=True)
                add(report, "llama-server", shape, *of_peer)
                found = [*found, *of_peer[0]]
            for turn in found if options.turns else ():
                print(turn, file=sys.stderr)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
