"""A vocabulary of bytes, control tokens and a few words, and the masks over it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

FIRST_CONTROL = 256


class ByteVocabulary:
    """See llmrun.engine.llama.base.Vocabulary.

    Args:
        control: texts of the control tokens, from FIRST_CONTROL on; the last one ends an answer.
        words: tokens of several bytes, behind these. They are never the result of tokenize().
    """

    suppressed = ()
    shown_control_texts = ()

    def __init__(self, control: Mapping[int, bytes], words: Sequence[bytes] = ()) -> None:
        self.control, self.words = control, words
        self.end = max(control)
        self.n_tokens = self.end + 1 + len(words)
        self.control_texts = tuple(text.decode() for text in control.values())

    def word(self, text: bytes) -> int:
        """Return the token of one of the words."""
        return self.end + 1 + self.words.index(text)

    def tokenize(self, text: str, *, special: bool, begins: bool = True) -> list[int]:
        tokens, data = list[int](), text.encode()
        while data:
            control = next((token for token in self.control if special and data.startswith(self.control[token])), None)
            tokens.append(data[0] if control is None else control)
            data = data[1 if control is None else len(self.control[control]) :]
        return tokens

    def with_bos(self, tokens: list[int]) -> list[int]:
        return tokens

    def piece(self, token: int) -> bytes:
        if token > self.end:
            return self.words[token - self.end - 1]
        return bytes([token]) if token < FIRST_CONTROL else b""

    def control_piece(self, token: int) -> bytes:
        return self.control.get(token) or self.piece(token)

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.end,)

    def is_end(self, token: int) -> bool:
        return token in self.ends


def allowed_tokens(constraint: Any, n_vocab: int) -> list[int]:
    """Return the tokens of a constraint's mask, read as the native sampler reads it."""
    words = (ctypes.c_uint32 * -(-n_vocab // 32)).from_address(constraint.mask())
    tokens = [token for token in range(32 * len(words)) if words[token // 32] >> token % 32 & 1]
    assert max(tokens, default=0) < n_vocab
    return tokens
