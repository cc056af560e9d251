"""Documents in the requests of clients: read in front of the model, while the server answers others."""

from __future__ import annotations

import base64
import threading
from pathlib import Path
from typing import Any

import pytest
from support.pdfs import pdf
from support.served import CHAT, LiveServer

from llmrun.server.protocols import attachments

pytestmark = pytest.mark.usefixtures("package_on_path")


def pdf_data(text: str) -> str:
    """Return a PDF in base64, shorter than the bodies that are parsed in another thread anyway."""
    return base64.b64encode(pdf(text)).decode()


def file(text: str) -> dict[str, Any]:
    part = {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{pdf_data(text)}"}}
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": " What is it?"}]}]}


def test_a_pdf_is_in_the_prompt(tmp_path: Path) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": pdf_data("A harvest.")}
    message = {"role": "user", "content": [{"type": "document", "source": source}, {"type": "text", "text": "What?"}]}
    with LiveServer(tmp_path, ("echo",), n_ctx=4096) as server:
        told = server.post(CHAT, file("A harvest.")).json["choices"][0]["message"]["content"]
        assert "a.pdf\n\n[page 1]\nA harvest. What is it?" in told
        told = server.post("/v1/messages", {"max_tokens": 99, "messages": [message]}).json["content"][0]["text"]
        assert "[page 1]\nA harvest.\nWhat?" in told


def test_others_are_answered_while_a_document_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, begun, goes_on, in_time = attachments.text_of, threading.Event(), threading.Event(), list[bool]()

    def waiting(*arguments: Any) -> Any:
        begun.set()
        in_time.append(goes_on.wait(300))
        return read(*arguments)

    monkeypatch.setattr(attachments, "text_of", waiting)
    with LiveServer(tmp_path, ("echo",), n_ctx=4096) as server:
        asking = threading.Thread(target=server.post, args=(CHAT, file("A slow one.")))
        asking.start()
        assert begun.wait(300)
        assert server.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}]}).status == 200
        goes_on.set()
        asking.join()
    assert in_time == [True]
