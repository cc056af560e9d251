"""The part of an answer in which a model thinks before it speaks: which texts enclose it, and how long it may be.

Pure; must not know tokens or models. What is shown of it is the front's business.
"""

from __future__ import annotations

# (opening, closing), as makers write them; a model's chat template tells which are its own.
_KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<thought>", "</thought>"),
)


def thinking_tags(template: str | None) -> tuple[str, str] | None:
    """The texts between which a model with this chat template thinks; None if it does not."""
    return next((tags for tags in _KNOWN if template and tags[1] in template), None)


def opens(prompt: str, tags: tuple[str, str]) -> bool:
    """Whether a rendered prompt ends inside the thinking part, so that the answer begins there."""
    opening, closing = tags
    return prompt.rfind(opening) > prompt.rfind(closing) and prompt.rstrip().endswith(opening)


class ThinkingBudget:
    """Counts the tokens of the thinking part.

    Args:
        tags: what it is enclosed in.
        inside: the answer begins inside of it.
        most: how many tokens it may take.
    """

    def __init__(self, tags: tuple[str, str], inside: bool, most: int) -> None:
        self._tags = tags
        self._inside = inside
        self._left = most
        self._tail = ""

    @property
    def used_up(self) -> bool:
        """Whether the part has to be closed now."""
        return self._inside and self._left <= 0

    @property
    def closing(self) -> str:
        """The text that closes it."""
        return f"\n{self._tags[1]}\n\n"

    def push(self, text: str) -> None:
        """One more token of the answer, with this text."""
        awaited = self._tags[self._inside]
        self._tail = (self._tail + text)[-len(text) - len(awaited) :]
        if awaited in self._tail:
            self._inside = not self._inside
            self._tail = self._tail.rpartition(awaited)[2]
        elif self._inside:
            self._left -= 1
