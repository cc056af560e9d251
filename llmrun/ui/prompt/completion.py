"""What Tab offers while a slash command is typed: its name, then whatever its arguments can be.

Owns the choice; must not know what a command does, nor how a key is read. Pure but for file_names().
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from llmrun.errors import LlmrunError
from llmrun.ui.terminal.sanitize import clean

MOST = 500
"""So many candidates are offered; nobody reads more."""
_LOOKED_AT = 10_000


class Candidate(NamedTuple):
    """A word that Tab can put in the place of the one being typed.

    Attributes:
        text: the whole word.
        hint: what to know about it, such as a parameter's bounds; shown only.
    """

    text: str
    hint: str = ""


Completion = Callable[[Sequence[str]], Iterable["str | Candidate"]]
"""Gets the words behind the command, split at single spaces; the last is the one being typed, "" if it is not begun.
Gives what that word can be; those that do not begin with it are left out. Called when Tab is pressed, so it may look
at the disk, but not at the network."""


class Completions(NamedTuple):
    """What Tab does: the word being typed becomes one of these.

    Attributes:
        typed: of that word, so far.
        candidates: the shown and inserted words; each begins with `typed`.
    """

    typed: str
    candidates: list[Candidate]

    @property
    def hint(self) -> str:
        """What to say when nothing can be added to what is typed."""
        complete = len(self.candidates) == 1 and self.candidates[0].text == self.typed
        return self.candidates[0].hint if complete else ""


def offer(line: str, commands: Mapping[str, Completion | None]) -> Completions:
    """What can stand at the end of a line.

    Args:
        line: what is typed up to the cursor.
        commands: name of each command, with its slash -> what completes its arguments.
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
    """A Completion for commands whose whole argument is the path of a file; spaces in it need no quotes."""
    path = " ".join(words)
    n_done = len(path) - len(words[-1])
    folder, beginning = path[: path.rfind("/") + 1], path[path.rfind("/") + 1 :]
    try:
        root = Path(folder or ".").expanduser()
    except RuntimeError:  # there is no such user
        return []
    with os.scandir(root) as entries:
        fitting = (
            entry for entry in entries if entry.name.startswith(beginning) and (beginning or entry.name[0] != ".")
        )
        names = [folder + entry.name + ("/" if entry.is_dir() else "") for entry in fitting]
    return [name[n_done:] for name in sorted(names)]


def _fitting(typed: str, words: Iterable[str | Candidate]) -> Completions:
    candidates = (Candidate(word) if isinstance(word, str) else word for word in islice(words, _LOOKED_AT))
    fitting = (word for word in candidates if word.text.startswith(typed) and clean(word.text) == word.text)
    return Completions(typed, list(dict.fromkeys(islice(fitting, MOST))))
