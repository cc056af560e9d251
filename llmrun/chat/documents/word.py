"""The text of Word documents: a walk over their XML that takes what Word shows, once and in order.

Deleted and hidden text is left out. Footnotes, endnotes, comments and the text of boxes follow their paragraph; headers
precede the document, footers end it. Elements are known by their names without namespaces, so that the two variants of
ECMA-376, transitional and strict, are one.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from xml.etree.ElementTree import Element

from llmrun.chat.documents.html import read_archived_page, read_html
from llmrun.chat.documents.numbering import Numbering
from llmrun.chat.documents.package import Part, attribute, child, is_on, local_name
from llmrun.chat.documents.text import DocumentText, UnreadableError
from llmrun.storage import decode_text

_LEFT_OUT = frozenset({"del", "moveFrom"})
_NOTES = {"footnoteReference": "footnotes", "endnoteReference": "endnotes"}
_CHARACTERS = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
_SHOWN = frozenset(("t", "sym", "fldChar", "txbxContent", "textpath", "commentReference", "ruby", "relIds", "chart"))
_INLINE = frozenset((*_SHOWN, *_CHARACTERS, *_NOTES))
_BLOCKS = frozenset(("p", "tbl", "altChunk"))
# Characters of Wingdings and Symbol, which documents write at U+F000; the boxes are the ones of forms.
_SYMBOLS = {0x6F: "☐", 0xA8: "☐", 0xFB: "✘", 0xFC: "✔", 0xFD: "☒", 0xFE: "☑", 0xB7: "•", 0xA7: "▪", 0xE0: "→"}


def read_word(data: bytes) -> DocumentText:
    """Return the text of a .docx or .docm file.

    Raises:
        UnreadableError: it has none.
    """
    document = _Document(zipfile.ZipFile(io.BytesIO(data)))
    text = "\n".join(document.lines()).strip()
    if not text:
        raise UnreadableError("it has no text")
    return DocumentText(text, document.note)


class _Document:
    """A document, and what its parts share.

    Attributes:
        numbering: of its lists and headings.
    """

    def __init__(self, package: zipfile.ZipFile) -> None:
        self._main = Part.main_of(package)
        styles, settings = self._main.related("styles"), self._main.related("settings")
        self._hidden = {
            attribute(style, "styleId")
            for style in (styles.root if styles else ())
            if is_on(child(style, "rPr"), "vanish")
        }
        self._has_even_pages = settings is not None and is_on(settings.root, "evenAndOddHeaders")
        self.numbering = Numbering(self._main.related("numbering"), styles)
        self._notes = {kind: self._main.related(kind) for kind in ("footnotes", "endnotes", "comments")}
        self._n_notes = self.n_charts = 0
        self.unread: list[str] = []

    @property
    def note(self) -> str:
        """What is left out; "" for nothing."""
        charts = f"{self.n_charts} chart{'s' * (self.n_charts > 1)}"
        left_out = [*([charts] if self.n_charts else []), *self.unread]
        return f"left out: {', '.join(left_out)}" if left_out else ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the document."""
        yield from self._margin("header")
        yield from _Walker(self, self._main).lines(self._main.root)
        yield from self._margin("footer")

    def is_hidden(self, run: Element) -> bool:
        """Return whether Word does not show the text of a run."""
        properties = child(run, "rPr")
        style = child(properties, "rStyle")
        return is_on(properties, "vanish") or (style is not None and attribute(style, "val") in self._hidden)

    def note_text(self, kind: str, reference: Element) -> str:
        """Return a footnote, an endnote or a comment by its reference; "" if it is missing."""
        part, wanted = self._notes[kind], attribute(reference, "id")
        note = next((each for each in (part.root if part else ()) if attribute(each, "id") == wanted), None)
        if part is None or note is None:
            return ""
        text = "\n".join(_Walker(self, part).lines(note)).strip()
        author = attribute(note, "author")
        return f"[comment{' by ' * bool(author)}{author}: {text}]" if kind == "comments" else text

    def next_note(self) -> int:
        """Return the number of the next footnote or endnote."""
        self._n_notes += 1
        return self._n_notes

    def _margin(self, kind: str) -> Iterator[str]:
        """Yield the lines of the headers, or of the footers, each once."""
        lines = [line for part in self._margins(kind) for line in _Walker(self, part).lines(part.root)]
        yield from (f"[{kind}] {line.strip()}" for line in dict.fromkeys(lines) if line.strip())

    def _margins(self, kind: str) -> Iterator[Part]:
        for section in self._main.root.iter():
            for reference in section if local_name(section) == "sectPr" else ():
                pages = attribute(reference, "type")
                is_used = (pages != "first" or is_on(section, "titlePg")) and (pages != "even" or self._has_even_pages)
                part = self._main.part(attribute(reference, "id")) if is_used else None
                if local_name(reference) == f"{kind}Reference" and part is not None:
                    yield part


