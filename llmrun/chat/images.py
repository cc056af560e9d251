"""The pictures of a conversation, read again for every request: a saved chat remembers files, not what was in them.

Owns the reading, and what is said of a file that is gone; must not know databases or terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from llmrun.chat.attachments import AttachedImage, read_image
from llmrun.errors import UsageError
from llmrun.protocol.messages import Image, Message


class ImageFile(NamedTuple):
    """A picture that was attached to a question.

    Attributes:
        path: absolute.
        sha256: of its bytes.
        n_bytes: how many there were.
    """

    path: str
    sha256: str
    n_bytes: int

    @classmethod
    def of(cls, picture: AttachedImage) -> ImageFile:
        """What is remembered of one that was read."""
        return cls(picture.path, picture.sha256, picture.n_bytes)

    @property
    def name(self) -> str:
        """For what is said about it."""
        return Path(self.path).name


class ImageCache:
    """Pictures as they are sent, kept while the chat runs.

    Args:
        on_note: told, once for each, which files are gone or have changed.
    """

    def __init__(self, on_note: Callable[[str], None]) -> None:
        self._on_note = on_note
        self._read: dict[ImageFile, Image | None] = {}
        self._told: set[str] = set()

    def show(self, message: Message, files: Sequence[ImageFile], blind: str = "") -> Message:
        """The message with its pictures; in place of one that can't be sent it says so, for the model too.

        Args:
            blind: name of a model that can't look at any.
        """
        found = [(file, None if blind else self._picture(file)) for file in files]
        for file in files if blind else ():
            self._tell(f"{blind} can't look at pictures: {file.name} is left out")
        missing = "".join(f"[The picture {file.name} can't be seen.]\n" for file, picture in found if picture is None)
        pictures = tuple(picture for _, picture in found if picture is not None)
        return replace(message, content=missing + message.content, pictures=pictures) if files else message

    def _picture(self, file: ImageFile) -> Image | None:
        if file not in self._read:
            self._read[file] = None
            try:
                picture = read_image(file.path)
            except UsageError as error:
                self._tell(f"{file.name} is gone, the model sees it no more: {error.why}")
            else:
                if picture.sha256 == file.sha256:
                    self._read[file] = Image(picture.data, file.name)
                else:
                    self._tell(f"{file.path} is another picture now; the model sees it no more")
        return self._read[file]

    def _tell(self, note: str) -> None:
        if note not in self._told:
            self._told.add(note)
            self._on_note(note)
