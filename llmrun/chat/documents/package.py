"""The parts of an Office file: XML in a zip archive, and the relationships between them (ECMA-376, part 2)."""

from __future__ import annotations

import posixpath
import zipfile
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from llmrun.chat.documents.text import UnreadableError

_OFF = frozenset(("0", "false", "off"))


class Part:
    """A part of the file.

    Attributes:
        root: its XML.
    """

    def __init__(self, package: zipfile.ZipFile, name: str) -> None:
        self._package, self._folder = package, posixpath.dirname(name)
        self.root = ElementTree.fromstring(package.read(name))  # noqa: S314 - the process has limits
        self._relations = _relations(package, name)

    @classmethod
    def main_of(cls, package: zipfile.ZipFile) -> Part:
        """Return the part with the document.

        Raises:
            UnreadableError: there is none.
        """
        relations = _relations(package, "")
        name = next((target for kind, target in relations.values() if kind == "officeDocument"), "word/document.xml")
        if name not in package.namelist():
            raise UnreadableError("it is an archive without a Word document")
        return cls(package, name)

    def related(self, kind: str) -> Part | None:
        """Return the part of a kind, such as "styles"; None without one."""
        return next((self.part(id_) for id_, (each, _) in self._relations.items() if each == kind), None)

    def part(self, relation: str) -> Part | None:
        """Return a part by the id of its relationship; None if it is missing."""
        name = self._name(relation)
        return None if name is None else Part(self._package, name)

    def bytes_of(self, relation: str) -> bytes | None:
        """Return the content of a part of any format; None if it is missing."""
        name = self._name(relation)
        return None if name is None else self._package.read(name)

    def _name(self, relation: str) -> str | None:
        _, target = self._relations.get(relation, ("", ""))
        return target if target in self._package.namelist() else None


def _relations(package: zipfile.ZipFile, name: str) -> dict[str, tuple[str, str]]:
    """Return the id of each relationship of a part, with the kind and the name of its target."""
    folder, file = posixpath.split(name)
    path = posixpath.join(folder, "_rels", f"{file}.rels")
    if path not in package.namelist():
        return {}
    root = ElementTree.fromstring(package.read(path))  # noqa: S314 - the process has limits
    return {
        attribute(each, "Id"): (
            attribute(each, "Type").rpartition("/")[2],
            posixpath.normpath(posixpath.join("/", folder, attribute(each, "Target"))).lstrip("/"),
        )
        for each in root
    }


def local_name(element: Element) -> str:
    """Return the name of an element without its namespace."""
    return str(element.tag).rpartition("}")[2]


def attribute(element: Element, name: str) -> str:
    """Return an attribute by its name without the namespace; "" without one."""
    return next((value for key, value in element.items() if key.rpartition("}")[2] == name), "")


def child(element: Element | None, name: str) -> Element | None:
    """Return the first child with a name; None without one, or without an element."""
    return None if element is None else next((each for each in element if local_name(each) == name), None)


def is_on(element: Element | None, name: str) -> bool:
    """Return whether a property is there and not switched off."""
    found = child(element, name)
    return found is not None and attribute(found, "val") not in _OFF
