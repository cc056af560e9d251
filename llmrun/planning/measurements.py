"""Earlier measurements on this machine: entries of a file, by what was measured, machine, build of llama.cpp and model.

Every answer waits for this, so it reads small files and imports nothing heavy.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.config import FASTER_VARIANTS_FILE, MEASURED_FILE
from llmrun.errors import LlmrunError
from llmrun.gguf.header import Header
from llmrun.gguf.types import WEIGHT_TYPES
from llmrun.planning.hardware import Hardware, probe
from llmrun.planning.plan import Measurements, Plan
from llmrun.protocol.codec import from_json, load_json
from llmrun.protocol.llama_folder import has_variants, library_folder
from llmrun.protocol.loading import Load
from llmrun.protocol.questions import Compare
from llmrun.protocol.sizes import readable_size
from llmrun.protocol.speculation import AttentionTime, ComparisonTimes, VariantTime
from llmrun.storage import alone_in, disk_errors, write_whole

if TYPE_CHECKING:
    from llmrun.protocol.loading import DeviceBuffer


_SCHEMA = 1
_MOST_BYTES = 1 << 20
_MOST_ENTRIES = 200
_LIBRARIES = ("libggml-cpu*.so", "libllama.so", "libggml-cpu*.dylib", "libllama.dylib", "ggml-cpu*.dll", "llama.dll")


def model_key(header: Header, hardware: Hardware) -> dict[str, Any]:
    """Return the facts that speed depends on as JSON data: the machine and the model's shape, not its name."""
    return {**machine_key(hardware), "shape": _as_json(_shape(header))}


def machine_key(hardware: Hardware) -> dict[str, Any]:
    """Return the part of a key that all models on this machine share."""
    return {"machine": _as_json(hardware.fingerprint), "build": _as_json(_build())}


