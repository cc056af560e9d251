"""The texts of control tokens, and how those of a conversation are kept apart from those that a chat template writes.

Text of users and models never becomes control tokens. Pure; must not know tokens.
"""

from __future__ import annotations

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


class Part(NamedTuple):
    """A section of the prompt; unless special, control texts in it are tokenized as plain text."""

    text: str
    special: bool


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
        if any(isinstance(value, Media) and character not in prompt for character, value in self._values.items()):
            raise BadTemplateError("the chat template omits an image or audio", hint=OTHER_TEMPLATE)
        hidden = {character for part, character in self._characters.items() if not part.special}
        parts: list[Part | Media] = []
        position = 0
        for match in self._control.pattern.finditer(prompt) if hidden else ():
            parts += [*self._restored(prompt[position : match.start()], hidden), Part(match[0], True)]
            position = match.end()
        return _merge([*parts, *self._restored(prompt[position:], hidden)])

    def _restored(self, text: str, hidden: set[str]) -> Iterator[Part | Media]:
        """Yield the parts of a text between control texts; it is special unless one of its parts is hidden."""
        special = hidden.isdisjoint(text)
        for piece in filter(None, re.split(f"([{''.join(self._values)}])", text)):
            yield self._values.get(piece) or Part(piece, special)


def _free_characters(texts: Sequence[str]) -> Iterator[str]:
    used = set[str]().union(*texts)
    yield from (chr(code) for code in PRIVATE if chr(code) not in used)
    raise UsageError("the conversation uses up all private characters of Unicode")


def _merge(parts: Iterable[Part | Media]) -> list[Part | Media]:
    """Join adjacent texts of one kind, so that the tokenizer sees as much text at once as possible."""
    merged: list[Part | Media] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Part) and isinstance(last, Part) and last.special == part.special:
            merged[-1] = Part(last.text + part.text, part.special)
        else:
            merged.append(part)
    return merged
