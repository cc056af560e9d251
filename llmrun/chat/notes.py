"""Notes across chats: one file of text that the user reads and edits, and that the system prompt of a chat holds.

Off unless the setting `notes` is on. A model writes nothing there: only /remember, and the user's editor, do.
"""

from __future__ import annotations

from pathlib import Path

from llmrun.config import has_notes, load_settings
from llmrun.errors import ResourceError, UsageError
from llmrun.protocol.messages import Message
from llmrun.storage import write_whole

MOST_CHARACTERS = 4_000
"""Of the notes in a system prompt, about a thousand tokens: the last ones, from the beginning of a line on."""
_HEADING = "Notes that the user keeps across conversations:"


def notes_file() -> Path:
    return load_settings().state_dir / "notes.md"


def read_notes() -> str:
    """Return the text of the file; "" if notes are off, or there are none.

    Raises:
        ResourceError: it can't be read.
    """
    if not has_notes():
        return ""
    try:
        return notes_file().read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        why = error.strerror or str(error)
        hint = "llmrun config set notes off"
        raise ResourceError(f"the notes in {str(notes_file())!r} can't be read", why=why, hint=hint) from None


def remember(text: str) -> None:
    """Add a note to the file.

    Raises:
        UsageError: notes are off.
        ResourceError: the file can't be read or written.
    """
    if not has_notes():
        raise UsageError("notes across chats are off", hint="llmrun config set notes on")
    read_notes()  # or the reason why it can't be
    before = notes_file().read_bytes() if notes_file().exists() else b""
    gap = b"\n" if before and not before.endswith(b"\n") else b""
    line = "- " + text.replace("\n", "\n  ") + "\n"
    write_whole(notes_file(), before + gap + line.encode("utf-8", "replace"), makes_folder=True, is_private=True)


def system_messages(system: str) -> list[Message]:
    """Return the message with the system prompt of a chat and the notes; none without both. Raises as read_notes()."""
    notes = _in_prompt(read_notes())
    text = "\n\n".join(filter(None, (system, f"{_HEADING}\n{notes}" if notes else "")))
    return [Message("system", text)] if text else []


def describe_notes() -> str:
    """Return a line about the notes in the system prompt; "" without any. Raises as read_notes()."""
    notes = read_notes()
    if not notes:
        return ""
    shown, place = _in_prompt(notes), notes_file()
    if shown == notes:
        return f"The system prompt holds your notes, {len(notes):,} characters of {place}."
    return f"The system prompt holds the last {len(shown):,} of {len(notes):,} characters of your notes in {place}."


def _in_prompt(notes: str) -> str:
    if len(notes) <= MOST_CHARACTERS:
        return notes
    last = notes[-MOST_CHARACTERS:]
    before = notes[-MOST_CHARACTERS - 1]
    return last if before == "\n" else last.partition("\n")[2] or last
