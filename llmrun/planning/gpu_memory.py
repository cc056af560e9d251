"""The difference between planned and allocated GPU memory: said once, and part of the next plan of the same model.

Must not know engines. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import LlmrunError
from llmrun.gguf.header import Header
from llmrun.planning import measurement_cache
from llmrun.planning.hardware import Hardware, probe
from llmrun.protocol.sizes import readable_size

if TYPE_CHECKING:
    from llmrun.planning.plan import Plan
    from llmrun.protocol.loading import DeviceBuffer

FILE = "gpu_memory.json"
_DIFFERS = 0.1  # share of the planned bytes
_LEAST_DIFFERENCE = 8 << 20


def known_excess(header: Header, hardware: Hardware, folder: Path) -> tuple[tuple[str, int], ...]:
    """Return each GPU's name and the bytes by which the last load of this model exceeded the plan.

    Args:
        folder: of the stored differences.
    """
    if not hardware.gpus or not (folder / FILE).exists():
        return ()
    entry = measurement_cache.find(folder / FILE, measurement_cache.model_key(header, hardware))
    found = entry.get("excess") if entry else None
    if not isinstance(found, dict):
        return ()
    return tuple((name, size) for name, size in found.items() if isinstance(size, int))


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
            key = measurement_cache.model_key(header, probe())
            measurement_cache.keep(folder / FILE, key, {"excess": excess})
    return notes
