"""What four streaming clients of `llmrun serve` see while something goes wrong beside them.

    python tests/benchmarks/adversity.py [--model smollm2] [--tokens 150]

In turn, while the clients stream: the engine is killed, the disk gets full, the model's file is replaced by another one
or cut off under the engine, the clock is set back by a day, eight programs keep the processor busy. Each row says what
the clients got, compared with the same answers on a quiet server, and how the next request went. The full disk is a
small file system in memory, which takes root; the clock takes libfaketime. Rows without them are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import peers
import psutil
import server
from busy import busy

N_CLIENTS = 4
SUBJECTS = ("the sea", "a city", "winter", "bread")
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")


class Outcome(NamedTuple):
    """What one client got: the text, and the end in a word or the error's message."""

    text: str
    end: str


class Place(NamedTuple):
    """A running server with files of its own."""

    port: int
    pid: int
    model: Path
    home: Path
    clock: Path  # what libfaketime reads


async def ask(port: int, subject: str, n_tokens: int) -> Outcome:
    """Stream one answer to its end."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": f"Tell me a long story about {subject}."}],
            "max_tokens": n_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    text, end = "", "the connection ended"
    with suppress(OSError):
        status = (await reader.readline()).decode().strip()
        while line := await reader.readline():
            if line.startswith((b"data: {", b"{")):
                event = json.loads(line.removeprefix(b"data: "))
                choice = (event.get("choices") or [{}])[0]
                text += choice.get("delta", {}).get("content") or ""
                end = choice.get("finish_reason") or end
                if "error" in event:
                    end = f"{status.split(' ', 1)[-1]}: {event['error']['message']}"
    writer.close()
    return Outcome(text, end)


async def all_clients(
    port: int, n_tokens: int, trouble: Callable[[], object] | None = None
) -> tuple[list[Outcome], float]:
    """Let all clients stream, cause trouble after a moment, and return what each got, and the seconds."""
    began = time.perf_counter()
    asking = [asyncio.create_task(ask(port, subject, n_tokens)) for subject in SUBJECTS]
    if trouble is not None:
        await asyncio.sleep(0.5)
        await asyncio.to_thread(trouble)
    return list(await asyncio.gather(*asking)), time.perf_counter() - began


def engine_of(pid: int) -> psutil.Process:
    """Return the engine's process: the child with the most memory."""
    return max(psutil.Process(pid).children(recursive=True), key=lambda child: child.memory_info().rss)


@contextmanager
def running(llmrun: str, model: str, stack: ExitStack) -> Iterator[Place]:
    """Serve a copy of the model, with a home on a small file system where that is possible."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    home, clock, path = folder / "home", folder / "clock", folder / "model.gguf"
    home.mkdir()
    shutil.copy(model, path)
    clock.write_text("+0\n")
    environment = {"LLMRUN_HOME": str(home)}
    if os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", home], check=True)
        stack.callback(subprocess.run, ["umount", "-l", home], check=False)
    if FAKETIME.exists():
        faked = {"FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1", "DONT_FAKE_MONOTONIC": "1"}
        environment |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME_DONT_FAKE_MONOTONIC": "1", **faked}
    os.environ |= environment
    stack.callback(lambda: [os.environ.pop(name) for name in environment])
    command = [llmrun, "serve", str(path), "--parallel", str(N_CLIENTS), "--ctx", "2048"]
    with server.process(command) as (port, pid):
        yield Place(port, pid, path, home, clock)


def kill_engine(place: Place) -> None:
    """Kill it as the kernel does when memory ends."""
    engine_of(place.pid).kill()


def fill_disk(place: Place) -> None:
    """Leave no byte for states, logs and chats."""
    with suppress(OSError), (place.home / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def replace_file(place: Place) -> None:
    """Replace the model's file by another one, as a download does."""
    other = place.model.with_name("other")
    other.write_bytes(bytes(1000))
    other.replace(place.model)


def cut_file(place: Place) -> None:
    """Write over the model's file, as `cp` does: its mapped pages are gone."""
    place.model.write_bytes(bytes(1000))


def set_clock_back(place: Place) -> None:
    """Set the time of day back, but not the monotonic clock, which no system sets."""
    place.clock.write_text("-1d\n")


TROUBLES: dict[str, Callable[[Place], None]] = {
    "the engine is killed": kill_engine,
    "the disk is full": fill_disk,
    "the clock is set back a day": set_clock_back,
    "8 busy programs": lambda place: None,
    "the model's file is replaced": replace_file,
    "the model's file is cut off": cut_file,
}


def tell(name: str, quiet: list[Outcome], found: list[Outcome], seconds: float, after: Outcome) -> None:
    """Print a row."""
    same = sum(one == other for one, other in zip(found, quiet, strict=True))
    ends = Counter(
        outcome.end if outcome.text == usual.text else f"{len(outcome.text)} characters, then {outcome.end}"
        for outcome, usual in zip(found, quiet, strict=True)
    )
    print(f"{name}: {same} of {N_CLIENTS} as on a quiet server, {seconds:.1f} s")
    for end, count in ends.items():
        print(f"    {count} x {end}")
    print(f"    the next request: {after.end}, {len(after.text)} characters", flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llmrun", metavar="PATH")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=150)
    options = parser.parse_args()
    llmrun = peers.find_llmrun(options.llmrun)
    model = peers.model_file(llmrun, options.model)
    for name, trouble in TROUBLES.items():
        if (name == "the disk is full" and os.geteuid()) or ("clock" in name and not FAKETIME.exists()):
            continue
        with ExitStack() as stack, running(llmrun, model, stack) as place:
            quiet, _ = asyncio.run(all_clients(place.port, options.tokens))
            with busy(8 if name.startswith("8") else 0):
                found, seconds = asyncio.run(
                    all_clients(place.port, options.tokens, lambda act=trouble, place=place: act(place))
                )
                after = asyncio.run(ask(place.port, "rain", 8))
        tell(name, quiet, found, seconds, after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
