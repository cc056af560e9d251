"""What is quantized: a GGUF file, a model by its name, or a folder of Hugging Face, which is converted first.

Owns finding it and saying what it is not; must not know types or how it is quantized.
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

OnProgress = Callable[[str, float], None]
"""Gets (what is being done, how much of it: 0 to 1)."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """What a name leads to.

    Attributes:
        path: of the first GGUF file, or of a folder that has to be converted.
        name: what files made of it are called.
        is_folder: whether it is such a folder.
    """

    path: Path
    name: str
    is_folder: bool


def find(text: str) -> SourceFile:
    """Find what is to be quantized, without the network.

    Raises:
        ModelNotFoundError: it is not on this disk; says how it gets there.
        UsageError: it can't be a model's name.
    """
    from llmrun.models.location import locate, not_on_disk

    folder = Path(text).expanduser()
    if (folder / "config.json").is_file():
        return SourceFile(folder, folder.resolve().name, True)
    if folder.is_dir() and not any(folder.glob("*.gguf")):
        raise ModelNotFoundError(
            f"there is no model in the folder {text!r}",
            why="it has neither a config.json of Hugging Face nor a .gguf file",
            hint="name a .gguf file, or the folder that holds config.json",
        )
    located = locate(text, load_settings())
    if located.path is None:
        raise not_on_disk(text)
    return SourceFile(located.path, _stem(located.path, located.spec.alias), False)


def _stem(path: Path, alias: str | None) -> str:
    """A file's name without what tells its type and part, or the catalogue's name where files have none."""
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
    found: SourceFile, beside: Path, on_progress: OnProgress, say: Callable[[str], None] = lambda text: None
) -> Iterator[Header]:
    """The header of the GGUF file to read; of a folder that of a conversion, which is gone when the block ends.

    Args:
        beside: folder that a conversion is kept in meanwhile.
        say: gets what a conversion has to say.

    Raises:
        BadModelError: it is damaged, or no model that llama.cpp can run.
        UsageError: a folder's model can't be converted.
    """
    if not found.is_folder:
        header = read_header(found.path)
        check(header)
        yield header
        return
    from llmrun.convert.job import convert_folder

    path = temporary(beside / f"{found.name}.gguf", "converted")
    try:
        converted = convert_folder(
            found.path, path, on_progress=lambda done, total: on_progress("converting", done / total if total else 1.0)
        )
        for note in converted.notes:
            say(f"note: {note}")
        yield replace(read_header(path), path=path)
    finally:
        path.unlink(missing_ok=True)
