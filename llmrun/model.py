"""A model that answers: from a name to a loaded engine, and from a conversation to events.

Owns the way from name to plan to engine, and the engine's restart after a crash; must not know terminals. The
commands use the same objects as the Python API.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from llmrun import runner
from llmrun.config import Settings, load_settings
from llmrun.errors import LlmrunError, ModelNotFoundError
from llmrun.hardware import probe
from llmrun.launch import launch
from llmrun.messages import Event, Generate, Load, Loaded, Message
from llmrun.models.check import check
from llmrun.models.gguf import read_header
from llmrun.models.header import Header
from llmrun.models.registry import ModelSpec, load_catalogue, resolve
from llmrun.models.store import Store
from llmrun.params import Limits, SamplingParams, resolve_sampling
from llmrun.plan import Plan, Wishes, make_plan


@dataclass(frozen=True, slots=True)
class Located:
    """What a name means, and where its file is; path is None while the model is not on this disk."""

    spec: ModelSpec
    path: Path | None


def locate(name: str, settings: Settings) -> Located:
    """Find a model without the network.

    Raises:
        ModelNotFoundError: nothing is called that.
        UsageError: the name makes no sense.
    """
    spec = resolve(name, load_catalogue())
    if spec.path is not None:
        return Located(spec, spec.path)
    installed = Store(settings).find(spec)
    return Located(spec, installed.path if installed else None)


def not_on_disk(name: str) -> ModelNotFoundError:
    """The error for a model that would have to be downloaded first."""
    return ModelNotFoundError(f"{name} is not on this disk", hint=f"llmrun pull {name}")


def open_ahead(name: str) -> None:
    """Let the prestarted engine load a model's weights while the command line is still being read.

    A guess: if it is wrong, or there is no such model, what comes later finds out and says so.
    """
    with suppress(LlmrunError):
        path = locate(name, load_settings()).path
        if path is not None and path.is_file():
            runner.prestarted().open_ahead(str(path.absolute()))


class Model:
    """A loaded model. One answer at a time; use it as a context manager or call close().

    Attributes:
        path: of the GGUF file.
        spec: what the name meant.
        header: what the file says about itself.
        plan: context window, threads and layers, and why.
        loaded: what the engine says about it.
    """

    def __init__(self, path: Path, spec: ModelSpec, header: Header, plan: Plan, load: Load) -> None:
        self.path = path
        self.spec = spec
        self.header = header
        self.plan = plan
        self.loaded: Loaded
        self._load = load
        self._runner: runner.Runner | None = None
        self._numbers = itertools.count(1)
        self._request = 0

    def sampling(self, flags: Mapping[str, Any] | None = None) -> tuple[SamplingParams, dict[str, str]]:
        """Sampling parameters and each one's origin: "flag", else "model" (the file), "catalogue", "default".

        Raises:
            UsageError: a value is out of its bounds.
        """
        return resolve_sampling(
            ("flag", flags or {}),
            ("model", self.header.recommended_sampling),
            ("catalogue", self.spec.sampling),
        )

    def start(self, engine: runner.Runner, on_progress: Callable[[float], None] = lambda fraction: None) -> None:
        """Load into an engine.

        Raises:
            BadModelError: llama.cpp refuses the file.
            EngineCrashedError: the file killed the engine.
        """
        self._runner = engine
        self.loaded = engine.load(self._load, on_progress)

    def chat(
        self,
        messages: Iterable[Message],
        *,
        sampling: SamplingParams | None = None,
        limits: Limits | None = None,
        template: str | None = None,
    ) -> Iterator[Event]:
        """Answer a conversation; yields Started, PrefillProgress and TextDelta, at last Finished.

        Args:
            messages: the whole conversation; what the KV cache knows of it already is reused.
            sampling: as sampling() gives it by default.
            limits: max tokens and stop strings.
            template: Jinja text in place of the model's own chat template.

        Raises:
            BadTemplateError: the model has no chat template, or it fails.
            ContextOverflowError: the conversation alone is longer than the context window.
            EngineCrashedError: the engine died; the next call starts a new one.
        """
        return self._generate(sampling, limits, messages=tuple(messages), template=template)

    def generate(
        self, prompt: str, *, sampling: SamplingParams | None = None, limits: Limits | None = None
    ) -> Iterator[Event]:
        """Continue a plain text, without a chat template. Events and errors as chat()."""
        return self._generate(sampling, limits, prompt=prompt)

    def _generate(self, sampling: SamplingParams | None, limits: Limits | None, **request: Any) -> Iterator[Event]:
        if self._runner is None or not self._runner.alive:
            self.start(runner.Runner(launch(verbose=self._load.verbose)))
        assert self._runner is not None
        self._request = next(self._numbers)
        return self._runner.generate(
            Generate(
                self._request,
                sampling=sampling or self.sampling()[0],
                limits=limits or Limits(),
                **request,
            )
        )

    def cancel(self) -> None:
        """Stop the running answer, which then ends with Finished. Safe in a signal handler."""
        if self._runner is not None:
            self._runner.cancel(self._request)

    def close(self) -> None:
        """End the engine."""
        if self._runner is not None:
            self._runner.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def prepare(
    spec: ModelSpec, path: Path, wishes: Wishes | None = None, *, warm_up: bool = False, verbose: bool = False
) -> Model:
    """Read a model's header and make the plan; start() loads it.

    Raises:
        BadModelError: the file is damaged, or no model that llama.cpp can run.
        OutOfMemoryError: it does not fit.
    """
    header = read_header(path)
    check(header)
    plan = make_plan(header, probe(), wishes or Wishes())
    load = Load(
        path=str(path.absolute()),
        n_ctx=plan.n_ctx,
        n_ctx_start=plan.n_ctx_start,
        n_batch=plan.n_batch,
        threads=plan.threads,
        gpu_layers=plan.gpu_layers,
        warm_up=warm_up,
        verbose=verbose,
    )
    return Model(path, spec, header, plan, load)


def load(
    name: str,
    *,
    n_ctx: int | None = None,
    threads: int | None = None,
    gpu_layers: int | None = None,
    pull: bool = True,
    on_pull: Callable[[int, int], None] = lambda done, total: None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> Model:
    """Load a model by name or path; downloads it first when it is missing.

    Args:
        name: an alias such as "smollm2", owner/repo[:quant], a URL, or a path.
        n_ctx: context window in tokens; None is what the model was trained on, cut to what fits into memory.
        threads: None is one for each physical core.
        gpu_layers: None is all.
        pull: False never downloads.
        on_pull: called with (bytes done, bytes in all) during the download.
        on_progress: called with the loaded share of the weights, 0 to 1.

    Raises:
        LlmrunError: see llmrun.errors for the kinds.
    """
    settings = load_settings()
    located = locate(name, settings)
    path = located.path
    if path is None and not pull:
        raise not_on_disk(name)
    if path is None:
        from llmrun.models.pull import pull as fetch

        path = fetch(located.spec, settings, on_pull, lambda note: None)
    model = prepare(located.spec, path, Wishes(n_ctx=n_ctx, threads=threads, gpu_layers=gpu_layers))
    model.start(runner.Runner(), on_progress)
    return model
