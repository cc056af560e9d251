"""The weights of the model that the front guesses from its first argument, before it parses the others.

Must not know commands.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from llmrun import _native
from llmrun.engine.llama.model import LlamaModel
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
        super().__init__(daemon=True)
        self._descriptor = descriptor
        self.flag, self.has_read = _native.CancelFlag(), threading.Event()
        self.path = ""
        self.weights: LlamaModel | None = None

    def run(self) -> None:
        with open(self._descriptor, "rb", buffering=0, closefd=False) as pipe:
            self.path = os.fsdecode(pipe.readline().rstrip(b"\n"))
        self.has_read.set()
        if self.path:
            with suppress(LlmrunError):
                self.weights = LlamaModel(self.path, -1, self.flag, draft_heads=True)  # the plan decides later
