"""Memory of `llmrun serve` over requests that each bring something new: breakers, an image, a grammar, control tokens.

    python tests/benchmarks/memory.py [--requests 10000] [--clients 4]

A tiny model with a projector, both with random weights, is served. What each request brings is remembered for later
ones; here it never comes again, so whatever has no bound grows with each. The memory of the front and of the engine is
printed twenty times. It has to be the same, but for what allocators keep, after a third of the requests and at the end.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peers
import psutil
import server

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.hf_writer import WIDTH
from support.tiny_projector import png, projector, text_model

_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}so"
_LINES = 20
_GROWTH, _SPARE_BYTES = 1.05, 8 << 20


def body(number: int) -> dict[str, Any]:
    """The request of a number: always the same one, and like no other."""
    content: Any = f"Question {number}?"
    fields: dict[str, Any] = {"max_tokens": 4, "seed": number}
    if number % 4 == 0:
        fields |= {"dry_multiplier": 0.5, "dry_sequence_breakers": [f"w{number}", f"{number} ", "\n"]}
    elif number % 4 == 1:
        url = "data:image/png;base64," + base64.b64encode(png(40, 30, number)).decode()
        content = [{"type": "text", "text": content}, {"type": "image_url", "image_url": {"url": url}}]
    elif number % 4 == 2:
        fields["grammar"] = f'root ::= "a{number}" [0-9]+'
    else:
        schema = {"type": "object", "properties": {f"field_{number}": {"type": "string"}}}
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": [{"role": "user", "content": content}], **fields}


def ask(port: int, number: int) -> str:
    """Send a request; return "answer", or the error."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body(number)).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            response.read()
            return "answer"
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["error"]["message"])


def measure(port: int, front: psutil.Process, n_requests: int, n_clients: int) -> bool:
    """Send all requests; print the memory, and return whether it stayed the same."""
    print(f"{'requests':>10}{'front':>12}{'engine':>12}{'seconds':>10}")
    began, outcomes, held = time.monotonic(), Counter[str](), []
    with ThreadPoolExecutor(n_clients) as clients:
        for line in range(_LINES):
            numbers = range(n_requests * line // _LINES, n_requests * (line + 1) // _LINES)
            outcomes.update(clients.map(lambda number: ask(port, number), numbers))
            held.append([process.memory_info().rss for process in (front, *front.children())])
            front_mb, engine_mb = (each / 1e6 for each in held[-1])
            print(
                f"{numbers.stop:>10,}{front_mb:>9.1f} MB{engine_mb:>9.1f} MB{time.monotonic() - began:>10.0f}",
                flush=True,
            )
    print("\n".join(f"{count:,} x {outcome}" for outcome, count in outcomes.most_common(5)))
    before, after = held[_LINES // 3], held[-1]
    is_flat = all(last <= first * _GROWTH + _SPARE_BYTES for first, last in zip(before, after, strict=True))
    print("flat" if is_flat else "GROWS")
    return is_flat and set(outcomes) == {"answer"}


def main() -> int:
    """Serve a model of a temporary folder, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llmrun", metavar="PATH", help="the command; default: beside this Python, or PATH")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLMRUN_HOME"] = folder  # KV states go there
        model, eyes = Path(folder, "tiny.gguf"), Path(folder, "eyes.gguf")
        text_model(model, "gemma3", _TEMPLATE)
        projector(eyes, WIDTH, "gemma3")
        command = [
            peers.find_llmrun(options.llmrun),
            "serve",
            str(model),
            "--mmproj",
            str(eyes),
            "--ctx",
            "512",
            "-t",
            "1",
        ]
        with server.process([*command, "--parallel", "4"]) as (port, pid):
            return 0 if measure(port, psutil.Process(pid), options.requests, options.clients) else 1


if __name__ == "__main__":
    sys.exit(main())
