"""Which of a repository's GGUF files is meant: quantizations and split parts, by file name alone.

Pure functions over names; must not know whether the names come from the hub or from this disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

PREFERRED = (
    "Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4", "Q5_K_M", "Q5_K_S", "Q5_0",
    "Q5_1", "Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "Q2_K", "BF16", "F16", "F32",
)  # fmt: skip
"""What to take when nothing is asked for: good answers for the size first, then the nearest to it."""

_QUANT = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?(?:I?Q[1-8](?:_[0-9A-Z]+)*|TQ[12]_0|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))(?![A-Z0-9_])"
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_MOST_PARTS = 1000
_PROJECTORS = ("F16", "Q8_0", "BF16", "F32")  # the best first; bfloat16 is slow where the processor lacks it
_NOT_MODELS = ("mmproj", "imatrix")


def is_model(filename: str) -> bool:
    """Whether it is a model's GGUF file: no projector of an image model, no importance matrix, no drafter alone."""
    name = filename.rpartition("/")[2].lower()
    return name.endswith(".gguf") and not name.startswith("mtp-") and not any(word in name for word in _NOT_MODELS)


def is_projector(filename: str) -> bool:
    """Whether it is a file that turns pictures into what a model takes."""
    name = filename.rpartition("/")[2].lower()
    return name.endswith(".gguf") and "mmproj" in name


def projector_for(model: str, filenames: Iterable[str]) -> str | None:
    """Which of the files beside a model is its projector; None where there is none."""
    folder = model.rpartition("/")[0]
    found = [name for name in filenames if is_projector(name)]
    return min(found, key=lambda name: (name.rpartition("/")[0] != folder, _projector_rank(name), name), default=None)


def _projector_rank(name: str) -> int:
    quant = quant_of(name) or ""
    return _PROJECTORS.index(quant) if quant in _PROJECTORS else len(_PROJECTORS)


def quant_of(filename: str) -> str | None:
    """The quantization a file's name (or else its folder's) tells, upper case; None when it tells none."""
    folder, _, name = filename.upper().rpartition("/")
    stem = _PART.sub("", name).removesuffix(".GGUF")
    for text in (stem, folder):
        found = _QUANT.findall(text)
        if found:
            quant: str = found[-1]
            return quant.replace("FP", "F") if quant in {"FP16", "FP32"} else quant
    return None


def is_later_part(filename: str) -> bool:
    """Whether it is a part of a split model other than the first."""
    part = _PART.search(filename)
    return part is not None and int(part[1]) != 1


def all_parts(first: str) -> tuple[str, ...]:
    """The names of all files of the model that starts with this one: itself alone when it is not split."""
    part = _PART.search(first)
    if part is None:
        return (first,)
    count = int(part[2])
    if not 1 <= count <= _MOST_PARTS:
        return (first,)
    stem = first[: part.start()]
    return tuple(f"{stem}-{number:05}-of-{part[2]}.gguf" for number in range(1, count + 1))


def available(filenames: Iterable[str]) -> dict[str, str]:
    """Quantization -> its (first) file, the preferred first. Files that tell none go by their name."""
    found: dict[str, str] = {}
    for name in sorted((name for name in filenames if is_model(name) and not is_later_part(name)), key=_depth):
        found.setdefault(quant_of(name) or name, name)
    return dict(sorted(found.items(), key=lambda item: _rank(item[0])))


def choose(filenames: Iterable[str], quant: str | None) -> str | None:
    """The (first) file of the quant asked for, or of the best there is; None when there is none."""
    files = available(filenames)
    if quant is None:
        return next(iter(files.values()), None)
    wanted = quant.upper()
    return files.get(wanted) or files.get(f"UD-{wanted}")


def _depth(filename: str) -> tuple[int, int, str]:
    return filename.count("/"), len(filename), filename


def _rank(quant: str) -> tuple[int, str]:
    return PREFERRED.index(quant) if quant in PREFERRED else len(PREFERRED), quant
