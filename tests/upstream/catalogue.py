"""Asks the hub about every entry of models.toml: is it there, with these files, of this size, and what is newer?

    python tests/upstream/catalogue.py [CATALOGUE]

One line an entry; ends with 1 when something is wrong with one. What changed since it was checked is only said. The hub
is the one of HF_ENDPOINT.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from llmrun.config import Settings, load_settings
from llmrun.errors import LlmrunError
from llmrun.models.hub import Repository, repository_files
from llmrun.models.registry import CatalogueEntry, load_catalogue

MOST_WRONG = 0.02
"""Of a size in models.toml, which is rounded, and of a file that was uploaded again."""


def wrong(entry: CatalogueEntry, found: Repository) -> Iterator[str]:
    """What models.toml says of an entry and the hub does not."""
    sizes = {file.name: file.size for file in found.files}
    for quant in entry.quants:
        if entry.filename(quant) not in sizes:
            yield f"no {entry.filename(quant)}"
    size = sizes.get(entry.filename(entry.quant), 0) / 1e6
    if size and abs(size / entry.size_mb - 1) > MOST_WRONG:
        yield f"{entry.quant} has {size:.0f} MB, not {entry.size_mb}"
    if found.gated:
        yield "it is gated"


def answer(entry: CatalogueEntry, settings: Settings) -> tuple[bool, str]:
    """Whether an entry is right, and a line on it."""
    try:
        found = repository_files(entry.repository, "main", settings, note)
    except LlmrunError as error:
        return False, str(error)
    faults = list(wrong(entry, found))
    newer = f"; changed on {found.updated}, checked {entry.checked}" if found.updated > entry.checked else ""
    return not faults, ("; ".join(faults) or f"right, at {found.commit[:8]}") + newer


def note(text: str) -> None:
    """What the hub is asked again for."""
    print(text, file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Gives the exit status."""
    catalogue = load_catalogue(Path(arguments[0]) if arguments else None)
    settings = load_settings()
    all_right = True
    for entry in catalogue.entries.values():
        right, line = answer(entry, settings)
        all_right &= right
        print(f"{'ok   ' if right else 'WRONG'} {entry.alias}: {line}", flush=True)
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
