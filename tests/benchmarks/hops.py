"""The ways of --top-k to the sampler and of a token to its three ends: functions of llmrun/ that hand a value on.

    python tests/benchmarks/hops.py smollm2 [FOLDER]

FOLDER is another checkout, with its native part built, to compare. A function is a hop of --top-k if it gets the value
in an argument, alone or inside of a text, a collection or a record, and returns it, gives it to another hop, to the
pipe or to the native sampler. So is one of a token's text on its way from the engine's vocabulary to a terminal, to a
client of /v1/chat/completions and to the page, if it also returns what it took from a queue, or is one that stores
text. Each function counts once; those that only look are none, and what a function does by itself, such as rendering,
is its own.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import pty
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import peers
import server

TOP_K = "31337"
TOKEN = " Sweden"  # one of SmolLM2's, which no text of llmrun has
BIAS = 100
# Runs at the start of each Python process; prints nothing, so that the pipe between them stays theirs.
WATCH = """
import itertools, os, threading, sys
folder, value, stores = os.environ["HOPS_FOLDER"] + "/llmrun/", os.environ["HOPS_VALUE"], "HOPS_STORES" in os.environ
ends = {"Pipe._write", "SequenceSampler.__init__", "Outbox.add", "Channel.send", "PendingRequest.take", "Page.add",
        "Page.take", "AnswerView._write", "ChunkWriter.write", "Exchange.put", "RunningAnswer._send"}
own = {"Page.add", "Page.take", "AnswerSplitter.feed", "TextStream.push", "LlamaVocabulary.piece"}
local, count, told = threading.local(), itertools.count(), set()
def carries(thing, depth=0):
    cls = type(thing)
    if cls is int: return not stores and thing == int(value)
    if cls is str: return value in thing
    if cls in (bytes, bytearray): return value.encode() in thing
    if depth > 4: return False
    if cls is dict: return any(carries(inner, depth + 1) for inner in list(thing.values()))
    if cls in (list, tuple): return any(carries(inner, depth + 1) for inner in list(thing)[:200])
    names = getattr(cls, "__dataclass_fields__", None) or getattr(cls, "_fields", ())
    if type(names) not in (dict, tuple): return False
    return any(carries(getattr(thing, name, None), depth + 1) for name in names)
def watch(frame, event, result):
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(folder): return
    if not hasattr(local, "stack"): local.stack, local.inside = [], 0
    name = code.co_qualname
    if event == "call":
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
        gets = not local.inside and any(carries(frame.f_locals.get(each)) for each in names)
        local.stack.append([next(count), gets, gets and name in ends])
        local.inside += name in own
    elif local.stack:
        local.inside -= name in own
        order, gets, passes = local.stack.pop()
        if not local.inside and (passes or ((gets or stores) and carries(result))):
            for above in reversed(local.stack):
                if above[1] or stores:
                    above[2] = above[1]
                    break
            if code not in told:
                told.add(code)
                with open(os.environ["HOPS_FILE"], "a") as file:
                    print(os.getpid(), order, code.co_filename[len(folder) :], code.co_qualname, file=file)
sys.setprofile(watch)
threading.setprofile(watch)
"""
PROGRAM = "from llmrun.__main__ import main; main()"


class Watched:
    """Commands of a checkout whose hops are written to a file.

    Args:
        value: the text to follow.
        stores: it may be stored on its way.
    """

    def __init__(self, folder: Path, value: str, *, stores: bool) -> None:
        self._place = tempfile.TemporaryDirectory()
        place = Path(self._place.name)
        place.joinpath("sitecustomize.py").write_text(WATCH, encoding="utf-8")
        self._notes, self._folder = place / "notes", folder
        paths = os.pathsep.join((str(place), str(folder)))
        self.environment = {"PYTHONPATH": paths, "HOPS_FOLDER": str(folder), "HOPS_FILE": str(self._notes)}
        self.environment |= {"HOPS_VALUE": value, "LLMRUN_HOME": str(place)} | ({"HOPS_STORES": "1"} if stores else {})

    def run(self, *words: str, terminal: bool = False) -> None:
        """Run a command to its end."""
        command = [sys.executable, "-c", PROGRAM, *words]
        environment = {**os.environ, **self.environment}
        if not terminal:
            subprocess.run(command, cwd=self._folder, env=environment, check=True, stdout=subprocess.DEVNULL)
            return
        screen, other = pty.openpty()
        process = subprocess.Popen(command, cwd=self._folder, env=environment, stdout=other, stderr=other, stdin=other)
        os.close(other)
        try:
            while os.read(screen, 4096):
                pass
        except OSError:  # Linux's end of a terminal
            pass
        if process.wait():
            sys.exit(f"this failed with status {process.returncode}: {' '.join(command)}")

    def print(self, title: str) -> None:
        """Show the hops, in their order in each process."""
        lines = [line.split(" ", 3) for line in self._notes.read_text(encoding="utf-8").splitlines()]
        for process, _, file, name in sorted(lines, key=lambda line: (line[0], int(line[1]))):
            print(f"{process:>8} {file:<40} {name}")
        print(f"{len(lines)} functions: {title}\n", flush=True)
        self._place.cleanup()


def post(port: int, path: str, body: Mapping[str, object]) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    assert response.status == 200, data
    return data


def to_clients(folder: Path, model: str, token: str) -> None:
    """Follow the token to a client of the API, and to the page."""
    for title in ("a token to a client of /v1/chat/completions", "a token to the page"):
        watched = Watched(folder, TOKEN.strip(), stores=True)
        command = (sys.executable, "-c", PROGRAM, "serve", model)
        answered = {"max_tokens": 1, "logit_bias": {token: BIAS}}
        before = dict(os.environ)
        os.environ.update(watched.environment)
        try:
            with server.running(command) as port:
                if "page" in title:
                    chat = json.loads(post(port, "/ui/ask", {"text": "hi"}))
                    question = chat["entries"][-1]["id"]
                    data = post(port, "/ui/answer", {"chat": chat["id"], "question": question, **answered})
                else:
                    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **answered}
                    data = post(port, "/v1/chat/completions", body)
        finally:
            os.environ.clear()
            os.environ.update(before)
        assert TOKEN.strip().encode() in data, data
        watched.print(title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[2])
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    os.chdir(folder)  # Python looks for modules there first
    llmrun = peers.find_llmrun(None)
    model = peers.model_file(llmrun, arguments.model)
    token = subprocess.check_output([llmrun, "tokenize", model, TOKEN], text=True).split()[-1]
    watched = Watched(folder, TOP_K, stores=False)
    watched.run("run", model, "hi", "--top-k", TOP_K, "--max-tokens", "2")
    watched.print("--top-k to the sampler")
    watched = Watched(folder, TOKEN.strip(), stores=True)
    watched.run("run", model, "hi", "--max-tokens", "1", "--logit-bias", f"{token}={BIAS}", terminal=True)
    watched.print("a token to a terminal")
    to_clients(folder, model, token)


if __name__ == "__main__":
    main()
