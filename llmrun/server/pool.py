"""The loaded models: each has its own engine, is loaded on the first request, and unloaded when idle.

Decides which models are in memory, and which is unloaded first; must not know protocols or HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped,unused-ignore]

from llmrun.config import Settings
from llmrun.errors import LlmrunError, ModelNotFoundError, OutOfMemoryError, UsageError
from llmrun.gguf.header import Header
from llmrun.model import Model
from llmrun.models.location import ModelLocation, locate, not_on_disk
from llmrun.models.store.use import using
from llmrun.protocol.adapters import Adapter, AdapterScale
from llmrun.protocol.exclusions import spelled, yielding
from llmrun.protocol.jobs import Empty
from llmrun.protocol.layers import FLAG, Layer, layer, origins_of, resolved, values_of
from llmrun.protocol.media import Modality
from llmrun.protocol.messages import (
    REQUEST_FIELDS,
    AnswerRequest,
    Message,
    Started,
    TextDelta,
    given_values,
    with_defaults,
)
from llmrun.protocol.params import PARAMETERS, Limits, SamplingParams, resolve_sampling
from llmrun.protocol.questions import COMPARE, STATUS, EngineStatus
from llmrun.runner.launch import EngineHandle
from llmrun.server.connection import EngineConnection
from llmrun.server.http import CrashingPromptError, model_not_found
from llmrun.server.registry import LOADING


class ServedAdapters(NamedTuple):
    """The adapters of one model."""

    model: str = ""  # name on the command line
    adapters: tuple[Adapter, ...] = ()  # in the order of their ids
    scales: tuple[AdapterScale, ...] | None = None  # of requests that name none; None: those of the command line

    @property
    def names(self) -> list[str]:
        """Names of the model with one adapter each."""
        return [f"{self.model}:{adapter.name}" for adapter in self.adapters]

    def base(self, name: str) -> str:
        """Return the model of a name, without its adapter."""
        return self.model if name in self.names else name

    def apply(self, name: str, request: AnswerRequest) -> AnswerRequest:
        """Return a request to the model with the adapter in its name, at its own scale, or 1 if that is 0; without one
        in either, with the scales that were set since the start.

        Raises:
            UsageError: the request has `lora` as well.
        """
        if name not in self.names:
            return request if request.adapters is not None else replace(request, adapters=self.scales)
        if request.adapters is not None:
            raise UsageError("lora and an adapter in the model's name can't be used together", hint="give one of them")
        number = self.names.index(name)
        return replace(request, adapters=(AdapterScale(number, self.adapters[number].scale or 1.0),))

    def refuse(self, name: str) -> None:
        """Raise UsageError if a request for vectors names an adapter."""
        if name in self.names:
            why = "vectors are computed with the adapters that the server was started with"
            raise UsageError(f"{name} can't compute vectors", why=why, hint=f"use {self.model}")

    def scaled(self, scales: Sequence[AdapterScale]) -> ServedAdapters:
        """Return the adapters with other scales for requests that name none; one that is not listed gets 0.

        Raises:
            UsageError: there is no such adapter.
        """
        unknown = next((number for number, _ in scales if number >= len(self.adapters)), None)
        if unknown is not None:
            raise UsageError(f"there is no adapter {unknown}", why=f"the server was started with {len(self.adapters)}")
        return self._replace(scales=tuple(scales))

    @property
    def described(self) -> list[dict[str, Any]]:
        """The response of llama-server's GET /lora-adapters."""
        scales = {number: adapter.scale for number, adapter in enumerate(self.adapters)}
        if self.scales is not None:
            scales = dict.fromkeys(scales, 0.0) | dict(self.scales)
        return [
            {"id": number, "path": adapter.name, "scale": scales[number]}
            for number, adapter in enumerate(self.adapters)
        ]


NO_ADAPTERS = ServedAdapters()


MOST_CRASHES = 2
"""A prompt that was in so many crashed engines is rejected."""
IDLE_SECONDS = 5.0
"""An engine that is idle for this long compares ways to compute, if a comparison is missing."""
_REMEMBERED_PROMPTS = 1000
_LONGEST_NAME = 500
# A name that a client may use: never a path.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w][\w.-]*){0,2}(:[\w.-]+)?")

ModelIdentity = tuple[Path | None, str]
Prepare = Callable[[ModelLocation, Path, int], Model]
"""Reads a model's header and plans its load; the last argument is the number of bytes of free memory to leave."""


