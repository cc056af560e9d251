"""The results of tuning: entries of tune.json, and the best profile for an answer of some length.

Must not know the measuring; measurement_cache.py has the file and its keys.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrun.config import TUNE_FILE
from llmrun.gguf.header import Header
from llmrun.planning import measurement_cache
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import KV_BYTES, MOST_UBATCH
from llmrun.planning.settings import OF_PROCESS, TUNED, TunableSettings
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.devices import SPLIT_MODES
from llmrun.protocol.settings import FLASH_ATTENTION, MAX_THREADS

_STORED = (*(name for name in TUNED if name not in ("kv_type_k", "kv_type_v")), *OF_PROCESS)


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings and their measured speed."""

    settings: TunableSettings
    load_seconds: float  # of weights and context, with the file in the page cache
    prefill_rate: float  # tokens/s
    decode_rate: float  # tokens/s

    def seconds(self, prompt_tokens: float, answer_tokens: float, *, loads: bool = True) -> float:
        """Return the time from the start to the answer's end."""
        compute = prompt_tokens / self.prefill_rate + answer_tokens / self.decode_rate
        return compute + self.load_seconds * loads

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
    tuned: TunedSettings,
    prompt_tokens: float,
    answer_tokens: float,
    *,
    loads: bool = True,
    own_environment: bool = True,
) -> TunableSettings:
    """Return the settings with the shortest expected time of an answer.

    Args:
        prompt_tokens: to prefill, in all turns of a conversation.
        answer_tokens: to decode.
        loads: the model is not loaded yet, so loading counts.
        own_environment: an engine can be started with an environment of its own.
    """
    usable = [profile for profile in tuned.others if own_environment or not profile.settings.environment]
    best = min((tuned.default, *usable), key=lambda each: each.seconds(prompt_tokens, answer_tokens, loads=loads))
    return best.settings


def remembered(header: Header, hardware: Hardware, folder: Path) -> TunedSettings | None:
    """Return the result for a model of this shape on this machine; None if it was never tuned.

    Args:
        folder: config.Settings.state_dir.
    """
    path = folder / TUNE_FILE
    entry = measurement_cache.find(path, measurement_cache.model_key(header, hardware)) if path.exists() else None
    return _tuned(entry) if entry else None


def loads_as_usual(path: Path, folder: Path) -> bool:
    """Return whether all tuned settings of a model load its weights in the default way, so that loading can begin.

    Args:
        path: of the model; only read if the settings of some model load it otherwise.
        folder: config.Settings.state_dir.

    Raises:
        BadModelError: the file is damaged.
    """
    found = [tuned for entry in measurement_cache.entries(folder / TUNE_FILE) if (tuned := _tuned(entry)) is not None]
    if all(_keep_usual_weights(tuned) for tuned in found):
        return True
    from llmrun.gguf.reader import read_header
    from llmrun.planning.hardware import probe

    own = remembered(read_header(path), probe(), folder)
    return own is None or _keep_usual_weights(own)


def _keep_usual_weights(tuned: TunedSettings) -> bool:
    return all(profile.settings.loads_as_usual for profile in tuned.others)


def summaries(hardware: Hardware, folder: Path) -> list[str]:
    """Return a line for each result of this machine and build, the latest first."""
    entries = measurement_cache.entries(folder / TUNE_FILE)
    here = measurement_cache.machine_key(hardware) if entries else {}
    found = []
    for entry in entries:
        tuned, key = _tuned(entry), entry.get("key")
        if tuned is not None and isinstance(key, dict) and {**key, **here} == key:
            found.append(f"{entry.get('name') or 'a model without a name'}, {tuned.summary}")
    return found


def remember(tuned: TunedSettings, header: Header, hardware: Hardware, folder: Path, name: str = "") -> None:
    """Store a result; it replaces that of the same model.

    Args:
        name: the model's, for display.

    Raises:
        LlmrunError: the folder can't be written.
    """
    data = as_dict(tuned)
    data |= {"default": tuned.default.to_json(), "others": [each.to_json() for each in tuned.others]}
    measurement_cache.keep(
        folder / TUNE_FILE, measurement_cache.model_key(header, hardware), {"name": name, "tuned": data}
    )


def forget(header: Header, hardware: Hardware, folder: Path) -> bool:
    """Remove the result of a model, and return whether there was one.

    Raises:
        LlmrunError: the folder can't be written.
    """
    return measurement_cache.drop(folder / TUNE_FILE, measurement_cache.model_key(header, hardware))


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
