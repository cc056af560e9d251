"""The page's own protocol with the real SmolLM2: a token taken instead goes on from the cached prefix."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.installed import SECONDS, eventually
from support.real_server import RealServer, environment


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


@pytest.mark.usefixtures("pulled")
def test_chat_web_opens_the_page_and_ends_with_ctrl_c(command: str, tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}.new && mv {opened}.new {opened}\n')
    browser.chmod(0o755)
    surroundings = {**environment(tmp_path / "home"), "BROWSER": str(browser)}
    arguments = [command, "chat", "smollm2", "--web", "--ctx", "512"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, env=surroundings, text=True) as running:
        assert eventually(opened.exists, SECONDS)
        address = opened.read_text()
        request = urllib.request.Request(address, headers={"accept": "text/html"})
        with urllib.request.urlopen(request, timeout=SECONDS) as page:
            assert b"/ui/files/page.js" in page.read()
        running.send_signal(signal.SIGINT)
        assert running.wait(SECONDS) == 0
        assert running.stderr is not None
        assert f"The browser opens {address}" in running.stderr.read()