@dataclass(slots=True)
class PooledAnswer:
    """An answer in progress."""

    number: int  # of its request in its engine
    request: AnswerRequest  # as the engine got it
    started: Started
    stream: bool
    n_tokens: int = 0
    has_new_line: bool = False

    def add(self, delta: TextDelta) -> None:
        self.n_tokens += delta.tokens
        self.has_new_line = self.has_new_line or "\n" in delta.text


class PooledModel:
    """A model that is loaded, is being loaded, or was loaded."""

    def __init__(self, name: str, located: ModelLocation, path: Path) -> None:
        self.name, self.located, self.path = name, located, path  # the name in the first request
        self.users = 0  # running and waiting requests; the model stays loaded while there are any
        self.used_at = 0.0  # end of the last request, by the event loop's clock
        self.keep_seconds: float | None = None  # that a request asked for; None: the server's default
        self.model: Model | None = None  # header and plan; None before the first load
        self.connection: EngineConnection | None = None
        self.starting: asyncio.Task[EngineConnection] | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self.idling: asyncio.TimerHandle | None = None
        self.can_compare = True  # while idle
        self.running: dict[int, PooledAnswer] = {}  # by the lowest numbers that were free when they started
        self.locks = ExitStack()

    def cancel_timers(self) -> None:
        for timer in (self.expiry, self.idling):
            if timer is not None:
                timer.cancel()
        self.expiry = self.idling = None

    @property
    def is_loaded(self) -> bool:
        return self.connection is not None and self.connection.alive

    @property
    def loaded_model(self) -> Model:
        """The model of a lease, after Pool.ready()."""
        assert self.model is not None
        return self.model

    @property
    def is_unused(self) -> bool:
        return not self.users and (self.starting is None or self.starting.done())


class CrashTracker:
    """The prompts that were in an engine when it died, with the ids of these engines. The oldest are dropped."""

    def __init__(self) -> None:
        self._engines: OrderedDict[str, set[int]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._engines)

    def add(self, prompt: str, engine: int) -> None:
        """Add a prompt that was in this engine when it died."""
        self._engines[prompt] = self._engines.pop(prompt, set()) | {engine}
        while len(self._engines) > _REMEMBERED_PROMPTS:
            self._engines.popitem(last=False)

    def forget(self, prompt: str) -> None:
        """Remove a prompt that was answered."""
        self._engines.pop(prompt, None)

    def check(self, prompt: str) -> None:
        """Raise CrashingPromptError if the prompt was in too many crashed engines."""
        if len(self._engines.get(prompt, ())) >= MOST_CRASHES:
            reason = f"the engine crashed {MOST_CRASHES} times while this prompt was in it"
            raise CrashingPromptError("this prompt is rejected", why=reason)


def prompt_hash(request: AnswerRequest) -> str:
    """Return a hash of everything in a request that the engine parses."""
    plain = (request.prompt, request.prompt_tokens, request.suffix)
    parts = (request.messages, plain, request.template, request.template_variables, request.grammar, request.tools)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


Defaults = Callable[[str], Layer]
"""Returns what requests and loads of a model leave open, by its name on the command line: fields of AnswerRequest,
Limits, SamplingParams and LoadPreferences, and "system"."""


def no_defaults(model: str) -> Layer:
    return {}


def completed(request: AnswerRequest, defaults: Layer) -> AnswerRequest:
    """Return a request with defaults of what it leaves open, unless they exclude what it has."""
    given = {name: value for name, value in given_values(request).items() if name in REQUEST_FIELDS}
    values = values_of(yielding(defaults, spelled(given)))
    fields = {name: value for name, value in values.items() if name in REQUEST_FIELDS}
    if fields or "max_tokens" in values:
        request = with_defaults(request, AnswerRequest(limits=Limits(values.get("max_tokens")), **fields))
    if values.get("system") and request.messages and all(message.role != "system" for message in request.messages):
        request = replace(request, messages=(Message("system", values["system"]), *request.messages))
    return request


