"""The text of documents that are not plain text: PDF and Word's .docx.

Documents are untrusted, and a parser can be made to run for ever or to fill the memory: a process of its own reads
each, within limits.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from typing import NamedTuple

from llmrun.errors import UsageError
from llmrun.protocol.codec import load_json
from llmrun.system import disable_core_dumps

MAX_DOCUMENT_BYTES = 64 << 20
"""Most of a document are fonts and pictures."""
_MAX_SECONDS = 60  # of processor time; on Windows, of time that passes
_TOO_LONG = f"reading its text takes more than {_MAX_SECONDS} seconds"
_MAX_MEMORY = 2 << 30  # bytes
_ROOT = os.path.abspath(os.sep)  # noqa: PTH100 - nothing in the user's folder may shadow a module
_COMMAND = (sys.executable, "-c", "from llmrun.chat.documents import main; main()")


class DocumentText(NamedTuple):
    """The text of a document.

    Attributes:
        text: of a PDF, with a line "[page N]" before each page.
        note: which pages have no text; empty if all have.
    """

    text: str
    note: str = ""


class _UnreadableError(Exception):
    """A document has no text; with the reason and a hint."""


def is_document(data: bytes) -> bool:
    """Return whether a file is a PDF or a Word document."""
    return data.startswith(b"%PDF-") or (data.startswith(b"PK\x03\x04") and b"word/" in data)


def read_document(data: bytes, name: str, max_bytes: int) -> DocumentText:
    """Return the text of a document.

    Args:
        name: as errors call it.
        max_bytes: limit of the text.

    Raises:
        UsageError: it has no text, is encrypted or damaged, or takes too long.
    """

    def refused(why: str, hint: str = "") -> UsageError:
        return UsageError(f"{name!r} can't be attached", why=why, hint=hint)

    seconds = _MAX_SECONDS if sys.platform == "win32" else None  # main() limits itself elsewhere
    try:
        read = subprocess.run(_COMMAND, input=data, capture_output=True, timeout=seconds, cwd=_ROOT)
    except subprocess.TimeoutExpired:
        raise refused(_TOO_LONG) from None
    if sys.platform != "win32" and read.returncode == -signal.SIGXCPU:
        raise refused(_TOO_LONG)
    try:
        answer = load_json(read.stdout)
    except ValueError:
        raise refused("reading its text needs too much memory, or the file is damaged") from None
    if "why" in answer:
        raise refused(answer["why"], answer["hint"])
    document = DocumentText(**answer)
    if len(document.text.encode()) > max_bytes:
        raise refused(f"its text is larger than {max_bytes:,} bytes")
    return document


def main() -> None:
    """Read a document from stdin, and write its text to stdout as JSON."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (_MAX_SECONDS, _MAX_SECONDS + 1))
        disable_core_dumps()
    data = sys.stdin.buffer.read()
    try:
        answer = (_pdf(data) if data.startswith(b"%PDF-") else _docx(data))._asdict()
    except _UnreadableError as error:
        answer = dict(zip(("why", "hint"), error.args, strict=True))
    except Exception as error:  # a parser raises anything for a damaged file
        answer = {"why": f"it is damaged: {type(error).__name__}: {str(error)[:200]}", "hint": ""}
    sys.stdout.write(json.dumps(answer))


def _pdf(data: bytes) -> DocumentText:
    import logging

    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    logging.disable()  # pypdf's warnings about what it repairs
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise _UnreadableError("it is encrypted", "qpdf --decrypt --password=PASSWORD FILE OUT.pdf decrypts it")
        pages = [page.extract_text().strip() for page in reader.pages]
    except DependencyError:
        raise _UnreadableError("it is encrypted with AES", "qpdf --decrypt FILE OUT.pdf decrypts it") from None
    empty = [number for number, text in enumerate(pages, 1) if not text]
    if len(empty) == len(pages):
        raise _UnreadableError("it has no text: its pages are pictures", "ocrmypdf FILE OUT.pdf adds their text")
    note = f"{len(empty)} of {len(pages)} pages have no text, such as page {empty[0]}" if empty else ""
    return DocumentText("\n\n".join(f"[page {number}]\n{text}" for number, text in enumerate(pages, 1) if text), note)


def _docx(data: bytes) -> DocumentText:
    try:
        from docx import Document
        from docx.table import Table
    except ModuleNotFoundError:
        raise _UnreadableError(
            "Word documents need the python-docx package, which is not installed", "pip install 'llmrun[docx]'"
        ) from None
    lines: list[str] = []
    for block in Document(io.BytesIO(data)).iter_inner_content():
        if isinstance(block, Table):
            lines += ["\t".join(cell.text for cell in row.cells) for row in block.rows]
        else:
            lines.append(block.text)
    text = "\n".join(lines).strip()
    if not text:
        raise _UnreadableError("it has no text", "")
    return DocumentText(text)
