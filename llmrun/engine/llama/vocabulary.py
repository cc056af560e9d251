"""A model's vocabulary: tokenizer, text of tokens, end tokens and control tokens.

Owns every call about llama.cpp's llama_vocab; must not know contexts or prompts.
"""

from __future__ import annotations

import ctypes
import re
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from llmrun import _native
from llmrun.engine.llama.base import PIECE_TOKENS
from llmrun.engine.llama.cuts import PIECE_CHARACTERS, Cuts
from llmrun.engine.llama.library import address
from llmrun.errors import BadModelError, OutOfMemoryError, UsageError

if TYPE_CHECKING:
    from llmrun.engine.llama.text_rules import TextRules

_NO_TOKEN = -1
_SENTENCE_PIECE, _BYTE_PAIRS, _WORD_PIECE, _UNIGRAM, _RWKV = 1, 2, 3, 4, 5  # enum llama_vocab_type
STRIPS_ACCENTS = b"tokenizer.ggml.normalizer.strip_accents"
SPACE_CHANGES = (b"tokenizer.ggml.add_space_prefix", b"tokenizer.ggml.remove_extra_whitespaces")
_BERT_UNKNOWN = 100  # llama.cpp's default for WordPiece
_NORMAL_FORMS = {"qwen2": "NFC", "qwen35": "NFC"}  # tokenizer.ggml.pre -> normal form, where a file has no rules
_ID_DIGITS = 10
_MOST_WORD_CHARACTERS = 100  # max_input_chars_per_word of WordPiece; a longer word is the unknown token
_WORD_START = "\u2581", "\U0001f8b1"  # of llama.cpp's tokens of WordPiece; and a rare symbol in place of it in a text
_MOST_CHARACTERS = 4 << 20  # of a text that can't be cut: it takes up to 1 KiB a character
_SAMPLE = "ab", "cd"  # words
# Of byte pairs: std::regex, which splits a text for many models, calls itself for each character of a word or a line.
_MOST_HERE, _STACK_BYTES, _LEAST_STACK = 2048, 512, 8 << 20
# Of gpt-oss: llama.cpp makes them user-defined, so that they are shown, and finds them in every text.
_SHOWN = frozenset({"<|channel|>", "<|constrain|>", "<|message|>", "<|start|>"})
_INSIDE_SHOWN = re.compile(f"(?<=<)(?={'|'.join(re.escape(text[1:]) for text in sorted(_SHOWN))})")
_LONG_RUN = re.compile(rf"\S{{{_MOST_WORD_CHARACTERS + 1},}}")
# What BERT makes a word of its own: punctuation, and the blocks that it calls Chinese.
_CHINESE = (
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class LlamaVocabulary:
    """base.Vocabulary over llama.cpp.

    Attributes:
        pointer: the llama_vocab.
        bos: the begin-of-sequence token, negative without one.
        adds_bos: prompts begin with it.
        end_of_turn: the token that ends a turn, or else the text; negative without either.
    """

    def __init__(self, llama: Any, model: Any) -> None:
        """Read the vocabulary of a llama_model."""
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
        self._kind = int(llama.llama_vocab_type(vocab))
        if self._kind == _WORD_PIECE:
            self._lowercases = self._setting(model, "tokenizer.ggml.normalizer.lowercase") != "false"
            strips = self._setting(model, STRIPS_ACCENTS.decode())
            self._strips_accents = strips == "true" if strips else self._lowercases
            self._unknown = int(self._setting(model, "tokenizer.ggml.unknown_token_id") or _BERT_UNKNOWN)
        self._settings = {key: self._setting(model, key) for key in _rule_keys()}
        self._model_kind = self._setting(model, "tokenizer.ggml.model")
        self._is_nfc = _NORMAL_FORMS.get(self._setting(model, "tokenizer.ggml.pre")) == "NFC"

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        return tuple(map(self._text, self._control_tokens))

    @cached_property
    def shown_control_texts(self) -> tuple[str, ...]:
        shown = self._tokens_with(self._llama.LLAMA_TOKEN_ATTR_USER_DEFINED) if self._kind == _BYTE_PAIRS else ()
        return tuple(text for text in map(self._text, shown) if text in _SHOWN)

    @cached_property
    def _control_tokens(self) -> list[int]:
        return self._tokens_with(self._llama.LLAMA_TOKEN_ATTR_CONTROL | self._llama.LLAMA_TOKEN_ATTR_UNKNOWN)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        return tuple(_native.end_tokens(address("llama_vocab_is_eog"), self.pointer, self.n_tokens))

    def _tokens_with(self, bits: int) -> list[int]:
        """Return the tokens that have any of these attributes of llama.cpp's."""
        return _native.tokens_with(address("llama_vocab_get_attr"), self.pointer, self.n_tokens, bits)

    @cached_property
    def _damage(self) -> str:
        """The reason for which llama.cpp's tokenizer would abort or never return; "" if the vocabulary is intact."""
        if self._kind == _SENTENCE_PIECE:
            usual = self._tokens_with(self._llama.LLAMA_TOKEN_ATTR_BYTE)
            return self._missing_byte(usual) and self._missing_byte(range(self.n_tokens))
        return self._missing_beginning() if self._kind == _RWKV else ""

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

    def tokenize(self, text: str, *, special: bool, begins: bool = True) -> list[int]:
        """Tokenize as base.Vocabulary.tokenize(). Raises as token_pieces()."""
        return [*chain.from_iterable(self.token_pieces(text, special=special, begins=begins))]

    def token_pieces(self, text: str, *, special: bool, begins: bool = True) -> Iterator[list[int]]:
        """Tokenize as base.Vocabulary.token_pieces(); a lone surrogate becomes a question mark.

        Raises:
            BadModelError: llama.cpp's tokenizer fails with this vocabulary.
            UsageError: a long part of the text has no place where it can be cut.
            OutOfMemoryError: there is no memory for that part.
        """
        if self._damage:
            raise _damaged(self._damage)
        parts = [text] if special or not self.shown_control_texts else _INSIDE_SHOWN.split(text)
        for number, part in enumerate(parts):
            yield from self._pieces_of(part, special=special, begins=begins and number == 0)

    def _pieces_of(self, text: str, *, special: bool, begins: bool) -> Iterator[list[int]]:
        """Yield the tokens of a text as llama.cpp finds them, which has user-defined tokens even without special."""
        if self._rules is not None:
            for part in self._rules.parts(text, special=special, begins=begins):
                yield from [[part]] if isinstance(part, int) else self._tokenize(part, special=False)
            return
        text = self._normalized(text, special=special)
        long_words = dict.fromkeys(_long_words(text), self._unknown) if self._kind == _WORD_PIECE else {}
        pattern = f"({'|'.join(map(re.escape, long_words))})"
        split = re.split(pattern, text) if long_words else [text]  # text and a long word in turn
        for number, part in enumerate(split):
            yield from [[long_words[part]]] if number % 2 else self._tokenize(part, special=special)

    @cached_property
    def _rules(self) -> TextRules | None:
        """The rules that a file converted by us has for its text; None in other files."""
        from llmrun.engine.llama.text_rules import AddedToken, TextRules
        from llmrun.gguf.metadata import ADDED_FLAGS, CHARSMAP, NORMALIZER, SPACE_PREFIX

        if not self._settings[SPACE_PREFIX]:
            return None
        flags: dict[int, set[str]] = {}
        for flag, key in ADDED_FLAGS.items():
            for number in self._settings[key].split():
                if number.isdecimal() and len(number) < _ID_DIGITS and int(number) < self.n_tokens:
                    flags.setdefault(int(number), set()).add(flag)
        control = {*self._control_tokens}
        added = [
            AddedToken(token, self._text(token), token in control, frozenset(flags.get(token, ())))
            for token in sorted({*control, *self._tokens_with(self._llama.LLAMA_TOKEN_ATTR_USER_DEFINED), *flags})
        ]
        steps, prefix, charsmap = (self._settings[key] for key in (NORMALIZER, SPACE_PREFIX, CHARSMAP))
        return TextRules(steps, prefix, charsmap, added, finds_pieces=self._kind != _UNIGRAM)

    def _tokenize(self, text: str, *, special: bool) -> Iterator[list[int]]:
        """Tokenize as llama.cpp does, a long text in pieces."""
        cuts = self._cuts if len(text) > PIECE_CHARACTERS else None
        for piece in cuts.pieces(text) if cuts is not None else [text]:
            if len(piece) > _MOST_CHARACTERS:
                raise UsageError(
                    "the text can't be tokenized",
                    why=f"a part of {len(piece):,} characters has no space or line break where it can be cut",
                    hint="shorten it",
                )
            yield from self._tokenize_piece(piece, special=special)

    def _tokenize_piece(self, text: str, *, special: bool) -> Iterator[list[int]]:
        data = text.encode("utf-8", "replace")
        room, count = len(data) + 8, -1
        while count < 0:
            tokens = (ctypes.c_int32 * room)()
            arguments = self.pointer, data, len(data), tokens, room, False, special
            if self._kind == _BYTE_PAIRS and len(text) > _MOST_HERE:
                count = _with_stack(len(text) * _STACK_BYTES, self._llama.llama_tokenize, *arguments)
            else:
                count = self._llama.llama_tokenize(*arguments)
            room = max(room, -count)
        yield from _in_pieces(tokens, count)

    @cached_property
    def _cuts(self) -> Cuts | None:
        """The cuts of long texts; None if pieces have other tokens, as a sample shows."""
        first, second = _SAMPLE
        whole, left, right, behind_space = (
            [*chain.from_iterable(self._tokenize_piece(text, special=False))]
            for text in (f"{first} {second}", first, f" {second}", second)
        )
        if whole not in (left + right, left + behind_space) or self._model_kind == "hybriddna":
            return None
        tokens = map(self.control_piece, range(self.n_tokens))
        found_first = self._llama.LLAMA_TOKEN_ATTR_CONTROL | self._llama.LLAMA_TOKEN_ATTR_USER_DEFINED
        special = map(self._text, self._tokens_with(found_first | self._llama.LLAMA_TOKEN_ATTR_UNKNOWN))
        return Cuts(tokens, special, drops_space=whole != left + right, is_plain=self._kind == _UNIGRAM)

    def _setting(self, model: Any, key: str) -> str:
        """Return a value of the file's metadata as llama.cpp writes it; "" without one."""
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self._llama.llama_model_meta_val_str(model, key.encode(), buffer, room)
            if count < room:
                return buffer.value.decode("utf-8", "replace")
            room = count + 1

    def _normalized(self, text: str, *, special: bool) -> str:
        """Normalize a text as Hugging Face's tokenizer does, except the control tokens in it."""
        if self._kind != _WORD_PIECE and (not self._is_nfc or unicodedata.is_normalized("NFC", text)):
            return text
        parts = self._control_pattern.split(text) if special and self.control_texts else [text]
        return "".join(part if number % 2 else self._normalized_part(part) for number, part in enumerate(parts))

    def _normalized_part(self, text: str) -> str:
        if self._kind != _WORD_PIECE:
            return unicodedata.normalize("NFC", text)
        return _bert_normalized(text, lowercases=self._lowercases, strips_accents=self._strips_accents)

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        texts = sorted(filter(None, self.control_texts), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, texts))})")

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

    def cut(self, text: str, n_tokens: int) -> str:
        """Return the text, or its beginning, of at least n_tokens, if it certainly has more.

        A token has a limited length. Where unknown characters in a row are one token, a word is at least one.
        """
        limit = n_tokens * self._longest_piece
        if len(text) <= limit or len(text.encode("utf-8", "replace")) <= limit:
            return text
        if self._kind not in (_WORD_PIECE, _UNIGRAM):
            return text[: limit + 1]
        words = text.split(maxsplit=n_tokens + 1)
        return " ".join(words[: n_tokens + 1]) if len(words) > n_tokens + 1 else text

    @cached_property
    def _longest_piece(self) -> int:
        return max(len(self.piece(token)) for token in range(self.n_tokens))

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
        return token in self.ends