class Pool:
    """The models of one server.

    Args:
        names: the models of the command line; the first answers requests that name none.
        files: what the command line has for some of these names: paths, which requests may use too.
        keep_seconds: time until an idle model is unloaded.
        start: starts an engine process for a model.
        on_loaded: called after every load.
        adapters: of one of the models.
        aliases: other names of models.
        any_model: the first model answers requests for all other names.
        defaults: of each model.
    """

    def __init__(
        self,
        names: Sequence[str],
        settings: Settings,
        prepare: Prepare,
        *,
        keep_seconds: float,
        start: Callable[[Model], EngineHandle],
        on_loaded: Callable[[PooledModel], None] = lambda pooled: None,
        idle_seconds: float = IDLE_SECONDS,
        adapters: ServedAdapters = NO_ADAPTERS,
        aliases: Mapping[str, str] = MappingProxyType({}),
        any_model: bool = False,
        defaults: Defaults = no_defaults,
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._files, self._names_of_files = files, {path: name for name, path in files.items()}
        self._defaults = defaults
        self.names, self.adapters, self.aliases, self._any_model = tuple(names), adapters, aliases, any_model
        # Engines inherit the scheduling of the thread that starts them: start it before the server changes its own.
        self._launcher = ThreadPoolExecutor(1, "engine launcher")
        self._launcher.submit(int)
        self.crashes = CrashTracker()
        self._settings, self._prepare, self._keep_seconds = settings, prepare, keep_seconds
        self._start_engine, self._on_loaded, self._idle_seconds = start, on_loaded, idle_seconds
        self._n_to_warm, self._has_loaded = len(self.names), False  # models of the command line; whether any loaded
        self._failure: LlmrunError | None = None  # of the last one that could not be loaded
        self._warmed = asyncio.Event()  # all of these were tried
        self._models: dict[ModelIdentity, PooledModel] = {}
        self.windows: dict[ModelIdentity, int] = {}  # context windows that the user chose on the page
        self._identities: dict[str, ModelIdentity] = {}  # by the name in requests
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def models(self) -> list[PooledModel]:
        """The models that are loaded, or being loaded."""
        return [each for each in self._models.values() if each.is_loaded or each.users]

    @asynccontextmanager
    async def lease(self, name: str, keep_seconds: float | None = None) -> AsyncIterator[PooledModel]:
        """Keep a model, to be loaded by ready(), until the block ends.

        Args:
            name: "" for the first model of the command line.
            keep_seconds: time until it is unloaded afterwards, below 0: never. None: as the last request asked for,
                else the server's default.

        Raises:
            ModelNotFoundError: it is not on this disk.
            UsageError: there is no name.
        """
        pooled = await self._find(name)
        pooled.users += 1
        pooled.cancel_timers()
        try:
            yield pooled
        finally:
            pooled.users -= 1
            if keep_seconds is not None:
                pooled.keep_seconds = keep_seconds
            self._set_timers(pooled)

    def _set_timers(self, pooled: PooledModel) -> None:
        """Schedule the unload and the comparisons of a model that may be idle from now on."""
        loop = asyncio.get_running_loop()
        pooled.used_at = loop.time()
        keep_seconds = self._keep_seconds if pooled.keep_seconds is None else pooled.keep_seconds
        if not pooled.users and 0 <= keep_seconds < math.inf:
            pooled.expiry = loop.call_later(keep_seconds, self._when_unused, pooled, self._unload)
        if not pooled.users and pooled.is_loaded and pooled.can_compare:
            pooled.idling = loop.call_later(self._idle_seconds, self._when_unused, pooled, self._compare)

    def _when_unused(self, pooled: PooledModel, work: Callable[[PooledModel], Coroutine[Any, Any, None]]) -> None:
        if pooled.is_unused:
            task = asyncio.ensure_future(work(pooled))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _compare(self, pooled: PooledModel) -> None:
        """Let an idle engine compare ways to compute; it stops at the next request, and tries again later."""
        connection, model = pooled.connection, pooled.model
        if connection is None or model is None:
            return
        pooled.can_compare = False  # after an error, or with nothing to compare
        if (missing := await asyncio.to_thread(model.comparisons.missing)) is None:
            return
        with suppress(LlmrunError):
            await asyncio.to_thread(model.comparisons.remember, await connection.do(COMPARE, missing))
            pooled.can_compare = await asyncio.to_thread(model.comparisons.missing) is not None

    def true_name(self, name: str) -> str:
        """Return the name of the model that answers requests for a name; "" for the first one."""
        name = self.aliases.get(name.removesuffix(":latest"), name)
        path, _, adapter = name.rpartition(":")
        if name in self._names_of_files:
            name = self._names_of_files[name]
        elif path in self._names_of_files:
            name = f"{self._names_of_files[path]}:{adapter}"
        is_known = name.removesuffix(":latest") in (*self.names, *self.adapters.names, *self.aliases.values())
        return "" if self._any_model and not is_known else name

    def base_name(self, name: str) -> str:
        """Return the name of the model that answers requests for a name, without its adapter; "" if there is none."""
        return self.adapters.base(self.true_name(name)).removesuffix(":latest") or next(iter(self.names), "")

    def alias_target(self, name: str) -> str:
        """Return the listed name of the model that an alias means; "" for a name that is not an alias."""
        target = self.aliases.get(name, "")
        return self._names_of_files.get(target, target)

    def n_ctx(self, name: str) -> int:
        """Return the context window of a model that is or was loaded, 0 for others."""
        pooled = self._models.get(self._identities.get(name, (None, "")))
        if pooled is None or pooled.model is None:
            return 0
        return pooled.model.n_ctx if pooled.is_loaded else pooled.model.load.n_ctx

    def modalities(self, name: str) -> frozenset[Modality] | None:
        """Return the kinds of files that a loaded model reads; None for others."""
        pooled = self._models.get(self._identities.get(name, (None, "")))
        return pooled.loaded_model.modalities if pooled is not None and pooled.is_loaded else None

    async def _find(self, name: str) -> PooledModel:
        name = self.base_name(name)
        if not name:
            raise UsageError("model is missing", hint="name one of /v1/models")
        identity = self._identities.get(name)
        if identity is None or identity not in self._models:
            located = await asyncio.to_thread(self._locate, name)
            assert located.path is not None
            identity = self._identities[name] = located.identity
            self._models.setdefault(identity, PooledModel(name, located, located.path))
        return self._models[identity]

    def complete(self, pooled: PooledModel, name: str, request: AnswerRequest) -> AnswerRequest:
        """Return a request with the server's defaults, and the adapter in the name of the model.

        Raises:
            UsageError: see ServedAdapters.apply().
        """
        identity = pooled.located.identity
        is_first = bool(self.names) and self._identities.get(self.names[0], identity) == identity
        defaults = self._defaults(self._given_name(name))
        if is_first:  # whose adapters they are, and the template
            request = self.adapters.apply(name, request)
        else:
            defaults = {field: each for field, each in defaults.items() if field != "template"}
        return pooled.located.spec.modelfile.complete(completed(request, defaults))

    def sampling(
        self, pooled: PooledModel, name: str, given: Mapping[str, Any], header: Header | None = None
    ) -> tuple[SamplingParams, dict[str, str]]:
        """Return the sampling parameters of requests that set some of them, and each one's origin, FLAG for these.

        Args:
            header: of the model's file, unless it is loaded.
        """
        defaults = self._defaults(self._given_name(name)).items()
        left_open = {field: each for field, each in defaults if field in PARAMETERS}
        found = resolved(layer(FLAG, given), yielding(left_open, spelled(given)))
        header = header or pooled.loaded_model.header
        own = pooled.located.spec.sampling_layers(header.recommended_sampling)
        params, origins = resolve_sampling((FLAG, values_of(found)), *own)
        return params, {**origins, **origins_of(found)}

    def _given_name(self, name: str) -> str:
        """Return what the command line has for a model, which presets are found by."""
        base = self.base_name(name)
        return self._files.get(base, base)

    def _locate(self, name: str) -> ModelLocation:
        """Locate a model; only names and aliases of the command line may be paths.

        Raises:
            ModelNotFoundError: it is not on this disk; the server downloads nothing.
        """
        is_given = name in self.names or name in self.aliases.values()
        unknown = model_not_found(name, hint="; llmrun serve --any-model answers other names with the first one")
        if not is_given and (len(name) > _LONGEST_NAME or not _NAME.fullmatch(name)):
            raise unknown
        try:
            located = locate(self._files.get(name, name), self._settings)
        except ModelNotFoundError:  # its hint is for the command line
            raise unknown from None
        if located.spec.is_file and not is_given:
            raise unknown
        if located.path is None:
            raise not_on_disk(name)
        return located

    async def ready(self, pooled: PooledModel) -> EngineConnection:
        """Return the engine of a leased model; load the model first if necessary.

        Raises:
            LlmrunError: it can't be loaded.
        """
        if pooled.is_loaded:
            assert pooled.connection is not None
            return pooled.connection
        if pooled.starting is None or pooled.starting.done():
            pooled.starting = asyncio.ensure_future(self._start(pooled))
            pooled.starting.add_done_callback(lambda task: self._started(pooled, task))
        return await asyncio.shield(pooled.starting)

    async def set_window(self, pooled: PooledModel, n_ctx: int) -> None:
        """Let a leased model have another context window, 0: the server's choice; it is loaded again when it is needed.

        Raises:
            UsageError: it answers other requests.
        """
        identity = pooled.located.identity
        if n_ctx == self.windows.get(identity, 0):
            return
        is_starting = pooled.starting is not None and not pooled.starting.done()  # its client may have left
        if pooled.users > 1 or is_starting:
            raise UsageError(f"{pooled.name} is in use", why="it answers requests", hint="try again later")
        self.windows[identity] = n_ctx
        await self._close(pooled)

    def _started(self, pooled: PooledModel, task: asyncio.Task[EngineConnection]) -> None:
        if not task.cancelled():
            task.exception()  # otherwise asyncio warns that it was never retrieved
            self._set_timers(pooled)

    async def _start(self, pooled: PooledModel) -> EngineConnection:
        async with self._loading:  # one at a time: each plan must see the memory of the one before
            while True:
                try:
                    return await self._load(pooled)
                except OutOfMemoryError:
                    idle = [each for each in self._models.values() if each.is_loaded and each.is_unused]
                    if not idle:
                        raise
                    await self._unload(min(idle, key=lambda each: each.used_at))

    async def _load(self, pooled: PooledModel) -> EngineConnection:
        await self._close(pooled)
        promised = sum(map(_expected_growth, self._models.values()))
        pooled.model = model = await asyncio.to_thread(self._prepare, pooled.located, pooled.path, promised)
        for each in (pooled.path, *([model.draft.path] if model.draft is not None else ())):
            pooled.locks.enter_context(using(each))
        try:
            _ = model.used  # as it is now: its file may be renamed or deleted during an answer
            loop = asyncio.get_running_loop()
            connection = EngineConnection(await loop.run_in_executor(self._launcher, self._start_engine, model))
            model.loaded = await connection.load(replace(model.load, each_token=True))
        except BaseException:
            pooled.locks.close()
            raise
        pooled.connection, self._has_loaded = connection, True
        self._on_loaded(pooled)
        return connection

    async def unload(self, path: Path) -> None:
        """Unload the model of a file, so that the file can be removed.

        Raises:
            UsageError: it answers requests, or is being loaded.
        """
        for pooled in [each for each in self._models.values() if each.path == path]:
            if not pooled.is_unused:
                raise UsageError(f"{pooled.name} is in use", why="it answers requests", hint="try again later")
            pooled.cancel_timers()
            await self._unload(pooled)

    async def _unload(self, pooled: PooledModel) -> None:
        if not pooled.is_unused:  # a request arrived after the timer, and before this task
            return
        await self._close(pooled)
        if pooled.is_unused and not pooled.is_loaded:  # a request may have arrived meanwhile
            self._models.pop(pooled.located.identity, None)

    async def _close(self, pooled: PooledModel) -> None:
        connection, pooled.connection = pooled.connection, None
        pooled.locks.close()
        if connection is not None:
            await connection.close()

    async def statuses(self) -> dict[str, EngineStatus]:
        """Return the status of the engine of each loaded model."""
        found: dict[str, EngineStatus] = {}
        for pooled in self.models:
            if pooled.connection is not None and pooled.is_loaded:
                with suppress(LlmrunError):  # it is dying
                    found[pooled.name] = await pooled.connection.do(STATUS, Empty())
        return found

    async def warm(self, name: str) -> None:
        """Load a model of the command line before its first request.

        Raises:
            LlmrunError: it can't be loaded.
        """
        try:
            async with self.lease(name) as pooled:
                await self.ready(pooled)
        except LlmrunError as error:
            self._failure = error
            raise
        finally:
            self._n_to_warm -= 1
            if not self._n_to_warm:
                self._warmed.set()

    async def wait_until_warm(self, seconds: float) -> None:
        """Wait for the models of the command line, no longer than this."""
        if self._n_to_warm > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._warmed.wait(), seconds)

    def unready(self) -> str:
        """Return why no request can be answered yet, "" if one can: LOADING until the models of the command line are
        loaded, then that none of them could be. Clients without a key may ask, so the file is not named."""
        if self._n_to_warm > 0:
            return LOADING
        if self._has_loaded or self._failure is None:
            return ""
        return f"No model could be loaded: {self._failure.code}"

    async def close(self) -> None:
        for pooled in list(self._models.values()):
            if pooled.starting is not None:
                pooled.starting.cancel()
            pooled.cancel_timers()
            await self._close(pooled)
        self._launcher.shutdown(wait=False)


def _expected_growth(pooled: PooledModel) -> int:
    """Return the bytes that an engine may still allocate: its KV cache grows, and mapped weights count as free."""
    if not pooled.is_loaded:
        return 0
    assert pooled.connection is not None
    with suppress(psutil.Error):
        memory = psutil.Process(pooled.connection.pid).memory_info()
        return max(pooled.loaded_model.plan.ram_bytes - int(memory.rss - getattr(memory, "shared", 0)), 0)
    return 0  # it has just died
