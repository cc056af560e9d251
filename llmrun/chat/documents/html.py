"""The text of web pages as Markdown: without scripts, navigation, and what a browser hides."""

from __future__ import annotations

import codecs
import email
import email.policy
import re
from typing import Any

from llmrun.chat.documents.text import DocumentText, UnreadableError
from llmrun.storage import DecodedText, decode_text

_UNSEEN = "script, style, template, noscript, [hidden], [aria-hidden=true], dialog:not([open])"
_NAVIGATION = "nav, [role=navigation], [role=menu], [role=menubar]"
_MARGINS = "header, footer, aside, menu, [class], [id]"  # navigation where most of their text are links
_NAMED = re.compile(
    r"(?:^|[-_\s])(?:(?:\w*nav(?:bar|igation)?)|(?:\w*menu)|sidebar|breadcrumbs?|toc)(?:$|[-_\s])", re.I
)
_HIDDEN = re.compile(r"(?:^|[;\s])(?:display\s*:\s*none|visibility\s*:\s*hidden)\b", re.I)
_BLANK_LINES = re.compile(r"\n{3,}")
_SCRIPTS = ("it has no text: its scripts write it", "print it to a PDF in a browser, or save what it shows as text")


def read_html(data: bytes) -> DocumentText:
    """Return the text of a page.

    Raises:
        UnreadableError: it has none.
    """
    decoded = _decoded(data)
    text = _markdown(decoded.text)
    if not text:
        raise UnreadableError(*_SCRIPTS)
    return DocumentText(text, decoded.note)


def read_archived_page(data: bytes) -> DocumentText:
    """Return the text of a page that a browser saved as one file (MHTML).

    Raises:
        UnreadableError: it has none.
    """
    message = email.message_from_bytes(data, policy=email.policy.default)
    for part in message.walk():
        if part.get_content_type() == "text/html":
            content = part.get_payload(decode=True)
            assert isinstance(content, bytes)
            charset = part.get_content_charset()
            page = read_html(content if charset is None else content.decode(charset, "replace").encode("utf-8-sig"))
            return DocumentText(page.text)
    raise UnreadableError("it has no page")


def _decoded(data: bytes) -> DecodedText:
    """Return the source of a page, in the encoding that it states, else in the one that its bytes suggest."""
    from bs4.dammit import EncodingDetector

    try:
        data.decode()
    except UnicodeDecodeError:
        stated = EncodingDetector.find_declared_encoding(data, is_html=True)
        try:
            if stated and codecs.lookup(stated).name not in ("utf-8", "utf-16"):
                return DecodedText(data.decode("cp1252" if codecs.lookup(stated).name == "iso8859-1" else stated))
        except (LookupError, UnicodeDecodeError):
            pass
    return decode_text(data, "the page can't be read")


def _markdown(source: str) -> str:
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(source, "lxml")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    for element in soup.select(f"head, {_UNSEEN}, {_NAVIGATION}"):
        element.decompose()
    for element in soup.select("[style]"):
        if not element.decomposed and _HIDDEN.search(str(element["style"])):
            element.decompose()
    for element in soup.select(_MARGINS):
        if not element.decomposed and _is_navigation(element):
            element.decompose()
    text = _BLANK_LINES.sub("\n\n", _converter().convert_soup(soup)).strip()
    return f"{title}\n\n{text}" if title and text and title not in text else text


def _is_navigation(element: Any) -> bool:
    """Return whether a margin, or an element whose name says so, consists of links for the most part."""
    names = " ".join((*element.get("class", ()), str(element.get("id", ""))))
    if element.name not in ("header", "footer", "aside", "menu") and not _NAMED.search(names):
        return False
    links = element.find_all("a")
    n_linked = sum(len("".join(link.get_text().split())) for link in links)
    return len(links) > 1 and n_linked * 2 > len("".join(element.get_text().split()))


def _converter() -> Any:
    """Return what turns elements into Markdown: links as their text, images as their description."""
    from markdownify import ATX, MarkdownConverter

    class Converter(MarkdownConverter):
        def convert_a(self, element: Any, text: str, parent_tags: set[str]) -> str:
            return "" if text.strip() in ("¶", "#") else text

        def convert_img(self, element: Any, text: str, parent_tags: set[str]) -> str:
            return str(element.get("alt") or "")

        def convert_input(self, element: Any, text: str, parent_tags: set[str]) -> str:
            kind = str(element.get("type", "text")).lower()
            if kind in ("checkbox", "radio"):
                return "☒ " if element.has_attr("checked") else "☐ "
            return "" if kind in ("hidden", "password") else str(element.get("value", ""))

    return Converter(
        heading_style=ATX, bullets="-", escape_asterisks=False, escape_underscores=False, escape_misc=False
    )
