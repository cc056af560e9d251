"""Text of Word documents and PDFs that other programs wrote, beside what LibreOffice and Poppler read in them.

    python tests/benchmarks/documents.py [FOLDER]

Every program that is installed writes five documents: for Word python-docx, htmldocx, docxtpl, pandoc, LibreOffice,
and docx, html-to-docx, html-docx-js and officegen of Node (in NODE_PATH); PDFs fpdf2, reportlab, weasyprint, typst,
LibreOffice, and Node's pdfkit, pdf-lib and jspdf. Those of LibreOffice, docx and pandoc have footnotes, tracked
changes, boxes or headers too; those of pdf-lib and some of reportlab are forms. Printed for each that differs: the
words that the judge reads and llmrun does not, those that only llmrun reads, and how many of the common ones stand in
another order. Files in FOLDER are judged instead, if it is named.

Figures of 28 November 2026 on 55 and 50 files: of LibreOffice's 17,585 words llmrun lacks 5, all of them deleted text
that LibreOffice shows; of Poppler's 14,828 none. What llmrun has more are headers, footnotes, pages inside documents
of html-docx-js, and the names of fields; LibreOffice and pandoc read none of html-docx-js.
"""

from __future__ import annotations

import difflib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from llmrun.chat.documents import kind_of, read_document

Block = tuple[str, Any]
DOCUMENTS: list[list[Block]] = [
    [
        ("h1", "Lease"),
        ("p", "The rent is nine euros a day, due on the first; late payment costs interest of 3 %."),
        ("ol", ["The tenant pays.", "The landlord repairs.", "Both keep the peace."]),
        ("table", [["Room", "Area"], ["Kitchen", "12 m²"], ["Attic", "31 m²"]]),
    ],
    [
        ("h1", "Größen und Maße"),
        ("p", "Die Straße nach Köln ist gesperrt; wer über Düren fährt, kommt schneller an."),
        ("ul", ["Äpfel", "Öl", "Übermut"]),
        ("p", "Ein zweiter Absatz mit „Anführungszeichen“ – und einem Gedankenstrich."),
    ],
    [
        ("h1", "Report"),
        *(block for year in (1911, 1912) for block in (("h2", f"Harvest of {year}"), ("p", f"It was poor in {year}."))),
        ("table", [[f"cell {row} {column}" for column in range(4)] for row in range(6)]),
    ],
    [("p", " ".join(f"Sentence number {number} of a long text follows the one before it." for number in range(120)))],
    [
        ("h1", "List of parts"),
        ("ul", [f"Part {number}: bolt M{number}" for number in range(4, 40)]),
        ("p", "End of the list."),
    ],
]
_PLAIN = {0x201E: '"', 0x201C: '"', 0x2013: "-"}  # what the fonts of PDF have
_WORD = re.compile(r"\w+")
_OWN = re.compile(r"^\[page \d+\]$|^\[(?:header|footer)\] |^\[comment(?: by [^:]*)?: ", re.MULTILINE)
_NOTE = re.compile(r"\[\^(\d+)\]")


def html(blocks: list[Block]) -> str:
    parts = []
    for kind, content in blocks:
        if kind == "table":
            rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in content)
            parts.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")
        elif kind in ("ul", "ol"):
            parts.append(f"<{kind}>{''.join(f'<li>{escape(each)}</li>' for each in content)}</{kind}>")
        else:
            parts.append(f"<{kind}>{escape(content)}</{kind}>")
    return f"<!DOCTYPE html><html><head><meta charset='utf-8'></head><body>{''.join(parts)}</body></html>"


def lines(blocks: list[Block]) -> list[str]:
    """The lines of a document, for programs that only write lines."""
    found = list[str]()
    for kind, content in blocks:
        if kind == "table":
            found += ["  ".join(row) for row in content]
        else:
            found += content if isinstance(content, list) else [content]
    return found


# ---- Word ------------------------------------------------------------------------------------------


def python_docx(blocks: list[Block], target: Path) -> None:
    from docx import Document

    made = Document()
    for kind, content in blocks:
        if kind == "table":
            table = made.add_table(len(content), len(content[0]))
            for row, cells in zip(table.rows, content, strict=True):
                for cell, text in zip(row.cells, cells, strict=True):
                    cell.text = text
        elif kind in ("ul", "ol"):
            for each in content:
                made.add_paragraph(each, "List Bullet" if kind == "ul" else "List Number")
        else:
            made.add_heading(content, int(kind[1])) if kind[0] == "h" else made.add_paragraph(content)
    made.sections[0].header.paragraphs[0].text = "Header of python-docx"
    made.save(str(target))


def htmldocx(blocks: list[Block], target: Path) -> None:
    from htmldocx import HtmlToDocx

    HtmlToDocx().parse_html_string(html(blocks)).save(str(target))


