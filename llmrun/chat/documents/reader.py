"""The process that reads one document, within limits of memory and processor time."""

from __future__ import annotations

import json
import sys

from llmrun.chat.documents.text import DocumentText, UnreadableError
from llmrun.system import disable_core_dumps

MAX_SECONDS = 60  # of processor time; on Windows, of time that passes
_MAX_MEMORY = 2 << 30  # bytes
_MAX_DEPTH = 10_000  # calls: pages and documents nest deeply


def main(kind: str) -> None:
    """Read a document from stdin, and write its text to stdout as JSON.

    Args:
        kind: one of read_as().
    """
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 1))
        disable_core_dumps()
    sys.setrecursionlimit(_MAX_DEPTH)
    data = sys.stdin.buffer.read()
    try:
        answer = read_as(kind, data)._asdict()
    except UnreadableError as error:
        answer = {"why": error.why, "hint": error.hint, "is_lasting": error.is_lasting}
    except ModuleNotFoundError as error:
        package = error.name or str(error)
        why = f"reading it needs the package {package}, which is not installed"
        answer = {"why": why, "hint": f"pip install {package}", "is_lasting": False}
    except Exception as error:  # a parser raises anything for a damaged file
        answer = {"why": f"it is damaged: {type(error).__name__}: {str(error)[:200]}", "hint": "", "is_lasting": True}
    sys.stdout.write(json.dumps(answer))


def read_as(kind: str, data: bytes) -> DocumentText:
    """Return the text of a document of a kind. Each reader is imported when it is needed.

    Raises:
        UnreadableError: it has no text.
    """
    if kind == "pdf":
        from llmrun.chat.documents.pdf import read_pdf

        return read_pdf(data)
    if kind == "word":
        from llmrun.chat.documents.word import read_word

        return read_word(data)
    from llmrun.chat.documents.html import read_archived_page, read_html

    return read_archived_page(data) if kind == "mhtml" else read_html(data)
