"""Models that are kept loaded: each in an engine of its own, loaded when first asked for, gone when nobody asks.

Owns which models are in memory and which of them goes first; must not know protocols or HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrun.config import Settings
from llmrun.errors import LlmrunError, ModelNotFoundError, OutOfMemoryError, UsageError
from llmrun.model import Model
from llmrun.models.location import ModelLocation, locate, not_on_disk
from llmrun.models.store.in_use import using
from llmrun.protocol.engine_status import EngineStatus, GetStatus
from llmrun.protocol.loading import Loaded
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.speculation import MeasureSteps, StepsMeasured
from llmrun.runner.launch import EngineHandle
from llmrun.server.adapters import NO_ADAPTERS, ServedAdapters
from llmrun.server.connection import EngineConnection
from llmrun.server.http_errors import CrashingPromptError

MOST_DEATHS = 2
"""After so many deaths of an engine a prompt that was in it is refused."""
IDLE_SECONDS = 5.0
"""An engine that nobody asks for so long measures what drafting costs it, where that isn't known yet."""
_REMEMBERED_PROMPTS = 1000
_LONGEST_NAME = 500
# What a client may name: no path, whatever a name means elsewhere.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w][\w.-]*){0,2}(:[\w.-]+)?")

Prepare = Callable[[ModelLocation, Path, int], Model]
"""Reads a model's header and makes the plan, within the free memory but so many bytes."""


class PooledModel:
    """A model that is loaded, is being loaded, or was.

    Attributes:
        name: as it was first asked for.
        located: what that means.
        path: of its file.
        users: requests that are in it or wait for it; it stays as long as there are any.
        used_at: when the last one ended, by the event loop's clock.
        model: its header and plan; None before it was first loaded.
        loaded: what the engine says of it.
    """

    def __init__(self, name: str, located: ModelLocation, path: Path) -> None:
        self.name, self.located, self.path = name, located, path
        self.users = 0
        self.used_at = 0.0
        self.keep_seconds = 0.0
        self.model: Model | None = None
        self.loaded: Loaded | None = None
        self.connection: EngineConnection | None = None
        self.starting: asyncio.Task[EngineConnection] | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self.idling: asyncio.TimerHandle | None = None
        self.can_measure = True
        self.locks = ExitStack()

    def cancel_timers(self) -> None:
        """Nothing happens by itself any more."""
        for timer in (self.expiry, self.idling):
            if timer is not None:
                timer.cancel()

    @property
    def is_loaded(self) -> bool:
        """Whether it is in memory, all of it."""
        return self.connection is not None and self.connection.alive and self.loaded is not None

    @property
    def is_unused(self) -> bool:
        """Whether nobody asks it, and it isn't just being loaded for somebody who has left."""
        return not self.users and (self.starting is None or self.starting.done())


@dataclass
class CrashTracker:
    """Prompts that were in an engine when it died, and which engines that were; the oldest are forgotten."""

    _engines: OrderedDict[str, set[int]] = field(default_factory=OrderedDict)

    def __bool__(self) -> bool:
        """Whether any is remembered; most servers never see one."""
        return bool(self._engines)

    def add(self, prompt: str, engine: int) -> None:
        """It was in this engine, which died."""
        self._engines[prompt] = self._engines.pop(prompt, set()) | {engine}
        while len(self._engines) > _REMEMBERED_PROMPTS:
            self._engines.popitem(last=False)

    def forget(self, prompt: str) -> None:
        """It was answered: others are to blame."""
        self._engines.pop(prompt, None)

    def check(self, prompt: str) -> None:
        """Raises CrashingPromptError if that happened too often."""
        if len(self._engines.get(prompt, ())) >= MOST_DEATHS:
            raise CrashingPromptError(
                "this prompt is refused", why=f"the engine died {MOST_DEATHS} times while this prompt was in it"
            )


def prompt_hash(asked: AnswerRequest) -> str:
    """What a prompt is known by."""
    return hashlib.sha256(
        repr((asked.messages, asked.prompt, asked.template, asked.grammar, asked.tools)).encode()
    ).hexdigest()


