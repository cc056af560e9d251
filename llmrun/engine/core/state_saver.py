"""Prefixes that are worth it go to disk beside the loop, which waits for no file.

Owns which ones are worth it, and the thread that writes them; must not know llama.cpp. What is lost is only a cache.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from queue import Full, Queue
from typing import TYPE_CHECKING

from llmrun.engine.core.prefix import common_prefix

if TYPE_CHECKING:
    from llmrun.engine.core.states import KVStore

_WORTH_SAVING = 256  # tokens that are not on disk yet
_MOST_REMEMBERED = 64
_MOST_WAITING = 2  # states: they take as much memory as their cells


class StateSaver:
    """Writes states into a store, one after the other.

    Args:
        store: nobody else has to know that another thread uses it too.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._saved = deque[list[int]](maxlen=_MOST_REMEMBERED)
        self._queue = Queue[tuple[list[int], bytearray]](_MOST_WAITING)
        self._thread: threading.Thread | None = None

    def wants(self, tokens: list[int]) -> bool:
        """Whether enough of these tokens is not on disk, and there is time to write them."""
        known = max((common_prefix(saved, tokens) for saved in self._saved), default=0)
        return len(tokens) - known >= _WORTH_SAVING and not self._queue.full()

    def save(self, tokens: list[int], state: bytearray) -> None:
        """Write a state soon, or not at all where others are waited for."""
        self.know(tokens)
        with suppress(Full):
            self._queue.put_nowait((list(tokens), state))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="state saver", daemon=True)
            self._thread.start()

    def know(self, tokens: list[int]) -> None:
        """The state of these tokens is on disk."""
        self._saved.append(list(tokens))

    def wait(self) -> None:
        """Until all is written."""
        self._queue.join()

    def _write(self) -> None:
        while True:
            tokens, state = self._queue.get()
            with suppress(OSError):
                self._store.save(tokens, state)
            self._queue.task_done()
