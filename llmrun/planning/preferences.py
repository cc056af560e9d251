"""The user's preferences of a load; the plan decides what they leave open."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from llmrun.errors import UsageError, require_within
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import KV_BYTES, UBATCH
from llmrun.protocol.devices import Gpu, check_overrides, selected
from llmrun.protocol.exclusions import spelled, yielding
from llmrun.protocol.layers import Layer, values_of
from llmrun.protocol.settings import (
    DEFAULTS,
    DEVICE_SETTINGS,
    MAX_TOKENS,
    PARALLEL_BOUNDS,
    SETTINGS,
    EngineSettings,
    check_setting,
)

CONTEXT_BOUNDS = (256, MAX_TOKENS)
"""Inclusive bounds of a context window in tokens."""
ALL_LAYERS = -1
ATTENTION = ("flash_attention", "kv_type_k", "kv_type_v")
_PLANNED = ("threads", "n_batch", "n_ubatch", "gpu_layers", "cpu_experts")  # a plan chooses them by the machine


@dataclass(frozen=True, slots=True)
class LoadPreferences:
    """The user's preferences, named as the settings they decide; None leaves the choice to the plan.

    Raises:
        UsageError: a preference is out of bounds, or two contradict each other.
    """

    n_ctx: int | None = None  # context window in tokens
    threads: int | None = None
    n_batch: int | None = None  # most tokens of a decode call
    n_ubatch: int | None = None  # tokens of the largest micro-batch that there has to be memory for
    gpu_layers: int | None = None  # -1 is all; None is as many as fit
    cpu_experts: int | None = None  # layers whose experts stay with the processor
    flash_attention: str | None = None
    kv_type_k: str | None = None  # a key of memory.KV_BYTES
    kv_type_v: str | None = None
    split_mode: str = DEFAULTS.split_mode
    main_gpu: int = DEFAULTS.main_gpu
    tensor_split: str = DEFAULTS.tensor_split
    device: str = DEFAULTS.device
    override_tensor: str = DEFAULTS.override_tensor
    parallel: int = 1  # answers at the same time
    as_alone: bool = False  # choose flash attention as for one answer, so that each of several equals that of its seed
    # Without a preferred number, decode with fewer threads while the machine is busy. These may round otherwise.
    adapts_threads: bool = True
    workers: tuple[str, ...] = ()  # "HOST:PORT" of RPC workers that hold a part of the layers
    n_drafted: int | None = None  # drafted tokens of a step, for recurrent models; None is as many as memory allows
    draft_heads: bool | None = None  # draft with the model's own heads; None where it has some and memory allows it

    def __post_init__(self) -> None:
        require_within("--parallel", self.parallel, PARALLEL_BOUNDS)
        require_within("--ctx", self.n_ctx, CONTEXT_BOUNDS)
        for name in LOAD_OPTIONS:
            check_setting(name, getattr(self, name), choices=tuple(KV_BYTES) if name.startswith("kv_type") else ())
        if self.flash_attention == "off" and self.attention["kv_type_v"] != "f16":
            what = f"--cache-type-v {self.kv_type_v} needs flash attention"
            raise UsageError(what, hint="leave out --flash-attention off")
        if self.flash_attention == "off" and self.split_mode == "tensor":
            raise UsageError("--split-mode tensor needs flash attention", hint="leave out --flash-attention off")
        chosen = next((name for name in DEVICE_SETTINGS if getattr(self, name) != getattr(DEFAULTS, name)), None)
        if self.workers and chosen is not None:
            what = f"--rpc and {SETTINGS[chosen].option} can't be used together"
            raise UsageError(what, why="layers are divided by the memory of each machine")

    def completed(self, layer: Layer) -> LoadPreferences:
        """Return the preferences with values of a layer where they leave the choice to the plan."""
        given = spelled({name: value for name in ATTENTION if (value := getattr(self, name)) is not None})
        found = values_of(yielding(layer, given))
        return replace(self, **{name: value for name, value in found.items() if getattr(self, name, ...) is None})

    @property
    def kv_type(self) -> str:
        """The larger of the two types, for which memory is planned."""
        return max(self.attention["kv_type_k"], self.attention["kv_type_v"], key=KV_BYTES.__getitem__)

    @property
    def micro_batch(self) -> int:
        """Tokens of the largest micro-batch, which is a part of a batch."""
        return min(self.n_ubatch or UBATCH, self.n_batch or MAX_TOKENS)

    @property
    def attention(self) -> dict[str, str]:
        """The settings of attention; defaults where the user left them open."""
        return {name: getattr(self, name) or getattr(DEFAULTS, name) for name in ATTENTION}

    @property
    def as_given(self) -> dict[str, Any]:
        """The settings of a load that are not planned, as the user gave them; defaults where left open."""
        given = ((name, getattr(self, name)) for name in LOAD_OPTIONS if name not in _PLANNED)
        return {name: getattr(DEFAULTS, name) if value is None else value for name, value in given}

    def gpus(self, there: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        """Return those of a machine's GPUs that are to be used.

        Raises:
            UsageError: the preferences name a GPU that is not there.
        """
        used = selected(there, self.device, self.split_mode, self.main_gpu, self.tensor_split)
        check_overrides(self.override_tensor, used)
        return used

    def settings(self, hardware: Hardware) -> EngineSettings:
        """Return the settings for a job that loads a model without a plan."""
        return EngineSettings(
            threads=self.threads or hardware.usable_cores,
            gpu_layers=ALL_LAYERS if self.gpu_layers is None else self.gpu_layers,
            **self.as_given,
        )


LOAD_OPTIONS = tuple(each.name for each in fields(LoadPreferences) if each.name in SETTINGS)
"""The engine settings that a user may prefer, in the order of their options."""
