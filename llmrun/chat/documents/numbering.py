"""The numbers and bullets of a Word document's lists and headings, which its text does not hold."""

from __future__ import annotations

import re
from typing import NamedTuple
from xml.etree.ElementTree import Element

from llmrun.chat.documents.package import Part, attribute, child, is_on, local_name

_NUMBER = re.compile(r"%([1-9])")
_ROMAN = ((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl"))
_ROMAN_ONES = ((10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i"))


class _Level(NamedTuple):
    form: str  # such as "decimal" or "bullet"
    text: str  # such as "%1.%2"
    start: int
    style: str  # of the paragraphs that it numbers; "" for none
    is_legal: bool  # numbers of the levels above are decimal


class _List(NamedTuple):
    abstract: str  # id of the definition; lists of one definition go on counting
    levels: dict[int, _Level]
    restarts: dict[int, int]  # level -> the number that begins when the list is first used


class Numbering:
    """The lists of a document, counted as its paragraphs are read in order.

    Args:
        part: with the lists; None without any.
        styles: the part of the styles.
    """

    def __init__(self, part: Part | None, styles: Part | None) -> None:
        abstract = {
            attribute(each, "abstractNumId"): _levels(each)
            for each in (part.root if part else ())
            if local_name(each) == "abstractNum"
        }
        self._lists = {
            attribute(each, "numId"): _list(each, abstract)
            for each in (part.root if part else ())
            if local_name(each) == "num"
        }
        self._styles = {
            attribute(each, "styleId"): each for each in (styles.root if styles else ()) if local_name(each) == "style"
        }
        self._counts: dict[str, dict[int, int]] = {}
        self._used: set[str] = set()

    def label(self, properties: Element | None) -> str:
        """Return the number or bullet of the next paragraph, with a blank; "" without one."""
        style = _value(properties, "pStyle")
        number, level = self._place(child(properties, "numPr"), style)
        found = self._lists.get(number)
        if found is None or level not in found.levels:
            return ""
        counts = self._counts.setdefault(found.abstract, {})
        if number not in self._used:
            self._used.add(number)
            counts.update({each: start - 1 for each, start in found.restarts.items()})
        for each in [each for each in counts if each > level]:
            del counts[each]
        for each in range(level):
            counts.setdefault(each, found.levels[each].start if each in found.levels else 1)
        counts[level] = counts.get(level, found.levels[level].start - 1) + 1
        return _label(found.levels, level, counts)

    def _place(self, own: Element | None, style: str) -> tuple[str, int]:
        """Return the list and the level of a paragraph, by itself, or by its style and that one's base styles."""
        number, level, seen = _value(own, "numId"), _value(own, "ilvl"), set[str]()
        while not number and style in self._styles and style not in seen:
            seen.add(style)
            given = child(child(self._styles[style], "pPr"), "numPr")
            number, level = _value(given, "numId"), level or _value(given, "ilvl")
            if number and not level:
                levels = self._lists[number].levels if number in self._lists else {}
                level = str(next((each for each, found in levels.items() if found.style == style), 0))
            style = _value(self._styles[style], "basedOn")
        return number, int(level or 0)


def _levels(definition: Element) -> dict[int, _Level]:
    return {
        int(attribute(each, "ilvl") or 0): _Level(
            _value(each, "numFmt") or "decimal",
            _value(each, "lvlText"),
            int(_value(each, "start") or 0),
            _value(each, "pStyle"),
            is_on(each, "isLgl"),
        )
        for each in definition
        if local_name(each) == "lvl"
    }


def _list(number: Element, abstract: dict[str, dict[int, _Level]]) -> _List:
    definition = _value(number, "abstractNumId")
    levels, restarts = dict(abstract.get(definition, {})), dict[int, int]()
    for each in number:
        if local_name(each) == "lvlOverride":
            levels.update(_levels(each))
            if start := _value(each, "startOverride"):
                restarts[int(attribute(each, "ilvl") or 0)] = int(start)
    return _List(definition, levels, restarts)


def _label(levels: dict[int, _Level], level: int, counts: dict[int, int]) -> str:
    here = levels[level]
    if here.form == "bullet":
        return "• "

    def number(match: re.Match[str]) -> str:
        at = int(match[1]) - 1
        form = levels[at].form if at in levels else "decimal"
        return _numeral(counts.get(at, 1), "decimal" if here.is_legal and at < level else form)

    text = _NUMBER.sub(number, here.text)
    return f"{text} " if text else ""


def _numeral(number: int, form: str) -> str:
    if form in ("none", "bullet"):
        return ""
    if form == "decimalZero":
        return f"{number:02}"
    if form in ("lowerLetter", "upperLetter") and number > 0:
        letters = chr(ord("a") + (number - 1) % 26) * ((number - 1) // 26 + 1)  # after z comes aa, then bb
        return letters if form == "lowerLetter" else letters.upper()
    if form in ("lowerRoman", "upperRoman") and number > 0:
        digits = ""
        for value, digit in (*_ROMAN, *_ROMAN_ONES):
            digits, number = digits + digit * (number // value), number % value
        return digits if form == "lowerRoman" else digits.upper()
    return str(number)


def _value(element: Element | None, name: str) -> str:
    """Return the value of a property; "" without one."""
    found = child(element, name)
    return "" if found is None else attribute(found, "val")
