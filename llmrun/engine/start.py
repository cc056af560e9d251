"""Entry of the engine process: begins to load weights before most of the engine is imported.

Must not know commands. The front guesses the model's file from its first argument, before it parses the others.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

from llmrun import _native
from llmrun.engine import environment
from llmrun.errors import LlmrunError


class Preload(threading.Thread):
    """A thread that reads the front's guess, one line before the commands, and loads that file's weights.

    Args:
        descriptor: of the pipe from the front.

    Attributes:
        path: of the GGUF file; empty until has_read is set, and without a guess.
        weights: a LlamaModel after the thread's end; None without a guess, or if loading failed: Load reports it.
    """

    def __init__(self, descriptor: int = 0) -> None:
        from llmrun.engine.llama.model import LlamaModel

        super().__init__(daemon=True)
        self._descriptor = descriptor
        self.flag, self.has_read = _native.CancelFlag(), threading.Event()
        self.path = ""
        self._model = LlamaModel
        self.weights: LlamaModel | None = None

    def run(self) -> None:
        with open(self._descriptor, "rb", buffering=0, closefd=False) as pipe:
            self.path = os.fsdecode(pipe.readline().rstrip(b"\n"))
        self.has_read.set()
        if self.path:
            with suppress(LlmrunError):
                self.weights = self._model(self.path, -1, self.flag)


def main() -> None:
    """Run the engine process; never return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment.set_environment()
    environment.disable_core_dumps()
    environment.shorten_switch_interval()
    _native.exit_when_closed(0)
    environment.load_libraries()
    preload = None
    if sys.argv[1:] == ["preload"]:
        preload = Preload()
        preload.start()
    from llmrun.engine.main import serve

    serve(preload)
