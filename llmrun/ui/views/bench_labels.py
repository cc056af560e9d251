"""Labels of bench rows: the model and the settings by which the rows of one result differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from llmrun.bench.results import BenchRow
from llmrun.ui.terminal.format import counted

_FLASH = {-1: "flash attention auto", 0: "no flash attention", 1: "flash attention"}


def labels(rows: Sequence[BenchRow]) -> list[str]:
    """Return each row's model and settings, without settings that are equal in all rows."""
    models = _distinct([model_name(row) for row in rows])
    settings = [_settings(row) | {"model": model} for row, model in zip(rows, models, strict=True)]
    varying = [name for name in (settings[0] if settings else {}) if len({s[name] for s in settings}) > 1]
    return [", ".join(filter(None, (each[name] for name in varying))) for each in settings]


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names without the words that all of them begin with."""
    first, last = min(names, default=""), max(names, default="")
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    cut = 0 if first == last else max(first[:same].rfind(mark) for mark in " -_./:") + 1
    return [name[cut:] or name for name in names]


def _settings(row: BenchRow) -> dict[str, str]:
    return {
        "program": row.program,
        "model": model_name(row),
        "threads": counted(row.n_threads, "thread"),
        "threads_batch": f"{row.n_threads_batch} for prompts" if row.n_threads_batch else "",
        "batch": f"batch {row.n_batch}",
        "ubatch": f"ubatch {row.n_ubatch}",
        "keys": f"keys {row.type_k}",
        "values": f"values {row.type_v}",
        "flash": _FLASH.get(row.flash_attn, ""),
        "repack": "repacked" if row.repack else "not repacked",
        "load": "read" if row.load_mode == "none" else "mapped",
        "gpu": f"{row.n_gpu_layers} layers on the GPU" if row.n_gpu_layers >= 0 else "all layers on the GPU",
        "environment": " ".join(f"{name}={value}" for name, value in sorted(row.environment.items())),
    }


def model_name(row: BenchRow) -> str:
    """Return the model's name, or the best substitute that a result has."""
    return row.model or PurePath(row.model_filename).name or row.model_type or "a model"
