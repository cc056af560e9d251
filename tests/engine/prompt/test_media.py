"""WebP images: converted by Pillow where that is installed, otherwise named."""

from __future__ import annotations

import base64
import struct
import sys
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any

import pytest

from llmrun.engine.prompt.control_texts import ControlTexts, Part, Placeholders
from llmrun.engine.prompt.media import checked_file, without_unreadable
from llmrun.errors import UsageError
from llmrun.protocol.media import MODALITIES, Media
from llmrun.protocol.messages import Message

WEBP = Media(base64.b64encode(b"RIFF\x10\0\0\0WEBPVP8 and more").decode(), "a.webp")
PNG = Media(base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(8) + struct.pack(">II", 3, 2)).decode(), "a.png")


class _Opened:
    """An image that Pillow has opened."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height

    def __enter__(self) -> _Opened:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def convert(self, mode: str) -> _Opened:
        assert mode == "RGB"
        return self

    def save(self, file: Any, kind: str, **options: Any) -> None:
        assert kind == "PNG"
        file.write(base64.b64decode(PNG.data))


def install(monkeypatch: pytest.MonkeyPatch, opened: _Opened | None) -> None:
    """Pretend that Pillow is installed; it can't read the image if `opened` is None."""
    module = ModuleType("PIL.Image")

    def open_image(file: Any, formats: Sequence[str]) -> _Opened:
        assert formats == ["WEBP"]
        if opened is None:
            raise OSError("cannot identify image file")
        return opened

    module.open, module.DecompressionBombError = open_image, RuntimeError  # type: ignore[attr-defined]
    package = ModuleType("PIL")
    package.Image = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "PIL", package)
    monkeypatch.setitem(sys.modules, "PIL.Image", module)


def test_images_stand_where_they_were_put_in_any_text() -> None:
    first, second, third = (Media("x", str(at), at) for at in (1, 5, 99))
    messages = [Message("user", "\0cats\0", media=(first, second, third)), Message("user", "?", media=(first,))]
    placeholders = Placeholders([], ControlTexts([]))
    said, more = placeholders.with_media(messages)
    assert not said.media
    texts = [Part(text, True) for text in ("\0", "cats", "\0", "?")]
    assert placeholders.parts(said.content + more.content) == [
        texts[0], first, texts[1], second, texts[2], third, texts[3], first
    ]  # fmt: skip


def test_pillow_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, _Opened(3, 2))
    assert checked_file(WEBP) == ("image", base64.b64decode(PNG.data), 3, 2, 1)


@pytest.mark.parametrize(("opened", "words"), [(_Opened(99_999, 99_999), "too large"), (None, "cannot identify")])
def test_pillow_refuses_it(monkeypatch: pytest.MonkeyPatch, opened: _Opened | None, words: str) -> None:
    install(monkeypatch, opened)
    with pytest.raises(UsageError, match=words):
        checked_file(WEBP)


@pytest.mark.parametrize("data", ["#", PNG.data + "ÄÖÜß"])
def test_other_characters_than_those_of_base64_are_refused(data: str) -> None:
    with pytest.raises(UsageError, match="not base64"):
        checked_file(Media(data, "a.png"))


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match="Pillow is not installed") as raised:
        checked_file(WEBP)
    assert "pip install" in raised.value.hint


def test_in_a_result_it_is_a_line_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    question, result = Message("user", "u", media=(WEBP,)), Message("tool", "seen", media=(WEBP, PNG))
    assert without_unreadable([question, result], MODALITIES) == [
        question,
        Message("tool", "seen\n[image omitted: it is WebP, and Pillow is not installed]", media=(PNG,)),
    ]
    (blind,) = without_unreadable([result], frozenset())
    assert blind.content.count("[image omitted: this model has no vision]") == 2
    assert not blind.media


def test_in_a_users_message_right_after_a_result_it_is_one_too() -> None:
    """Some agents pass on a result's image there; an image that a user sends is never left out."""
    messages = [
        Message("user", "u", media=(PNG,)),
        Message("tool", "see the next message"),
        Message("user", "", media=(PNG,)),
        Message("user", "this one", media=(PNG,)),
        Message("tool", "\nb"),
        Message("user", "\nand this"),
    ]
    found = without_unreadable(messages, frozenset())
    assert [message.content for message in found] == [
        "u", "see the next message", "[image omitted: this model has no vision]", "this one", "\nb", "\nand this",
    ]  # fmt: skip
    assert [len(message.media) for message in found] == [1, 0, 0, 1, 0, 0]
    assert without_unreadable(messages, MODALITIES) == messages
