"""Many clients at once, some of whom leave, lie or lose their engine: all are answered, and nothing is left over."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.installed import eventually
from support.served import CHAT, SECONDS, LiveServer, parse

pytestmark = pytest.mark.usefixtures("package_on_path")
N_REQUESTS = 120
N_CLIENTS = 12


def ask(server: LiveServer, number: int) -> str:
    """What became of a request: "left", or how it was answered."""
    chance = random.Random(number)
    body = {"messages": [{"role": "user", "content": f"Question {number}"}], "stream": chance.random() < 0.5}
    data = server.request("POST", CHAT, json.dumps(body).encode())
    if number % 20 == 3:
        return str(parse(server.raw(server.request("POST", CHAT, b"{"))).status)
    if number % 5 == 1:
        with server.connect() as connection:
            connection.sendall(data[: chance.randrange(1, len(data) + 1)])
        return "left"
    answer = parse(server.raw(data))
    if answer.headers["content-type"] != "text/event-stream":
        return "error" if "error" in answer.json else "answer"
    if answer.body.endswith(b"data: [DONE]\n\n"):
        return "answer"
    assert "error" in answer.events[-1]
    return "error"


def test_everybody_is_answered_and_nothing_is_left(tmp_path: Path) -> None:
    with LiveServer(tmp_path, parallel=4, queue=N_REQUESTS) as server, ThreadPoolExecutor(N_CLIENTS) as clients:
        asked = []
        for number in range(N_REQUESTS):
            asked.append(clients.submit(ask, server, number))
            if number % 40 == 39:
                asked[-1].result(SECONDS)
                for engine in psutil.Process().children():
                    engine.kill()
        results = [each.result(SECONDS) for each in asked]
        assert results.count("left") == N_REQUESTS // 5
        assert results.count("400") == N_REQUESTS // 20
        assert results.count("answer") > N_REQUESTS // 2
        quiet = 'num_requests_running{model_name="' + server.model + '"} 0'
        assert eventually(lambda: quiet in server.get("/metrics").body.decode(), SECONDS)
        metrics = server.get("/metrics").body.decode()
        assert f'num_requests_waiting{{model_name="{server.model}"}} 0' in metrics
        assert server.post(CHAT, {"messages": [{"role": "user", "content": "The last"}]}).status == 200
        assert server.engines <= 5
