"""Documents in messages: text is read, others are named."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from llmrun.errors import UsageError
from llmrun.server.protocols import anthropic, openai_chat, openai_responses

TEXT, PDF = (base64.b64encode(data).decode() for data in ("Größe".encode(), b"%PDF-1.7 \xff"))
OMITTED = "[document omitted: a.pdf is PDF, and only text is read]"


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


def test_a_pdf_is_named() -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": PDF}
    assert claude(source, title="a.pdf") == f"Read\n{OMITTED}"
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
    assert message.pictures[0].at == len(message.content) + 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ({"filename": "a.txt", "file_data": f"data:text/plain;base64,{TEXT}"}, "a.txt\n\nGröße"),
        ({"filename": "a.txt", "file_data": f"data:text/plain;charset=utf-8;base64,{TEXT}"}, "a.txt\n\nGröße"),
        ({"file_data": TEXT}, "Größe"),
        ({"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}, OMITTED),
        ({"filename": "a.pdf", "file_data": PDF}, OMITTED),
    ],
)
def test_files_of_openai(file: dict[str, Any], text: str) -> None:
    parts = [{"type": "file", "file": file}]
    assert openai_chat.read({"messages": [{"role": "user", "content": parts}]}).request.messages[0].content == text
    items = [{"role": "user", "content": [{"type": "input_file", **file}]}]
    assert openai_responses.read({"input": items}).request.messages[0].content == text


def test_a_file_elsewhere_is_refused() -> None:
    with pytest.raises(UsageError, match="without file_data"):
        openai_chat.read({"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f1"}}]}]})
