"""The text of PDFs: of their pages, what was typed into their forms and onto their pages, and comments."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from typing import Any

from llmrun.chat.documents.text import DocumentText, UnreadableError

_HIDDEN = 1 << 1 | 1 << 5  # flags of an annotation: hidden, no view
_PASSWORD = 1 << 13  # flag of a text field
_PUSH_BUTTON = 1 << 16  # flag of a button
_MOST_PARENTS = 32
_COMMENTS = frozenset(
    ("/Text", "/Highlight", "/Underline", "/Squiggly", "/StrikeOut", "/Caret", "/Square", "/Circle", "/Line", "/Stamp")
)
_DATA = re.compile(r"\{http://www\.xfa\.org/schema/xfa-data/[\d.]+/\}data")


def read_pdf(data: bytes) -> DocumentText:
    """Return the text of a PDF.

    Raises:
        UnreadableError: it has none, or is encrypted.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    logging.disable()  # pypdf's warnings about what it repairs
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableError("it is encrypted", "qpdf --decrypt --password=PASSWORD FILE OUT.pdf decrypts it")
        form = _Form(reader)
        pages = ["\n".join(filter(None, (page.extract_text().strip(), *form.lines(page)))) for page in reader.pages]
    except DependencyError:
        hint = "pip install 'pypdf[crypto]', or qpdf --decrypt FILE OUT.pdf"
        raise UnreadableError("it is encrypted with AES", hint, is_lasting=False) from None
    rest = "\n".join(form.rest())
    empty = [number for number, text in enumerate(pages, 1) if not text]
    if len(empty) == len(pages) and not rest:
        raise UnreadableError("it has no text: its pages are pictures", "ocrmypdf FILE OUT.pdf adds their text")
    note = f"{len(empty)} of {len(pages)} pages have no text, such as page {empty[0]}" if empty else ""
    texts = [f"[page {number}]\n{text}" for number, text in enumerate(pages, 1) if text]
    return DocumentText("\n\n".join((*texts, *filter(None, (rest,)))), note)


class _Form:
    """The values of a form's fields and the other annotations, each once."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._seen: set[str] = set()

    def lines(self, page: Any) -> Iterator[str]:
        """Yield what was typed on a page."""
        for reference in _list(page.get("/Annots")):
            annotation = _resolved(reference)
            if not isinstance(annotation, dict) or _number(annotation.get("/F")) & _HIDDEN:
                continue
            kind, contents = annotation.get("/Subtype"), _text(annotation.get("/Contents")).strip()
            if kind == "/Widget":
                yield from self._value(annotation)
            elif kind == "/FreeText" and contents:
                yield contents
            elif kind in _COMMENTS and contents:
                author = _text(annotation.get("/T")).strip()
                yield f"[comment{' by ' * bool(author)}{author}: {contents}]"

    def rest(self) -> Iterator[str]:
        """Yield the values of fields that no page shows, and those of a form in XML (XFA) without such fields."""
        root = _resolved(self._reader.trailer.get("/Root")) or {}
        form = _resolved(root.get("/AcroForm")) or {}
        for field in _leaves(_list(form.get("/Fields"))):
            if "/T" in field and not _number(field.get("/F")) & _HIDDEN:
                yield from self._value(field)
        if not self._seen:
            yield from self._xml_values()

    def _value(self, field: dict[str, Any]) -> Iterator[str]:
        """Yield the name and the value of a field that has one."""
        name, flags, kind = _full_name(field), _number(_inherited(field, "/Ff")), _inherited(field, "/FT")
        value = _inherited(field, "/V")
        if (name and name in self._seen) or value is None or (kind == "/Tx" and flags & _PASSWORD):
            return
        if kind == "/Btn" and flags & _PUSH_BUTTON:
            return
        self._seen.add(name)
        shown = "signed" if kind == "/Sig" else self._shown(field, value)
        if shown.strip():
            yield f"{name}: {shown}" if name else shown

    def _shown(self, field: dict[str, Any], value: Any) -> str:
        """Return a value as a viewer shows it: an option by the text that stands for it."""
        values = _list(value) if isinstance(value, list) else [value]
        options = [
            _list(each) if isinstance(_resolved(each), list) else [each] for each in _list(_inherited(field, "/Opt"))
        ]
        texts = {_text(each[0]): _text(each[-1]) for each in options if each}
        if _inherited(field, "/FT") == "/Btn":
            texts = {str(number): _text(each[-1]) for number, each in enumerate(options) if each}
        return ", ".join(texts.get(text, text) for text in map(_text, values))

    def _xml_values(self) -> Iterator[str]:
        from xml.etree import ElementTree

        data = (self._reader.xfa or {}).get("datasets")
        root = ElementTree.fromstring(data) if data else None  # noqa: S314
        for part in () if root is None else root.iter():
            for field in part.iter() if _DATA.fullmatch(str(part.tag)) else ():
                if not len(field) and (field.text or "").strip():
                    yield f"{str(field.tag).rpartition('}')[2]}: {field.text}"


def _leaves(fields: list[Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the fields without fields below them."""
    for reference in fields:
        field = _resolved(reference)
        if not isinstance(field, dict) or depth > _MOST_PARENTS:
            continue
        below = _list(field.get("/Kids"))
        if any("/T" in (_resolved(each) or {}) for each in below):
            yield from _leaves(below, depth + 1)
        else:
            yield field


def _full_name(field: dict[str, Any]) -> str:
    names = [_text(each["/T"]) for each in _upwards(field) if "/T" in each]
    return ".".join(reversed(names))


def _inherited(field: dict[str, Any], key: str) -> Any:
    return next((_resolved(each[key]) for each in _upwards(field) if key in each), None)


def _upwards(field: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a field and its parents."""
    for _ in range(_MOST_PARENTS):
        yield field
        parent = _resolved(field.get("/Parent"))
        if not isinstance(parent, dict):
            return
        field = parent


def _resolved(value: Any) -> Any:
    """Return what a reference leads to."""
    return value.get_object() if hasattr(value, "get_object") else value


def _list(value: Any) -> list[Any]:
    found = _resolved(value)
    return list(found) if isinstance(found, list) else []


def _number(value: Any) -> int:
    found = _resolved(value)
    return int(found) if isinstance(found, int) else 0


def _text(value: Any) -> str:
    """Return a string, a name without its slash, or the text of a stream."""
    found = _resolved(value)
    if hasattr(found, "get_data"):
        found = found.get_data()
    if isinstance(found, bytes):
        return found.decode("utf-16" if found.startswith((b"\xfe\xff", b"\xff\xfe")) else "utf-8", "replace")
    return "" if found is None else str(found).removeprefix("/") if type(found).__name__ == "NameObject" else str(found)
