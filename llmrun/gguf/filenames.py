"""The choice among a repository's GGUF files by name: quantizations, split parts, projectors.

Pure functions of names, of the hub or of this disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

PREFERRED = (
    "Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4", "Q5_K_M", "Q5_K_S", "Q5_0",
    "Q5_1", "Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "Q2_K", "BF16", "F16", "F32",
)  # fmt: skip
"""Quants in order of preference: good answers for the size first."""

_QUANT = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?(?:I?Q[1-8](?:_[0-9A-Z]+)*|TQ[12]_0|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))(?![A-Z0-9_])"
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_MOST_PARTS = 1000
_PROJECTOR_WORDS = {"mmproj", "model", "projector", "vision", "gguf", "f16", "f32", "bf16", "fp16", "fp32"}
_PROJECTORS = ("F16", "Q8_0", "BF16", "F32")  # the best first; bfloat16 is slow where the processor lacks it
_NOT_MODELS = ("mmproj", "imatrix")
# As in llama.cpp's common/download.cpp; but "-mtp-" is in the names of models with heads, too.
_DRAFTER = re.compile(r"^mtp-|(?:^|[-_.])(?:eagle3|dflash|dspark)[-.]")


def is_model(filename: str) -> bool:
    """Return whether a GGUF file is a model rather than a projector, an importance matrix or a sole drafter."""
    name = filename.rpartition("/")[2].lower()
    return name.endswith(".gguf") and not _DRAFTER.search(name) and not any(word in name for word in _NOT_MODELS)


def is_projector(filename: str) -> bool:
    """Return whether a file is a projector of images or audio."""
    name = filename.rpartition("/")[2].lower()
    return name.endswith(".gguf") and "mmproj" in name


def projector_for(model: str, filenames: Iterable[str]) -> str | None:
    """Return the projector among the files beside a model, by their names; None without one."""
    folder = model.rpartition("/")[0]
    candidates = projectors_for(model, filenames)
    return min(
        candidates, key=lambda name: (name.rpartition("/")[0] != folder, _projector_rank(name), name), default=None
    )


def projectors_for(model: str, filenames: Iterable[str]) -> list[str]:
    """Return the projectors that may be a model's: those with its name, else those without a name, else others'.

    One that has the name of another model beside it is that one's.
    """
    names, words = list(filenames), _words(model)
    words_of = {name: _words(name) - _PROJECTOR_WORDS for name in names if is_projector(name)}
    others = [_words(name) for name in names if is_model(name) and name.rpartition("/")[2] != model.rpartition("/")[2]]
    named = [name for name, said in words_of.items() if said and said <= words]
    unnamed = [name for name, said in words_of.items() if not said]
    return named or unnamed or [name for name, said in words_of.items() if not any(said <= other for other in others)]


def name_of_projector(filename: str) -> frozenset[str]:
    """Return the words that name a projector's model; none without any."""
    return frozenset(_words(filename) - _PROJECTOR_WORDS)


def _words(filename: str) -> set[str]:
    """Return the words of a file's name, in lower case and without its quant."""
    stem = _PART.sub("", filename.rpartition("/")[2]).removesuffix(".gguf").lower()
    quant = (quant_of(filename) or "").lower()
    return {word for word in re.split(r"[-_. ]+", stem.replace(quant, "") if quant else stem) if word}


def _projector_rank(name: str) -> int:
    quant = quant_of(name) or ""
    return _PROJECTORS.index(quant) if quant in _PROJECTORS else len(_PROJECTORS)


def quant_of(filename: str) -> str | None:
    """Return the quant in a file's name, or else in its folder's, in upper case; None without one."""
    folder, _, name = filename.upper().rpartition("/")
    stem = _PART.sub("", name).removesuffix(".GGUF")
    for text in (stem, folder):
        quants = _QUANT.findall(text)
        if quants:
            quant: str = quants[-1]
            return quant.replace("FP", "F") if quant in {"FP16", "FP32"} else quant
    return None


def model_name(filename: str) -> str:
    """Return a model's name from that of its file: without part number, quant and characters that names lack."""
    stem = _PART.sub("", filename).removesuffix(".gguf").removesuffix(".GGUF")
    if quant := quant_of(filename):
        stem = re.sub(rf"(?i)[-._]?{re.escape(quant)}$", "", stem)
    return re.sub(r"[^A-Za-z0-9._]+|\.\.+", "-", stem).strip("-._") or "model"


def is_later_part(filename: str) -> bool:
    """Return whether a file is a part of a split model other than the first."""
    part = _PART.search(filename)
    return part is not None and int(part[1]) != 1


def all_parts(first: str) -> tuple[str, ...]:
    """Return the names of all files of the model that starts with this one."""
    part = _PART.search(first)
    if part is None:
        return (first,)
    count = int(part[2])
    if not 1 <= count <= _MOST_PARTS:
        return (first,)
    stem = first[: part.start()]
    return tuple(f"{stem}-{number:05}-of-{part[2]}.gguf" for number in range(1, count + 1))


def available(filenames: Iterable[str]) -> dict[str, str]:
    """Return quant -> (first) file, in order of preference. A file without a quant has its name as key."""
    files: dict[str, str] = {}
    for name in sorted((name for name in filenames if is_model(name) and not is_later_part(name)), key=_depth):
        files.setdefault(quant_of(name) or name, name)
    return dict(sorted(files.items(), key=lambda item: _rank(item[0])))


def choose(filenames: Iterable[str], quant: str | None) -> str | None:
    """Return the (first) file of a quant, or of the preferred one; None without one."""
    files = available(filenames)
    if quant is None:
        return next(iter(files.values()), None)
    name = quant.upper()
    return files.get(name) or files.get(f"UD-{name}")


def _depth(filename: str) -> tuple[int, int, str]:
    return filename.count("/"), len(filename), filename


def _rank(quant: str) -> tuple[int, str]:
    return PREFERRED.index(quant) if quant in PREFERRED else len(PREFERRED), quant
