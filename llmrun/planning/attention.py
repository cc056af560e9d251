"""Flash attention on or off for one sequence: as measured on this machine, else as llama.cpp chooses.

Owns attention.json. Which setting is faster depends on the processor, the build of llama.cpp and the model's shape: off
was 0.70 of the time of a step after 2,000 tokens on one processor, on 0.94 of it on another.
"""

from __future__ import annotations

import math
from pathlib import Path

from llmrun.config import ATTENTION_FILE
from llmrun.gguf.header import Header
from llmrun.planning import measurement_cache
from llmrun.planning.hardware import Hardware
from llmrun.protocol.codec import from_json
from llmrun.protocol.loading import Load
from llmrun.protocol.speculation import AttentionTime

_MIN_GAIN = 1.03


def can_be_measured(hardware: Hardware, load: Load) -> bool:
    """Return whether both settings can be compared: a quantized KV cache needs flash attention."""
    return not (hardware.gpus or load.workers) and (load.kv_type_k, load.kv_type_v) == ("f16", "f16")


def measured_attention(header: Header, hardware: Hardware, folder: Path) -> str:
    """Return "on" or "off", the faster setting for decode; "" if it was not measured.

    Args:
        folder: config.Settings.state_dir.
    """
    times = _times(header, hardware, folder)
    if not times:
        return ""
    # Without flash attention, prefill is slower and needs more memory.
    return "off" if sum(each.on for each in times) >= _MIN_GAIN * sum(each.off for each in times) else "on"


def forget(header: Header, hardware: Hardware, folder: Path, seconds: float) -> None:
    """Remove a measurement of which no step was as fast as `seconds`.

    Raises:
        LlmrunError: the folder can't be written.
    """
    times = _times(header, hardware, folder)
    if times and all(min(each.on, each.off) > seconds for each in times):
        measurement_cache.drop(folder / ATTENTION_FILE, measurement_cache.model_key(header, hardware))


def _times(header: Header, hardware: Hardware, folder: Path) -> list[AttentionTime]:
    """Return what was measured; nothing if it was not, or is damaged."""
    path = folder / ATTENTION_FILE
    entry = measurement_cache.find(path, measurement_cache.model_key(header, hardware)) if path.exists() else None
    try:
        times = [from_json(AttentionTime, each) for each in entry["times"]] if entry else []
    except (TypeError, ValueError, KeyError):
        return []  # edited by hand
    return times if all(0 < seconds < math.inf for each in times for seconds in (each.on, each.off)) else []


def remember(times: tuple[AttentionTime, ...], header: Header, hardware: Hardware, folder: Path) -> None:
    """Store a measurement.

    Raises:
        LlmrunError: the folder can't be written.
    """
    key = measurement_cache.model_key(header, hardware)
    measurement_cache.keep(folder / ATTENTION_FILE, key, {"times": [each._asdict() for each in times]})
