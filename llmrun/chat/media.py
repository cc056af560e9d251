"""The images and audio of a conversation, read again for every request: a saved chat stores paths and hashes.

A note tells of each file that is missing or has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from llmrun.chat.attachments import AttachedMedia, read_media
from llmrun.errors import UsageError
from llmrun.protocol.media import PLURALS, Media, Modality
from llmrun.protocol.messages import Message


class MediaFile(NamedTuple):
    """An image or an audio file attached to a question."""

    path: str  # absolute
    sha256: str  # of the bytes
    n_bytes: int

    @classmethod
    def of(cls, media: AttachedMedia) -> MediaFile:
        return cls(media.path, media.sha256, media.n_bytes)

    @property
    def name(self) -> str:
        return Path(self.path).name


class MediaReader(Protocol):
    """A model, as far as it reads images or audio."""

    @property
    def name(self) -> str: ...
    @property
    def modalities(self) -> frozenset[Modality]: ...


class MediaCache:
    """Files in the form in which they are sent, cached while the chat runs.

    Args:
        on_note: called once for each file that is missing, has changed, or can't be read by the model.
    """

    def __init__(self, on_note: Callable[[str], None]) -> None:
        self._on_note = on_note
        self._read: dict[MediaFile, AttachedMedia | None] = {}
        self._noted: set[str] = set()

    def show(self, message: Message, files: Sequence[MediaFile], model: MediaReader) -> Message:
        """Return the message with its files; a line of text tells the model of each file that can't be sent."""
        missing, sent = "", list[Media]()
        for file in files:
            media = self._file(file)
            if media is not None and media.modality in model.modalities:
                sent.append(Media(media.data, file.name))
                continue
            if media is not None:
                self._note(f"{model.name} can't read {PLURALS[media.modality]}: {file.name} is left out")
            missing += f"[The {media.modality if media else 'file'} {file.name} can't be read.]\n"
        return replace(message, content=missing + message.content, media=tuple(sent)) if files else message

    def show_results(self, messages: Iterable[Message], model: MediaReader) -> Iterator[Message]:
        """Yield messages without the files in results of tools that the model can't read; a line tells it of each."""
        for message in messages:
            sent = tuple(file for file in message.media if file.modality in model.modalities)
            if message.role == "tool" and len(sent) < len(message.media):
                missing = [file for file in message.media if file not in sent]
                self._note(f"{model.name} can't read {PLURALS[missing[0].modality or 'image']}: the tool's is left out")
                lines = [f"[The {file.modality or 'file'} can't be read.]" for file in missing]
                message = replace(message, content="\n".join([message.content, *lines]).lstrip("\n"), media=sent)
            yield message

    def _file(self, file: MediaFile) -> AttachedMedia | None:
        if file not in self._read:
            self._read[file] = None
            try:
                media = read_media(file.path)
            except UsageError as error:
                self._note(f"{file.name} is missing, the model no longer has it: {error.why}")
            else:
                if media.sha256 == file.sha256:
                    self._read[file] = media
                else:
                    self._note(f"{file.path} has changed; the model no longer has it")
        return self._read[file]

    def _note(self, note: str) -> None:
        if note not in self._noted:
            self._noted.add(note)
            self._on_note(note)
