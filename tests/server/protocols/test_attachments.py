"""Images and audio in every protocol: where they stand in a message, and what is refused by name."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from support.pdfs import pdf

from llmrun.errors import UsageError
from llmrun.protocol.messages import Message
from llmrun.server.protocols import anthropic, attachments, ollama, openai_chat, openai_responses

pytestmark = pytest.mark.usefixtures("package_on_path")
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\nand more").decode()
URL = f"data:image/png;base64,{PNG}"
TEXT = base64.b64encode(b"this is no picture").decode()
WAV = base64.b64encode(b"RIFF\x24\0\0\0WAVEfmt ").decode()
OGG = base64.b64encode(b"OggS\0\2 and more").decode()

Read = Callable[[Any], Message]


def chat(picture: Any) -> Message:
    parts = [
        {"type": "text", "text": "This "},
        {"type": "image_url", "image_url": picture},
        {"type": "text", "text": "?"},
    ]
    return openai_chat.read({"messages": [{"role": "user", "content": parts}]}).request.messages[0]


def responses(picture: Any) -> Message:
    parts = [
        {"type": "input_text", "text": "This "},
        {"type": "input_image", "image_url": picture},
        {"type": "input_text", "text": "?"},
    ]
    return openai_responses.read({"input": [{"role": "user", "content": parts}]}).request.messages[0]


def claude(picture: Any) -> Message:
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    parts = [{"type": "text", "text": "This "}, {"type": "image", "source": source}, {"type": "text", "text": "?"}]
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": parts}]}
    return anthropic.read(body).request.messages[0]


def ollama_chat(picture: Any) -> Message:
    said = {"role": "user", "content": "This ?", "images": [picture]}
    return ollama.read_chat({"model": "m", "messages": [said]}).request.messages[0]


def ollama_generate(picture: Any) -> Message:
    return ollama.read_generate({"model": "m", "prompt": "This ?", "images": [picture]}).request.messages[0]


def chat_audio(data: Any) -> Message:
    heard = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    parts = [{"type": "text", "text": "This "}, heard, {"type": "text", "text": "?"}]
    return openai_chat.read({"messages": [{"role": "user", "content": parts}]}).request.messages[0]


def chat_audio_url(url: Any) -> Message:
    parts = [{"type": "text", "text": "This "}, {"type": "audio_url", "audio_url": {"url": url}}]
    return openai_chat.read({"messages": [{"role": "user", "content": parts}]}).request.messages[0]


def responses_audio(data: Any) -> Message:
    heard = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    parts = [{"type": "input_text", "text": "This "}, heard, {"type": "input_text", "text": "?"}]
    return openai_responses.read({"input": [{"role": "user", "content": parts}]}).request.messages[0]


@pytest.mark.parametrize(
    ("read", "given", "content", "at"),
    [
        (chat_audio, WAV, "This ?", 5),
        (chat_audio_url, f"data:audio/wav;base64,{WAV}", "This ", 5),
        (responses_audio, WAV, "This ?", 5),
        (ollama_chat, WAV, "This ?", 0),
        (ollama_generate, WAV, "This ?", 0),
    ],
)
def test_audio_stands_where_it_was_put(read: Read, given: Any, content: str, at: int) -> None:
    message = read(given)
    [audio] = message.media
    assert (message.content, audio.data, audio.at, audio.modality) == (content, WAV, at, "audio")


@pytest.mark.parametrize(
    ("read", "given", "words"),
    [
        (chat_audio, TEXT, r"messages\[0\].content\[1\].input_audio.data: must be a WAV, MP3 or FLAC file"),
        (chat_audio, PNG, "must be a WAV, MP3 or FLAC file"),
        (chat_audio, OGG, "it is Ogg; audio must be WAV, MP3 or FLAC"),
        (chat_audio, "###", "must be audio in base64"),
        (chat_audio, "", "must be audio in base64"),
        (chat_audio, f"{WAV}\ufffd", "must be audio in base64"),
        (chat_audio, None, "data is missing"),
        (chat_audio_url, "https://example.org/a.wav", "data: URL with audio"),
        (chat_audio_url, URL, "data: URL with audio"),
        (chat, f"data:audio/wav;base64,{WAV}", "data: URL with an image"),
        (chat, f"data:image/png;base64,{WAV}", "must be a PNG"),
        (claude, WAV, "must be a PNG"),
        (ollama_chat, OGG, "it is Ogg"),
    ],
)
def test_what_is_no_audio_is_refused_by_name(read: Read, given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(given)


@pytest.mark.parametrize(
    ("read", "given", "content", "at"),
    [
        (chat, {"url": URL}, "This ?", 5),
        (chat, URL, "This ?", 5),
        (responses, URL, "This ?", 5),
        (claude, PNG, "This \n?", 6),
        (ollama_chat, PNG, "This ?", 0),
        (ollama_generate, PNG, "This ?", 0),
    ],
)
def test_a_picture_stands_where_it_was_put(read: Read, given: Any, content: str, at: int) -> None:
    message = read(given)
    [picture] = message.media
    assert (message.content, picture.data, picture.at) == (content, PNG, at)


@pytest.mark.parametrize(
    ("read", "given", "words"),
    [
        (chat, {"url": "https://example.org/cat.png"}, r"messages\[0\].content\[1\].image_url.url.*data: URL"),
        (chat, {"url": "file:///etc/passwd"}, "data: URL"),
        (chat, {"url": "data:text/html;base64,aGk="}, "data: URL"),
        (chat, {"url": f"data:image/png;base64,{TEXT}"}, "must be a PNG"),
        (chat, {"url": "data:image/png;base64,###"}, "in base64"),
        (chat, {"url": "data:image/png;base64,ÄÖÜß"}, "in base64"),
        (chat, {"url": f"{URL}\ud800"}, "in base64"),
        (responses, f"{URL}é", "in base64"),
        (claude, f"{PNG}#", "in base64"),
        (ollama_chat, f"{PNG}A", "in base64"),
        (chat, {"url": 5}, "must be a string"),
        (chat, {}, "url is missing"),
        (responses, "https://example.org/cat.png", "data: URL"),
        (claude, TEXT, r"messages\[0\].content\[1\].source.data"),
        (claude, None, "data is missing"),
        (ollama_chat, TEXT, r"messages\[0\].images\[0\]"),
        (ollama_generate, "", r"images\[0\]"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(read: Read, given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(given)


def test_pictures_without_a_chat_template_are_refused() -> None:
    with pytest.raises(UsageError, match="raw and images"):
        ollama.read_generate({"model": "m", "prompt": "?", "images": [PNG], "raw": True})


def test_a_picture_by_its_address_is_refused() -> None:
    block = {"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}}
    with pytest.raises(UsageError, match=r"source\.type must be one of base64"):
        anthropic.read({"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]})


def test_a_result_of_a_tool_may_have_images() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    blocks = [{"type": "text", "text": "a.png"}, {"type": "image", "source": source}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": blocks, "is_error": True}
    made = anthropic.read({"max_tokens": 5, "messages": [{"role": "user", "content": [result]}]}).request.messages[0]
    assert (made.role, made.content) == ("tool", "Error: a.png")
    assert [(image.data, image.at) for image in made.media] == [(PNG, len("Error: a.png\n"))]
    parts = [{"type": "input_text", "text": "a.png"}, {"type": "input_image", "image_url": URL}]
    items = [{"role": "user", "content": "Hi"}, {"type": "function_call_output", "call_id": "c", "output": parts}]
    made = openai_responses.read({"input": items}).request.messages[1]
    assert (made.role, made.content, [image.at for image in made.media]) == ("tool", "a.png", [len("a.png")])


TEXT, LATIN, PDF, SCAN = (
    *(base64.b64encode("Größe".encode(encoding)).decode() for encoding in ("utf-8", "cp1252")),
    base64.b64encode(pdf("A harvest.")).decode(),
    base64.b64encode(b"%PDF-1.7 \xff").decode(),
)
READ = "a.pdf\n\n[page 1]\nA harvest."
DAMAGED = "[document omitted: a.pdf: it is damaged: "
PAGE = base64.b64encode(b"<html><nav>Home</nav><p>A lamp.</html>").decode()


def claude(source: dict[str, Any], **more: Any) -> str:
    blocks = [{"type": "text", "text": "Read"}, {"type": "document", "source": source, **more}]
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": blocks}]}
    return anthropic.read(body).request.messages[0].content


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "Hello"}, "Hello"),
        ({"type": "base64", "media_type": "text/markdown", "data": TEXT}, "Größe"),
        ({"type": "content", "content": "Hello"}, "Hello"),
        ({"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
    ],
)
def test_text_documents_of_anthropic(source: dict[str, Any], text: str) -> None:
    assert claude(source) == f"Read\n{text}"
    assert claude(source, title="notes") == f"Read\nnotes\n\n{text}"


def test_a_pdf_is_read_and_a_damaged_one_named() -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": PDF}
    assert claude(source, title="a.pdf") == f"Read\n{READ}"
    assert claude(source) == "Read\n[page 1]\nA harvest."
    assert claude({**source, "data": SCAN}, title="a.pdf").startswith(f"Read\n{DAMAGED}")
    assert claude({**source, "media_type": "text/html", "data": PAGE}) == "Read\nA lamp."
    with pytest.raises(UsageError, match="'url' can't be read"):
        claude({"type": "url", "url": "https://example.org/a.pdf"})
    for data in ("#", "ÄÖÜß"):
        with pytest.raises(UsageError, match="must be base64"):
            claude({"type": "base64", "media_type": "text/plain", "data": data})


def test_an_image_stands_behind_a_document() -> None:
    png = base64.b64encode(b"\x89PNG\r\n\x1a\nand more").decode()
    blocks = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Hello"}},
        {"type": "search_result", "source": "https://e.org", "title": "T", "content": [{"type": "text", "text": "x"}]},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png}},
    ]
    message = anthropic.read({"max_tokens": 5, "messages": [{"role": "user", "content": blocks}]}).request.messages[0]
    assert message.content == "Hello\nT\nhttps://e.org\nx"
    assert message.media[0].at == len(message.content) + 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ({"filename": "a.txt", "file_data": f"data:text/plain;base64,{TEXT}"}, "a.txt\n\nGröße"),
        ({"filename": "a.txt", "file_data": f"data:text/plain;charset=utf-8;base64,{TEXT}"}, "a.txt\n\nGröße"),
        ({"file_data": TEXT}, "Größe"),
        ({"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}, READ),
        ({"filename": "a.pdf", "file_data": PDF}, READ),
        ({"filename": "a.txt", "file_data": LATIN}, "a.txt (read as windows-1252)\n\nGröße"),
        ({"filename": "a.png", "file_data": PNG}, "[document omitted: a.png: it is an image, not text]"),
    ],
)
def test_files_of_openai(file: dict[str, Any], text: str) -> None:
    parts = [{"type": "file", "file": file}]
    assert openai_chat.read({"messages": [{"role": "user", "content": parts}]}).request.messages[0].content == text
    items = [{"role": "user", "content": [{"type": "input_file", **file}]}]
    assert openai_responses.read({"input": items}).request.messages[0].content == text


def test_a_document_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = base64.b64encode(pdf("Sent again with every question.")).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    first = claude(source)
    monkeypatch.setattr(attachments, "text_of", None)
    assert claude(source) == first


def test_a_file_elsewhere_is_refused() -> None:
    with pytest.raises(UsageError, match="without file_data"):
        openai_chat.read({"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f1"}}]}]})