def docxtpl(blocks: list[Block], target: Path) -> None:
    from docx import Document
    from docxtpl import DocxTemplate

    template, file = Document(), io.BytesIO()
    template.add_paragraph("{%p for line in lines %}")
    template.add_paragraph("{{ line }}")
    template.add_paragraph("{%p endfor %}")
    template.save(file)
    made = DocxTemplate(io.BytesIO(file.getvalue()))
    made.render({"lines": lines(blocks)}, autoescape=True)
    made.save(str(target))


def pandoc(blocks: list[Block], target: Path) -> None:
    subprocess.run(["pandoc", "-f", "html", "-o", target], input=html(blocks), text=True, check=True)


def pandoc_markdown(blocks: list[Block], target: Path) -> None:
    source = "\n\n".join(lines(blocks)) + "\n\nWith a note[^1] and $x^2$ in it.\n\n[^1]: The note's own text.\n"
    subprocess.run(["pandoc", "-f", "markdown", "-o", target], input=source, text=True, check=True)


def libreoffice(blocks: list[Block], target: Path) -> None:
    text = "".join(f"<text:p>{escape(line)}</text:p>" for line in lines(blocks))
    converted(_FODT.replace("BODY", text).encode(), ".fodt", target, target.suffix[1:])


def libreoffice_html(blocks: list[Block], target: Path) -> None:
    converted(
        html(blocks).encode(), ".html", target, "docx:Office Open XML Text" if target.suffix == ".docx" else "pdf"
    )


_FODT = """<?xml version="1.0" encoding="UTF-8"?>
<office:document xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0"
 xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0" xmlns:dc="http://purl.org/dc/elements/1.1/"
 xmlns:draw="urn:oasis:names:tc:opendocument:xmlns:drawing:1.0"
 xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0"
 xmlns:svg="urn:oasis:names:tc:opendocument:xmlns:svg-compatible:1.0"
 xmlns:style="urn:oasis:names:tc:opendocument:xmlns:style:1.0" office:version="1.3"
 office:mimetype="application/vnd.oasis.opendocument.text">
<office:automatic-styles>
<style:page-layout style:name="L"><style:header-style/></style:page-layout></office:automatic-styles>
<office:master-styles>
<style:master-page style:name="Standard" style:page-layout-name="L">
<style:header><text:p>Header of LibreOffice</text:p></style:header></style:master-page></office:master-styles>
<office:body><office:text><text:tracked-changes><text:changed-region text:id="c1" xml:id="c1"><text:insertion>
<office:change-info>
<dc:creator>Ada</dc:creator><dc:date>2026-01-01T00:00:00</dc:date></office:change-info></text:insertion>
</text:changed-region></text:tracked-changes>
<text:p>It says <text:change-start text:change-id="c1"/>inserted words
<text:change-end text:change-id="c1"/> here<text:note
 text:note-class="footnote"><text:note-citation>1</text:note-citation><text:note-body>
<text:p>A footnote stands below.</text:p>
</text:note-body></text:note>, and goes on.</text:p>BODY
<text:p>Around a box <draw:frame text:anchor-type="as-char" svg:width="6cm" svg:height="2cm"><draw:text-box>
<text:p>Words in a box</text:p></draw:text-box></draw:frame> the text goes on.</text:p>
<table:table><table:table-row><table:table-cell>
<text:p>outer cell</text:p><table:table><table:table-row><table:table-cell>
<text:p>inner cell</text:p></table:table-cell></table:table-row></table:table>
</table:table-cell></table:table-row></table:table>
</office:text></office:body></office:document>"""


# ---- PDF -------------------------------------------------------------------------------------------


def fpdf2(blocks: list[Block], target: Path) -> None:
    from fpdf import FPDF

    made = FPDF()
    made.add_page()
    made.set_font("helvetica", size=11)
    for line in lines(blocks):
        made.multi_cell(0, 6, line.translate(_PLAIN), new_x="LMARGIN", new_y="NEXT")
    made.output(str(target))


def reportlab(blocks: list[Block], target: Path) -> None:
    from reportlab.lib.styles import getSampleStyleSheet
    from reportlab.platypus import Paragraph, SimpleDocTemplate, Table

    style = getSampleStyleSheet()
    parts: list[Any] = []
    for kind, content in blocks:
        if kind == "table":
            parts.append(Table(content))
        else:
            texts = content if isinstance(content, list) else [content]
            parts += [Paragraph(escape(text), style["Heading1" if kind[0] == "h" else "Normal"]) for text in texts]
    SimpleDocTemplate(str(target)).build(parts)


def reportlab_form(blocks: list[Block], target: Path) -> None:
    from reportlab.pdfgen.canvas import Canvas

    canvas = Canvas(str(target))
    for number, line in enumerate(lines(blocks)[:20]):
        canvas.drawString(50, 800 - 30 * number, f"Field {number}")
        canvas.acroForm.textfield(
            name=f"f{number}", value=line.translate(_PLAIN)[:80], x=120, y=795 - 30 * number, width=400, height=20
        )
    canvas.save()


