"""The text of web pages: what a reader reads, without scripts and navigation, in the page's own encoding."""

from __future__ import annotations

import pytest

from llmrun.chat.documents.html import read_archived_page, read_html
from llmrun.chat.documents.text import UnreadableError


def text_of(body: str, head: str = "") -> str:
    return read_html(f"<!DOCTYPE html><html><head>{head}</head><body>{body}</body></html>".encode()).text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "<h1>Lamp</h1><p>It has <b>two</b> parts:<ul><li>a_b<li>c*d</ul>",
            "# Lamp\n\nIt has **two** parts:\n\n- a_b\n- c*d",
        ),
        ("<p>a</p><script>b()</script><style>c{}</style><noscript>d</noscript><template>e</template><p>f", "a\n\nf"),
        ("<nav><a href=/>Home</a></nav><div role=navigation>x</div><p>text", "text"),
        ("<header><a>Home</a> <a>Shop</a></header><p>text</p><footer><a>One</a> | <a>Two</a></footer>", "text"),
        (
            "<header><h1>Title</h1><a>by Ada</a></header><p>text</p><footer>Written in 1911. <a>Imprint</a></footer>",
            "# Title\n\nby Ada\n\ntext\n\nWritten in 1911. Imprint",
        ),
        (
            "<div class='main-menu'><a>Home</a><a>Shop</a></div><ul class=links><li><a>one</a><li><a>two</a></ul>",
            "- one\n- two",
        ),
        ("<p hidden>a</p><p style='color:red; display : none'>b</p><p aria-hidden=true>c</p><p>d", "d"),
        ("<p>See <a href='https://example.org/long'>the page</a><img src=x alt='a boat'>", "See the pagea boat"),
        ("<pre>  a\n    b</pre>", "```\n  a\n    b\n```"),
        ("<table><tr><th>a<th>b<tr><td>1<td>2</table>", "| a | b |\n| --- | --- |\n| 1 | 2 |"),
        (
            "<input type=checkbox checked>Yes <input value=Ada> <input type=hidden value=no><textarea>long</textarea>",
            "☒ Yes Ada long",
        ),
    ],
)
def test_pages(body: str, text: str) -> None:
    assert " ".join(text_of(body).split()) == " ".join(text.split())


def test_the_title_precedes_a_page_that_does_not_say_it() -> None:
    assert text_of("<p>text", "<title>A \n title</title>") == "A title\n\ntext"
    assert text_of("<h1>A title</h1>", "<title>A title</title>") == "# A title"


@pytest.mark.parametrize(
    ("data", "text", "note"),
    [
        ("<meta charset=windows-1251><p>мир".encode("cp1251"), "мир", ""),
        (
            "<meta http-equiv=Content-Type content='text/html; charset=shift_jis'><p>日本語".encode("shift_jis"),
            "日本語",
            "",
        ),
        ("<meta charset=iso-8859-1><p>5 €".encode("cp1252"), "5 €", ""),
        ("<meta charset=utf-8><p>Größe".encode("cp1252"), "Größe", "read as windows-1252"),
        ("<meta charset=no-such><p>Größe".encode("cp1252"), "Größe", "read as windows-1252"),
        ("<p>Größe".encode("utf-16"), "Größe", ""),
        ("<meta charset=iso-8859-1><p>Größe".encode(), "Größe", ""),
    ],
)
def test_encodings(data: bytes, text: str, note: str) -> None:
    assert read_html(data) == (text, note)


def test_pages_without_text() -> None:
    with pytest.raises(UnreadableError, match="its scripts write it"):
        text_of("<div id=root></div><script src=app.js></script>", "<title>App</title>")


def test_a_page_saved_with_its_pictures() -> None:
    head = "MIME-Version: 1.0\r\nContent-Type: multipart/related; boundary=x\r\n\r\n--x\r\n"
    page = "Content-Type: text/html; charset=windows-1252\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n"
    page += "<p>Gr=F6=DFe</p>"
    assert read_archived_page(f"{head}{page}\r\n--x--\r\n".encode()).text == "Größe"
    with pytest.raises(UnreadableError, match="no page"):
        read_archived_page(b"MIME-Version: 1.0\nContent-Type: multipart/related; boundary=x\n\n--x--\n")