class _Walker:
    """A walk over a part of a document, or over a box in it."""

    def __init__(self, document: _Document, part: Part) -> None:
        self._document, self._part = document, part
        self._fields: list[bool] = []  # those open: whether the walk is in the code, which Word does not show
        self._after: list[str] = []  # lines that follow the paragraph

    def lines(self, element: Element) -> Iterator[str]:
        """Yield the lines of the paragraphs and tables in an element."""
        held = ""  # the text of paragraphs whose end is deleted: they continue in the next one
        for block in self._nearest(element, _BLOCKS):
            if local_name(block) == "tbl":
                yield from self._rows(block)
            elif local_name(block) == "altChunk":
                yield from self._embedded(attribute(block, "id"))
            else:
                properties = child(block, "pPr")
                held += self._text(block)
                mark = child(properties, "rPr")
                if any(child(mark, name) is not None for name in _LEFT_OUT):
                    continue
                yield f"{self._document.numbering.label(properties)}{held}"
                held = ""
            yield from self._after
            self._after = []
        if held or self._after:
            yield from (held, *self._after)

    def _rows(self, table: Element) -> Iterator[str]:
        for row in self._nearest(table, frozenset(("tr",))):
            if child(child(row, "trPr"), "del") is None:
                yield "\t".join(map(self._cell, self._nearest(row, frozenset(("tc",)))))

    def _cell(self, cell: Element) -> str:
        """Return the text of a cell; none if it only continues one that is merged with it, or is deleted."""
        properties = child(cell, "tcPr")
        merged = (child(properties, "vMerge"), child(properties, "hMerge"))
        if child(properties, "cellDel") is not None or any(
            each is not None and attribute(each, "val") in ("", "continue") for each in merged
        ):
            return ""
        return "\n".join(_Walker(self._document, self._part).lines(cell))

    def _text(self, element: Element) -> str:
        """Return what an element shows in its line."""
        return "".join(map(self._shown, self._nearest(element, _INLINE)))

    def _shown(self, element: Element) -> str:
        name = local_name(element)
        if name == "fldChar":
            return self._field(element)
        if any(self._fields):
            return ""
        if name in _CHARACTERS:
            return _CHARACTERS[name]
        if name == "sym":
            code = int(attribute(element, "char") or "0", 16)
            return _SYMBOLS.get(code & 0xFF, chr(code)) if code >> 8 == 0xF0 else chr(code)
        if name == "ruby":
            base, reading = (child(element, each) for each in ("rubyBase", "rt"))
            return "".join((self._text_of(base), f"({self._text_of(reading)})" if reading is not None else ""))
        if name in _NOTES:
            text, number = self._document.note_text(_NOTES[name], element), self._document.next_note()
            self._after += [f"[^{number}]: {text}"] if text else []
            return f"[^{number}]" if text else ""
        if name == "t":
            return element.text or ""
        self._after += self._beside(name, element)
        return ""

    def _text_of(self, element: Element | None) -> str:
        return "" if element is None else self._text(element)

    def _beside(self, name: str, element: Element) -> Iterable[str]:
        """Return the lines of what stands beside a paragraph: a box, a comment, a diagram."""
        if name == "txbxContent":
            return list(_Walker(self._document, self._part).lines(element))
        if name == "textpath":  # WordArt of older documents
            return filter(None, (attribute(element, "string"),))
        if name == "commentReference":
            return filter(None, (self._document.note_text("comments", element),))
        if name == "relIds" and (diagram := self._part.part(attribute(element, "dm"))) is not None:
            return filter(None, _Walker(self._document, diagram).lines(diagram.root))
        self._document.n_charts += name == "chart"
        return ()

    def _field(self, element: Element) -> str:
        """Follow the marks of a field, and return the value of a box or a choice in a form."""
        kind = attribute(element, "fldCharType")
        if kind == "begin":
            self._fields.append(True)
            return _form_value(child(element, "ffData"))
        if self._fields and kind == "separate":
            self._fields[-1] = False
        elif self._fields:
            self._fields.pop()
        return ""

    def _nearest(self, element: Element, names: frozenset[str]) -> Iterator[Element]:
        """Yield the descendants with these names, in order, but not those inside them or what is not shown."""
        for each in element:
            name = local_name(each)
            if name in names:
                yield each
            elif name == "AlternateContent":
                yield from self._nearest(_choice(each), names)
            elif not (name in _LEFT_OUT or name.endswith("Pr") or (name == "r" and self._document.is_hidden(each))):
                yield from self._nearest(each, names)

    def _embedded(self, name: str) -> Iterator[str]:
        """Yield the lines of a whole file of another format, which Word shows in its place."""
        data = self._part.bytes_of(name)
        if data is None:
            return
        beginning = data[:1024].lower()
        if data.startswith(b"PK"):
            yield from _Document(zipfile.ZipFile(io.BytesIO(data))).lines()
        elif data.startswith(b"{\\rtf"):
            self._document.unread.append("a part in RTF")
        elif b"mime-version" in beginning or b"<" in beginning:
            with suppress(UnreadableError):
                page = read_archived_page(data) if b"mime-version" in beginning else read_html(data)
                yield from page.text.split("\n")
        else:
            yield from decode_text(data, "").text.split("\n")


def _choice(alternatives: Element) -> Element:
    """Return the alternative that is shown: the first one with a text, else the first."""
    shown = (each for each in alternatives if any(local_name(below) in _SHOWN for below in each.iter()))
    return next(shown, alternatives[0] if len(alternatives) else alternatives)


def _form_value(form: Element | None) -> str:
    """Return the value of a check box or of a list of a form; "" for other fields."""
    box, choices = child(form, "checkBox"), child(form, "ddList")
    if box is not None:
        return "☒" if is_on(box, "checked" if child(box, "checked") is not None else "default") else "☐"
    if choices is None:
        return ""
    entries = [attribute(each, "val") for each in choices if local_name(each) == "listEntry"]
    chosen = child(choices, "result") if child(choices, "result") is not None else child(choices, "default")
    index = int(attribute(chosen, "val") or "0") if chosen is not None else 0
    return entries[index] if index < len(entries) else ""
