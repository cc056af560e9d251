"""A model's vocabulary: tokenizer, text of tokens, end tokens and control tokens.

Owns every call about llama.cpp's llama_vocab; must not know contexts or prompts.
"""

from __future__ import annotations

import ctypes
import threading
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from llmrun.engine.llama.base import PIECE_TOKENS
from llmrun.errors import BadModelError

_NO_TOKEN = -1
_SENTENCE_PIECE, _WORD_PIECE, _RWKV = 1, 3, 5  # enum llama_vocab_type
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


class LlamaVocabulary:
    """base.Vocabulary over llama.cpp.

    Attributes:
        pointer: the llama_vocab.
        bos: the begin-of-sequence token, negative without one.
        adds_bos: prompts begin with it.
        end_of_turn: the token that ends a turn, or else the text; negative without either.
    """

    def __init__(self, llama: Any, model: Any) -> None:
        """Read the vocabulary of a llama_model, which must not be freed before close()."""
        self._llama = llama
        self.pointer = vocab = llama.llama_model_get_vocab(model)
        self.n_tokens = int(llama.llama_vocab_n_tokens(vocab))
        self.bos = int(llama.llama_vocab_bos(vocab))
        self.adds_bos = bool(llama.llama_vocab_get_add_bos(vocab)) and self.bos != _NO_TOKEN
        self.bos_text = self._text(self.bos)
        eos, end_of_turn = int(llama.llama_vocab_eos(vocab)), int(llama.llama_vocab_eot(vocab))
        self.eos_text = self._text(eos)
        before, after, middle = (
            int(find(vocab))
            for find in (llama.llama_vocab_fim_pre, llama.llama_vocab_fim_suf, llama.llama_vocab_fim_mid)
        )
        self.fill_in = None if _NO_TOKEN in (before, after, middle) else (before, after, middle)
        self.end_of_turn = eos if end_of_turn == _NO_TOKEN else end_of_turn
        count = ctypes.c_int32()
        tokens = llama.llama_vocab_get_suppress_tokens(vocab, ctypes.byref(count))
        self.suppressed: tuple[int, ...] = tuple(tokens[: count.value]) if tokens else ()
        self._pieces: list[bytes | None] = [None] * self.n_tokens
        self._ends: list[bool | None] = [None] * self.n_tokens
        self._control_texts: tuple[str, ...] = ()
        self._kind = int(llama.llama_vocab_type(vocab))
        # llama.cpp takes only the first part of a character that uncased BERT divides, as Hangul's syllables.
        self._normal_form = "NFD" if self._kind == _WORD_PIECE else _normal_form(llama, model)
        self._damage = ""  # the reason for which llama.cpp's tokenizer would abort or never return
        # In parallel with the creation of the context, which does not need the GIL.
        self._collecting = threading.Thread(target=self._collect, daemon=True)
        self._collecting.start()

    def close(self) -> None:
        """Wait for the thread that reads the vocabulary; call it before the model is freed."""
        self._collecting.join()

    @property
    def control_texts(self) -> tuple[str, ...]:
        self._collecting.join()
        return self._control_texts

    def _collect(self) -> None:
        """Collect the texts of all control tokens; check for tokens that the tokenizer requires."""
        llama, vocab = self._llama, self.pointer
        attribute = llama.llama_vocab_get_attr
        attributes = [attribute(vocab, token) for token in range(self.n_tokens)]
        control = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN
        self._control_texts = tuple(self._text(token) for token, found in enumerate(attributes) if found & control)
        if self._kind == _SENTENCE_PIECE:
            usual = [token for token, found in enumerate(attributes) if found & llama.LLAMA_TOKEN_ATTR_BYTE]
            self._damage = self._missing_byte(usual) and self._missing_byte(range(self.n_tokens))
        elif self._kind == _RWKV:
            self._damage = self._missing_beginning()

    def _missing_byte(self, tokens: Iterable[int]) -> str:
        """Return the damage of a SentencePiece vocabulary without all byte tokens: the tokenizer throws."""
        texts = set(map(self._raw_text, tokens))
        missing = [byte for byte in range(256) if not texts & {b"<0x%02X>" % byte, bytes([byte])}]
        return f"it has no token for the byte 0x{missing[0]:02X}" if missing else ""

    def _missing_beginning(self) -> str:
        """Return the damage of an RWKV vocabulary with a token whose first byte is no token: its tokenizer may hang."""
        pieces = [self.control_piece(token) for token in range(self.n_tokens)]
        missing = {piece[:1] for piece in pieces} - set(pieces)
        return f"it has longer tokens that begin with {min(missing)!r}, but no such token" if missing else ""

    def _text(self, token: int) -> str:
        if token == _NO_TOKEN:
            return ""
        return self._raw_text(token).decode("utf-8", "replace")

    def _raw_text(self, token: int) -> bytes:
        return bytes(self._llama.llama_vocab_get_text(self.pointer, token))

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Tokenize as base.Vocabulary.tokenize(); a lone surrogate becomes a question mark.

        Raises:
            BadModelError: llama.cpp's tokenizer fails with this vocabulary.
        """
        if self._kind in (_SENTENCE_PIECE, _RWKV):
            self._collecting.join()
        if self._damage:
            raise _damaged(self._damage)
        if self._normal_form and not text.isascii():
            text = unicodedata.normalize(self._normal_form, text)
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        while True:
            tokens = (ctypes.c_int32 * room)()
            count = self._llama.llama_tokenize(self.pointer, data, len(data), tokens, room, False, special)
            if count < 0:
                room = -count
            else:
                return [*chain.from_iterable(_in_pieces(tokens, count))]

    @property
    def around_text(self) -> tuple[list[int], list[int]]:
        """The tokens before and after a text for an encoder, e.g. [CLS] and [SEP]."""
        tokens = (ctypes.c_int32 * 4)()
        both = tokens[: max(self._llama.llama_tokenize(self.pointer, b"", 0, tokens, len(tokens), True, False), 0)]
        begins = int(len(both) > 1 or (self.adds_bos and both == [self.bos]))
        return both[:begins], both[begins:]

    @property
    def between_texts(self) -> list[int]:
        """The separator tokens between a query and a document that are scored together."""
        llama, ends = self._llama, self.around_text[1]
        separates = self._kind != _WORD_PIECE and llama.llama_vocab_get_add_sep(self.pointer)
        return [*ends, *([int(llama.llama_vocab_sep(self.pointer))] if separates else [])]

    def with_bos(self, tokens: list[int]) -> list[int]:
        if not self.adds_bos or tokens[:1] == [self.bos]:
            return tokens
        return [self.bos, *tokens]

    def piece(self, token: int) -> bytes:
        piece = self._pieces[token]
        if piece is None:
            self._pieces[token] = piece = self._piece(token, control=False)
        return piece

    def control_piece(self, token: int) -> bytes:
        return self._piece(token, control=True)

    def _piece(self, token: int, *, control: bool) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self._llama.llama_token_to_piece(self.pointer, token, buffer, room, 0, control)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def is_end(self, token: int) -> bool:
        is_end = self._ends[token]
        if is_end is None:
            self._ends[token] = is_end = bool(self._llama.llama_vocab_is_eog(self.pointer, token))
        return is_end


def _in_pieces(tokens: Any, count: int) -> Iterator[list[int]]:
    """Yield the first tokens of an array; between two pieces, a thread that decodes can take the interpreter."""
    for start in range(0, count, PIECE_TOKENS):
        piece = tokens[start : min(start + PIECE_TOKENS, count)]
        if min(piece) < 0:
            raise _damaged("it has no token for something in the text, and none for the unknown")
        yield piece


def _damaged(reason: str) -> BadModelError:
    return BadModelError("this model's vocabulary can't be used", why=reason, hint="try another file of this model")


def _normal_form(llama: Any, model: Any) -> Any:
    """Return the normal form of Unicode that a file of ours asks for; "" for none."""
    from llmrun.gguf.metadata import NORMALIZER  # after the weights: they would wait for the import

    buffer = ctypes.create_string_buffer(16)
    size = llama.llama_model_meta_val_str(model, NORMALIZER.encode(), buffer, len(buffer))
    text = buffer.value.decode("ascii", "replace")
    return text if 0 < size < len(buffer) and text in _NORMAL_FORMS else ""
