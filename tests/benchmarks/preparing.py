"""What three answers notice of a fourth request that is being prepared: their inter-token latency, p95.

    python tests/benchmarks/preparing.py [--rounds 6] [--tokens 6000] [--threads 2]

Three answers of the same length run together, again and again: undisturbed, while a long conversation is rendered and
tokenized (it is only counted, so that no prefill is measured), and while a grammar is compiled. A grammar's request
takes part in the batch for a moment, so it is compared with the same request without one. Only latencies of tokens that
come while something is being prepared count; over a whole answer, where that happens once, hardly any would be seen.

The engine's threads run in this process, as engine/main.py makes them, so that each token's time is known.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import peers

from llmrun.engine import channel, environment
from llmrun.engine.main import EngineProcess
from llmrun.grammar import Grammar
from llmrun.protocol.loading import Load, Loaded
from llmrun.protocol.messages import (
    AnswerRequest,
    Command,
    CountTokens,
    Event,
    Failed,
    Finished,
    Frame,
    Generate,
    Message,
    Started,
    TextDelta,
    TokenCount,
)
from llmrun.protocol.params import Limits, SamplingParams

OTHERS = 3
PAUSE = 0.3  # seconds between two requests that are prepared
SENTENCE, SENTENCE_TOKENS = "The quick brown fox jumps over the lazy dog. ", 10
ENDLESS = Grammar("gbnf", "root ::= [a-z ]+")  # every answer is as long as it may be


def schema(n_properties: int) -> Grammar:
    """A JSON schema that takes tenths of a second to compile."""
    kinds = [{"type": "string", "pattern": "^[a-z]{3,20}$"}, {"type": "integer"}, {"enum": ["one", "two", "three"]}]
    properties = {f"property {number}": {"type": "array", "items": {"anyOf": kinds}} for number in range(n_properties)}
    return Grammar("json_schema", json.dumps({"type": "object", "properties": properties, "required": [*properties]}))


@dataclass
class Front:
    """Speaks to the engine's threads, and notes when what comes back."""

    commands: queue.SimpleQueue[Frame] = field(default_factory=queue.SimpleQueue)
    heard: threading.Condition = field(default_factory=threading.Condition)
    events: list[tuple[float, Event]] = field(default_factory=list)
    number: int = 0

    def receive(self) -> Frame:
        """See Channel."""
        return self.commands.get()

    def send(self, *events: Event) -> None:
        """See Channel."""
        with self.heard:
            self.events += [(time.perf_counter(), event) for event in events]
            self.heard.notify_all()

    def say(self, kind: type[Generate] | type[CountTokens], asked: AnswerRequest) -> int:
        """Send a request; its number."""
        self.number += 1
        self.commands.put(kind(self.number, asked))
        return self.number

    def wait(self, request: int, *kinds: type[Any]) -> tuple[float, Any]:
        """The first event of a request that is one of these, and when it came."""

        def found() -> tuple[float, Event] | None:
            return next(
                (each for each in self.events if each[1].request == request and isinstance(each[1], kinds)), None
            )

        with self.heard:
            self.heard.wait_for(lambda: found() is not None or any(isinstance(e, Failed) for _, e in self.events))
            event = found()
        return event or sys.exit(str([e for _, e in self.events if isinstance(e, Failed)]))


def latencies(front: Front, n_tokens: int, disturb: Callable[[], int] | None) -> list[float]:
    """Inter-token latencies of three answers, in seconds: all, or those while what disturb() sends is prepared."""
    asked = AnswerRequest(
        prompt="Once upon a time", sampling=SamplingParams(seed=1), limits=Limits(n_tokens), grammar=ENDLESS
    )
    front.events.clear()
    requests = [front.say(Generate, asked) for _ in range(OTHERS)]
    for request in requests:
        front.wait(request, TextDelta)
    over = threading.Event()
    windows: list[tuple[float, float]] = []

    def now_and_then() -> None:
        while disturb is not None and not over.wait(PAUSE):
            began = time.perf_counter()
            windows.append((began, front.wait(disturb(), Started, TokenCount)[0]))

    thread = threading.Thread(target=now_and_then)
    thread.start()
    for request in requests:
        front.wait(request, Finished)
    over.set()
    thread.join()
    gaps: list[float] = []
    for request in requests:
        times = [at for at, event in front.events if isinstance(event, TextDelta) and event.request == request]
        for before, after in pairwise(times):
            if disturb is None or any(before < end and after > begin for begin, end in windows):
                gaps.append(after - before)
    return gaps


def p95(values: list[float]) -> float:
    """Milliseconds."""
    return 1000 * statistics.quantiles(values, n=20)[-1]


def measure(front: Front, options: Any) -> int:
    """Measure and print."""
    path = peers.model_file(peers.find_llmrun(options.llmrun), options.model)
    threads = options.threads or peers.cores()
    load: Command = Load(path, 8192, 8192, n_seq_max=OTHERS + 1, threads=threads, warm_up=True)
    front.commands.put(load)
    front.wait(0, Loaded)
    peers.warn_if_busy()
    turns = [Message(role, SENTENCE * 10) for role in ("user", "assistant")]
    conversation = AnswerRequest((*turns * (options.tokens // SENTENCE_TOKENS // 20), turns[0]))
    short = AnswerRequest(prompt="Hi", limits=Limits(1))
    compiled = AnswerRequest(prompt="Hi", limits=Limits(1), grammar=schema(60))
    if front.wait(front.say(CountTokens, conversation), TokenCount)[1].total < options.tokens:
        sys.exit("the conversation is too short")
    kinds: dict[str, Callable[[], int] | None] = {
        "undisturbed": None,
        "a conversation is rendered": lambda: front.say(CountTokens, conversation),
        "a short request comes": lambda: front.say(Generate, short),
        "a grammar is compiled": lambda: front.say(Generate, compiled),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, disturb in kinds.items():
            found[name] += latencies(front, options.answer, disturb)
    print(f"{OTHERS} answers beside what is prepared, {threads} threads: latency of their tokens meanwhile, ms")
    for name, values in found.items():
        print(f"{name:28} p50 {1000 * statistics.median(values):6.1f}  p95 {p95(values):6.1f}  ({len(values)} tokens)")
    rendered = p95(found["a conversation is rendered"]) / p95(found["undisturbed"])
    grammar = p95(found["a grammar is compiled"]) / p95(found["a short request comes"])
    good = peers.verdict("rendering, times undisturbed", rendered, 1.2, at_most=True)
    good &= peers.verdict("compiling, times a short request", grammar, 1.2, at_most=True)
    sys.stdout.flush()
    return int(not good)


def main() -> None:
    """Run the engine's threads, and measure beside them."""
    parser = peers.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=6000, help="of the conversation that is rendered")
    parser.add_argument("--answer", type=int, default=200, help="tokens of each answer")
    options = parser.parse_args()
    channel._SERVED_TEXT_INTERVAL = -1.0  # every token is told at once
    environment.set_environment()
    environment.share_the_interpreter()
    front = Front()
    threading.Thread(target=lambda: os._exit(measure(front, options)), daemon=True).start()
    EngineProcess(front).run()  # type: ignore[arg-type]  # the main thread prepares


if __name__ == "__main__":
    main()
