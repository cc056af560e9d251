"""The text of PDFs and Word documents, and what is said of those without one."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docx import Document
from pypdf import PdfReader, PdfWriter
from support.pdfs import pdf

from llmrun.chat import documents
from llmrun.chat.attachments import attach
from llmrun.chat.documents import DocumentError, Kind, kind_of, process, read_document, readers
from llmrun.errors import UsageError

pytestmark = pytest.mark.usefixtures("package_on_path")
MOST = 1 << 20


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """End the process that an earlier test has left, and the one that this one leaves: tests change its environment."""
    process.end_kept()
    yield
    process.end_kept()


def text_of(data: bytes, kind: Kind = "pdf") -> str:
    return read_document(data, "a.pdf", MOST, kind).text


def why(data: bytes, most: int = MOST, kind: Kind = "pdf") -> str:
    with pytest.raises(UsageError) as refused:
        read_document(data, "a.pdf", most, kind)
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
    assert kind_of(file.getvalue()) == "word"
    assert text_of(file.getvalue(), "word") == "Trees\nAn oak.\nheight\t20 m\nThe end."


def encrypted(password: str) -> bytes:
    writer, file = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf("secret")))), io.BytesIO()
    writer.encrypt(password, "owner", algorithm="RC4-128")
    writer.write(file)
    return file.getvalue()


def test_documents_without_a_text_say_why() -> None:
    assert "its pages are pictures (ocrmypdf" in why(pdf("", ""))
    assert "it is encrypted (qpdf" in why(encrypted("user"))
    assert text_of(encrypted("")) == "[page 1]\nsecret"
    assert "it is damaged" in why(pdf("text")[:400])
    assert "Error" not in why(pdf("text")[:400]), "a name of Python"
    assert "it is damaged" in why(b"PK\x03\x04 word/", kind="word")


@pytest.mark.skipif(sys.platform == "win32", reason="has no limit of processor time")
def test_a_document_that_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """if True:
        from llmrun.chat.documents import reader
        reader.MAX_SECONDS = 1
        def endless(kind, data):
            while True: pass
        reader.read_as = endless
        reader.main()"""
    monkeypatch.setattr(process, "_COMMAND", (sys.executable, "-c", code))
    assert "takes more than 60 seconds" in why(pdf("text"))


@pytest.mark.skipif(sys.platform == "win32", reason="has no fork")
def test_a_process_reads_several_documents_and_none_sees_another(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """if True:
        from llmrun.chat.documents import reader
        from llmrun.chat.documents.text import DocumentText
        seen = []
        def remember(kind, data):
            seen.append(data.decode())
            if data == b"dies": reader.os.abort()
            return DocumentText(" ".join(seen))
        reader.read_as = remember
        reader.main()"""
    monkeypatch.setattr(process, "_COMMAND", (sys.executable, "-c", code))
    assert text_of(b"one") == "one"
    (kept,) = process._kept
    assert "needs too much memory, or the file is damaged" in why(b"dies")
    assert text_of(b"two") == "two"
    assert process._kept == [kept]


@pytest.mark.skipif(sys.platform == "win32", reason="reads one document")
def test_a_process_that_was_idle_for_too_long_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """if True:
        from llmrun.chat.documents import reader
        reader._comes = iter((True, False)).__next__
        reader.main()"""
    monkeypatch.setattr(process, "_COMMAND", (sys.executable, "-c", code))
    assert text_of(pdf("one")) == "[page 1]\none"
    (kept,) = process._kept
    assert kept.wait(300) == 0
    assert text_of(pdf("two")) == "[page 1]\ntwo"
    assert process._kept != [kept]


def test_a_process_that_dies_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_COMMAND", (sys.executable, "-c", "import os; os.abort()"))
    assert "needs too much memory, or the file is damaged" in why(pdf("text"))


@pytest.mark.parametrize(
    ("beginning", "name", "kind"),
    [
        ("%PDF-1.7", "", "pdf"),
        ("<!DOCTYPE html><p>", "", "html"),
        ("\ufeff\n<!-- saved -->\n<HTML lang=en>", "", "html"),
        ("<?xml version='1.0'?>\n<html xmlns='x'>", "a.xhtml", "html"),
        ("<p>a fragment", "a.HTM", "html"),
        ("<p>a fragment", "a.txt", None),
        ("{% extends 'base' %}<p>", "a.html", None),
        ("<header>", "a.vue", None),
        ("Subject: a\nMIME-Version: 1.0\nContent-Type: multipart/related; boundary=x\n", "", "mhtml"),
        ("MIME-Version: 1.0\nContent-Type: text/plain\n", "", None),
        ("PK\x03\x04 xl/", "a.xlsx", None),
    ],
)
def test_documents_are_known_by_their_content(beginning: str, name: str, kind: str | None) -> None:
    assert kind_of(beginning.encode(), name) == kind


def test_a_text_of_many_comments_is_told_at_once() -> None:
    assert kind_of(b"<!--a-->" * 400 + b"<p>") is None
    assert kind_of(b"<!--a-->\n" * 400 + b"<html>") == "html"


def test_a_page_that_nests_deeply() -> None:
    assert text_of(b"<!doctype html>" + b"<div>" * 900 + b"deep", "html") == "deep"


def test_a_missing_package_is_not_the_documents_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pypdf.py").write_text("raise ModuleNotFoundError(name='pypdf')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(DocumentError, match="reading it needs the package pypdf, which is not installed") as refused:
        text_of(pdf("text"))
    assert (refused.value.hint, refused.value.is_lasting) == ("pip install pypdf", False)
    monkeypatch.undo()
    process.end_kept()
    with pytest.raises(DocumentError) as refused:
        text_of(pdf(""))
    assert refused.value.is_lasting


def test_the_readers_versions_change_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    before = readers()
    monkeypatch.setattr(documents, "_PACKAGES", ("pypdf", "no-such-package"))
    assert "pypdf" in before
    assert "no no-such-package" in readers()
