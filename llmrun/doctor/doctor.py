"""Checks of `llmrun doctor`: requirements of a model run, the hardware that it will use, and a short trial answer.

Nothing is cached or changed; llama.cpp runs in its own process.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

from llmrun.chat.store.rows import FILE
from llmrun.chat.store.rows import examine as examine_chats
from llmrun.chat.store.store import folder_in
from llmrun.config import Settings
from llmrun.doctor.gpu_build import GpuBuild, gpu_build
from llmrun.errors import LlmrunError, ResourceError
from llmrun.model import Model
from llmrun.model.loading import prepare
from llmrun.models.location import locate
from llmrun.models.registry import ModelSpec, load_catalogue
from llmrun.models.store.store import Store
from llmrun.planning.hardware import Details, Hardware, probe, probe_details
from llmrun.planning.measurements import fastest_variants
from llmrun.planning.memory import repacked_types
from llmrun.planning.predict import predict, work_of
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.speed import remembered
from llmrun.planning.tuned import summaries
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.machine import BUILD, Build
from llmrun.protocol.llama_folder import (
    CUDA,
    INSTALLED,
    backend_folders,
    has_variants,
    is_bundled,
    library_folder,
    llama_version,
)
from llmrun.protocol.messages import AnswerRequest, Finished, Message, Stats, TextDelta
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.sizes import readable_size
from llmrun.runner.client import EngineClient
from llmrun.runner.hang import HangDetector
from llmrun.system import processor_seconds

ANSWER_SECONDS = 5.0
"""For the answer; loading comes on top."""
_LOAD_SECONDS = 30.0  # of processor time
_SHADER_SECONDS = 150.0  # the same on a GPU, whose driver may compile shaders the first time
_LOOK_SECONDS = 0.2
_CONTEXT = 512
_PROMPT = "Write the numbers from 1 to 1000 in words, one a line."


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of a trial answer."""

    name: str  # of the model
    description: str  # architecture, parameters and quant
    devices: tuple[str, ...]  # ggml's
    load_seconds: float  # for weights and context
    tokens: int  # generated
    decode_rate: float  # tokens/s
    predicted_rate: float = 0.0  # tokens/s by this processor's measured speed; 0 when not measured, or on a GPU


def try_model(settings: Settings) -> TrialResult | None:
    """Run the default model, else the smallest installed one; None when there is no model on this disk.

    Raises LlmrunError if it can't be loaded, or the engine died or hung.
    """
    spec = _choose(settings)
    if spec is None or spec.path is None:
        return None
    with prepare(spec, spec.path, LoadPreferences(n_ctx=_CONTEXT)) as model:
        engine = EngineClient()
        seconds = (_SHADER_SECONDS if model.plan.vram_bytes else _LOAD_SECONDS) + 2 * ANSWER_SECONDS
        with _ending_hung(model, engine, seconds) as reasons:
            try:
                model.start(engine)
                stats = _answer(model)
            except LlmrunError as error:
                if not reasons:
                    raise
                raise LlmrunError("the trial answer does not end", why=reasons[0]) from error
        return TrialResult(
            spec.name,
            f"{model.header.architecture} {model.header.readable_parameters} {model.header.quant}",
            tuple(model.loaded.devices),
            model.loaded.load_seconds,
            stats.completion_tokens,
            stats.decode_rate,
            _predicted(model, stats, settings),
        )


@contextmanager
def _ending_hung(model: Model, engine: EngineClient, seconds: float) -> Iterator[list[str]]:
    """End an engine that hangs, as with a GPU's driver, or takes more processor time; yield a list for the reason."""
    detector = HangDetector(partial(processor_seconds, engine.pid), seconds)
    is_over, reasons = threading.Event(), list[str]()

    def watch() -> None:
        while not is_over.wait(_LOOK_SECONDS):
            if why := detector.look():
                reasons.append(why)
                model.close()
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield reasons
    finally:
        is_over.set()


