"""Compares what pictures make of an answer with llama.cpp's own server: greedy tokens and log-probabilities.

    python tests/upstream/pictures_like_llama_server.py PATH/TO/llama-server MODEL MMPROJ PICTURE...

The server gets the very prompt that we make, with its marker where the picture stands. Both compute with one thread.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from llmrun import _native
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.loaded import LoadedModel
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Event, Generate, Image, Message, TextDelta
from llmrun.protocol.params import Limits, SamplingParams

PORT, N_TOKENS, N_CTX = 18083, 12, 4096
TEMPLATE = "Look:{{ messages[0].content }} It is"
QUESTION = " What is it?"


def ours(model: str, projector: str, pictures: list[str]) -> list[tuple[tuple[int, ...], float]]:
    """Bytes and log-probability of each token of the answer."""
    weights = LlamaModel(model, 0, _native.CancelFlag(), repack=False)
    load = Load(model, N_CTX, N_CTX, gpu_layers=0, projector=projector)
    loaded = LoadedModel(weights, LlamaContext(weights, load), load)
    shown = tuple(Image(picture, f"picture {number}") for number, picture in enumerate(pictures))
    asked = AnswerRequest(
        (Message("user", QUESTION, pictures=shown),),
        sampling=SamplingParams(temperature=0),
        limits=Limits(N_TOKENS),
        template=TEMPLATE,
        logprobs=1,
    )
    events: list[Event] = []
    loaded.engine.add(*loaded.preparer.prepare(Generate(1, asked), events.append))
    while loaded.engine.busy:
        events += loaded.engine.step()
    logprobs = [each for event in events if isinstance(event, TextDelta) for each in event.logprobs]
    controls = weights.vocabulary.control_texts  # of which the server tells no bytes
    return [(() if each.text in controls else each.bytes, each.logprob) for each in logprobs]


def theirs(server: str, model: str, projector: str, pictures: list[str]) -> list[tuple[tuple[int, ...], float]]:
    """The same of llama.cpp's server."""
    command = [server, "-m", model, "--mmproj", projector, "--port", str(PORT), "-c", str(N_CTX), "-t", "1", "-np", "1"]
    process = subprocess.Popen([*command, "--no-repack", "--no-warmup"], stderr=subprocess.DEVNULL)
    try:
        marker = _get("/props")["media_marker"]
        text = f"Look:{marker * len(pictures)}{QUESTION} It is"
        prompt = {"prompt_string": text, "multimodal_data": pictures}
        asked = {"prompt": prompt, "n_predict": N_TOKENS, "temperature": 0, "n_probs": 1, "ignore_eos": False}
        found = _get("/completion", asked)["completion_probabilities"]
        return [(tuple(each["bytes"]), each["logprob"]) for each in found]
    finally:
        process.terminate()
        process.wait()


def _get(path: str, data: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}",
        json.dumps(data).encode() if data else None,
        {"Content-Type": "application/json"},
    )
    for _ in range(120):
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise SystemExit(error.read().decode()) from None
        except urllib.error.URLError:
            pass
        time.sleep(0.5)
    raise SystemExit("llama-server did not start")


def main(server: str, model: str, projector: str, *files: str) -> int:
    """Says both, and how far apart they are; 0 where the tokens are the same."""
    pictures = [base64.b64encode(Path(file).read_bytes()).decode() for file in files]
    mine, other = ours(model, projector, pictures), theirs(server, model, projector, pictures)
    # The server tells of tokens that are no whole characters together, with the last one's probability.
    told, apart = b"", 0.0
    ends = [b"".join(bytes(data) for data, _ in mine[: index + 1]) for index in range(len(mine))]
    for data, logprob in other:
        told += bytes(data)
        apart = max(apart, min(abs(one[1] - logprob) for one, end in zip(mine, ends, strict=True) if end == told))
    same = ends[-1].startswith(told) and bool(told)
    print(f"{len(told)} bytes, {'the same' if same else 'different'}; log-probabilities at most {apart:.2e} apart")
    if not same:
        print(mine, other, sep="\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
