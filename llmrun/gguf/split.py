"""Rules of split models (`-00001-of-00003.gguf`): names of the parts, and one header of all.

Must not know whether a file is on this disk or on a server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn

from llmrun.errors import BadModelError
from llmrun.gguf.filenames import all_parts
from llmrun.gguf.header import Header, Tensor


def other_parts(first: Header) -> tuple[str, ...]:
    """Return the names of the files after the first, in order; none if the model is whole.

    Raises:
        BadModelError: the file is not the first, or the others' names don't follow from its name.
    """
    name = first.path.name
    if first.split_count == 1:
        return ()
    names = all_parts(name)
    number = first.split_number
    if number:
        hint = f"open the first: {names[0]}" if len(names) > number else "open the first"
        raise BadModelError(f"{name!r} is part {number + 1} of a split model", why=f"'split.no' is {number}", hint=hint)
    if len(names) != first.split_count:
        raise BadModelError(
            f"{name!r} is the first of {first.split_count} files, but its name does not tell their names",
            why=f"'split.count' is {first.split_count}",
            hint=f"restore the names of the files: they end in -00001-of-{first.split_count:05}.gguf",
        )
    if names[0] != name:
        _fail(first, f"'split.no' is 0, but by its name it is not {names[0]!r}")
    return names[1:]


def unite(first: Header, others: Iterable[Header]) -> Header:
    """Return one header for the whole model: the first file's metadata, all files' tensors and bytes.

    Args:
        others: headers of other_parts(), in that order.

    Raises:
        BadModelError: a file's number contradicts its name, or the number of tensors is wrong.
    """
    tensors = list(first.tensors)
    size = first.file_size
    for number, part in enumerate(others, 1):
        if part.split_number != number:
            stated = part.split_number
            _fail(part, f"'split.no' is {'missing' if stated is None else stated}; it should be {number}")
        tensors += [replace(tensor, part=number) for tensor in part.tensors]
        size += part.file_size
    _check_names(first, tensors)
    stated = first.integer("split.tensors.count")
    if stated != len(tensors):
        shown = "missing" if stated is None else stated
        _fail(first, f"'split.tensors.count' is {shown}, but its files have {len(tensors)} tensors")
    return replace(first, file_size=size, tensors=tuple(tensors))


def _check_names(first: Header, tensors: list[Tensor]) -> None:
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            _fail(first, f"tensor {tensor.name!r} is in two of its files")
        names.add(tensor.name)


def _fail(header: Header, why: str) -> NoReturn:
    raise BadModelError(
        f"the files of the split model {header.path.name!r} don't belong together",
        why=why,
        hint="download all of them again",
    )
