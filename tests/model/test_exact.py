"""`--exact` with the real SmolLM2: `serve` and `batch` give bit for bit what `run` gives, whatever else is in flight.

Log-probabilities are compared, too: where a logit differs at all, one of them does, also where no token changes.
"""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.installed import SECONDS, Installed
from support.real_server import RealServer

MOST = 8  # tokens of an answer
BATCH = 512  # tokens of a prompt that are computed at once


def squares(count: int) -> str:
    return " ".join(f"The square of {number} is {number * number}." for number in range(count))


PROMPTS = [
    "Hi",
    "Why is the sky blue?",
    "Name three colours.",
    "Write a short poem about the sea.",
    "What is 17 times 23?",
    "List five animals and say one thing about each of them.",
    "Explain how a bicycle stays upright.",
    "Translate to French: The weather is fine today.",
    "Tell me a story about a fox and a crow.",
    "Who wrote Hamlet, and when?",
    "Write a Python function that adds two numbers.",
    f"{squares(10)} What comes next?",
    f"{squares(30)} Say something about these.",
    f"{squares(90)} Summarise.",
    f"{squares(90)} Which number is the largest?",  # its beginning is known: one whole batch of it may be reused
]

Answer = list[tuple[str, float]]  # tokens, each with its log-probability


@pytest.fixture(scope="module")
def alone(command: str, pulled: None, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What `run --temp 0` answers to each prompt."""
    installed = Installed(command, home=tmp_path_factory.mktemp("run"))
    options = ("--temp", "0", "--max-tokens", str(MOST), "--speculate", "off", "--logprobs", "0", "--json")
    answers = []
    for prompt in PROMPTS:
        done = installed.run("run", "smollm2", prompt, *options)
        assert done.returncode == 0, done.stderr
        events = [json.loads(line) for line in done.stdout.splitlines()]
        answers.append([tokens_of(event) for event in events if event["event"] == "TextDelta"])
    assert events[0]["prompt_tokens"] > 2 * BATCH, "a prompt that is prefilled in several pieces"
    installed.close()
    return [[token for tokens in answer for token in tokens] for answer in answers]


def tokens_of(holder: dict[str, Any], name: str = "logprobs") -> Answer:
    return [(each["token"], each["logprob"]) for each in holder[name]]


def body(prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": MOST, "logprobs": True}


def answer_of(completion: dict[str, Any]) -> Answer:
    return tokens_of(completion["choices"][0]["logprobs"], "content")


@pytest.mark.slow
def test_a_server_answers_as_run_does(
    command: str, pulled: None, alone: list[Answer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = RealServer(command, tmp_path_factory.mktemp("serve"), "--exact", "-np", "4", "--grace", "0s")

    def ask(prompt: str) -> dict[str, Any]:
        request = urllib.request.Request(f"{server.address}/v1/chat/completions", json.dumps(body(prompt)).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return dict(json.load(answer))

    try:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            completions = list(pool.map(ask, PROMPTS))
        again = ask(PROMPTS[-1])
    finally:
        server.end()
    assert list(map(answer_of, completions)) == alone
    assert answer_of(again) == alone[-1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] % BATCH == 0


@pytest.mark.slow
def test_a_batch_answers_as_run_does(llmrun: Installed, alone: list[Answer], tmp_path: Path) -> None:
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body(prompt)}
        for number, prompt in enumerate(PROMPTS)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
    done = llmrun.run("batch", "smollm2", str(rows), "-o", str(out), "--exact", "-np", "3")
    assert done.returncode == 0, done.stderr
    lines = {int(line["custom_id"]): line for line in map(json.loads, out.read_text().splitlines())}
    assert [answer_of(lines[number]["response"]["body"]) for number in range(len(PROMPTS))] == alone
