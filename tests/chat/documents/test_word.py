"""What Word shows of a document, once and in order; deleted and hidden text not at all."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

import pytest

from llmrun.chat.documents.text import UnreadableError
from llmrun.chat.documents.word import read_word

OFFICE = "http://schemas.openxmlformats.org/"
SPACES = {
    "w": f"{OFFICE}wordprocessingml/2006/main",
    "r": f"{OFFICE}officeDocument/2006/relationships",
    "mc": f"{OFFICE}markup-compatibility/2006",
    "m": f"{OFFICE}officeDocument/2006/math",
    "a": f"{OFFICE}drawingml/2006/main",
    "c": f"{OFFICE}drawingml/2006/chart",
    "dgm": f"{OFFICE}drawingml/2006/diagram",
    "wps": "http://schemas.microsoft.com/office/word/2010/wordprocessingShape",
    "v": "urn:schemas-microsoft-com:vml",
}
NAMES = " ".join(f'xmlns:{name}="{address}"' for name, address in SPACES.items())


def docx(body: str, parts: Mapping[str, str | bytes] | None = None, strict: bool = False) -> bytes:
    """Return a document; its other parts are related by their names without an extension."""
    parts, file = parts or {}, io.BytesIO()
    names = NAMES.replace(SPACES["w"], "http://purl.oclc.org/ooxml/wordprocessingml/main") if strict else NAMES
    with zipfile.ZipFile(file, "w") as package:

        def relate(path: str, targets: Mapping[str, str]) -> None:
            rows = (
                f'<Relationship Id="{name}" Type="{SPACES["r"]}/{name.rstrip("0123456789")}" Target="{target}"/>'
                for name, target in targets.items()
            )
            package.writestr(
                path, f'<Relationships xmlns="{OFFICE}package/2006/relationships">{"".join(rows)}</Relationships>'
            )

        relate("_rels/.rels", {"officeDocument": "word/document.xml"})
        relate("word/_rels/document.xml.rels", {name.partition(".")[0]: name for name in parts})
        package.writestr("word/document.xml", f"<w:document {names}><w:body>{body}</w:body></w:document>")
        for name, content in parts.items():
            package.writestr(f"word/{name}", content if isinstance(content, bytes) else f"<w:x {NAMES}>{content}</w:x>")
    return file.getvalue()


def text_of(body: str, **parts: str) -> str:
    return read_word(docx(body, {f"{name}.xml": content for name, content in parts.items()})).text


def p(*inside: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr>{''.join(inside)}</w:p>"


def r(text: str, properties: str = "") -> str:
    return f"<w:r><w:rPr>{properties}</w:rPr><w:t>{text}</w:t></w:r>"


def field(kind: str, form: str = "") -> str:
    return f'<w:r><w:fldChar w:fldCharType="{kind}">{form}</w:fldChar></w:r>'


def row(*cells: str, properties: str = "") -> str:
    return f"<w:tr><w:trPr>{properties}</w:trPr>{''.join(cells)}</w:tr>"


def cell(inside: str, properties: str = "") -> str:
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{inside}</w:tc>"


def table(*rows: str) -> str:
    return f"<w:tbl><w:tblGrid/>{''.join(rows)}</w:tbl>"


def control(inside: str) -> str:
    return f"<w:sdt><w:sdtPr><w:alias w:val='name'/></w:sdtPr><w:sdtContent>{inside}</w:sdtContent></w:sdt>"


def box(inside: str) -> str:
    content = f"<w:txbxContent>{inside}</w:txbxContent>"
    new = f"<mc:Choice Requires='wps'><w:drawing><wps:txbx>{content}</wps:txbx></w:drawing></mc:Choice>"
    old = f"<mc:Fallback><w:pict><v:textbox>{content}</v:textbox></w:pict></mc:Fallback>"
    return f"<w:r><mc:AlternateContent>{new}{old}</mc:AlternateContent></w:r>"


DELETED = '<w:del w:id="1"><w:r><w:delText>gone</w:delText></w:r></w:del>'


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (p(r("We pay "), f"<w:ins>{r('nine')}</w:ins>", DELETED, r(" euros.")), "We pay nine euros."),
        (p(r("a"), f"<w:moveFrom>{r('here')}</w:moveFrom>", r("b"), f"<w:moveTo>{r('there')}</w:moveTo>"), "abthere"),
        (control(p(r("Title"))) + p(r("Name: "), control(r("Ada"))), "Title\nName: Ada"),
        (p(f"<w:smartTag>{r('Berlin')}</w:smartTag>", f"<w:fldSimple>{r(' 2026')}</w:fldSimple>"), "Berlin 2026"),
        (p(f"<w:hyperlink>{r('a link')}</w:hyperlink>", f"<w:dir><w:bdo>{r(' on')}</w:bdo></w:dir>"), "a link on"),
        (p(r("before "), box(p(r("in a box"))), r("after")) + p(r("next")), "before after\nin a box\nnext"),
        (p("<w:r><w:pict><v:shape><v:textpath string='DRAFT'/></v:shape></w:pict></w:r>", r("text")), "text\nDRAFT"),
        (p(r("seen"), r(" hidden", "<w:vanish/>"), r(" again", '<w:vanish w:val="0"/>')), "seen again"),
        (p("<m:oMath><m:r><m:t>x=1</m:t></m:r></m:oMath>"), "x=1"),
        (
            p("<w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t><w:noBreakHyphen/><w:t>d</w:t></w:r>"),
            "a\tb\nc-d",
        ),
        (p('<w:r><w:sym w:font="Wingdings" w:char="F0FE"/></w:r>', r(" yes")), "☑ yes"),
        (
            p(f"<w:r><w:ruby><w:rt>{r('kanji')}</w:rt><w:rubyBase>{r('漢字')}</w:rubyBase></w:ruby></w:r>"),
            "漢字(kanji)",
        ),
        # The code of a field is not shown, whatever stands in it; its result is.
        (p(field("begin"), r("code"), field("separate"), r("result"), field("end"), r(".")), "result."),
        (p(field("begin")) + p(r("code"), field("separate"), r("3"), field("end")), "3"),
        (
            p(field("begin", "<w:ffData><w:checkBox><w:checked/></w:checkBox></w:ffData>"), field("end"), r(" agreed")),
            "☒ agreed",
        ),
        (
            p(
                field(
                    "begin",
                    '<w:ffData><w:ddList><w:result w:val="1"/>'
                    '<w:listEntry w:val="red"/><w:listEntry w:val="blue"/></w:ddList></w:ffData>',
                ),
                field("end"),
            ),
            "blue",
        ),
        # A paragraph whose end is deleted continues in the next one; one that is deleted whole leaves no line.
        (p(r("one "), properties="<w:rPr><w:del/></w:rPr>") + p(r("two")), "one two"),
        (p(DELETED, properties="<w:rPr><w:del/></w:rPr>") + p(r("two")), "two"),
        (
            table(
                row(cell(p(r("a"))), cell(p(r("b")), '<w:gridSpan w:val="2"/>')),
                control(row(control(cell(p(r("c")))), cell(control(p(r("d")))))),
                row(cell(p(r("no"))), properties="<w:del/>"),
            ),
            "a\tb\nc\td",
        ),
        (
            table(
                row(cell(p(r("tall")), '<w:vMerge w:val="restart"/>'), cell(p(r("1")))),
                row(cell(p(), "<w:vMerge/>"), cell(p(r("2")))),
            ),
            "tall\t1\n\t2",
        ),
        (table(row(cell(p(r("out")) + table(row(cell(p(r("in")))))))), "out\nin"),
    ],
)
def test_what_is_shown_arrives_once_and_in_order(body: str, text: str) -> None:
    assert text_of(body) == text
    assert read_word(docx(body, strict=True)).text == text


def test_notes_follow_their_paragraph_and_margins_stand_around() -> None:
    body = (
        p(
            r("Cats"),
            '<w:r><w:footnoteReference w:id="2"/></w:r>',
            r(" sleep."),
            '<w:r><w:commentReference w:id="0"/></w:r>',
        )
        + p(r("Dogs"), '<w:r><w:endnoteReference w:id="2"/></w:r>')
        + '<w:sectPr><w:headerReference w:type="default" r:id="header1"/>'
        '<w:headerReference w:type="first" r:id="header2"/>'
        '<w:footerReference w:type="default" r:id="footer1"/></w:sectPr>'
    )
    parts = {
        "footnotes": f'<w:footnote w:id="0" w:type="separator">{p(r("no"))}</w:footnote>'
        f'<w:footnote w:id="2">{p("<w:r><w:footnoteRef/></w:r>", r(" All of them."))}</w:footnote>',
        "endnotes": f'<w:endnote w:id="2">{p(r("Not all."))}</w:endnote>',
        "comments": f'<w:comment w:id="0" w:author="Ada">{p(r("True?"))}</w:comment>',
        "header1": p(r("Animals")),
        "header2": p(r("only on a first page that is another")),
        "footer1": p(r("page 1")),
    }
    assert text_of(body, **parts).split("\n") == [
        "[header] Animals",
        "Cats[^1] sleep.",
        "[^1]: All of them.",
        "[comment by Ada: True?]",
        "Dogs[^2]",
        "[^2]: Not all.",
        "[footer] page 1",
    ]
    other = body.replace("</w:sectPr>", "<w:titlePg/></w:sectPr>")
    assert "[header] only on a first page" in text_of(other, **parts)


def level(number: int, form: str, text: str, more: str = "") -> str:
    properties = f'<w:start w:val="1"/><w:numFmt w:val="{form}"/><w:lvlText w:val="{text}"/>{more}'
    return f'<w:lvl w:ilvl="{number}">{properties}</w:lvl>'


def test_lists_and_headings_have_their_numbers() -> None:
    levels = (
        level(0, "upperRoman", "%1.", '<w:pStyle w:val="Title"/>')
        + level(1, "lowerLetter", "%1.%2)")
        + level(2, "bullet", "-")
    )
    legal = level(0, "upperRoman", "Article %1") + level(1, "decimal", "%1.%2", "<w:isLgl/>")
    numbering = (
        f'<w:abstractNum w:abstractNumId="7">{levels}</w:abstractNum>'
        f'<w:abstractNum w:abstractNumId="8">{legal}</w:abstractNum>'
        '<w:num w:numId="1"><w:abstractNumId w:val="7"/></w:num><w:num w:numId="3"><w:abstractNumId w:val="8"/></w:num>'
        '<w:num w:numId="2"><w:abstractNumId w:val="7"/>'
        '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="9"/></w:lvlOverride></w:num>'
    )
    styles = (
        '<w:style w:styleId="Title"><w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr></w:style>'
        '<w:style w:styleId="Own"><w:basedOn w:val="Title"/></w:style>'
    )

    def item(text: str, number: int, at: int = 0) -> str:
        return p(r(text), properties=f'<w:numPr><w:ilvl w:val="{at}"/><w:numId w:val="{number}"/></w:numPr>')

    body = (
        p(r("a"), properties='<w:pStyle w:val="Title"/>')
        + item("b", 1, 1)
        + item("c", 1, 1)
        + item("d", 1, 2)
        + item("none", 0)
        + p(r("e"), properties='<w:pStyle w:val="Own"/>')
        + item("f", 1, 1)
        + item("g", 2)
        + item("h", 1)
        + item("i", 3)
        + item("j", 3, 1)
    )
    assert text_of(body, numbering=numbering, styles=styles).split("\n") == [
        *("I. a", "I.a) b", "I.b) c", "• d", "none", "II. e", "II.a) f", "IX. g", "X. h", "Article I i", "1.1 j")
    ]


def test_parts_in_other_formats() -> None:
    diagram = "<dgm:pt><dgm:t><a:p><a:r><a:t>Plan</a:t></a:r></a:p></dgm:t></dgm:pt>"
    body = (
        p('<w:r><w:drawing><dgm:relIds r:dm="diagramData1"/></w:drawing></w:r>')
        + p('<w:r><w:drawing><c:chart r:id="chart1"/></w:drawing></w:r>')
        + '<w:altChunk r:id="aFChunk1"/><w:altChunk r:id="aFChunk2"/>'
        '<w:altChunk r:id="aFChunk3"/><w:altChunk r:id="aFChunk4"/>'
    )
    archive = "MIME-Version: 1.0\nContent-Type: multipart/related; boundary=x\n\n--x\n"
    archive += "Content-Type: text/html; charset=utf-8\n\n<p>archived</p>\n--x--\n"
    made = read_word(
        docx(
            body,
            {
                "diagramData1.xml": diagram,
                "aFChunk1.html": b"<html><body><p>page</p></body></html>",
                "aFChunk2.docx": docx(p(r("inner"))),
                "aFChunk3.rtf": b"{\\rtf1 lost}",
                "aFChunk4.mht": archive.encode(),
            },
        )
    )
    assert made.text.split() == ["Plan", "page", "inner", "archived"]
    assert made.note == "left out: 1 chart, a part in RTF"


def test_documents_without_text() -> None:
    with pytest.raises(UnreadableError, match="it has no text"):
        text_of(p())
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as package:
        package.writestr("word/readme.txt", "")
    with pytest.raises(UnreadableError, match="without a Word document"):
        read_word(file.getvalue())