def _choose(settings: Settings) -> ModelSpec | None:
    located = locate(load_catalogue().default, settings)
    if located.path is not None:
        return ModelSpec(located.spec.name, path=located.path)
    smallest = min(Store(settings).installed(), key=lambda model: model.size, default=None)
    return ModelSpec(smallest.name, path=smallest.path) if smallest else None


def _answer(model: Model) -> Stats:
    """Answer greedily until the context is full or time is up."""
    began = time.monotonic()
    stats = Stats()
    request = AnswerRequest(sampling=SamplingParams(temperature=0))
    if model.loaded.has_template:
        request = replace(request, messages=(Message("user", _PROMPT),))
    else:
        request = replace(request, prompt=_PROMPT)
    for event in model.answer(request):
        if isinstance(event, TextDelta) and time.monotonic() - began > ANSWER_SECONDS:
            model.cancel()
        if isinstance(event, Finished):
            stats = event.stats
    return stats


def _predicted(model: Model, stats: Stats, settings: Settings) -> float:
    hardware = probe()
    speed = remembered(hardware, settings.state_dir)
    if speed is None or model.plan.vram_bytes:
        return 0.0
    work = work_of(model.header)
    copies = work.copies(repacked_types(hardware.cpu_flags))
    return predict(work, speed, depth=stats.context_used // 2, copies=copies).decode_rate


Status = Literal["ok", "warning", "problem"]

_LITTLE_MEMORY = 1 << 30  # hardly more than the default model fits
_LITTLE_DISK = 2 << 30
_MAX_DAMAGED = 5  # chats to name
_HUB_SECONDS = 4.0
_BUILD_SECONDS = 10.0  # of processor time
_SLOW = 0.6  # share of the predicted speed; below, another program or throttling slows the machine down
_LIBRARY_NAMES = ("libllama.so", "libllama.dylib", "llama.dll")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    topic: str  # one or two words
    status: Status  # "ok", "warning" (works, but worse than possible) or "problem" (something will fail)
    text: str
    fix: str = ""  # advice; "" when there is nothing to do
    exit_status: int = 0  # of the error behind a problem, else 1; 0 without a problem

    def __post_init__(self) -> None:
        if self.status == "problem" and not self.exit_status:
            object.__setattr__(self, "exit_status", 1)

    @classmethod
    def of(cls, topic: str, error: LlmrunError) -> Finding:
        """Return the problem for an error."""
        return cls(topic, "problem", str(error), error.hint, error.exit_status)


def examine(
    settings: Settings,
    *,
    hardware: Hardware | None = None,
    details: Details | None = None,
    installed: int | None = None,
    trial: TrialResult | LlmrunError | None = None,
) -> list[Finding]:
    """Run all checks, in reading order; takes a few seconds at most.

    Args:
        hardware, details: the machine; None probes it.
        installed: number of models on this disk, if counted.
        trial: result of a trial answer, or its error; None without a trial.
    """
    machine = hardware or probe()
    more = details or probe_details()
    hub = _HubCheck(settings)
    return [
        *_versions(),
        _llama_library(),
        _native_sampler(),
        *_build(machine, more),
        *_variants(machine, settings),
        _processor(machine),
        _threads(machine),
        *_clock(more),
        _memory(machine),
        _directory("hub cache", settings.hub_cache),
        _directory("state", settings.state_dir),
        *_models(installed),
        *_saved_chats(settings),
        hub.finding(),
        *_trial(trial),
        *_tuning(machine, settings),
    ]


# ---- software --------------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} ({platform.platform(terse=True)})")
    yield _version("llmrun", "warning", "pip install -e .")  # a checkout runs without being installed
    yield _llama_version()


def _version(package: str, missing: Status, fix: str) -> Finding:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = ""
    return Finding(package, "ok", version) if version else Finding(package, missing, "not installed", fix)


def _llama_version() -> Finding:
    if is_bundled():
        return Finding(INSTALLED, "ok", f"{llama_version()}, in llmrun's own wheel")
    return _version(INSTALLED, "problem", f"pip install {INSTALLED}")


def _llama_library() -> Finding:
    topic = "llama.cpp library"
    folder = library_folder()
    for name in _LIBRARY_NAMES:
        if folder and (folder / name).is_file():
            return Finding(topic, "ok", str(folder / name))
    fix = "pip install --force-reinstall llama-cpp-python"
    return Finding(topic, "problem", "not found, so no model can be loaded", fix)


def _native_sampler() -> Finding:
    topic = "native sampler"
    try:
        from llmrun import _native
    except ImportError as error:
        return Finding(topic, "problem", f"can't be loaded: {error}", "install llmrun again")
    return Finding(topic, "ok", str(_native.__file__))


# Name in Hardware.cpu_flags -> ggml's name of the processor feature.
_FEATURES = {
    "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "avx_vnni": "AVX_VNNI", "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16",
    "asimddp": "DOTPROD", "i8mm": "MATMUL_INT8", "sve": "SVE", "sme": "SME",
}  # fmt: skip


def _build(machine: Hardware, details: Details) -> Iterator[Finding]:
    """Compare llama.cpp's build with the machine."""
    try:
        build = _read_build()
    except LlmrunError as error:
        yield Finding.of("build", error)
        return
    yield _processor_build(machine, build)
    yield _kernels(build)
    yield from _gpus(build, details)
    yield _rpc(build)


def _read_build() -> Build:
    with closing(EngineClient()) as engine:
        return engine.do(BUILD, Empty(), seconds=_BUILD_SECONDS)


def _kernels(build: Build) -> Finding:
    if build.kernels:
        return Finding("matrix kernels", "ok", f"llmrun's, for {build.kernels}")
    return Finding("matrix kernels", "ok", f"ggml's ({build.no_kernels or 'unknown'})")


def _processor_build(machine: Hardware, build: Build) -> Finding:
    features = set(build.features.get("CPU", ()))
    has = {_FEATURES[flag] for flag in machine.cpu_flags if flag in _FEATURES}
    compiled = features & set(_FEATURES.values())
    text = f"for {', '.join(sorted(compiled)) or 'any processor'}"
    if build.cpu_variant:
        chooser = "LLMRUN_CPU's" if os.environ.get("LLMRUN_CPU") else "ggml's"
        text = f"variant {build.cpu_variant} ({chooser} choice), {text}"
    if build.backends:
        text += f"; backends in use: {', '.join(build.backends)}"
    rebuild = GpuBuild("", "").command
    if has and compiled - has:
        missing = ", ".join(sorted(compiled - has))
        return Finding("build", "problem", f"{text}, but this processor has no {missing}: it will crash", rebuild)
    if has - features and not build.cpu_variant:  # llama.cpp has chosen the best variant
        unused = ", ".join(sorted(has - features))
        return Finding("build", "warning", f"{text}; {unused}, which this processor has, stays unused", rebuild)
    return Finding("build", "ok", text)


def _gpus(build: Build, details: Details) -> Iterator[Finding]:
    for gpu in build.gpus:
        total, free = readable_size(gpu.memory_total), readable_size(gpu.memory_free)
        yield Finding("GPU", "ok", f"{gpu.description} ({gpu.name}), {free} of {total} free")
    if len(backend_folders()) > 1 and "CUDA" not in build.backends:
        yield Finding(
            "GPU", "warning", f"{CUDA} is installed, but can't be loaded", "install or load NVIDIA's driver for CUDA 13"
        )
        return
    if build.gpus:
        return
    others = [name for name in build.backends if name != "CPU"]
    if others and not details.graphics:
        yield Finding("GPU", "ok", f"none: no device for {', '.join(others)}")
    for maker in sorted(set(details.graphics)):
        if build.offload:
            text = f"{maker}'s card is not used: llama.cpp can use GPUs, but sees none"
            yield Finding("GPU", "warning", text, "install or load the card's driver; in a container, pass the card in")
        elif (build_for_maker := gpu_build([maker])) is not None:
            # Intel's graphics mostly share the processor's memory, whose bandwidth limits both.
            text = f"{maker}'s card is not used: llama.cpp was built without support for it"
            text += "" if build_for_maker.missing else "; llmrun doctor --install-gpu builds it"
            yield Finding("GPU", "ok" if maker == "Intel" else "warning", text, build_for_maker.command)


def _rpc(build: Build) -> Finding:
    if build.rpc:
        return Finding("RPC", "ok", "built in: `llmrun worker` and --rpc can be used")
    text = "not built in; only models on several machines need it (llmrun help install)"
    return Finding("RPC", "ok", text, GpuBuild("", "-DGGML_RPC=ON").command)


# ---- machine ---------------------------------------------------------------------------------------


def _processor(machine: Hardware) -> Finding:
    text = f"{machine.cpu_name} ({', '.join(machine.cpu_flags) or 'features unknown'})"
    if "avx" in machine.cpu_flags and "avx2" not in machine.cpu_flags:
        return Finding("processor", "warning", f"{text}: without AVX2 answers come slowly")
    return Finding("processor", "ok", text)


def _threads(machine: Hardware) -> Finding:
    text = (
        f"{machine.usable_cores} used: {machine.physical_cores} cores, "
        f"{machine.logical_cores} hardware threads for this process"
    )
    if machine.cpu_quota is None or machine.cpu_quota >= machine.physical_cores:
        return Finding("threads", "ok", text)
    text += f", of which the container may use {machine.cpu_quota:g} at a time"
    return Finding("threads", "warning", text, "give the container more processor time")


def _clock(details: Details) -> Iterator[Finding]:
    """Yield conditions that may slow the processor down."""
    if details.on_battery:
        yield Finding("power", "warning", "on battery, which slows processors down", "plug the charger in")
    if details.governor == "powersave" and details.on_battery is None:
        # The usual governor of a laptop's hybrid drivers; on a server it means the lowest clock.
        fix = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
        yield Finding("power", "warning", "the clock's governor is powersave", fix)
    if details.throttled:
        text = f"the processor was slowed down by heat {details.throttled:,} times since the start"
        yield Finding("heat", "warning", text, "clean the fans, or give it air")
    if details.numa_nodes > 1:
        text = f"{details.numa_nodes} nodes: a model is faster within one"
        yield Finding("NUMA", "warning", text, "numactl --cpunodebind=0 --membind=0 llmrun ...")


def _memory(machine: Hardware) -> Finding:
    if not machine.memory_total:
        return Finding("memory", "warning", "unknown, so too large models are not refused")
    total, free = readable_size(machine.memory_total), readable_size(machine.memory_available)
    if machine.memory_available < _LITTLE_MEMORY:
        return Finding("memory", "warning", f"only {free} of {total} free", "close other programs")
    return Finding("memory", "ok", f"{free} of {total} free")


# ---- disk ------------------------------------------------------------------------------------------


def _directory(topic: str, path: Path) -> Finding:
    existing = next((folder for folder in (path, *path.parents) if _exists(folder)), path)
    if not existing.is_dir():
        return Finding(topic, "problem", f"{existing} is not a directory", f"move {existing} away", 6)
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(topic, "problem", f"{existing} can't be written to", f"change the owner of {existing}", 6)
    free = shutil.disk_usage(existing).free
    text = f"{path} ({'' if existing == path else 'not there yet, '}{readable_size(free)} free)"
    if free < _LITTLE_DISK:
        return Finding(topic, "warning", text, "remove unneeded models; `llmrun list` shows them")
    return Finding(topic, "ok", text)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # the nearest visible parent shows the reason
        return False


def _models(installed: int | None) -> Iterator[Finding]:
    try:
        catalogue = load_catalogue()
    except LlmrunError as error:
        yield Finding("catalogue", "problem", str(error), error.hint)
    else:
        count = len(catalogue.entries)
        yield Finding("catalogue", "ok", f"{count} models by short name, {catalogue.default} by default")
    if installed == 0:
        yield Finding("models", "ok", "none on this disk yet", "`llmrun run` fetches one")
    elif installed is not None:
        yield Finding("models", "ok", f"{installed} on this disk")


def _saved_chats(settings: Settings) -> Iterator[Finding]:
    topic, examined = "saved chats", examine_chats(folder_in(settings.state_dir) / FILE)
    if examined is None:
        return
    n_chats, damage = examined
    if not damage:
        yield Finding(topic, "ok", f"{n_chats}, all of them can be read")
        return
    more = len(damage) - _MAX_DAMAGED
    text = "; ".join((*damage[:_MAX_DAMAGED], *([f"and {more} more"] if more > 0 else ())))
    fix = "llmrun sessions rm ID deletes a damaged one; a damaged file is replaced when chats are used next"
    yield Finding(topic, "problem", text, fix, ResourceError.exit_status)


# ---- network ---------------------------------------------------------------------------------------


class _HubCheck:
    """Request to the hub, concurrent with the other checks."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._answer: list[Finding] = []
        self._thread = threading.Thread(target=self._request, daemon=True)
        if not settings.offline:
            self._thread.start()

    def finding(self) -> Finding:
        """Return the result; wait a few seconds at most."""
        if self._settings.offline:
            return Finding("hub", "ok", "not used: HF_HUB_OFFLINE is set")
        self._thread.join(_HUB_SECONDS)
        text = f"{self._settings.endpoint} does not answer within {_HUB_SECONDS:.0f} seconds"
        return self._answer[0] if self._answer else self._unreachable(text)

    def _request(self) -> None:
        import httpx2

        endpoint = self._settings.endpoint
        try:
            status = httpx2.get(f"{endpoint}/api/models?limit=1", timeout=_HUB_SECONDS).status_code
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError) as error:
            why = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
            self._answer.append(self._unreachable(f"can't reach {endpoint}: {why}"))
            return
        if status >= 400:
            self._answer.append(self._unreachable(f"{endpoint} answers {status}"))
        else:
            self._answer.append(Finding("hub", "ok", f"{endpoint} answers"))

    def _unreachable(self, text: str) -> Finding:
        fix = "check the network, HTTPS_PROXY and HF_ENDPOINT; models on this disk work offline"
        return Finding("hub", "warning", text, fix)


# ---- trial -----------------------------------------------------------------------------------------


def _trial(trial: TrialResult | LlmrunError | None) -> Iterator[Finding]:
    if trial is None:
        return
    if isinstance(trial, LlmrunError):
        yield Finding.of("answer", trial)
        return
    devices = ", ".join(trial.devices) or "no device named"
    text = f"{trial.name} ({trial.description}) loaded in {trial.load_seconds:.1f} s on {devices}"
    if trial.decode_rate:
        text += f", {trial.tokens} tokens at {trial.decode_rate:,.1f} tokens/s"
    if trial.predicted_rate and trial.decode_rate < _SLOW * trial.predicted_rate:
        text += f"; expected {trial.predicted_rate:,.1f} tokens/s"
        yield Finding("answer", "warning", text, "look for other programs that use the processor (top)")
    else:
        yield Finding("answer", "ok", text)


def _variants(hardware: Hardware, settings: Settings) -> Iterator[Finding]:
    if not has_variants() or os.environ.get("LLMRUN_CPU"):
        return
    fastest = fastest_variants(hardware, settings.state_dir)
    by_type = [f"{name} {variant}" + (f" ×{gain:.2f}" if gain > 1 else "") for name, (variant, gain) in fastest.items()]
    text = "not compared yet: an idle chat or server does that, once"
    if by_type:
        text = f"the fastest here, × ggml's choice: {', '.join(by_type)}"
    yield Finding("variants", "ok", text)


def _tuning(hardware: Hardware, settings: Settings) -> Iterator[Finding]:
    for summary in summaries(hardware, settings.state_dir):
        yield Finding("tuned", "ok", summary)
