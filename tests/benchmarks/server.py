"""Servers to be measured: started, asked by several clients at once, and stopped.

Not a benchmark itself.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

_START_SECONDS = 120

Ask = Callable[[list[int], int], Any]
"""Tokens of a prompt, and how many to answer with."""


@contextmanager
def started(program: str, model: str, threads: int, n_parallel: int, n_ctx: int) -> Iterator[Ask]:
    """A server for so many clients, with a unified KV cache of n_ctx tokens for each; what asks it."""
    command = [program, "-m", model, "-t", str(threads), "-np", str(n_parallel), "-c", str(n_ctx * n_parallel)]
    with running([*command, "--kv-unified", "-fa", "on", "--no-webui"]) as port:
        yield lambda prompt, n_tokens: _post(port, prompt, n_tokens)


@contextmanager
def running(command: Sequence[str]) -> Iterator[int]:
    """A server that takes --port and answers /health when it is ready; its port."""
    with process(command) as (port, _):
        yield port


@contextmanager
def process(command: Sequence[str]) -> Iterator[tuple[int, int]]:
    """As running(); its port and its process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen([*command, "--port", str(port)], **quiet)
    try:
        _wait_for(port)
        yield port, started.pid
    finally:
        started.terminate()
        started.wait()


def all_at_once(ask: Ask, prompts: Sequence[list[int]], n_tokens: int) -> None:
    """A client for each prompt; until all are answered."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: ask(prompt, n_tokens), prompts))


def _wait_for(port: int) -> None:
    for _ in range(10 * _START_SECONDS):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server does not start")


def _post(port: int, prompt: list[int], n_tokens: int) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"prompt": prompt, "n_predict": n_tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": True}
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        raise SystemExit(f"llama-server refuses: {answer}")
    return answer