def weasyprint(blocks: list[Block], target: Path) -> None:
    from weasyprint import HTML

    HTML(string=html(blocks)).write_pdf(str(target))


def typst(blocks: list[Block], target: Path) -> None:
    import typst as compiler

    source = target.with_suffix(".typ")
    source.write_text("\n\n".join(f"#text({json.dumps(line, ensure_ascii=False)})" for line in lines(blocks)))
    compiler.compile(str(source), output=str(target))
    source.unlink()


WORD: list[Callable[[list[Block], Path], None]] = [
    *(python_docx, htmldocx, docxtpl, pandoc, pandoc_markdown, libreoffice, libreoffice_html)
]
PDF: list[Callable[[list[Block], Path], None]] = [
    *(fpdf2, reportlab, reportlab_form, weasyprint, typst, libreoffice, libreoffice_html)
]


def make_all(folder: Path) -> None:
    """Write the documents of every program that is installed."""
    for number, blocks in enumerate(DOCUMENTS):
        for suffix, makers in (("docx", WORD), ("pdf", PDF)):
            for maker in [*makers]:
                target = folder / f"{maker.__name__}-{number}.{suffix}"
                try:
                    maker(blocks, target)
                except (ImportError, FileNotFoundError) as error:
                    print(f"without {maker.__name__}: {error}", file=sys.stderr)
                    makers.remove(maker)
    given = [{"lines": lines(blocks), "html": html(blocks)} for blocks in DOCUMENTS]
    if shutil.which("node"):
        words = ["node", str(Path(__file__).with_name("documents.cjs")), str(folder)]
        subprocess.run(words, input=json.dumps(given), text=True, check=True)


# ---- judging ---------------------------------------------------------------------------------------


def converted(data: bytes, suffix: str, target: Path, form: str) -> None:
    """Let LibreOffice convert a file."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, f"in{suffix}")
        source.write_bytes(data)
        words = ["soffice", f"-env:UserInstallation=file://{place}/profile", "--headless", "--convert-to", form]
        subprocess.run([*words, "--outdir", place, source], check=True, capture_output=True)
        shutil.copy(source.with_suffix(target.suffix), target)


def by_libreoffice(files: list[Path]) -> dict[Path, str]:
    with tempfile.TemporaryDirectory() as place:
        words = [
            "soffice",
            f"-env:UserInstallation=file://{place}/profile",
            "--headless",
            "--convert-to",
            "txt:Text (encoded):UTF8",
        ]
        subprocess.run([*words, "--outdir", place, *files], check=True, capture_output=True)
        return {file: Path(place, f"{file.stem}.txt").read_text("utf-8-sig") for file in files}


def by_pandoc(files: list[Path]) -> dict[Path, str]:
    words = ["pandoc", "-f", "docx", "-t", "plain", "--wrap", "none", "--track-changes", "accept"]
    return {file: subprocess.run([*words, file], capture_output=True, text=True, check=False).stdout for file in files}


def by_poppler(files: list[Path]) -> dict[Path, str]:
    return {
        file: subprocess.run(["pdftotext", file, "-"], capture_output=True, text=True, check=True).stdout
        for file in files
    }


def report(judge: str, texts: dict[Path, str], mark: str) -> None:
    """Print how our text of each file differs.

    Args:
        mark: as which the judge writes that of a footnote.
    """
    total: Counter[str] = Counter()
    differing = Counter[str]()
    for file, text in sorted(texts.items()):
        data = file.read_bytes()
        kind = kind_of(data)
        assert kind is not None, file
        text_here = read_document(data, file.name, 1 << 24, kind).text
        ours = _WORD.findall(_NOTE.sub(mark, _OWN.sub("", text_here)))
        theirs = _WORD.findall(text)
        missing, more = Counter(theirs) - Counter(ours), Counter(ours) - Counter(theirs)
        common = sum((Counter(ours) & Counter(theirs)).values())
        matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
        moved = common - sum(block.size for block in matcher.get_matching_blocks())
        counts = {"words": len(theirs), "missing": sum(missing.values()), "more": sum(more.values()), "moved": moved}
        total.update(counts, files=1)
        if missing or more or moved:
            differing[file.stem.rpartition("-")[0]] += 1
            print(f"  {file.name}: {counts} missing {[*missing][:8]} more {[*more][:8]}")
    print(f"{judge}: {dict(total)}; files that differ: {dict(differing)}")


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else place)
        if len(sys.argv) < 2:
            make_all(folder)
        word, pdf = (sorted(folder.glob(f"*.{suffix}")) for suffix in ("docx", "pdf"))
        print(f"{len(word)} Word documents, {len(pdf)} PDFs")
        if shutil.which("soffice"):
            report("LibreOffice", by_libreoffice(word), r"\1")
        if shutil.which("pandoc"):
            report("pandoc", by_pandoc(word), r"[\1]")
        if shutil.which("pdftotext"):
            report("Poppler", by_poppler(pdf), "")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUTF8", "1")
    main()