def _with_stack(n_bytes: int, call: Callable[..., int], *arguments: Any) -> int:
    """Call a function of C that needs a large stack.

    Raises:
        OutOfMemoryError: there is no memory for the stack.
    """
    result: list[int] = []
    before = threading.stack_size(max(n_bytes, _LEAST_STACK))
    try:
        thread = threading.Thread(target=lambda: result.append(call(*arguments)), daemon=True)
        thread.start()
    except RuntimeError:
        raise OutOfMemoryError("there is not enough memory to tokenize the text", hint="shorten it") from None
    finally:
        threading.stack_size(before)
    thread.join()
    return result[0]


def _in_pieces(tokens: Any, count: int) -> Iterator[list[int]]:
    """Yield the first tokens of an array; between two pieces, a thread that decodes can take the interpreter."""
    for start in range(0, count, PIECE_TOKENS):
        piece = tokens[start : min(start + PIECE_TOKENS, count)]
        if min(piece) < 0:
            raise _damaged("it has no token for something in the text, and none for the unknown")
        yield piece


@cache
def _rule_keys() -> tuple[str, ...]:
    from llmrun.gguf.metadata import ADDED_FLAGS, CHARSMAP, NORMALIZER, SPACE_PREFIX  # the weights would wait for it

    return NORMALIZER, SPACE_PREFIX, CHARSMAP, *ADDED_FLAGS.values()


