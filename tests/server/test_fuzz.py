"""Hostile bodies to every route, beside streams of well-behaved clients, over real engines of tiny random models."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.embedding_models import gguf_of
from support.fuzz import Fuzzer
from support.installed import children_of
from support.random_model import write_random_model
from support.request_bodies import KILLERS, ROUTES
from support.served import CHAT, LiveServer, RawResponse, parse
from support.tiny_projector import projector
from support.tool_templates import TOOL_TEMPLATES

pytestmark = pytest.mark.usefixtures("package_on_path")
WIDTH, N_CTX = 128, 768
UNTOUCHED = ("keep_alive",)  # unloads the model, as it should
STORIES = ("Tell a long story.", "Name the planets, one a line.")
_MOST_SHOWN = 12
_REQUESTS_A_STORY = 100


@contextmanager
def fuzzed_server(folder: Path) -> Iterator[LiveServer]:
    """A server of a model that writes calls and sees images, and of an embedding model."""
    model = write_random_model(
        folder / "fuzzed.gguf", layers=2, width=WIDTH, n_ctx=N_CTX, template=TOOL_TEMPLATES["qwen-xml"]
    )
    embeds = gguf_of("bert, mean", folder / "bert")
    images = str(projector(folder / "eyes.gguf", WIDTH, "gemma3"))
    names = (str(model), str(embeds))
    with LiveServer(
        folder,
        ("real",),
        model=model,
        names=names,
        n_ctx=N_CTX,
        parallel=8,
        queue=400,
        keep_seconds=-1,
        projector=images,
    ) as server:
        yield server


def engines() -> set[int]:
    """The process ids of this process's engines."""
    return {child.pid for child in children_of(None, "llmrun.engine")}


def story(server: LiveServer, said: str) -> str:
    """A greedy stream's text."""
    body = {"messages": [{"role": "user", "content": said}], "temperature": 0, "max_tokens": 40, "stream": True}
    answer = server.post(CHAT, {**body, "speculate": "off"})
    assert answer.status == 200, answer.body
    return "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events)


def complaint(path: str, data: bytes, answer: RawResponse) -> str:
    """Return what is wrong with an answer; "" if nothing is."""
    shown = f"{path} {answer.status} {answer.body[:300]!r} for {data[:1500]!r}"
    if any(word in answer.body for word in (b"internal-error", b"engine-crashed", b"internal error", b"deadly-prompt")):
        return shown
    if 200 <= answer.status < 300:
        return ""
    try:
        error = answer.json.get("error")
        reason = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        reason = None
    return "" if 400 <= answer.status < 500 and isinstance(reason, str) and reason.strip() else shown


class Attack:
    """Requests of several clients to all routes in turns, beside well-behaved ones.

    Attributes:
        counts: (path, status) -> answers.
        complaints: about answers.
    """

    def __init__(self, server: LiveServer, n_requests: int, seed: int) -> None:
        self._server, self._n_requests = server, n_requests
        bodies = [body for bodies in ROUTES.values() for body in bodies]
        self._fuzzer, self._paths = Fuzzer(bodies, seed, UNTOUCHED), [*ROUTES]
        self._lock, self._number, self._is_over = threading.Lock(), 0, threading.Event()
        self.counts: Counter[tuple[str, int]] = Counter()
        self.complaints: list[str] = []

    def run(self, stories: dict[str, str]) -> int:
        """Send all requests; return how many stories came out well meanwhile."""
        with ThreadPoolExecutor(6) as pool:
            neighbours = [pool.submit(self._tell, said, told) for said, told in stories.items()]
            attackers = [pool.submit(self._attack) for _ in range(3)]
            try:
                for attacker in attackers:
                    attacker.result()
            finally:
                self._is_over.set()
            return sum(neighbour.result() for neighbour in neighbours)

    def _tell(self, said: str, told: str) -> int:
        n_told = 0
        while not (self._is_over.is_set() and n_told):
            assert story(self._server, said) == told
            n_told += 1
            while self._number < n_told * _REQUESTS_A_STORY and not self._is_over.wait(0.05):
                pass
        return n_told

    def _attack(self) -> None:
        while (made := self._next()) is not None:
            path, data = made
            headers = {"sec_fetch_site": "same-origin"} if path.startswith("/ui/") else {}
            try:
                answer = parse(self._server.raw(self._server.request("POST", path, data, **headers)))
            except (OSError, LookupError, ValueError) as error:  # none, or no HTTP
                answer = RawResponse(0, {}, repr(error).encode())
            with self._lock:
                self.counts[path, answer.status] += 1
                self.complaints += filter(None, [complaint(path, data, answer)])

    def _next(self) -> tuple[str, bytes] | None:
        """Return the next request: what it is depends on its number only."""
        with self._lock:
            self._number += 1
            path = self._paths[self._number % len(self._paths)]
            bodies = ROUTES[path]
            good = bodies[self._number // len(self._paths) % len(bodies)]
            return (path, self._fuzzer.body(good)) if self._number <= self._n_requests else None


def table(counts: Counter[tuple[str, int]]) -> str:
    """The answers by route and status."""
    paths = sorted({path for path, _ in counts})
    rows = [
        f"{path:36}" + " ".join(f"{s}: {n:4}" for (p, s), n in sorted(counts.items()) if p == path) for path in paths
    ]
    totals = Counter[int]()
    for (_, status), count in counts.items():
        totals[status] += count
    return "\n".join([*rows, f"{sum(totals.values())} requests: {dict(sorted(totals.items()))}"])


@pytest.mark.parametrize(
    "n_requests",
    [400, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["some", "ten thousand"],
)
def test_nothing_that_a_request_holds_ends_an_engine(
    tmp_path: Path, n_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no models"))  # which requests could delete
    others = engines()  # of earlier tests
    with fuzzed_server(tmp_path) as server:
        for path, bodies in ROUTES.items():
            assert complaint(path, b"", server.post(path, bodies[0])) == ""
        stories = {said: story(server, said) for said in STORIES}
        running = engines() - others
        for path, body in KILLERS:
            assert complaint(path, b"", server.post(path, body)) == ""
            assert engines() - others == running
        attack = Attack(server, n_requests, seed=49)
        n_told = attack.run(stories)
        print(table(attack.counts))
        print(f"{n_told} neighbours' streams equal the ones alone")
        assert attack.complaints == [], "\n".join(attack.complaints[:_MOST_SHOWN])
        assert engines() - others == running, "the same processes"
        assert server.engines == len(running)
        assert sum(attack.counts.values()) == n_requests
