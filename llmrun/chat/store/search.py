"""Search in saved chats: a scan, since every message is read anyway to leave damaged chats out."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from llmrun.chat.passages import passages_block
from llmrun.chat.store.turns import Answer, Question, Tree

_WORD = re.compile(r"\w+")
_ACCENTS = re.compile("[\u0300-\u036f]+")  # combining, as NFD writes them
_AROUND = 40  # characters of an excerpt before the match
_EXCERPT = 160


@dataclass(frozen=True, slots=True)
class Hit:
    """A message that matches."""

    session: str  # name of its chat
    message: int  # its id
    turn: int  # from 1 on
    role: str  # "user" or "assistant"
    created: float  # seconds since 1970
    excerpt: str  # the text around the first match, on one line


def search(trees: Iterable[Tree], wanted: str, limit: int) -> list[Hit]:
    """Return the messages that contain every word or a word that begins like it, best first, undone ones too.

    If there are none, the messages that contain every word as a part of a word, or of a text without spaces. They are
    ranked as by BM25 without its weights of words, the newest first among equals.

    Args:
        wanted: words; case, accents and punctuation do not matter.
        limit: maximum number of hits.
    """
    words = [_folded(word) for word in _WORD.findall(wanted) or wanted.split()]
    beginnings = [re.compile(rf"(?<!\w){re.escape(word)}") for word in words]
    hits: list[tuple[Hit, list[int], list[int], int]] = []  # with the times of each word, and the message's length
    total = n_messages = 0
    for tree in trees if words else ():
        turns: dict[int | None, int] = {None: 0}
        for entry in tree.entries:
            turn = turns[entry.id] = turns[entry.parent] + (entry.role == "user")
            text = _own_text(entry.part)
            content = _folded(text)
            total, n_messages = total + len(content), n_messages + 1
            parts = [content.count(word) for word in words]
            if not all(parts):
                continue
            starts = [len(beginning.findall(content)) for beginning in beginnings]
            excerpt = _excerpt(text, min(content.find(word) for word in words))
            hit = Hit(tree.name, entry.id, turn, entry.role, entry.created, excerpt)
            hits.append((hit, starts, parts, len(content)))
    ranked = [(hit, starts, length) for hit, starts, _, length in hits if all(starts)]
    ranked = ranked or [(hit, parts, length) for hit, _, parts, length in hits]

    def rank(ranked_hit: tuple[Hit, list[int], int]) -> tuple[float, int]:
        hit, times, length = ranked_hit
        damping = 1.2 * (0.25 + 0.75 * length * n_messages / total)  # k1 and b as in SQLite's FTS5
        return -sum(count / (count + damping) for count in times), -hit.message

    return [hit for hit, _, _ in sorted(ranked, key=rank)[:limit]]


def _own_text(part: Question | Answer) -> str:
    """Return the text of a message: what was typed, then its files, without the passages that were found for it."""
    if isinstance(part, Answer) or not part.typed:
        return part.content
    files = part.content.removesuffix(part.typed).removeprefix(passages_block(part.passages))
    return f"{part.typed}\n{files}"


def _folded(text: str) -> str:
    """Return text in lower case without accents."""
    return text.lower() if text.isascii() else _ACCENTS.sub("", unicodedata.normalize("NFD", text.lower()))


def _excerpt(text: str, place: int) -> str:
    start = max(0, place - _AROUND)
    end = start + _EXCERPT
    excerpt = " ".join(text[start:end].split())
    return f"{'…' if start else ''}{excerpt}{'…' if end < len(text) else ''}"
