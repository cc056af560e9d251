"""The text of PDFs and Word documents, and what is said of those without one."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from docx import Document
from fpdf import FPDF
from pypdf import PdfReader, PdfWriter

from llmrun.chat import documents
from llmrun.chat.attachments import attach
from llmrun.chat.documents import is_document, read_document
from llmrun.errors import UsageError

pytestmark = pytest.mark.usefixtures("package_on_path")
MOST = 1 << 20


def pdf(*pages: str) -> bytes:
    """Return a PDF; a page without a text has a line drawn on it."""
    made = FPDF()
    made.set_font("helvetica", size=12)
    for text in pages:
        made.add_page()
        if text:
            made.multi_cell(0, 6, text)
        else:
            made.line(1, 1, 100, 100)
    return bytes(made.output())


def why(data: bytes, most: int = MOST) -> str:
    with pytest.raises(UsageError) as refused:
        read_document(data, "a.pdf", most)
    assert refused.value.what == "'a.pdf' can't be attached"
    return f"{refused.value.why} ({refused.value.hint})"


def test_each_page_of_a_pdf_has_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("report.pdf").write_bytes(pdf("The harvest of 1911 was poor.", "", "The next one was better: \xfc, \xe9."))
    attached = attach(["report.pdf"])
    text = "[page 1]\nThe harvest of 1911 was poor.\n\n[page 3]\nThe next one was better: \xfc, \xe9."
    assert attached.files[0].text == text
    assert attached.files[0].n_bytes == len(text.encode())
    assert attached.notes == ("report.pdf: 1 of 3 pages have no text, such as page 2",)
    assert attached.block == f"report.pdf:\n```\n{text}\n```"


def test_a_large_pdf_is_taken_and_its_text_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("large.pdf").write_bytes(pdf("short") + b"%" + b"x" * (5 << 20))
    assert attach(["large.pdf"]).files[0].text == "[page 1]\nshort"
    assert "its text is larger than 10 bytes" in why(pdf("longer than ten bytes"), 10)


def test_a_word_document(tmp_path: Path) -> None:
    made, file = Document(), io.BytesIO()
    made.add_heading("Trees", 1)
    made.add_paragraph("An oak.")
    table = made.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "height", "20 m"
    made.add_paragraph("The end.")
    made.save(file)
    assert is_document(file.getvalue())
    assert read_document(file.getvalue(), "a.docx", MOST).text == "Trees\nAn oak.\nheight\t20 m\nThe end."


def encrypted(password: str) -> bytes:
    writer, file = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf("secret")))), io.BytesIO()
    writer.encrypt(password, "owner", algorithm="RC4-128")
    writer.write(file)
    return file.getvalue()


def test_documents_without_a_text_say_why() -> None:
    assert "its pages are pictures (ocrmypdf" in why(pdf("", ""))
    assert "it is encrypted (qpdf" in why(encrypted("user"))
    assert read_document(encrypted(""), "a.pdf", MOST).text == "[page 1]\nsecret"
    assert "it is damaged" in why(pdf("text")[:400])
    assert "it is damaged" in why(b"PK\x03\x04 word/")


@pytest.mark.skipif(sys.platform == "win32", reason="has no limit of processor time")
def test_a_document_that_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """if True:
        from llmrun.chat import documents
        documents._MAX_SECONDS = 1
        def endless(data):
            while True: pass
        documents._pdf = endless
        documents.main()"""
    monkeypatch.setattr(documents, "_COMMAND", (sys.executable, "-c", code))
    assert "takes more than 60 seconds" in why(pdf("text"))


def test_a_process_that_dies_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_MAX_MEMORY", 1)
    monkeypatch.setattr(documents, "_COMMAND", (documents.sys.executable, "-c", "import os; os.abort()"))
    assert "needs too much memory, or the file is damaged" in why(pdf("text"))
