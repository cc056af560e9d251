"""Resident memory of an engine against its plan: conversations fill the KV cache, idle, and another model is loaded.

    python tests/benchmarks/conversation_memory.py [GB ...]

Each size is that of the KV cache. The model has few weights and 1 MiB of keys and values for each token. Two
conversations of two turns fill the cache; then the engine idles and writes them to disk; then it loads another
model. Printed is the most memory of each phase that is not a file's (Anonymous in smaps_rollup).

With --sparse, a context stands in whose states are holes of files, for more than the machine's memory: a conversation
is saved, and found again by the next engine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from random_model import Shape, write_model

from llmrun import Limits, SamplingParams
from llmrun.engine.core.states import KVStore
from llmrun.model.loading import prepare
from llmrun.models.registry import ModelSpec
from llmrun.planning.preferences import LoadPreferences

_SHAPE = Shape(256, 32, 256, 32, 32, 256, 1024, tied=True)
_OTHER = Shape(256, 1, 256, 1, 1, 256, 1024, tied=True)
_TOKEN_BYTES = _SHAPE.layers * _SHAPE.kv_heads * _SHAPE.head_length * 2 * 2
_INTERVAL = 0.02  # seconds between two looks
_PHASES = ("full", "idle", "another model")


class Anonymous:
    """The most memory of a process that is not a file's, in bytes, since the last reset()."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/smaps_rollup")
        self.most = self.now

    @property
    def now(self) -> int:
        lines = self._path.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.most, done = self.now, threading.Event()

        def look() -> None:
            while not done.wait(_INTERVAL):
                self.most = max(self.most, self.now)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.most = max(self.most, self.now)


def words(first: int, count: int) -> str:
    """A text of a token for each word."""
    return "".join(f" {(first + index) % 700}" for index in range(count))


def measure(folder: Path, gigabytes: float, idle_seconds: float) -> list[int]:
    """Return the plan's bytes, and the most memory of each phase."""
    model, other = folder / "model.gguf", folder / "other.gguf"
    if not model.exists():
        write_model(model, _SHAPE, lambda name: "Q8_0")
        write_model(other, _OTHER, lambda name: "Q8_0")
    window = -(-int(gigabytes * 1e9 / _TOKEN_BYTES / 2) // 256) * 256
    preferences = LoadPreferences(n_ctx=window, parallel=2)
    loaded = prepare(ModelSpec("model", path=model), model, preferences, keeps_states=True)
    engine = loaded.new_engine()
    loaded.start(engine)
    memory, most = Anonymous(engine.pid), list[int]()
    with memory.watched():
        for first in (1, 300):
            text, limits = words(first, window - 50), Limits(max_tokens=4)
            for _ in range(2):
                text += loaded.generate(text, limits=limits, sampling=SamplingParams(temperature=0)).text + " 5 6 7"
    most.append(memory.most)
    with memory.watched():
        time.sleep(idle_seconds)
    most.append(memory.most)
    with memory.watched():
        prepare(ModelSpec("other", path=other), other, LoadPreferences(n_ctx=512)).start(engine)
        time.sleep(1)
    most.append(memory.most)
    loaded.close()
    return [loaded.plan.ram_bytes, *most]


def measure_sparse(folder: Path, gigabytes: float) -> list[int]:
    """Return the bytes that the conversation's state has, and the most memory of saving it and of finding it again."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.conversation import Conversation
    from support.fake_context import hashed

    n_bytes, most, prompt = int(gigabytes * 1e9), list[int](), "a long conversation " * 20
    store = KVStore(folder / f"{gigabytes}", "model", 2 * n_bytes)
    for is_saved in (False, True):
        talk = Conversation(hashed, store, n_ctx=600, n_batch=512, copy_bytes=0)
        set_state = talk.context.set_state

        def write_state(slot: int, path: Path) -> int:
            with path.open("wb") as file:
                file.truncate(n_bytes)
            return 0

        def set_sparse(slot: int, state: memoryview, n_tokens: int, plain: Any = set_state) -> bool:
            assert len(state) == n_bytes
            return bool(plain(slot, bytearray(str([*prompt.encode()]).encode()), n_tokens))

        replaced = {"state_bytes": lambda slot: n_bytes, "write_state": write_state, "set_state": set_sparse}
        vars(talk.context).update(replaced)
        memory = Anonymous(os.getpid())
        with memory.watched():
            talk.answer(prompt, most=1)
            assert (talk.started().reused_tokens > 0) == is_saved
            if not is_saved:
                assert talk.engine.save(1, prompt_only=True)[1] > n_bytes
        most.append(memory.most)
    return [n_bytes, *most]


def main() -> None:
    """Measure, and print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", metavar="GB", type=float, nargs="*", default=[1.0], help="of the KV cache")
    parser.add_argument("--idle", type=float, default=30, metavar="SECONDS")
    parser.add_argument("--sparse", action="store_true", help="holes of files stand in for states")
    options = parser.parse_args()
    columns = ("state", "saving", "finding") if options.sparse else ("plan", *_PHASES)
    print("".join(f"{column:>16}" for column in ("KV cache", *columns)))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"LLMRUN_HOME": folder, "LLMRUN_KV_BYTES": str(1 << 40)}
        for size in options.sizes:
            measured = (
                measure_sparse(Path(folder), size) if options.sparse else measure(Path(folder), size, options.idle)
            )
            print("".join(f"{n_bytes / 1e9:>13.2f} GB" for n_bytes in (size * 1e9, *measured)), flush=True)


if __name__ == "__main__":
    main()
