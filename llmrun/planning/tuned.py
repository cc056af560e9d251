"""The settings that `llmrun tune` may change, its results, and the best of them for an answer."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.planning.hardware import Hardware, probe
from llmrun.planning.measured import drop_measured, find_measured, keep_measured, measured
from llmrun.planning.measurements import machine_key, measured_variant, model_key
from llmrun.planning.memory import KV_BYTES, MOST_UBATCH
from llmrun.planning.preferences import ATTENTION, LoadPreferences
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.devices import SPLIT_MODES
from llmrun.protocol.loading import Load
from llmrun.protocol.settings import (
    DEFAULTS,
    DEVICE_SETTINGS,
    FLASH_ATTENTION,
    MAX_THREADS,
    EngineSettings,
    setting,
    shown,
)

_KIND = "tune"
SPINS = 8000
"""Times that an idle thread of libgomp looks for work before it sleeps, in our engine: part of a millisecond."""
_SPINS_BESIDE_GPU = 300_000
TUNED = (
    "threads", "threads_batch", "n_ubatch", "flash_attention", "kv_type_k", "kv_type_v", "repack", "mmap", "split_mode",
    "cpu_variant",
)  # fmt: skip
"""The fields of a Load that tuning may change."""
OF_PROCESS = ("spins", "huge_pages")
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
        settings = cls(**{name: getattr(load, name) for name in TUNED})
        return replace(settings, threads_batch=settings.threads_batch or settings.threads)

    def applied(self, load: Load) -> Load:
        """Return the load with these settings."""
        return replace(load, **{name: getattr(self, name) for name in TUNED})

    def applied_within(self, load: Load, preferences: LoadPreferences, *, without_flash: bool) -> Load:
        """Return the load with these settings, without changing the user's preferences or exceeding memory.

        The split mode is the plan's, see preferred().

        Args:
            without_flash: there is memory for attention without flash attention.
        """
        applied = replace(self.applied(load), split_mode=load.split_mode)
        if preferences.threads is not None:
            applied = replace(applied, threads=load.threads, threads_batch=load.threads_batch)
        if os.environ.get("LLMRUN_CPU"):
            applied = replace(applied, cpu_variant=load.cpu_variant)
        is_given = any(getattr(preferences, name) is not None for name in ATTENTION)
        if is_given or (applied.flash_attention == "off" and not without_flash):  # they were measured together
            applied = replace(applied, **{name: getattr(load, name) for name in ATTENTION})
        return applied

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
        return variables

    @property
    def loads_as_usual(self) -> bool:
        """Whether weights that were loaded before these settings were chosen can be used."""
        is_usual = self.repack and self.mmap and self.split_mode == DEFAULTS.split_mode
        return is_usual and not (self.cpu_variant or self.environment)

    def changes(self, default: TunableSettings, *, in_answers: bool = False) -> tuple[str, ...]:
        """Return the differences from other settings in words, e.g. ("repack off", "2 batch threads").

        Args:
            in_answers: only differences that can change a greedy answer.
        """
        names = _ROUNDING if in_answers else (*TUNED, *OF_PROCESS)
        changed = (words(name, getattr(self, name)) for name in names if getattr(self, name) != getattr(default, name))
        return tuple(dict.fromkeys(changed))  # keys and values of the KV cache are one setting here


_LABELS = {field.name: field.metadata["setting"].label for field in fields(TunableSettings)}
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
    if name == "cpu_variant" and not value:
        return "ggml's own processor variant"
    label = _LABELS[name]
    if name in ("threads", "threads_batch"):
        return f"{value} {label.removesuffix('s') if value == 1 else label}"
    return f"{label} {shown(value)}"


_STORED = (*(name for name in TUNED if name not in ("kv_type_k", "kv_type_v")), *OF_PROCESS)


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings and their measured speed."""

    settings: TunableSettings
    load_seconds: float  # of weights and context, with the file in the page cache
    prefill_rate: float  # tokens/s
    decode_rate: float  # tokens/s

    def seconds(self, prompt_tokens: float, answer_tokens: float) -> float:
        """Return the time from the start to the answer's end."""
        return self.load_seconds + prompt_tokens / self.prefill_rate + answer_tokens / self.decode_rate

    def to_json(self) -> dict[str, Any]:
        """Return JSON data, with one type for the keys and values of the KV cache."""
        settings = {name: getattr(self.settings, name) for name in _STORED}
        return {**as_dict(self), "settings": settings | {"kv_type": self.settings.kv_type_k}}


@dataclass(frozen=True, slots=True)
class TunedSettings:
    """The result of tuning one model on one machine."""

    default: Profile  # without tuning
    others: tuple[Profile, ...]  # significantly faster in prefill or in decode
    depth: int  # tokens in the context during decode
    at: float  # time in seconds since 1970

    @property
    def prefill_gain(self) -> float:
        """Best prefill rate over the default's; at least 1."""
        return max(profile.prefill_rate for profile in (self.default, *self.others)) / self.default.prefill_rate

    @property
    def decode_gain(self) -> float:
        """Best decode rate over the default's; at least 1."""
        return max(profile.decode_rate for profile in (self.default, *self.others)) / self.default.decode_rate

    @property
    def summary(self) -> str:
        """One line, e.g. for `llmrun doctor`."""
        day = time.strftime("%Y-%m-%d", time.localtime(self.at))
        if not self.others:
            return f"tuned on {day}: no setting was measurably faster"
        changes = " or ".join(", ".join(profile.settings.changes(self.default.settings)) for profile in self.others)
        return f"tuned on {day}: prefill ×{self.prefill_gain:.2f}, decode ×{self.decode_gain:.2f} with {changes}"


