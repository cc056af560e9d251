"""Compares what images and audio make of an answer with llama.cpp's own command line tool: the bytes of greedy tokens.

    python tests/upstream/media_like_mtmd_cli.py PATH/TO/llama-mtmd-cli MODEL MMPROJ FILE...

Each file is asked about alone. The model's own chat template is used; both compute with one thread.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path

from llmrun import _native
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.loaded import LoadedModel
from llmrun.protocol.loading import Load
from llmrun.protocol.media import Media, modality_of
from llmrun.protocol.messages import AnswerRequest, Event, Generate, MediaAccepted, Message, TextDelta
from llmrun.protocol.params import Limits, SamplingParams

N_TOKENS, N_CTX, N_TRIES = 24, 4096, 20
QUESTION = "What is it?"
MARKER = "the answer comes here"


def open_model(path: str, projector: str) -> LoadedModel:
    weights = LlamaModel(path, 0, _native.CancelFlag(), repack=False)
    load = Load(path, N_CTX, gpu_layers=0, projector=projector)
    return LoadedModel(weights, LlamaContext(weights, load), load)


def ours(loaded: LoadedModel, file: Path) -> tuple[bytes, MediaAccepted]:
    """The bytes of our answer, and what the file took."""
    media = Media(base64.b64encode(file.read_bytes()).decode(), file.name)
    asked = AnswerRequest(
        (Message("user", QUESTION, media=(media,)),),
        sampling=SamplingParams(temperature=0),
        limits=Limits(N_TOKENS),
        logprobs=1,
    )
    events: list[Event] = []
    loaded.engine.add(loaded.preparer.prepare(Generate(1, asked), events.append))
    while loaded.engine.busy:
        events += loaded.engine.step()
    (accepted,) = (event for event in events if isinstance(event, MediaAccepted))
    told = [each for event in events if isinstance(event, TextDelta) for each in event.logprobs]
    return b"".join(bytes(each.bytes) for each in told), accepted


def theirs(tool: str, model: str, projector: str, file: Path) -> bytes:
    """The bytes of the tool's answer."""
    option = f"--{modality_of(file.read_bytes())}"
    command = [tool, "-m", model, "--mmproj", projector, option, str(file), "-p", QUESTION, "--jinja", "--no-warmup"]
    command += ["-n", str(N_TOKENS), "-c", str(N_CTX), "--temp", "0", "-t", "1", "--no-repack", "-ngl", "0"]
    environment = {**os.environ, "MTMD_TEST_RESPONSE_MARKER": MARKER}
    for _ in range(N_TRIES):  # the program may end before the thread that writes its log
        done = subprocess.run(command, capture_output=True, check=False, env=environment)
        _, found, answer = done.stdout.partition(f"{MARKER}\n".encode())
        if done.returncode != 0:
            raise SystemExit(done.stderr.decode("utf-8", "replace")[-2000:])
        if found and answer.endswith(b"\n\n"):
            return answer[1:-2]
    raise SystemExit(f"{tool} did not write its whole answer in {N_TRIES} tries")


def main(tool: str, model: str, projector: str, *files: str) -> int:
    """Says of each file whether both gave the same; 0 where all are."""
    loaded, all_same = open_model(model, projector), True
    for file in map(Path, files):
        (mine, accepted), other = ours(loaded, file), theirs(tool, model, projector, file)
        same = bool(mine) and mine == other
        all_same &= same
        print(
            f"{file.name}: {accepted.seconds:.2f} s, {accepted.tokens} tokens; {len(mine)} bytes,",
            "the same" if same else "different",
        )
        if not same:
            print(mine, other, sep="\n")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
