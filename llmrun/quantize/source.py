"""Source of a quantization: a GGUF file, a model by its name, or a Hugging Face folder, which is converted first.

Owns the search and its errors; must not know types or quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llmrun.config import load_settings
from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.models.store.new_file import temporary
from llmrun.system import user_path

OnProgress = Callable[[str, float], None]
"""Called with (phase, share done: 0 to 1)."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Located source."""

    path: Path  # of the first GGUF file, or of a Hugging Face folder
    name: str  # stem of the names of new files
    is_folder: bool


def find(text: str) -> SourceFile:
    """Find a source on this disk, without the network.

    Raises:
        ModelNotFoundError: the source is not on this disk; the hint says how to get it.
        UsageError: the text can't be a model's name.
    """
    from llmrun.models.location import locate, not_on_disk

    folder = user_path(text)
    if (folder / "config.json").is_file():
        return SourceFile(folder, folder.resolve().name, True)
    if folder.is_dir() and not any(folder.glob("*.gguf")):
        raise ModelNotFoundError(
            f"there is no model in the folder {text!r}",
            why="it has neither Hugging Face's config.json nor a .gguf file",
            hint="name a .gguf file, or the folder that contains config.json",
        )
    located = locate(text, load_settings())
    if located.path is None:
        raise not_on_disk(text)
    return SourceFile(located.path, model_stem(located.path, located.spec.alias), False)


def model_stem(path: Path, alias: str | None = None) -> str:
    """Return a file's name without type and part, or the catalogue's name if nothing else is left."""
    from llmrun.gguf.filenames import is_later_part, quant_of

    if is_later_part(path.name):
        raise UsageError(f"{path.name!r} is not the first part of its model", hint="name the one with -00001-of-")
    stem = path.name.removesuffix(".gguf").removesuffix(".GGUF")
    stem = stem.partition("-00001-of-")[0]
    quant = quant_of(stem)
    for ending in (quant, quant and quant.replace("F", "FP")):
        if ending and stem.upper().endswith(ending) and len(stem) > len(ending) + 1:
            return stem[: -len(ending)].rstrip("-_.")
    return stem or alias or "model"


@contextmanager
def open_source(
    source: SourceFile, folder: Path, on_progress: OnProgress, say: Callable[[str], None] = lambda text: None
) -> Iterator[Header]:
    """Yield the header of the GGUF file to read; a folder is converted to a temporary file for the block.

    Args:
        folder: folder of the temporary file.
        say: called with each note about a conversion.

    Raises:
        BadModelError: the model is damaged, or llama.cpp can't run it.
        UsageError: the model can't be converted.
    """
    if not source.is_folder:
        header = read_header(source.path)
        check(header)
        yield header
        return
    from llmrun.convert.job import convert_folder

    path = temporary(folder / f"{source.name}.gguf", "converted")
    try:
        converted = convert_folder(
            source.path, path, on_progress=lambda done, total: on_progress("converting", done / total if total else 1.0)
        )
        for note in converted.notes:
            say(f"note: {note}")
        yield replace(read_header(path), path=path)
    finally:
        path.unlink(missing_ok=True)
