"""The page's own protocol with the real SmolLM2: a token taken instead goes on from the cached prefix."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from support.installed import SECONDS
from support.real_server import RealServer


def post(server: RealServer, path: str, body: dict[str, Any]) -> str:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(server.address + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return str(answer.read().decode())


def test_another_token_is_taken_and_the_prefix_is_not_computed_again(server: RealServer) -> None:
    chat = json.loads(post(server, "/ui/ask", {"text": "Name a color."}))
    asked = {"chat": chat["id"], "question": chat["entries"][0]["id"], "max_tokens": 6, "temperature": 0}
    streamed = post(server, "/ui/answer", {**asked, "candidates": 5})
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    tokens = [token for event in events for token in event.get("tokens", ())]
    assert len(tokens) == 6
    assert all(len(token["top_logprobs"]) == 5 for token in tokens)
    kept, other = tokens[:3], tokens[3]["top_logprobs"][1]
    begins = bytes(byte for token in (*kept, other) for byte in token["bytes"]).decode()
    streamed = post(server, "/ui/answer", {**asked, "begins": begins})
    started = json.loads(streamed.split("data: ", 1)[1].splitlines()[0])
    assert started["prompt_tokens"] > events[0]["prompt_tokens"]
    assert started["cached_tokens"] > events[0]["prompt_tokens"], "tokens of the answer before are reused too"
    with urllib.request.urlopen(f"{server.address}/ui/chats/{chat['id']}", timeout=SECONDS) as answer:
        last = json.loads(answer.read())["entries"][-1]
    assert last["text"].startswith(begins)
    assert len(last["alternatives"]) == 2
