"""The process that reads documents, each in a fork of it, within limits of memory and processor time.

What is in the memory of the process before it forks are the readers alone: a document can't change how another is read.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
from contextlib import suppress

from llmrun.chat.documents.text import DocumentText, UnreadableError
from llmrun.system import disable_core_dumps

MAX_SECONDS = 60  # of processor time; on Windows, of time that passes
_MAX_MEMORY = 2 << 30  # bytes
_MAX_DEPTH = 10_000  # calls: pages and documents nest deeply
_IDLE_SECONDS = 60.0  # without a document, after which the process ends
_LIBRARIES = {"pdf": ("pypdf", "llmrun.chat.documents.pdf"), "word": ("llmrun.chat.documents.word",)}
_OF_PAGES = ("bs4", "lxml.etree", "markdownify", "llmrun.chat.documents.html")


def main() -> None:
    """Read documents from stdin, each after a line with its kind, see read_as(), and its length, until stdin ends.

    Each is answered on stdout: a line with the exit status of what read it and the length of the answer, then the text
    as JSON.
    """
    disable_core_dumps()
    sys.setrecursionlimit(_MAX_DEPTH)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while _comes() and (line := requests.readline()):
        kind, n_bytes = line.decode().split()
        data = requests.read(int(n_bytes))
        status, answer = _forked(kind, data)
        answers.write(b"%d %d\n" % (status, len(answer)) + answer)
        answers.flush()


def _comes() -> bool:
    """Wait for a document or the end of stdin; return False if the process was idle for too long."""
    return sys.platform == "win32" or bool(select.select([sys.stdin.fileno()], [], [], _IDLE_SECONDS)[0])


def _forked(kind: str, data: bytes) -> tuple[int, bytes]:
    """Read a document in a fork of this process, which has the libraries; return its exit status and its answer."""
    if sys.platform == "win32":  # which has no fork
        return 0, _answer(kind, data)
    for name in _LIBRARIES.get(kind, _OF_PAGES):
        with suppress(ImportError):  # the fork says which
            importlib.import_module(name)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            _limit()
            os.closerange(0, 2)  # those of the process that goes on
            with os.fdopen(writing, "wb") as out:
                out.write(_answer(kind, data))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def _limit() -> None:
    """Limit the memory and the processor time of this process."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 1))


def _answer(kind: str, data: bytes) -> bytes:
    """Return the text of a document, or why it has none, as JSON."""
    try:
        answer = read_as(kind, data)._asdict()
    except UnreadableError as error:
        answer = {"why": error.why, "hint": error.hint, "is_lasting": error.is_lasting}
    except ModuleNotFoundError as error:
        package = error.name or str(error)
        why = f"reading it needs the package {package}, which is not installed"
        answer = {"why": why, "hint": f"pip install {package}", "is_lasting": False}
    except Exception as error:  # a parser raises anything for a damaged file
        found = str(error)[:200]  # a sentence, or only a key that was not found
        why = f"it is damaged: {found}" if " " in found else "it is damaged"
        answer = {"why": why, "hint": "", "is_lasting": True}
    return json.dumps(answer).encode()


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
