"""Engine processes that measure: started when needed, and reused while memory allows.

Must not know what is measured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Protocol, TypeVar

from llmrun.protocol.jobs import JobKind

_Command = TypeVar("_Command")
_Update = TypeVar("_Update")
_Result = TypeVar("_Result")


class Worker(Protocol):
    """An engine process: runner.EngineClient, or a stand-in for tests."""

    def do(
        self, kind: JobKind[_Command, _Update, _Result], command: _Command, on_update: Callable[[_Update], None] = ...
    ) -> _Result: ...

    def close(self) -> None: ...


class EnginePool:
    """Engines by key. The least recently used one is closed to make room for another.

    Args:
        start: an engine with these environment variables.
        limit: engines that may run at once; None for any number.
    """

    def __init__(self, start: Callable[[Mapping[str, str]], Worker], limit: int | None = None) -> None:
        self._start, self._limit = start, limit
        self._engines: OrderedDict[Hashable, Worker] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._engines

    def engine(self, key: Hashable, environment: Mapping[str, str]) -> Worker:
        """Return the engine of this key, started where there is none."""
        if key not in self._engines:
            while self._limit is not None and len(self._engines) >= self._limit:
                self.drop(next(iter(self._engines)))
            self._engines[key] = self._start(environment)
        self._engines.move_to_end(key)
        return self._engines[key]

    def drop(self, key: Hashable) -> None:
        """Close the engine of this key, if there is one."""
        engine = self._engines.pop(key, None)
        if engine is not None:
            engine.close()

    def close(self) -> None:
        """Close all engines."""
        for key in list(self._engines):
            self.drop(key)