def _bert_normalized(text: str, *, lowercases: bool, strips_accents: bool) -> str:
    """Normalize as Hugging Face's BertNormalizer: llama.cpp keeps only the first character of a decomposition."""
    if text.isascii():
        return text.lower() if lowercases else text
    text = text.replace(*_WORD_START)
    if strips_accents:
        decomposed = unicodedata.normalize("NFD", text)
        text = "".join(character for character in decomposed if unicodedata.category(character) != "Mn")
    return "".join(map(str.lower, text)) if lowercases else text  # each by itself: a final sigma is no special case


def _long_words(text: str) -> list[str]:
    """Return the words of a normalized text that are too long for WordPiece, the longest first."""
    words = (word for run in _LONG_RUN.findall(text) for word in _bert_words(run))
    return sorted({word for word in words if len(word) > _MOST_WORD_CHARACTERS}, key=len, reverse=True)


def _bert_words(run: str) -> list[str]:
    """Split characters without white space at those that BERT makes words of their own."""
    return "".join(" " if _is_own_word(character) else character for character in run).split()


def _is_own_word(character: str) -> bool:
    code = ord(character)
    if code < 0x7F and not character.isalnum():
        return True
    return unicodedata.category(character).startswith("P") or any(low <= code <= high for low, high in _CHINESE)


def _damaged(reason: str) -> BadModelError:
    return BadModelError("this model's vocabulary can't be used", why=reason, hint="try another file of this model")
