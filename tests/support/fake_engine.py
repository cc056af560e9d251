"""A tiny process that speaks the engine's side of the pipe, with switches for faults.

Run as `python tests/fake_engine.py MODE` through EngineClient(launch(...)). A mode is "normal", one of the functions'
names below, or "die:PHASE:CAUSE", where the cause is the name of a signal or an exit status.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from llmrun.errors import as_llmrun_error
from llmrun.protocol.answer import AnswerSplitter
from llmrun.protocol.frames import encode, read_frame
from llmrun.protocol.jobs.beams import BeamAnswer, BeamsFound, BeamStep, TreeNode
from llmrun.protocol.jobs.machine import Build
from llmrun.protocol.jobs.text import TextsEmbedded, TextTokens
from llmrun.protocol.loading import Load, Loaded, LoadProgress
from llmrun.protocol.messages import (
    Cancel,
    Event,
    Failed,
    Finished,
    Frame,
    Generate,
    Job,
    JobDone,
    JobUpdate,
    PrefillProgress,
    Rendered,
    Rendering,
    Started,
    Stats,
    TextDelta,
    TokenLogprob,
)
from llmrun.protocol.questions import COUNT_TOKENS, EngineStatus, StateSaved, TokenCount
from llmrun.protocol.speculation import AttentionTime, ComparisonTimes
from llmrun.protocol.toolcalls import HERMES

MODE = sys.argv[1]
OPEN: list[int] = []
LOADED: list[Load] = []
FOREVER = 3600  # seconds: longer than a test may take
OTHER = (" other", tuple(b" other"), -1.5)
LAST_WORDS = "/tmp/pip-install-1/vendor/llama.cpp/fake_engine.cpp:42: GGML_ASSERT(fake) failed"
TOO_LARGE = "ggml-backend.cpp:941: pre-allocated tensor (cache_k_l0) in a buffer (Vulkan0) that cannot run it"


def receive() -> Frame:
    """The next command; without a front, the end."""
    frame = read_frame(sys.stdin.buffer.read)
    if frame is None:
        sys.exit(0)
    return frame


def send(*events: Event) -> None:
    sys.stdout.buffer.write(b"".join(map(encode, events)))
    sys.stdout.buffer.flush()


def phase(name: str) -> None:
    """Die here, if that is the mode."""
    if not MODE.startswith(f"die:{name}:"):
        return
    print(TOO_LARGE if MODE.endswith(":too_large") else LAST_WORDS, file=sys.stderr, flush=True)
    print("llama_decode: failed to decode, ret = 2", file=sys.stderr, flush=True)
    print("llama_init: error: model default pooling_type is [-1], but [3] was specified", file=sys.stderr, flush=True)
    print("the end", file=sys.stderr, flush=True)
    cause = MODE.split(":")[2]
    if cause.isdigit():
        os._exit(int(cause))
    os.kill(os.getpid(), getattr(signal, cause))


def wait_in(name: str) -> None:
    """Wait here for a file, if that is the mode."""
    may_end = f"starved_in_{name}"
    while may_end == MODE and not Path(os.environ["FAKE_ENGINE_MAY_END"]).exists():
        time.sleep(0.05)


def load(command: Load) -> None:
    phase("load")
    LOADED.append(command)
    wait_in("load")
    if MODE == "refuse":
        print("llama_model_load: error loading model: no tensors", file=sys.stderr)
        print("llama_model_load_from_file_impl: failed to load model", file=sys.stderr, flush=True)
        send(Failed(0, "bad-model", f"llama.cpp can't load {command.path}"))
    elif MODE == "no_memory":
        print("ggml_backend_alloc: failed to allocate buffer of size 99", file=sys.stderr, flush=True)
        send(Failed(0, "bad-model", f"llama.cpp can't load {command.path}"))
    else:
        send(LoadProgress(0.5), Loaded(command.n_ctx, 2048, 260, "fake", True, ("CPU",), 0.25))


def render(request: int) -> None:
    send(Rendering(request))
    phase("render")
    if MODE == "hang_in_render":
        time.sleep(FOREVER)
    while MODE == "spin_in_render":
        pass
    wait_in("render")
    send(Rendered(request))
    phase("rendered")


def count(job: Job) -> None:
    render(job.request)
    send(JobDone(job.request, TokenCount((3,) * len(COUNT_TOKENS.read(job.arguments).messages), 7)))


def held(command: Generate | Cancel | Job) -> None:
    """Any number of answers that go on until their status is asked for, and one that ends with its Cancel."""
    if isinstance(command, Generate):
        render(command.request)
        send(started(command), TextDelta(command.request, "Hel", 1))
        OPEN.append(command.request)
    elif isinstance(command, Cancel):
        OPEN.remove(command.request)
        send(Finished(command.request, "cancelled", Stats()))
    else:
        for request in OPEN:
            send(TextDelta(request, "lo", 1), Finished(request, "stop", Stats(3, completion_tokens=2)))
        OPEN.clear()
        send(JobDone(command.request, EngineStatus()))


def unending(command: Frame) -> None:
    """Does everything at the same time and ends nothing before its Cancel; its status has the number."""
    if is_job(command, "status"):
        send(JobDone(command.request, EngineStatus(running=len(OPEN))))
    elif isinstance(command, Generate | Job):
        OPEN.append(command.request)
    elif isinstance(command, Cancel) and command.request in OPEN:
        OPEN.remove(command.request)
        send(Failed(command.request, "cancelled", "it was cancelled"))


def generate(command: Generate) -> None:
    render(command.request)
    if MODE == "calling":
        calling(command)
        return
    if MODE == "failing":
        send(Failed(command.request, "context-overflow", "too long", "it is", "shorten it"))
        return
    if MODE == "buggy":
        try:
            raise KeyError("of ours")
        except KeyError as error:
            send(Failed.of(as_llmrun_error(error), command.request))
        return
    send(started(command))
    if MODE == "echo":
        echo(command)
        return
    if MODE == "reporting":
        report(command)
        return
    phase("prefill")
    send(PrefillProgress(command.request, 3, 0.5))
    send(TextDelta(command.request, "Hel", 1))
    phase("decode")
    fault = globals().get(MODE)
    speculation = command.asked.speculation
    if speculation is not None and (MODE == "long" or not speculation.only_if_it_pays):
        drafted(command.request)
    elif fault is None:
        send(
            TextDelta(command.request, "lo", 1),
            Finished(command.request, "stop", Stats(3, completion_tokens=2, context_used=5, n_ctx=256)),
        )
    else:
        fault(command.request)


def started(command: Generate) -> Started:
    """With the seed that was asked for, or one of its own."""
    seed = command.asked.sampling.seed
    return Started(command.request, 3, 0, 7 if seed is None else seed)


def calling(command: Generate) -> None:
    """Calls the first tool, or "tool" of the arguments that the user said, with these, and says what it heard of it."""
    last = command.asked.messages[-1]
    send(Started(command.request, 3, 0, 7, tool_syntax="hermes"))
    splitter = AnswerSplitter((), syntax=HERMES, tools=command.asked.tools)
    text = f"I heard: {last.content}"
    if last.role == "user":
        name = json.loads(last.content).get("tool") or command.asked.tools[0].name
        text = f'Let me see.\n<tool_call>\n{{"name": "{name}", "arguments": {last.content}}}\n</tool_call>'
    send(*(TextDelta(command.request, each, 1, parts=splitter.feed(each)) for each in text))
    send(TextDelta(command.request, "", 0, parts=splitter.flush()))
    send(Finished(command.request, "stop", Stats(3, completion_tokens=2)))


def echo(command: Generate) -> None:
    """Answer with the text of the last message, in pieces; each is a token where probabilities are requested."""
    request, asked = command
    text = asked.messages[-1].content if asked.messages else ""
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    for piece in pieces:
        token = TokenLogprob(piece, tuple(piece.encode()), -0.5, ((piece, tuple(piece.encode()), -0.5), OTHER))
        send(TextDelta(request, piece, 1, () if asked.logprobs is None else (token,)))
    figures = Stats(3, completion_tokens=len(pieces), decode_seconds=0.5, context_used=9, n_ctx=256)
    send(Finished(request, "stop", figures))


def report(command: Generate) -> None:
    """Answer with the settings of the request and of the loaded model, as JSON."""
    asked, loaded = command.asked, LOADED[-1]
    settings = {
        "system": [message.content for message in asked.messages if message.role == "system"],
        "max_tokens": asked.limits.max_tokens,
        "temperature": asked.sampling.temperature,
        "ctx": loaded.n_ctx,
        "cache": [loaded.kv_type_k, loaded.kv_type_v],
    }
    send(TextDelta(command.request, json.dumps(settings), 1), Finished(command.request, "stop", Stats(3)))


def drafted(request: int) -> None:
    """All but the first token come of one step."""
    stats = Stats(3, completion_tokens=70, context_used=73, n_ctx=256)
    stats = replace(stats, drafted_tokens=70, accepted_tokens=68, decode_steps=2, decode_seconds=0.69, draft_gain=2.5)
    send(TextDelta(request, "lo", 1, drafted=True), Finished(request, "stop", stats))


def together(command: Generate) -> None:
    """Two answers side by side: nothing but their beginnings before both are asked for."""
    render(command.request)
    send(started(command))
    OPEN.append(command.request)
    if len(OPEN) < 2:
        return
    if MODE == "half_deaf":  # a cancel is not heard, and the step that both are in lasts until a job
        while not isinstance(asked := receive(), Job):
            assert isinstance(asked, Cancel)
        count(asked)
    texts = (f"{number:032768}" for number in range(300)) if MODE == "flood_together" else ("Hel", "lo")
    send(*(TextDelta(request, text, 1) for text in texts for request in OPEN))
    phase("together")
    send(*(Finished(request, "stop", Stats()) for request in OPEN))
    OPEN.clear()


# ---- modes -----------------------------------------------------------------------------------------


def obedient(request: int) -> None:
    """Says nothing more until it is cancelled."""
    cancel = receive()
    assert cancel == Cancel(request)
    send(Finished(request, "cancelled", Stats(3, completion_tokens=1)))


late = obedient
"""As obedient, and takes its time before it reads the first command."""


def deaf(request: int) -> None:
    """Neither hears a cancel nor says a word."""
    time.sleep(FOREVER)


def tireless(request: int) -> None:
    """Hears no cancel, as while it encodes an image; says the end when a file is there."""
    while not Path(os.environ["FAKE_ENGINE_MAY_END"]).exists():
        pass
    send(Finished(request, "stop", Stats()))


def chatty(request: int) -> None:
    """Hears no cancel and talks on, faster than anybody can read."""
    while True:
        send(*[TextDelta(request, "blah", 1)] * 1000)


def at_max_tokens(request: int) -> None:
    send(Finished(request, "length", Stats(3, completion_tokens=2, context_used=5, n_ctx=256)))


def long(request: int) -> None:
    """A long answer, as its figures have it."""
    send(TextDelta(request, "lo", 69), Finished(request, "stop", Stats(3, completion_tokens=70, decode_seconds=1.38)))


def window_full(request: int) -> None:
    send(Finished(request, "length", Stats(3, completion_tokens=2, context_used=256, n_ctx=256)))


def garbage(request: int) -> None:
    sys.stdout.buffer.write(b"\0\0\0\x05hello" * 3)
    sys.stdout.buffer.flush()
    time.sleep(FOREVER)


def claim_3_gb(request: int) -> None:
    sys.stdout.buffer.write(b"\xc0\0\0\0" + b"{" * 100)
    sys.stdout.buffer.flush()
    time.sleep(FOREVER)


def send_command(request: int) -> None:
    sys.stdout.buffer.write(encode(Cancel(request)))
    sys.stdout.buffer.flush()
    time.sleep(FOREVER)


def mistaken(request: int) -> None:
    send(JobDone(request, {}))


def truncated(request: int) -> None:
    """Dies within a frame."""
    sys.stdout.buffer.write(encode(TextDelta(request, "lo", 1))[:-3])
    sys.stdout.buffer.flush()
    os._exit(0)


def search(job: Job) -> None:
    """A search of one step that finds two answers."""
    tree = [TreeNode(-1, token, text, -token, -token, True) for token, text in ((1, "Rome"), (2, "Milan"))]
    answers = tuple(
        BeamAnswer((node.token,), node.text, node.total, node.total, "stop", place) for place, node in enumerate(tree)
    )
    found = BeamsFound(answers, 5, 0.1, 1, 1, 0.1, 256, is_full=False, is_cancelled=False)
    send(JobUpdate(job.request, BeamStep(tuple(tree), ())), JobDone(job.request, found))


def do(job: Job) -> None:
    """A job that says two updates and gives back what it was told."""
    phase("job")
    send(JobUpdate(job.request, {"done": 1}), JobUpdate(job.request, {"done": 2}))
    if MODE == "failing":
        send(Failed(job.request, "not-enough-disk", "no space is left"))
    elif MODE == "deaf":
        time.sleep(FOREVER)
    else:
        send(JobDone(job.request, {"said": job.arguments["say"], "name": job.name}))


def embedded(texts: list[str]) -> TextsEmbedded:
    """Vectors that are near to each other where texts have words in common."""
    from support.word_vectors import vector_of

    if MODE == "dying_of_queries" and "?" in texts[0]:
        os._exit(1)
    vectors = b"".join(vector_of(text).astype("<f4").tobytes() for text in texts)
    return TextsEmbedded(base64.b64encode(vectors).decode(), (3,) * len(texts))


ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "build": lambda _: Build({}, (), offload=False),  # asked for GPUs where llmrun's own wheel is installed
    "status": lambda _: EngineStatus(cells=100, cells_used=25, prefix_queries=8, prefix_hits=6),
    "save_state": lambda _: StateSaved(3, 100),
    "tokenize_loaded": lambda asked: TextTokens(tuple(asked["text"].encode()), (), 256),
    "compare": lambda _: ComparisonTimes((AttentionTime(0, 0.01, 0.02),)),
    "embed": lambda asked: embedded(asked["texts"]),
    "detokenize": lambda tokens: bytes(tokens).decode(),
}


def is_job(command: Frame, name: str) -> TypeGuard[Job]:
    return isinstance(command, Job) and command.name == name


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the front's
    if MODE == "late":
        time.sleep(0.3)
    while True:
        command = receive()
        if isinstance(command, Load):
            load(command)
        elif MODE == "unending":
            unending(command)
        elif MODE == "held" and (isinstance(command, Generate | Cancel) or is_job(command, "status")):
            held(command)
        elif isinstance(command, Generate) and MODE in {
            "together",
            "flood_together",
            "half_deaf",
            "die:together:SIGSEGV",
        }:
            together(command)
        elif isinstance(command, Generate):
            generate(command)
        elif is_job(command, "count_tokens"):
            count(command)
        elif isinstance(command, Job) and command.name in ANSWERS:
            send(JobDone(command.request, ANSWERS[command.name](command.arguments)))
        elif is_job(command, "beams"):
            search(command)
        elif isinstance(command, Job):
            do(command)


if __name__ == "__main__":
    if sys.argv[2:] == ["preload"]:
        sys.stdin.buffer.readline()  # the guessed model
    main()
