"""Completion of slash commands: their names, then their arguments.

Pure except for file_names().
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from llmrun.errors import LlmrunError
from llmrun.ui.terminal.sanitize import clean

MAX_CANDIDATES = 500
_MAX_EXAMINED = 10_000


class Candidate(NamedTuple):
    """A word that can replace the one being typed."""

    text: str
    hint: str = ""  # shown only, such as a parameter's bounds


Completion = Callable[[Sequence[str]], Iterable["str | Candidate"]]
"""Maps the words after a command, split at single spaces, to candidates for the last one, which is being typed. Other
candidates than those that begin with it are dropped. Called when Tab is pressed, so it may use the disk, but not the
network."""


class Completions(NamedTuple):
    """The possible completions of the word being typed."""

    typed: str  # the word so far
    candidates: list[Candidate]  # each begins with `typed`

    @property
    def hint(self) -> str:
        """The note for a word that is complete."""
        complete = len(self.candidates) == 1 and self.candidates[0].text == self.typed
        return self.candidates[0].hint if complete else ""


def offer(line: str, commands: Mapping[str, Completion | None]) -> Completions:
    """Return the completions at the end of a line.

    Args:
        line: the text up to the cursor.
        commands: name of each command, with its slash -> completion of its arguments.
    """
    name, space, arguments = line.lstrip().partition(" ")
    if not name.startswith("/") or "\n" in line:
        return Completions("", [])
    if not space:
        names = (Candidate(known + (" " if takes else "")) for known, takes in sorted(commands.items()))
        return _fitting(name, names)
    completion = commands.get(name)
    words = arguments.split(" ")
    if completion is None:
        return Completions(words[-1], [])
    try:
        return _fitting(words[-1], completion(words))
    except (OSError, LlmrunError):  # a key must not end the chat
        return Completions(words[-1], [])


def file_names(words: Sequence[str]) -> Iterable[str]:
    """Complete the path of a file, for commands whose whole argument it is; spaces in it need no quotes."""
    path = " ".join(words)
    n_done = len(path) - len(words[-1])
    folder, beginning = path[: path.rfind("/") + 1], path[path.rfind("/") + 1 :]
    try:
        root = Path(folder or ".").expanduser()
    except RuntimeError:  # no such user
        return []
    with os.scandir(root) as entries:
        fitting = (
            entry for entry in entries if entry.name.startswith(beginning) and (beginning or entry.name[0] != ".")
        )
        names = [folder + entry.name + ("/" if entry.is_dir() else "") for entry in fitting]
    return [name[n_done:] for name in sorted(names)]


def _fitting(typed: str, words: Iterable[str | Candidate]) -> Completions:
    candidates = (Candidate(word) if isinstance(word, str) else word for word in islice(words, _MAX_EXAMINED))
    fitting = (word for word in candidates if word.text.startswith(typed) and clean(word.text) == word.text)
    return Completions(typed, list(dict.fromkeys(islice(fitting, MAX_CANDIDATES))))
