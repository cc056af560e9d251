"""What a terminal could be told by a text, and what of it may arrive."""

from __future__ import annotations

import unicodedata

ESC = "\x1b"


CSI_BODIES = [
    "m", "31m", "1;31;42m", "38;2;1;2;3m", "38:5:196m", "2J", "3J", "H", "1;1H", "?25l", "?1049h", "?2004h",
    "?1000h", "6n", "c", ">c", "=c", "5i", "4i", "21t", "8;1;1t", "s", "u", "1000A", "1000D", "K", "2K",
    "L", "M", "P", "X", "@", "r", "1;5r", "0 q", "!p", '"q', "?6c", ">4;2m", "<u", "20h", "4h", "b", "Z",
    "I", "d", "G", "E", "F", "S", "T",
]  # fmt: skip


STRING_BODIES = [
    "0;title", "2;title", "1;icon", "8;;https://example.org", "8;id=1;file:///etc/passwd", "8;;",
    "52;c;aGVsbG8=", "52;c;?", "4;1;rgb:ff/00/00", "10;?", "11;?", "7;file://host/tmp", "9;ping",
    "777;notify;a;b", "1337;File=name=a:Zm8=", "133;A", "50;font", "104", "112", "$q\"p", "+q544e",
    "q#0;2;0;0;0#0~~", "Ga=T,f=100;AAAA", "1;2;3|17/17", "",
]  # fmt: skip


SHORT_ESCAPES = [
    "7", "8", "c", "D", "E", "H", "M", "N", "O", "Z", "=", ">", "(B", "(0", ")A", "*B", "+B", "#8", "#3",
    " F", " G", "%G", "%@", "n", "o", "|", "}", "~", "6", "9", "l", "m", "\\",
]  # fmt: skip


CONTROLS = [chr(code) for code in (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))]


INVISIBLE = [
    *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2060, 0x2070)), "\u200b", "\u200e", "\u200f",
    "\u061c", "\ufeff", "\u00ad", "\u180e", "\ufff9", "\ufffb", "\uffff", "\U000e0001", "\U000e0041",
    "\U000e007f",
]  # fmt: skip


SEQUENCES = [
    *(introducer + body for body in CSI_BODIES for introducer in (f"{ESC}[", "\x9b")),
    *(
        introducer + body + end
        for body in STRING_BODIES
        for introducer, end in (
            (f"{ESC}]", "\x07"), (f"{ESC}]", f"{ESC}\\"), ("\x9d", "\x9c"), (f"{ESC}P", f"{ESC}\\"),
            ("\x90", "\x9c"), (f"{ESC}_", f"{ESC}\\"), (f"{ESC}^", f"{ESC}\\"), (f"{ESC}X", f"{ESC}\\"),
            ("\x9f", "\x9c"), ("\x9e", f"{ESC}\\"), ("\x98", "\x07"),
        )
    ),
    *(ESC + body for body in SHORT_ESCAPES),
    *(control for control in CONTROLS if control not in f"{ESC}\x90\x98\x9b\x9d\x9e\x9f"),
    *INVISIBLE,
]  # fmt: skip


UNFINISHED = [
    ESC, f"{ESC}[", f"{ESC}[31", f"{ESC}[?", f"{ESC}[1 ", "\x9b", "\x9b1;", f"{ESC}]", f"{ESC}]0",
    f"{ESC}P", "\x9d", "\x90", f"{ESC}_", f"{ESC}^", f"{ESC}X", f"{ESC}]0{ESC}", f"{ESC}(", f"{ESC}{ESC}",
    f"{ESC}[{ESC}[", f"{ESC}]{ESC}]",
]  # fmt: skip


def is_allowed(char: str) -> bool:
    """The rule again, from Unicode's own tables and not from the list in the code."""
    if char in "\n\t\u200c\u200d":
        return True
    return unicodedata.category(char) not in {"Cc", "Cs", "Zl", "Zp"} and char not in INVISIBLE
