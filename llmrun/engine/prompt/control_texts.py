"""The texts of control tokens: a conversation's stay text, a chat template's become tokens.

Text of users and models never becomes control tokens. Pure; must not know tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from os.path import commonprefix
from typing import NamedTuple

from llmrun.engine.prompt.sandbox import OTHER_TEMPLATE
from llmrun.errors import BadTemplateError, UsageError
from llmrun.protocol.media import Media
from llmrun.protocol.messages import Message

PRIVATE = range(0x100000, 0x10FFFE)  # plane 16, private use: no tokenizer has special tokens there
_ESCAPED = re.compile(r"\\U0010[0-9a-f]{4}|\\udb[c-f][0-9a-f]\\ud[c-f][0-9a-f]{2}")  # see _escaped()


class Part(NamedTuple):
    """A section of the prompt; unless special, control texts in it are tokenized as plain text."""

    text: str
    special: bool


def text_of(parts: Iterable[Part | Media]) -> str:
    """Return the text of a prompt, without its files."""
    return "".join(part.text for part in parts if isinstance(part, Part))


class ControlTexts:
    """A search for texts that the tokenizer turns into control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        control = sorted(set(texts) - {""})
        self.pattern = re.compile(_longest_of(control) if control else r"(?!)")
        self._longest = max(map(len, control), default=0)
        self._prefixes = {text[:size] for text in control for size in range(1, len(text))}
        self._suffixes = {text[-size:] for text in control for size in range(1, len(text))}

    def may_continue(self, content: str) -> bool:
        """Return whether the end of this content is the beginning of a control text."""
        return any(content[-size:] in self._prefixes for size in range(1, self._longest))

    def may_join(self, content: str) -> bool:
        """Return whether this content and the text around it could form a control text together."""
        sizes = range(1, self._longest)
        return any(content[-size:] in self._prefixes or content[:size] in self._suffixes for size in sizes)


def _longest_of(texts: list[str], depth: int = 20) -> str:
    """Return a pattern for the longest match of some sorted texts, as llama.cpp searches them.

    Common prefixes are factored out, because a vocabulary may have thousands of control tokens.
    """
    if depth == 0:
        return "(?:" + "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) + ")"
    branches = []
    for _, group in groupby(filter(None, texts), key=lambda text: text[0]):
        members = [*group]
        prefix = commonprefix([members[0], members[-1]])  # noqa: RUF071 - of texts, not paths
        rests = [text[len(prefix) :] for text in members]
        branches.append(re.escape(prefix) + (_longest_of(rests, depth - 1) if rests != [""] else ""))
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")


class Placeholders:
    """Single private characters that stand for control texts and files while a template runs.

    The rest of the conversation is unchanged, so that a template can test, trim or split it. All control texts in the
    output are then the template's own.

    Args:
        texts: all of the conversation, whose characters are not free.
        control: the texts to hide.
    """

    _GUARD = Part("", False)

    def __init__(self, texts: Sequence[str], control: ControlTexts) -> None:
        self._control = control
        self._values: dict[str, Part | Media] = {}  # by the character that stands for it
        self._characters: dict[Part, str] = {}
        self._free = _free_characters(texts)

    def hide(self, text: str) -> str:
        """Replace the control texts of a text, which stay plain text.

        The text gets invisible guards around it if its edge could form a control text with the template's.
        """
        text = self._control.pattern.sub(lambda match: self._character(Part(match[0], False)), text)
        stripped = text.strip()
        if not self._control.may_join(stripped):
            return text
        start, guard = text.index(stripped), self._character(self._GUARD)
        return f"{text[:start]}{guard}{stripped}{guard}{text[start + len(stripped) :]}"

    def keep(self, text: str) -> str:
        """Replace the control texts of a text that is ours, which become control tokens again."""
        return self._control.pattern.sub(lambda match: self._character(Part(match[0], True)), text)

    def with_media(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with characters in their contents that stand for their images and audio."""
        replaced = []
        for message in messages:
            content = message.content
            for media in reversed(message.media):
                at = min(max(media.at, 0), len(message.content))
                content = f"{content[:at]}{self._next(media)}{content[at:]}"
            replaced.append(replace(message, content=content, media=()) if message.media else message)
        return replaced

    def _character(self, part: Part) -> str:
        if part not in self._characters:
            self._characters[part] = self._next(part)
        return self._characters[part]

    def _next(self, value: Part | Media) -> str:
        """Return a new character for a value."""
        character = next(self._free)
        self._values[character] = value
        return character

    def parts(self, prompt: str) -> list[Part | Media]:
        """Split a rendered prompt into files, plain texts, and texts of the template, which are special.

        Raises:
            BadTemplateError: the prompt lacks a file.
        """
        if not self._values:
            return [Part(prompt, True)]
        characters = {form: character for character in self._values for form in _escaped(character)}
        prompt = _ESCAPED.sub(lambda match: characters.get(match[0], match[0]), prompt)
        if any(isinstance(value, Media) and character not in prompt for character, value in self._values.items()):
            raise BadTemplateError("the chat template omits an image or audio", hint=OTHER_TEMPLATE)
        parts: list[Part | Media] = []
        position = 0
        for match in self._control.pattern.finditer(prompt):
            parts += [*self._restored(prompt[position : match.start()]), Part(match[0], True)]
            position = match.end()
        return _merge([*parts, *self._restored(prompt[position:])])

    def _restored(self, text: str) -> list[Part | Media]:
        """Return the parts of a text between control texts; it is special unless plain text was hidden in it."""
        pieces = [piece for piece in re.split(f"([{''.join(self._values)}])", text) if piece]
        values = [self._values.get(piece) for piece in pieces]
        special = all(value.special for value in values if isinstance(value, Part))
        return [value or Part(piece, special) for piece, value in zip(pieces, values, strict=True)]


def _escaped(character: str) -> tuple[str, str]:
    """Return a character as templates write it in data that they print as Python does, or as JSON that is all ASCII."""
    return character.encode("unicode_escape").decode(), json.dumps(character)[1:-1]


def _free_characters(texts: Sequence[str]) -> Iterator[str]:
    """Yield private characters that no text has, escaped or not.

    Raises:
        UsageError: there are no more.
    """
    used = set[str]().union(*texts)
    for character in map(chr, PRIVATE):
        if character not in used and not any(form in text for text in texts for form in _escaped(character)):
            yield character
    raise UsageError("the conversation uses up all private characters of Unicode")


def _merge(parts: Iterable[Part | Media]) -> list[Part | Media]:
    """Join adjacent texts of one kind, so that the tokenizer sees as much text at once as possible."""
    merged: list[Part | Media] = []
    for special, group in groupby(parts, key=lambda part: part.special if isinstance(part, Part) else None):
        members = [*group]
        merged += members if special is None else [Part("".join(part[0] for part in members), special)]
    return merged
