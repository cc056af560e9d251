"""What was typed into the forms of PDFs and onto their pages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmrun.chat.documents.pdf import read_pdf
from llmrun.chat.documents.text import UnreadableError

FONT = "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"


def pdf(annotations: Sequence[str], *more: str, text: str = "A form", fields: str = "", form: str = "") -> bytes:
    """Return a page with annotations, objects from 6 on; other objects follow them."""
    content = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
    ids = " ".join(f"{number} 0 R" for number in range(6, 6 + len(annotations)))
    objects = [
        f"<</Type/Catalog/Pages 2 0 R/AcroForm<</Fields[{fields or ids}]{form}>>>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F1 4 0 R>>>>/Contents 5 0 R"
        f"/Annots[{ids}]>>",
        FONT,
        f"<</Length {len(content)}>>\nstream\n{content}\nendstream",
        *(f"<</Type/Annot{each}/Rect[200 700 400 715]>>" for each in annotations),
        *more,
    ]
    data, places = b"%PDF-1.7\n", list[int]()
    for number, each in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{each}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"trailer<</Size {len(objects) + 1}/Root 1 0 R>>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{end}".encode()


def lines(*annotations: str) -> list[str]:
    """Return the lines of a page after its text."""
    return read_pdf(pdf(annotations)).text.split("\n")[2:]


@pytest.mark.parametrize(
    ("annotation", "line"),
    [
        ("/Subtype/Widget/FT/Tx/T(phone)/V(555 0199)", "phone: 555 0199"),
        ("/Subtype/Widget/FT/Tx/T(name)/V<FEFF004A00FC00720067>", "name: J\xfcrg"),
        ("/Subtype/Widget/FT/Ch/T(land)/V(de)/Opt[[(de)(Germany)][(fr)(France)]]", "land: Germany"),
        ("/Subtype/Widget/FT/Ch/T(days)/V[(Mo)(Fr)]/Opt[(Mo)(Tu)(Fr)]", "days: Mo, Fr"),
        ("/Subtype/Widget/FT/Btn/T(agrees)/V/Yes", "agrees: Yes"),
        ("/Subtype/Widget/FT/Btn/T(size)/Ff 32768/V/1/Opt[(small)(large)]", "size: large"),
        ("/Subtype/Widget/FT/Sig/T(by)/V<</Type/Sig>>", "by: signed"),
        ("/Subtype/FreeText/Contents(typed on the page)", "typed on the page"),
        ("/Subtype/Text/T(Ada)/Contents(True?)", "[comment by Ada: True?]"),
        ("/Subtype/Highlight/Contents(here)", "[comment: here]"),
    ],
)
def test_what_was_typed_is_text(annotation: str, line: str) -> None:
    assert lines(annotation) == [line]


@pytest.mark.parametrize(
    "annotation",
    [
        "/Subtype/Widget/FT/Tx/T(phone)",
        "/Subtype/Widget/FT/Tx/T(phone)/V()",
        "/Subtype/Widget/FT/Tx/T(secret)/Ff 8192/V(1234)",
        "/Subtype/Widget/FT/Tx/T(hidden)/F 2/V(1234)",
        "/Subtype/Widget/FT/Btn/T(send)/Ff 65536/V/Off",
        "/Subtype/Link/Contents(a link)",
    ],
)
def test_what_a_viewer_does_not_show_is_not_text(annotation: str) -> None:
    assert lines(annotation) == []


def test_fields_are_named_whole_and_stand_once() -> None:
    kids = ["/Subtype/Widget/Parent 8 0 R", "/Subtype/Widget/Parent 8 0 R"]
    more = [
        "<</T(street)/Parent 9 0 R/V(Main St 1)/Kids[6 0 R 7 0 R]>>",
        "<</T(home)/FT/Tx/Kids[8 0 R 10 0 R]>>",
        "<</T(town)/Parent 9 0 R/V(Kiel)>>",
    ]
    made = read_pdf(pdf(kids, *more, fields="9 0 R")).text
    assert made == "[page 1]\nA form\nhome.street: Main St 1\n\nhome.town: Kiel"


def test_a_form_without_other_text() -> None:
    assert read_pdf(pdf(["/Subtype/Widget/FT/Tx/T(a)/V(b)"], text="")).text == "[page 1]\na: b"
    with pytest.raises(UnreadableError, match="its pages are pictures"):
        read_pdf(pdf([], text=""))


def test_a_form_in_xml() -> None:
    data = '<xfa:datasets xmlns:xfa="http://www.xfa.org/schema/xfa-data/1.0/"><xfa:data><form1><name>Ada</name><empty/></form1></xfa:data></xfa:datasets>'
    stream = f"<</Length {len(data)}>>\nstream\n{data}\nendstream"
    made = read_pdf(pdf([], stream, form="/XFA[(datasets)6 0 R]"))
    assert made.text == "[page 1]\nA form\n\nname: Ada"
