"""Texts a second over HTTP, beside llama-server, in turns: one client with many texts, and many with one each.

The model has the shape of bge-small and random weights.

    PYTHONPATH=tests python tests/benchmarks/embeddings.py LLAMA_SERVER [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from server import running
from support.hf_writer import config, safetensors, word_piece, write

from llmrun.convert.job import convert_folder

WIDTH, FEED_FORWARD, LAYERS, HEADS, N_VOCAB, N_CTX = 384, 1536, 12, 12, 30_522, 512
TEXTS, CLIENTS = 256, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model, threads = str(made(Path(place))), str(options.threads)
        theirs = [options.llama_server, "-m", model, "--embeddings", "--pooling", "mean", "-t", threads, "--no-webui"]
        theirs += ["-b", "2048", "-ub", "2048", "-np", str(CLIENTS), "-c", str(CLIENTS * N_CTX)]
        ours = [sys.executable, "-m", "llmrun", "serve", model, "-t", threads, "--parallel", str(CLIENTS)]
        with running(theirs) as first, running(ours) as second:
            measure({"llama-server": first, "llmrun": second}, options.rounds)


def measure(ports: dict[str, int], rounds: int) -> None:
    """Print texts a second; the order changes from round to round."""
    randomly = random.Random(1)
    for name, words, ask in (("many texts, 8 words", 8, at_once), ("many texts, 100 words", 100, at_once),
                             (f"{CLIENTS} clients, 8 words", 8, by_clients)):  # fmt: skip
        texts = [" ".join(f"w{randomly.randrange(1000)}" for _ in range(words)) for _ in range(TEXTS)]
        found: dict[str, list[float]] = {each: [] for each in ports}
        for number in range(rounds + 1):
            for each in sorted(ports, reverse=number % 2 == 1):
                began = time.perf_counter()
                vectors = ask(ports[each], texts)
                found[each].append(len(texts) / (time.perf_counter() - began))
                assert len(vectors) == len(texts)
        rates = {each: statistics.median(rows[1:]) for each, rows in found.items()}
        ratio = rates["llmrun"] / rates["llama-server"]
        print(f"{name}: " + ", ".join(f"{each} {rate:.0f} texts/s" for each, rate in rates.items()) + f"; {ratio:.2f}")


def at_once(port: int, texts: list[str]) -> list[Any]:
    """One request."""
    return post(port, texts)


def by_clients(port: int, texts: list[str]) -> list[Any]:
    """A request for each text, several at a time."""
    ask: Callable[[str], Any] = lambda text: post(port, [text])[0]  # noqa: E731
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, texts))


def post(port: int, texts: list[str]) -> list[Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = json.dumps({"input": texts, "encoding_format": "base64"})
    connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
    found: list[Any] = json.loads(connection.getresponse().read())["data"]
    connection.close()
    return found


def made(place: Path) -> Path:
    """The file."""
    generator = np.random.default_rng(1)
    norm = ("embeddings.LayerNorm", *(f"encoder.layer.{layer}.{part}.LayerNorm" for layer in range(LAYERS)
                                      for part in ("attention.output", "output")))  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (N_VOCAB, WIDTH),
        "embeddings.position_embeddings.weight": (N_CTX, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
    }
    for layer in range(LAYERS):
        own = {f"attention.self.{part}": (WIDTH, WIDTH) for part in ("query", "key", "value")}
        own |= {"attention.output.dense": (WIDTH, WIDTH), "intermediate.dense": (FEED_FORWARD, WIDTH)}
        for name, shape in {**own, "output.dense": (WIDTH, FEED_FORWARD)}.items():
            shapes |= {f"encoder.layer.{layer}.{name}.weight": shape, f"encoder.layer.{layer}.{name}.bias": shape[:1]}
    shapes |= {f"{name}.{kind}": (WIDTH,) for name in norm for kind in ("weight", "bias")}
    tensors = {name: generator.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}
    words = word_piece()
    vocabulary = words["model"]["vocab"]
    vocabulary |= {f"w{number}": len(vocabulary) + number for number in range(N_VOCAB - len(vocabulary))}
    settings = {"num_key_value_heads": None, "rms_norm_eps": None, "rope_theta": None, "model_type": "bert"}
    sizes = {"hidden_size": WIDTH, "intermediate_size": FEED_FORWARD, "num_hidden_layers": LAYERS,
             "num_attention_heads": HEADS, "max_position_embeddings": N_CTX}  # fmt: skip
    files = {
        "config.json": config("BertModel", N_VOCAB, **settings, **sizes),
        "tokenizer.json": words,
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer"},
        "model.safetensors": safetensors(tensors),
    }
    return convert_folder(write(place / "Random-33M", files), place / "random.gguf", type="q8_0").path


if __name__ == "__main__":
    main()
