"""The settings that `llmrun tune` may change, as one value.

Owns their way into a Load and into the engine's environment, and their names in words; must not know which are fast.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

from llmrun.planning.plan import ATTENTION, LoadPreferences
from llmrun.protocol.loading import Load
from llmrun.protocol.settings import DEFAULTS, DEVICE_SETTINGS, EngineSettings, setting, shown

SPINS = 8000
"""Times that an idle thread of libgomp looks for work before it sleeps, in our engine: part of a millisecond."""
_SPINS_BESIDE_GPU = 300_000
TUNED = (
    "threads", "threads_batch", "n_ubatch", "flash_attention", "kv_type_k", "kv_type_v", "repack", "mmap", "split_mode",
)  # fmt: skip
"""The fields of a Load that tuning may change."""
OF_PROCESS = ("spins", "huge_pages", "cpu_variant")
"""The settings of the engine's process."""
_ROUNDING = ("threads", "flash_attention", "kv_type_k", "kv_type_v", "repack", "split_mode", "cpu_variant")


@dataclass(frozen=True, slots=True, kw_only=True)
class TunableSettings(EngineSettings):
    """The settings of an engine and of its process; only TUNED and OF_PROCESS are heeded."""

    spins: int = setting(SPINS, "spins")  # of libgomp's threads
    huge_pages: bool = setting(False, "huge pages")  # memory comes in pages of 2 MiB (glibc's malloc asks for them)
    cpu_variant: str = setting("", "processor variant")  # of a wheel's backends; "": the one that ggml chooses

    @classmethod
    def of(cls, load: Load) -> TunableSettings:
        """Return the settings of a load."""
        found = cls(**{name: getattr(load, name) for name in TUNED})
        return replace(found, threads_batch=found.threads_batch or found.threads)

    def applied(self, load: Load) -> Load:
        """Return the load with these settings."""
        return replace(load, **{name: getattr(self, name) for name in TUNED})

    def applied_within(self, load: Load, preferences: LoadPreferences, *, without_flash: bool) -> Load:
        """Return the load with these settings, without changing the user's preferences or exceeding memory.

        The split mode is the plan's, see preferred().

        Args:
            without_flash: there is memory for attention without flash attention.
        """
        found = replace(self.applied(load), split_mode=load.split_mode)
        if preferences.threads is not None:
            found = replace(found, threads=load.threads, threads_batch=load.threads_batch)
        is_given = any(getattr(preferences, name) is not None for name in ATTENTION)
        if is_given or (found.flash_attention == "off" and not without_flash):  # they were measured together
            found = replace(found, **{name: getattr(load, name) for name in ATTENTION})
        return found

    def preferred(self, preferences: LoadPreferences) -> LoadPreferences:
        """Return preferences with this split mode, unless they choose or divide GPUs themselves."""
        is_given = any(getattr(preferences, name) != getattr(DEFAULTS, name) for name in DEVICE_SETTINGS)
        return preferences if is_given else replace(preferences, split_mode=self.split_mode)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the engine process needs from its start; none by default."""
        variables = {}
        if self.spins != SPINS:
            variables["GOMP_SPINCOUNT"] = str(self.spins)
        if self.huge_pages:
            others = [os.environ.get("GLIBC_TUNABLES", ""), "glibc.malloc.hugetlb=1"]
            variables["GLIBC_TUNABLES"] = ":".join(filter(None, others))
        if self.cpu_variant and "LLMRUN_CPU" not in os.environ:
            variables["LLMRUN_CPU"] = self.cpu_variant
        return variables

    @property
    def loads_as_usual(self) -> bool:
        """Whether weights that were loaded before these settings were chosen can be used."""
        return self.repack and self.mmap and self.split_mode == DEFAULTS.split_mode and not self.environment

    def changes(self, default: TunableSettings, *, in_answers: bool = False) -> tuple[str, ...]:
        """Return the differences from other settings in words, e.g. ("repack off", "2 batch threads").

        Args:
            in_answers: only differences that can change a greedy answer.
        """
        names = _ROUNDING if in_answers else (*TUNED, *OF_PROCESS)
        found = (words(name, getattr(self, name)) for name in names if getattr(self, name) != getattr(default, name))
        return tuple(dict.fromkeys(found))  # keys and values of the KV cache are one setting here


_LABELS = {each.name: each.metadata["setting"].label for each in fields(TunableSettings)}
_LABELS |= dict.fromkeys(("kv_type_k", "kv_type_v"), "KV cache")


def waiting_environment(load: Load) -> dict[str, str]:
    """Return the variables of an engine whose processor computes experts in turns with a GPU.

    Its threads would sleep while the GPU computes: with the experts of 12 of 24 layers on 16 cores beside an H200,
    decode was 3 to 7 % slower.
    """
    is_chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    return {"GOMP_SPINCOUNT": str(_SPINS_BESIDE_GPU)} if load.cpu_experts and not is_chosen else {}


def words(name: str, value: object) -> str:
    """Return a setting in words, e.g. "repack off", "1 thread", "ubatch 256"."""
    if name == "spins":
        return f"idle threads spin {value:,} times" if value else "idle threads sleep at once"
    label = _LABELS[name]
    if name in ("threads", "threads_batch"):
        return f"{value} {label.removesuffix('s') if value == 1 else label}"
    return f"{label} {shown(value)}"
