"""A function that is called again and again beside a block, as for progress. Any room may import this."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(seconds: float, function: Callable[[], object]) -> Iterator[None]:
    """Call a function in a thread of its own, again and again after some seconds, until the block has ended."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(seconds):
            function()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
