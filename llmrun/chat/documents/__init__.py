"""The text of documents that are not plain text: PDFs, Word documents and web pages.

Documents are untrusted, and a parser can be made to run for ever or to fill the memory: another process reads each,
within limits. What it is, and the readers, are in the modules below; none of the readers is imported here.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from llmrun.chat.documents.process import read_elsewhere
from llmrun.chat.documents.reader import MAX_SECONDS
from llmrun.chat.documents.text import DocumentText
from llmrun.errors import UsageError
from llmrun.protocol.codec import load_json

Kind = Literal["pdf", "word", "html", "mhtml"]

MAX_DOCUMENT_BYTES = 64 << 20
"""Most of a document are fonts and pictures."""
_TOO_LONG = f"reading its text takes more than {MAX_SECONDS} seconds"
_READERS_VERSION = 1  # of the readers here: what could not be read is tried again with another one
_PACKAGES = ("pypdf", "cryptography", "beautifulsoup4", "markdownify")
_BEGINNING = 4096  # bytes
# A whole page; a fragment or a template is a page only by the name of its file.
_PAGE = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--(?:(?!-->).)*-->\s*)*<(?:!doctype\s+html|html|head|body)[\s>]",
    re.I | re.DOTALL,
)
_PAGE_NAME = re.compile(r"\.x?html?$", re.I)
_ARCHIVED_PAGE = re.compile(
    rb"(?=.*^mime-version:)(?=.*^content-type:\s*multipart/related)", re.I | re.DOTALL | re.MULTILINE
)


class DocumentError(UsageError):
    """A document has no text.

    Args:
        is_lasting: whether its bytes are the cause; otherwise something around it is, such as a missing package.
    """

    def __init__(self, what: str, *, why: str = "", hint: str = "", is_lasting: bool = True) -> None:
        super().__init__(what, why=why, hint=hint)
        self.is_lasting = is_lasting


def kind_of(data: bytes, name: str = "") -> Kind | None:
    """Return what kind of document a file is, by its content, or for fragments of HTML by its name; None for others."""
    if data.startswith(b"%PDF-"):
        return "pdf"
    if data.startswith(b"PK\x03\x04"):
        return "word" if b"word/" in data else None
    beginning = data[:_BEGINNING]
    if _PAGE.match(beginning) or (
        _PAGE_NAME.search(name) and beginning.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")
    ):
        return "html"
    return "mhtml" if _ARCHIVED_PAGE.match(beginning) else None


def readers() -> str:
    """Return the versions of what reads documents: a document that one of them could not read is tried with others."""
    found = [f"{_READERS_VERSION}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def read_document(data: bytes, name: str, max_bytes: int, kind: Kind) -> DocumentText:
    """Return the text of a document.

    Args:
        name: as errors call it.
        max_bytes: limit of the text.

    Raises:
        DocumentError: it has no text, is encrypted or damaged, or takes too long.
    """

    def refused(why: str, hint: str = "", *, is_lasting: bool = True) -> DocumentError:
        return DocumentError(f"{name!r} can't be attached", why=why, hint=hint, is_lasting=is_lasting)

    try:
        status, read = read_elsewhere(kind, data, MAX_SECONDS)
        if sys.platform != "win32" and status == -signal.SIGXCPU:
            raise refused(_TOO_LONG)
        answer = load_json(read)
    except subprocess.TimeoutExpired:
        raise refused(_TOO_LONG) from None
    except (OSError, ValueError):
        raise refused("reading its text needs too much memory, or the file is damaged") from None
    if "why" in answer:
        raise refused(**answer)
    document = DocumentText(**answer)
    if len(document.text.encode()) > max_bytes:
        raise refused(f"its text is larger than {max_bytes:,} bytes")
    return document
