"""The images of a conversation, read again for every request: a saved chat stores paths and hashes, not the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from llmrun.chat.attachments import AttachedImage, read_image
from llmrun.errors import UsageError
from llmrun.protocol.messages import Image, Message


class ImageFile(NamedTuple):
    """An image attached to a question."""

    path: str  # absolute
    sha256: str  # of the bytes
    n_bytes: int

    @classmethod
    def of(cls, image: AttachedImage) -> ImageFile:
        return cls(image.path, image.sha256, image.n_bytes)

    @property
    def name(self) -> str:
        return Path(self.path).name


class ImageCache:
    """Images in the form in which they are sent, cached while the chat runs.

    Args:
        on_note: called once for each file that is missing or has changed.
    """

    def __init__(self, on_note: Callable[[str], None]) -> None:
        self._on_note = on_note
        self._read: dict[ImageFile, Image | None] = {}
        self._noted: set[str] = set()

    def show(self, message: Message, files: Sequence[ImageFile], blind: str = "") -> Message:
        """Return the message with its images; a line of text tells the model of each image that can't be sent.

        Args:
            blind: name of a model without image input; "" if the model has it.
        """
        found = [(file, None if blind else self._image(file)) for file in files]
        for file in files if blind else ():
            self._note(f"{blind} can't see images: {file.name} is left out")
        missing = "".join(f"[The image {file.name} can't be seen.]\n" for file, image in found if image is None)
        images = tuple(image for _, image in found if image is not None)
        return replace(message, content=missing + message.content, pictures=images) if files else message

    def _image(self, file: ImageFile) -> Image | None:
        if file not in self._read:
            self._read[file] = None
            try:
                image = read_image(file.path)
            except UsageError as error:
                self._note(f"{file.name} is missing, the model no longer sees it: {error.why}")
            else:
                if image.sha256 == file.sha256:
                    self._read[file] = Image(image.data, file.name)
                else:
                    self._note(f"{file.path} has changed; the model no longer sees it")
        return self._read[file]

    def _note(self, note: str) -> None:
        if note not in self._noted:
            self._noted.add(note)
            self._on_note(note)