class Pool:
    """The models of one server.

    Args:
        names: that the server was started with; the first is the one that is meant where a client names none.
        settings: where models lie.
        prepare: reads a model's header and makes the plan.
        keep_seconds: how long a model stays that nobody asks.
        start: starts an engine's process, given the model it is for.
        on_loaded: told of every model that was loaded.
        idle_seconds: see IDLE_SECONDS.
        adapters: of one of the models.

    Attributes:
        deaths: prompts that were in dying engines.
    """

    def __init__(
        self,
        names: Sequence[str],
        settings: Settings,
        prepare: Prepare,
        *,
        keep_seconds: float,
        start: Callable[[Model], EngineHandle],
        on_loaded: Callable[[PooledModel], None] = lambda kept: None,
        idle_seconds: float = IDLE_SECONDS,
        adapters: ServedAdapters = NO_ADAPTERS,
    ) -> None:
        self.names, self.adapters = tuple(names), adapters
        # Engines inherit the niceness of the thread that starts them: one that is there before others give way.
        self._launcher = ThreadPoolExecutor(1, "engine launcher")
        self._launcher.submit(int)
        self.deaths = CrashTracker()
        self._settings, self._prepare, self._keep_seconds = settings, prepare, keep_seconds
        self._start_engine, self._on_loaded, self._idle_seconds = start, on_loaded, idle_seconds
        self._kept: dict[Path, PooledModel] = {}
        self._paths: dict[str, Path] = {}
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def kept(self) -> list[PooledModel]:
        """The models that are loaded, or being loaded."""
        return [kept for kept in self._kept.values() if kept.is_loaded or kept.users]

    @asynccontextmanager
    async def lease(self, name: str, keep_seconds: float | None = None) -> AsyncIterator[PooledModel]:
        """A model that stays until the block ends; ready() loads it.

        Args:
            name: "" is the first that the server was started with.
            keep_seconds: how long it stays afterwards; None is the server's own, less than 0 for ever.

        Raises:
            ModelNotFoundError: it is not on this disk.
            UsageError: it can't be a model's name.
        """
        kept = await self._find(name)
        kept.users += 1
        kept.cancel_timers()
        try:
            yield kept
        finally:
            kept.users -= 1
            kept.keep_seconds = self._keep_seconds if keep_seconds is None else keep_seconds
            self._rest(kept)

    def _rest(self, kept: PooledModel) -> None:
        """Nobody may be asking a model any more."""
        loop = asyncio.get_running_loop()
        kept.used_at = loop.time()
        if not kept.users and 0 <= kept.keep_seconds < math.inf:
            kept.expiry = loop.call_later(kept.keep_seconds, self._when_unused, kept, self._unload)
        if not kept.users and kept.is_loaded and kept.can_measure:
            kept.idling = loop.call_later(self._idle_seconds, self._when_unused, kept, self._measure_steps)

    def _when_unused(self, kept: PooledModel, work: Callable[[PooledModel], Coroutine[Any, Any, None]]) -> None:
        if kept.is_unused:
            task = asyncio.ensure_future(work(kept))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _measure_steps(self, kept: PooledModel) -> None:
        """Have an engine that nobody asks measure its decode steps; where somebody does ask, it stops, for now."""
        connection, model = kept.connection, kept.model
        if connection is None or model is None:
            return
        drafting = model.drafting
        if not (drafting.lacks_times or drafting.lacks_attention):
            return
        kept.can_measure = False  # what fails once is not tried for ever
        with suppress(LlmrunError):
            measure = MeasureSteps(connection.next_request(), drafting.lacks_attention)
            found = await connection.ask(measure, StepsMeasured)
            kept.can_measure = not found.times
            await asyncio.to_thread(drafting.remember, *found[1:])

    async def _find(self, name: str) -> PooledModel:
        name = self.adapters.base(name).removesuffix(":latest") or next(iter(self.names), "")
        if not name:
            raise UsageError("model is missing", hint="name one of /v1/models")
        path = self._paths.get(name)
        if path is None or path not in self._kept:
            located = await asyncio.to_thread(self._locate, name)
            assert located.path is not None
            path = self._paths[name] = located.path
            self._kept.setdefault(path, PooledModel(name, located, path))
        return self._kept[path]

    def _locate(self, name: str) -> ModelLocation:
        """What a name means; only those that the server was started with may be paths.

        Raises:
            ModelNotFoundError: it is not on this disk, and the server fetches nothing.
        """
        if name not in self.names and (len(name) > _LONGEST_NAME or not _NAME.fullmatch(name)):
            raise ModelNotFoundError(f"no model is called {name[:200]!r}", hint="GET /v1/models names those there are")
        located = locate(name, self._settings)
        is_path = located.spec.path is not None and not name.startswith(("ollama/", "lmstudio/"))
        if is_path and name not in self.names:
            raise ModelNotFoundError(f"no model is called {name[:200]!r}", hint="GET /v1/models names those there are")
        if located.path is None:
            raise not_on_disk(name)
        return located

    async def ready(self, kept: PooledModel) -> EngineConnection:
        """The engine that has a leased model loaded; loads it where it isn't.

        Raises:
            LlmrunError: it can't be loaded.
        """
        if kept.is_loaded:
            assert kept.connection is not None
            return kept.connection
        if kept.starting is None or kept.starting.done():
            kept.starting = asyncio.ensure_future(self._start(kept))
            kept.starting.add_done_callback(lambda task: self._started(kept, task))
        return await asyncio.shield(kept.starting)

    def _started(self, kept: PooledModel, task: asyncio.Task[EngineConnection]) -> None:
        """A model was loaded or could not be; all who waited for it may have left."""
        if not task.cancelled():
            task.exception()  # else asyncio complains that nobody looked at it
            self._rest(kept)

    async def _start(self, kept: PooledModel) -> EngineConnection:
        async with self._loading:  # one at a time, so that each sees what memory the one before has taken
            while True:
                try:
                    return await self._load(kept)
                except OutOfMemoryError:
                    idle = [each for each in self._kept.values() if each.is_loaded and not each.users]
                    if not idle:
                        raise
                    await self._unload(min(idle, key=lambda each: each.used_at))

    async def _load(self, kept: PooledModel) -> EngineConnection:
        await self._close(kept)
        promised = sum(map(_still_to_take, self._kept.values()))
        kept.model = model = await asyncio.to_thread(self._prepare, kept.located, kept.path, promised)
        for each in (kept.path, *([model.draft.path] if model.draft is not None else ())):
            kept.locks.enter_context(using(each))
        try:
            loop = asyncio.get_running_loop()
            connection = EngineConnection(await loop.run_in_executor(self._launcher, self._start_engine, model))
            kept.loaded = await connection.load(model.load)
        except BaseException:
            kept.locks.close()
            raise
        kept.connection = connection
        self._on_loaded(kept)
        return connection

    async def _unload(self, kept: PooledModel) -> None:
        await self._close(kept)
        if kept.is_unused and not kept.is_loaded:  # somebody may have asked for it while it was closed
            self._kept.pop(kept.path, None)

    async def _close(self, kept: PooledModel) -> None:
        connection, kept.connection, kept.loaded = kept.connection, None, None
        kept.locks.close()
        if connection is not None:
            await connection.close()

    async def conditions(self) -> dict[str, EngineStatus]:
        """How busy the engine of each model in memory is."""
        found: dict[str, EngineStatus] = {}
        for kept in self.kept:
            if kept.connection is not None and kept.is_loaded:
                with suppress(LlmrunError):  # it is dying
                    status = GetStatus(kept.connection.next_request())
                    found[kept.name] = await kept.connection.ask(status, EngineStatus)
        return found

    async def warm(self, name: str) -> None:
        """Load a model before anybody asks for it.

        Raises:
            LlmrunError: it can't be loaded; who asks for it will be told too.
        """
        async with self.lease(name) as kept:
            await self.ready(kept)

    async def close(self) -> None:
        """End all engines."""
        for kept in list(self._kept.values()):
            if kept.starting is not None:
                kept.starting.cancel()
            kept.cancel_timers()
            await self._close(kept)
        self._launcher.shutdown(wait=False)


def _still_to_take(kept: PooledModel) -> int:
    """Bytes that a loaded model's engine may come to take: its KV cache grows, and mapped weights count as free."""
    if not kept.is_loaded:
        return 0
    import psutil  # type: ignore[import-untyped,unused-ignore]

    assert kept.connection is not None
    assert kept.model is not None
    with suppress(psutil.Error):
        taken = psutil.Process(kept.connection.pid).memory_info()
        return max(kept.model.plan.ram_bytes - int(taken.rss - getattr(taken, "shared", 0)), 0)
    return 0  # it has just died
