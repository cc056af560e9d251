"""LoRA adapters named by the user, and their files."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.gguf.adapter import adapter_facts, check_fits
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.protocol.adapters import Adapter

LARGEST_SCALE = 1000.0


def read_adapters(texts: Sequence[str], label: str = "--lora") -> tuple[Adapter, ...]:
    """Parse FILE or FILE:SCALE. An adapter's name is its file's, without the suffix.

    Raises:
        ModelNotFoundError: there is no such file.
        UsageError: a scale is not a number, or two adapters have the same name.
    """
    adapters: dict[str, Adapter] = {}
    for text in texts:
        adapter = _read_adapter(text, label)
        if adapter.name in adapters:
            raise UsageError(
                f"two adapters are called {adapter.name}",
                why=f"{adapters[adapter.name].path} and {adapter.path}",
                hint="rename one of the files: requests name adapters by them",
            )
        adapters[adapter.name] = adapter
    return tuple(adapters.values())


def _read_adapter(text: str, label: str) -> Adapter:
    file, colon, tail = text.rpartition(":")
    if not colon or Path(text).exists():
        file, scale = text, 1.0
    else:
        try:
            scale = float(tail)
        except ValueError:
            scale = math.nan
        if not abs(scale) <= LARGEST_SCALE:
            why = f"the scale must be a number of at most {LARGEST_SCALE:g}"
            raise UsageError(f"invalid {label} {text}", why=why, hint=f"{label} {file}:0.5")
    path = Path(file)
    if path.is_dir():
        hint = f"llmrun convert {shlex.quote(file)} --base MODEL makes an adapter's file of a PEFT folder"
        raise UsageError(f"{label} {file} is a folder", why="a GGUF file is needed", hint=hint)
    if not path.exists():
        raise ModelNotFoundError(f"there is no adapter {file!r}", hint=f"{label} takes a GGUF file on this disk")
    return Adapter(path.stem, str(path.absolute()), scale)


def adapter_bytes(adapters: Iterable[Adapter], model: Header) -> int:
    """Return the memory of adapters besides the model's.

    Raises BadModelError if a file is damaged or not a LoRA adapter, and UsageError if one was made for another model.
    """
    headers = [adapter_facts(read_header(Path(adapter.path))) for adapter in adapters]
    for facts in headers:
        check_fits(facts, model)
    return sum(facts.header.weight_bytes for facts in headers)
