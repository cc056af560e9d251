"""`llmrun bench --at` beside NVIDIA's aiperf: the same load on the same server has to give the same figures.

    python tests/benchmarks/far_load.py [--aiperf PATH] [--llama-server PATH] [--clients 1 2 4] [--tokens 64] [--runs 3]

Servers are `llmrun serve`, llama-server where one is given, and one that is no model but sends its tokens by a clock,
so that it is known what both should measure. On each, for each number of clients, both tools take turns: as many
requests as clients, all at once, with prompts of the same kind that nobody has seen, each with a number of its own.
Told are tokens/s of all together, TTFT and the time between two pieces of text, medians of the turns, and how far
apart they are. Run it on a machine that does nothing else.

aiperf: python -m venv .aiperf && .aiperf/bin/pip install aiperf==0.13
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import peers
import server

from llmrun.bench.load import LoadCase, new_numbers, prompts

N_CTX = 2048
PACED_MODEL, PACED_TTFT, PACED_GAP = "clock", 0.2, 0.02  # seconds
_CHUNK = {"id": "1", "object": "text_completion", "created": 0, "model": PACED_MODEL}
_BOUND = 0.05
# aiperf counts prompts by a tokenizer of its own, which is looked up in the network; these files spare it that.
_WORDS = {
    "version": "1.0",
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
    **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    "added_tokens": [],
}


class Figures(NamedTuple):
    """Tokens/s of all together, and milliseconds."""

    rate: float
    ttft: float
    gap: float


def ours(llmrun: str, model: str, url: str, clients: int, tokens: int) -> Figures:
    """By the command, as it is typed."""
    command = [llmrun, "bench", model, "--at", url, "--clients", str(clients), "--tokens", str(tokens)]
    done = subprocess.run([*command, "-r", "1", "--json"], stdout=subprocess.PIPE, check=True)
    row = json.loads(done.stdout)["rows"][0]
    return Figures(row["avg_ts"], row["ttft_p50_ns"] / 1e6, row["token_p50_ns"] / 1e6)


def theirs(aiperf: str, model: str, url: str, clients: int, tokens: int) -> Figures:
    """By aiperf, in a folder that is removed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer.json").write_text(json.dumps(_WORDS))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        texts = prompts(LoadCase(clients, shares_prompt=False), new_numbers())
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        options = {
            "--model": model, "--url": url, "--endpoint-type": "completions", "--concurrency": clients,
            "--request-count": clients, "--custom-dataset-type": "single_turn", "--ui": "none",
            "--dataset-sampling-strategy": "sequential", "--input-file": folder / "prompts.jsonl",
            "--tokenizer": folder, "--output-artifact-dir": folder / "out",
        }  # fmt: skip
        inputs = {"max_tokens": tokens, "ignore_eos": "true", "temperature": 0}
        more = [word for key, value in inputs.items() for word in ("--extra-inputs", f"{key}:{value}")]
        words = [str(word) for pair in options.items() for word in pair]
        command = [aiperf, "profile", *words, *more, "--streaming", "--use-server-token-count"]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        found = json.loads((folder / "out/profile_export_aiperf.json").read_text())
    names = ("output_token_throughput", "avg"), ("time_to_first_token", "p50"), ("inter_chunk_latency", "p50")
    return Figures(*(found[name][figure] for name, figure in names))


@contextmanager
def paced() -> Iterator[int]:
    """A server whose answers come by the clock, whoever else asks."""
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(_answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield listening.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lengths = [line.split(":")[1] for line in head.lower().splitlines() if line.startswith("content-length:")]
    body = await reader.readexactly(int(lengths[0])) if lengths else b""
    if not body:
        listed = json.dumps({"data": [{"id": PACED_MODEL, "owned_by": "llmrun"}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n" + listed)
    else:
        await _stream(writer, json.loads(body)["max_tokens"])
    await writer.drain()
    writer.close()


async def _stream(writer: asyncio.StreamWriter, n_tokens: int) -> None:
    clock = asyncio.get_running_loop()
    begun = clock.time()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    usage = {"prompt_tokens": 500, "completion_tokens": n_tokens, "total_tokens": 500 + n_tokens}
    for number in range(n_tokens):
        await asyncio.sleep(begun + PACED_TTFT + PACED_GAP * number - clock.time())
        reason = "length" if number == n_tokens - 1 else None
        choice = {"index": 0, "text": " word", "finish_reason": reason}
        writer.write(b"data: " + json.dumps({**_CHUNK, "choices": [choice]}).encode() + b"\n\n")
        await writer.drain()
    writer.write(b"data: " + json.dumps({**_CHUNK, "choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")


def compare(name: str, sides: dict[str, list[Figures]]) -> bool:
    """A line for each figure; whether tokens/s are as near as they should be."""
    holds = True
    for figure, unit in (("rate", "t/s"), ("ttft", "ms"), ("gap", "ms")):
        each = {tool: [getattr(one, figure) for one in found] for tool, found in sides.items()}
        ratio = statistics.median(a / max(b, 1e-9) for a, b in zip(each["bench --at"], each["aiperf"], strict=True))
        told = "   ".join(f"{tool} {peers.spread(values, unit, 1)}" for tool, values in each.items())
        print(f"{name:32} {figure:5} {told}   ratio {ratio:.3f}", flush=True)
        holds &= figure != "rate" or abs(ratio - 1) <= _BOUND
    return holds


def main() -> None:
    parser = peers.parser(__doc__)
    parser.add_argument("--aiperf", default="aiperf", metavar="PATH")
    parser.add_argument("--llama-server", metavar="PATH")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    llmrun, most = peers.find_llmrun(options.llmrun), max(options.clients)
    aiperf = peers.find_tool("aiperf", options.aiperf)
    peers.warn_if_busy()
    file = peers.model_file(llmrun, options.model)
    servers = {
        "clock": (paced, PACED_MODEL),
        "llmrun serve": (
            partial(server.running, [llmrun, "serve", options.model, "--parallel", str(most), "--ctx", str(N_CTX)]),
            options.model,
        ),
    }
    if options.llama_server:
        program = peers.find_tool("llama-server", options.llama_server)
        sizes = ["-t", str(peers.cores()), "-np", str(most), "-c", str(N_CTX * most), "--no-webui"]
        servers["llama-server"] = (
            partial(server.running, [program, "-m", file, "-a", options.model, *sizes]),
            options.model,
        )
    held = []
    for name, (start, model) in servers.items():
        with start() as port:
            url = f"http://127.0.0.1:{port}"
            for clients in options.clients:
                sides = {
                    "bench --at": partial(ours, llmrun, model, url, clients, options.tokens),
                    "aiperf": partial(theirs, aiperf, model, url, clients, options.tokens),
                }
                held.append(compare(f"{name}, {clients} at once", peers.take_turns(options.runs, sides)))
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