def find_measured(kind: str, key: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return what was measured; None if it was not.

    Args:
        kind: what, such as "attention".
        key: model_key() or machine_key(), for a measurement that holds for all models.
        folder: config.Settings.state_dir.
    """
    path = folder / MEASURED_FILE
    return find_entry(path, {"kind": kind, **key}) if path.exists() else None


def keep_measured(kind: str, key: dict[str, Any], folder: Path, entry: dict[str, Any]) -> None:
    """Store what was measured; arguments as of find_measured(). Raises as keep_entry()."""
    keep_entry(folder / MEASURED_FILE, {"kind": kind, **key}, entry)


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file; none if it is missing, damaged or of another version."""
    try:
        with path.open("rb") as file:
            data = load_json(file.read(_MOST_BYTES))
        if data["schema"] != _SCHEMA:
            return []
        return [entry for entry in data["entries"] if isinstance(entry, dict)]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def find_entry(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Return the entry of a key; None without one."""
    return next((entry for entry in read_entries(path) if entry.get("key") == key), None)


def keep_entry(path: Path, key: dict[str, Any], entry: dict[str, Any]) -> None:
    """Write an entry; it replaces that of the same key.

    Raises:
        LlmrunError: the folder can't be written.
    """
    with _writing(path):
        _write(path, [{"key": key, **entry}, *_others(path, key)][:_MOST_ENTRIES])


def drop_entry(path: Path, key: dict[str, Any]) -> bool:
    """Remove the entry of a key, and return whether there was one. Raises as keep()."""
    if find_entry(path, key) is None:
        return False
    with _writing(path):
        _write(path, _others(path, key))
    return True


def _others(path: Path, key: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in read_entries(path) if entry.get("key") != key]


def _as_json(value: Any) -> Any:
    """Return a value as a file returns it: tuples become lists, and keys text."""
    return load_json(json.dumps(value))


def _shape(header: Header) -> dict[str, Any]:
    return {
        "architecture": header.architecture,
        "layers": header.n_layers,
        "width": header.n_embd,
        "heads": header.n_heads,
        "kv_heads": header.n_kv_heads,
        "head_length": [header.key_length, header.value_length],
        "window": header.sliding_window,
        "experts": [header.n_experts, header.n_experts_used],
        "vocabulary": header.n_vocab,
        "types": header.bytes_per_type,
    }


def _build() -> list[list[Any]]:
    """Return names, sizes and times of llama.cpp's libraries, which identify the build without loading it."""
    libraries = []
    folder = library_folder()
    for pattern in _LIBRARIES:
        for library in folder.glob(pattern) if folder else ():
            with suppress(OSError):
                status = library.stat()
                libraries.append([library.name, status.st_size, int(status.st_mtime)])
    return sorted(libraries)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Keep other threads and processes from changing a file after it was read here."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(path.parent):
            yield


def _write(path: Path, remaining: list[dict[str, Any]]) -> None:
    """Write the entries; remove the file if there are none, so that its presence means entries."""
    if remaining:
        write_whole(path, json.dumps({"schema": _SCHEMA, "entries": remaining}))
    else:
        path.unlink(missing_ok=True)


def measured_before(header: Header, hardware: Hardware, folder: Path) -> Measurements:
    """Return what earlier runs of a model measured here.

    Args:
        folder: config.Settings.state_dir.
    """
    attention, excess = measured_attention(header, hardware, folder), known_excess(header, hardware, folder)
    return Measurements(attention, excess, measured_variant(header, hardware, folder))


class Comparisons:
    """The comparisons that an idle engine can make of a loaded model, for its later loads.

    Args:
        folder: config.Settings.state_dir.
    """

    def __init__(self, header: Header, hardware: Hardware, load: Load, folder: Path) -> None:
        self._header, self._hardware, self._load, self._folder = header, hardware, load, folder

    def missing(self) -> Compare | None:
        """Return what was not compared yet; None if nothing is missing."""
        header, hardware, folder = self._header, self._hardware, self._folder
        is_known = measured_attention(header, hardware, folder)
        attention = can_compare_attention(hardware, self._load) and not is_known
        compare = Compare(attention, uncompared_types(header, hardware, self._load, folder))
        return compare if any(compare) else None

    def remember(self, found: ComparisonTimes) -> None:
        """Store what was compared.

        Raises:
            LlmrunError: the folder can't be written.
        """
        if found.attention:
            remember_attention(found.attention, self._header, self._hardware, self._folder)
        if found.variants:
            remember_variants(found.variants, self._hardware, self._folder)


# ---- flash attention on or off for one sequence
#
# Which setting is faster depends on the processor, the build of llama.cpp and the model's shape: off was 0.70 of the
# time of a step after 2,000 tokens on one processor, on 0.94 of it on another. Unmeasured, llama.cpp chooses.

_MIN_GAIN = 1.03


def can_compare_attention(hardware: Hardware, load: Load) -> bool:
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
    return "off" if sum(time.on for time in times) >= _MIN_GAIN * sum(time.off for time in times) else "on"


def _times(header: Header, hardware: Hardware, folder: Path) -> list[AttentionTime]:
    """Return what was measured; nothing if it was not, or is damaged."""
    entry = find_measured("attention", model_key(header, hardware), folder)
    try:
        times = [from_json(AttentionTime, row) for row in entry["times"]] if entry else []
    except (TypeError, ValueError, KeyError):
        return []  # edited by hand
    return times if all(0 < seconds < math.inf for row in times for seconds in (row.on, row.off)) else []


def remember_attention(times: tuple[AttentionTime, ...], header: Header, hardware: Hardware, folder: Path) -> None:
    """Store a measurement.

    Raises:
        LlmrunError: the folder can't be written.
    """
    entry = {"times": [time._asdict() for time in times]}
    keep_measured("attention", model_key(header, hardware), folder, entry)


# ---- the variants of the processor's backend, of which ggml chooses the one with the most instruction sets
#
# It is not always the fastest for a type of weights.

_MAIN_TYPES = 3
_FEWEST_SHARE = 0.05  # of the weights' bytes, of a type that is measured


def uncompared_types(header: Header, hardware: Hardware, load: Load, folder: Path) -> tuple[str, ...]:
    """Return the types of a model's weights for which the processor's variants can be compared, and were not.

    Args:
        folder: config.Settings.state_dir.
    """
    if hardware.gpus or load.workers or os.environ.get("LLMRUN_CPU") or not has_variants():
        return ()
    known = {time.type for time in variant_times(hardware, folder)}
    return tuple(name for name in _main_types(header) if name not in known)


def measured_variant(header: Header, hardware: Hardware, folder: Path) -> str:
    """Return the variant that is fastest for a model's weights; "" for ggml's choice, LLMRUN_CPU's, or if unmeasured.

    A prompt's token counts as much as one of an answer.

    Args:
        folder: config.Settings.state_dir.
    """
    times = [] if os.environ.get("LLMRUN_CPU") else variant_times(hardware, folder)
    sizes = {name: header.bytes_per_type[name] for name in _main_types(header)} if times else {}
    if not {time.type for time in times}.issuperset(sizes):
        return ""
    variant, gain = _fastest(times, sizes)
    return variant if gain >= _MIN_GAIN else ""


def fastest_variants(hardware: Hardware, folder: Path) -> dict[str, tuple[str, float]]:
    """Return the fastest variant for each measured type of weights, and its speed relative to ggml's choice.

    Args:
        folder: config.Settings.state_dir.
    """
    times = variant_times(hardware, folder)
    return {name: _fastest(times, {name: 1}) for name in dict.fromkeys(time.type for time in times)}


def _fastest(times: Sequence[VariantTime], sizes: Mapping[str, int]) -> tuple[str, float]:
    """Return the fastest variant for types of weights, and its speed over that of ggml's choice; "" without types."""
    seconds: dict[str, float] = {}
    for time in times:
        if time.type in sizes:
            total = sizes[time.type] * (time.decode + time.prefill)
            seconds[time.variant] = seconds.get(time.variant, 0.0) + total
    if not seconds:
        return "", 1.0
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest, next(iter(seconds.values())) / seconds[fastest]


def _main_types(header: Header) -> list[str]:
    """Return the types of most of the weights that are multiplied, the one with most bytes first."""
    sizes = {name: n_bytes for name, n_bytes in header.bytes_per_type.items() if name in WEIGHT_TYPES}
    names = sorted(sizes, key=lambda name: -sizes[name])[:_MAIN_TYPES]
    return [name for name in names if sizes[name] >= _FEWEST_SHARE * sum(sizes.values())]


def variant_times(hardware: Hardware, folder: Path) -> list[VariantTime]:
    """Return what was measured on this machine, of each type ggml's choice first; nothing if it is damaged."""
    entry = find_measured("variants", machine_key(hardware), folder)
    try:
        times = [from_json(VariantTime, row) for row in entry["times"]] if entry else []
    except (TypeError, ValueError, KeyError):
        return []  # edited by hand
    return times if all(0 < seconds < math.inf for time in times for seconds in (time.decode, time.prefill)) else []


def remember_variants(times: tuple[VariantTime, ...], hardware: Hardware, folder: Path) -> None:
    """Store a measurement, beside those of other types.

    Raises:
        LlmrunError: the folder can't be written.
    """
    types = {time.type for time in times}
    others = [time for time in variant_times(hardware, folder) if time.type not in types]
    key, path = machine_key(hardware), folder / FASTER_VARIANTS_FILE
    keep_measured("variants", key, folder, {"times": [time._asdict() for time in (*others, *times)]})
    faster = [name for name, (_, gain) in fastest_variants(hardware, folder).items() if gain >= _MIN_GAIN]
    if faster:
        keep_entry(path, key, {"types": faster})
    else:
        drop_entry(path, key)


# ---- the difference between planned and allocated GPU memory: said once, and part of the next plan of the same model

_DIFFERS = 0.1  # share of the planned bytes
_LEAST_DIFFERENCE = 8 << 20


def known_excess(header: Header, hardware: Hardware, folder: Path) -> tuple[tuple[str, int], ...]:
    """Return each GPU's name and the bytes by which the last load of this model exceeded the plan.

    Args:
        folder: of the stored differences.
    """
    if not hardware.gpus:
        return ()
    entry = find_measured("gpu memory", model_key(header, hardware), folder)
    excess = entry.get("excess") if entry else None
    if not isinstance(excess, dict):
        return ()
    return tuple((name, size) for name, size in excess.items() if isinstance(size, int))


def compare_allocated(header: Header, plan: Plan, buffers: Sequence[DeviceBuffer], folder: Path) -> list[str]:
    """Return a note on each GPU whose buffers differ from the plan by more than a tenth, and store the differences.

    Args:
        buffers: what llama.cpp allocated; none if unknown.
        folder: of the stored differences.
    """
    notes, excess = [], dict(plan.gpu_excess)
    for name, size in plan.gpu_bytes if buffers else ():
        allocated = sum(buffer.n_bytes for buffer in buffers if buffer.device == name)
        if abs(allocated - size) > max(_DIFFERS * size, _LEAST_DIFFERENCE):
            excess[name] = excess.get(name, 0) + allocated - size
            notes.append(f"{name} holds {readable_size(allocated)}; the plan expected {readable_size(size)}")
    if notes:
        with suppress(LlmrunError):  # the folder can't be written: the next load says it again
            keep_measured("gpu memory", model_key(header, probe()), folder, {"excess": excess})
    return notes