def choose(
    tuned: TunedSettings, prompt_tokens: float, answer_tokens: float, *, own_environment: bool = True
) -> TunableSettings:
    """Return the settings with the shortest expected time of an answer.

    Args:
        prompt_tokens: to prefill, in all turns of a conversation.
        answer_tokens: to decode.
        own_environment: an engine can be started with an environment of its own.
    """
    usable = [profile for profile in tuned.others if own_environment or not profile.settings.environment]
    best = min((tuned.default, *usable), key=lambda candidate: candidate.seconds(prompt_tokens, answer_tokens))
    return best.settings


def remembered(header: Header, hardware: Hardware, folder: Path) -> TunedSettings | None:
    """Return the result for a model of this shape on this machine; None if it was never tuned.

    Args:
        folder: config.Settings.state_dir.
    """
    entry = find_measured(_KIND, model_key(header, hardware), folder)
    return _tuned(entry) if entry else None


def loads_as_usual(path: Path, folder: Path) -> bool:
    """Return whether the settings measured for a model load its weights in the default way, so that loading can begin.

    Args:
        path: of the model.
        folder: config.Settings.state_dir.

    Raises:
        BadModelError: the file is damaged.
    """
    header, hardware = read_header(path), probe()
    result = remembered(header, hardware, folder)
    return not measured_variant(header, hardware, folder) if result is None else _keep_usual_weights(result)


def _keep_usual_weights(tuned: TunedSettings) -> bool:
    return all(profile.settings.loads_as_usual for profile in tuned.others)


def summaries(hardware: Hardware, folder: Path) -> list[str]:
    """Return a line for each result of this machine and build, the latest first."""
    entries = measured(_KIND, folder)
    here = machine_key(hardware) if entries else {}
    lines = []
    for entry in entries:
        tuned, key = _tuned(entry), entry["key"]
        if tuned is not None and {**key, **here} == key:
            lines.append(f"{entry.get('name') or 'a model without a name'}, {tuned.summary}")
    return lines


def remember(tuned: TunedSettings, header: Header, hardware: Hardware, folder: Path, name: str = "") -> None:
    """Store a result; it replaces that of the same model.

    Args:
        name: the model's, for display.

    Raises:
        LlmrunError: the folder can't be written.
    """
    data = as_dict(tuned)
    data |= {"default": tuned.default.to_json(), "others": [profile.to_json() for profile in tuned.others]}
    entry, loads_otherwise = {"name": name, "tuned": data}, not _keep_usual_weights(tuned)
    keep_measured(_KIND, model_key(header, hardware), folder, entry, loads_otherwise=loads_otherwise)


def forget(header: Header, hardware: Hardware, folder: Path) -> bool:
    """Remove the result of a model, and return whether there was one.

    Raises:
        LlmrunError: the folder can't be written.
    """
    return drop_measured(_KIND, model_key(header, hardware), folder)


def _read_profile(data: Mapping[str, Any]) -> Profile:
    """Read Profile.to_json().

    Raises:
        TypeError, ValueError, KeyError, AttributeError: the data is damaged.
    """
    settings = {"kv_type": "f16", **data["settings"]}
    kv_type = settings.pop("kv_type")
    if not {"threads", "threads_batch"} <= settings.keys() <= {*_STORED}:
        raise ValueError("the settings are of another llmrun")
    return from_json(Profile, {**data, "settings": {**settings, "kv_type_k": kv_type, "kv_type_v": kv_type}})


def _tuned(entry: Mapping[str, Any]) -> TunedSettings | None:
    """Return the result of an entry; None if it is damaged."""
    try:
        data = entry["tuned"]
        others = [_read_profile(profile) for profile in data["others"]]
        tuned = TunedSettings(_read_profile(data["default"]), tuple(others), data["depth"], data["at"])
        usable = all(_is_usable(profile) for profile in (tuned.default, *tuned.others))
        return tuned if usable else None
    except (TypeError, ValueError, KeyError, AttributeError):
        return None


def _is_usable(profile: Profile) -> bool:
    """Return whether a stored profile is valid: the file may have been edited."""
    settings = profile.settings
    counts = (settings.threads, settings.threads_batch, settings.n_ubatch, settings.spins + 1)
    return (
        all(0 < rate < math.inf for rate in (profile.prefill_rate, profile.decode_rate))
        and 0 <= profile.load_seconds < math.inf
        and min(counts) > 0
        and max(settings.threads, settings.threads_batch) <= MAX_THREADS
        and settings.n_ubatch <= MOST_UBATCH
        and settings.flash_attention in FLASH_ATTENTION
        and settings.split_mode in SPLIT_MODES
        and settings.kv_type_k in KV_BYTES
    )
