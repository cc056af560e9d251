"""A JSON schema as parts: itself, the schemas inside it, the targets of its $refs, and their places in the text.

Must not know which schemas are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from llmrun.errors import did_you_mean
from llmrun.grammar.jsontext import Places
from llmrun.grammar.place import SCHEMA, broken
from llmrun.grammar.values import kind_of

# Keywords whose value is one schema, a list of them, or an object of them.
SINGLE = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class Schema:
    """A schema and the schemas inside it."""

    def __init__(self, text: str, root: dict[str, Any], places: Places) -> None:
        """Find all parts.

        Raises:
            BadGrammarError: a part is not a schema, or a $ref leads nowhere.
        """
        self.text = text
        self.root = root
        # The root, and every schema inside it or at the end of a $ref, without true and false.
        self.parts: list[dict[str, Any]] = []
        self._places = places
        self._where: dict[int, tuple[Any, str | int]] = {}
        self._bases: dict[int, str] = {}
        self._named: dict[str, tuple[Any, str | int]] = {}  # URI of an $id or $anchor -> the schema
        self._find_names()
        waiting = [root]
        found = {id(root)}
        while waiting:
            part = waiting.pop()
            self.parts.append(part)
            for container, key in [*self._inside(part), *self._pointed_to(part)]:
                child = container[key]
                if isinstance(child, dict) and id(child) not in found:
                    found.add(id(child))
                    self._where[id(child)] = container, key
                    waiting.append(child)

    def target(self, part: dict[str, Any]) -> Any:
        """Return the target of a part's $ref; None if it has none."""
        return next((container[key] for container, key in self._pointed_to(part)), None)

    def fail(self, container: Any, key: str | int, why: str, hint: str = "") -> NoReturn:
        """Raise the error for the value under a key."""
        path = self._places.path(container, key)
        raise broken(SCHEMA, self.text, self._places.of_value(container, key), why, hint, path)

    def fail_key(self, container: Any, key: str, why: str, hint: str = "") -> NoReturn:
        """Raise the error for a key."""
        path = self._places.path(container, key)
        raise broken(SCHEMA, self.text, self._places.of_key(container, key), why, hint, path)

    def fail_part(self, part: dict[str, Any], why: str, hint: str = "") -> NoReturn:
        """Raise the error for a whole part."""
        if id(part) in self._where:
            self.fail(*self._where[id(part)], why, hint)
        raise broken(SCHEMA, self.text, len(self.text) - len(self.text.lstrip()), why, hint)

    def _inside(self, part: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        for container, key in places_inside(part):
            if container is None:
                kind = "an object" if key in NAMED else "a list"
                self.fail(part, key, f"{key} is {kind} of schemas, not {kind_of(part[key])}")
            if not isinstance(container[key], dict | bool):
                self.fail(container, key, f"a schema is an object, true or false, not {kind_of(container[key])}")
            yield container, key

    def _pointed_to(self, part: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the target of a part's $ref, if it has one, as a container and the key in it."""
        if "$ref" not in part:
            return
        reference = part["$ref"]
        if not isinstance(reference, str):
            self.fail(part, "$ref", f"$ref is a string, not {kind_of(reference)}")
        document, fragment = urldefrag(_joined(self._bases.get(id(part), ""), reference))
        if document not in self._named:
            hint = "copy it into $defs, and point there with #/$defs/name"
            self.fail(part, "$ref", f"{reference!r} is outside of this schema, and nothing is fetched", hint)
        container, key = self._named[document]
        if fragment and not fragment.startswith("/"):
            if f"{document}#{fragment}" not in self._named:
                self._points_to_nothing(part)
            container, key = self._named[f"{document}#{fragment}"]
            fragment = ""
        for step in unquote(fragment).split("/")[1:]:
            container, key = container[key], step.replace("~1", "/").replace("~0", "~")
            if isinstance(container, list) and key.isdecimal() and int(key) < len(container):
                key = int(key)
            elif not isinstance(container, dict) or key not in container:
                self._points_to_nothing(part)
        if not isinstance(container[key], dict | bool):
            self.fail(part, "$ref", f"{reference!r} points to {kind_of(container[key])}, not to a schema")
        yield container, key

    def _find_names(self) -> None:
        """Find the URI of each schema, and those that have a name of their own ($id, $anchor)."""
        waiting: list[tuple[Any, Any, str]] = [({"": self.root}, "", "")]
        self._named[""] = waiting[0][:2]
        while waiting:
            container, key, base = waiting.pop()
            part = container[key]
            if not isinstance(part, dict):
                continue
            if isinstance(part.get("$id"), str):
                uri = _joined(base, part["$id"])
                self._named.setdefault(uri.removesuffix("#"), (container, key))
                base = urldefrag(uri).url
            if isinstance(part.get("$anchor"), str):
                self._named.setdefault(f"{base}#{part['$anchor']}", (container, key))
            self._bases[id(part)] = base
            waiting += [(*place, base) for place in places_inside(part) if place[0] is not None]

    def _points_to_nothing(self, part: dict[str, Any]) -> NoReturn:
        groups = [(group, self.root.get(group)) for group in ("$defs", "definitions")]
        names = [f"#/{group}/{name}" for group, names in groups if isinstance(names, dict) for name in names]
        self.fail(part, "$ref", f"{part['$ref']!r} points to nothing", did_you_mean(part["$ref"], names))


def _joined(base: str, reference: str) -> str:
    return base + reference if reference.startswith("#") else urljoin(base, reference)


def places_inside(part: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the schemas inside a schema as a container and the key in it; (None, key) for a keyword without any."""
    for key, value in part.items():
        if key in SINGLE and not (key == "items" and isinstance(value, list)):
            yield part, key
        elif key in LISTS or key == "items":
            yield from ((value, index) for index in range(len(value))) if isinstance(value, list) else [(None, key)]
        elif key == "dependencies" and isinstance(value, dict):  # up to draft 7: names or a schema
            yield from ((value, name) for name in value if not isinstance(value[name], list))
        elif key in NAMED:
            yield from ((value, name) for name in value) if isinstance(value, dict) else [(None, key)]
