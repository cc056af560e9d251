"""Holds the tokens of one answer to a grammar: llguidance's matcher behind our own grammars and errors.

Owns llguidance, which nothing else imports; must not know sampling or the loop. What its matcher says at each token is
a bit mask over the vocabulary. A user's grammar is untrusted: sizes are limited before llguidance sees it, its own
limits bound time and memory, and whatever it raises becomes BadGrammarError.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from llmrun.engine.llama.submodules import import_submodule
from llmrun.errors import BadGrammarError, OutOfMemoryError
from llmrun.grammar import Grammar, gbnf, lark, schema
from llmrun.grammar.narrow import narrowed
from llmrun.grammar.place import GRAMMAR, SCHEMA, place

if TYPE_CHECKING:
    from llmrun.engine.llama.base import Vocabulary

_WORD_BITS = 32
# llguidance compiles by recursion, a few hundred bytes deep for each name that leads to another.
_STACK_BYTES = 256 * 1024 * 1024
# It can't be stopped, and what it takes may double with every pattern that one text has to match.
_MOST_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_MOST_RUNAWAYS = 2
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 1_000_000,  # about 70 ms for one token
    "step_max_items": 1_000_000,  # about 50 ms for one token
    "max_lexer_states": 100_000,  # about 200 MB
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
# As Python's json.dumps writes it. Free blanks would be a way for a small model to go on without saying anything.
_JSON_LAYOUT = {
    "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "coerce_one_of": False,
    "lenient": False, "json_allow_general_unicode_escapes": False,
}  # fmt: skip

_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): *")
_QUOTED = re.compile(r'(?:unknown name:|invalid regex) "((?:[^"\\]|\\.)+)"')

_Result = TypeVar("_Result")


class Mask:
    """A bit for each token, whether it may come next: bit t % 32 of 32-bit word t // 32 for token t. At first, none."""

    def __init__(self, n_tokens: int) -> None:
        self._n_tokens = n_tokens
        self.words = (ctypes.c_uint32 * -(-n_tokens // _WORD_BITS))()

    @property
    def address(self) -> int:
        """Where the words lie."""
        return ctypes.addressof(self.words)

    def allow_all(self) -> None:
        """Let any token come."""
        n_words = len(self.words)
        self.words[:] = [2**_WORD_BITS - 1] * n_words
        self.forbid(range(self._n_tokens, n_words * _WORD_BITS))

    def allow(self, tokens: Iterable[int]) -> None:
        """Let these come, too."""
        for token in tokens:
            self.words[token // _WORD_BITS] |= 1 << token % _WORD_BITS

    def forbid(self, tokens: Iterable[int]) -> None:
        """Let these not come."""
        for token in tokens:
            self.words[token // _WORD_BITS] &= ~(1 << token % _WORD_BITS)


class Constraint(Protocol):
    """What an answer may go on with, token by token."""

    def mask(self) -> int:
        """Address of the mask of the tokens that may come next, see Mask; valid until the next call.

        Raises:
            BadGrammarError: it takes too much to find out, or there are none.
        """

    def accept(self, token: int) -> None:
        """Go on with a token that the mask allowed, or that was forced.

        Raises:
            BadGrammarError: the grammar does not allow it.
        """

    def forced(self) -> list[int]:
        """The tokens about which there is no choice; mostly none. They are not accepted yet.

        Raises:
            BadGrammarError: it takes too much to find out.
        """

    def allowed(self, tokens: list[int]) -> int:
        """How many first tokens of a draft may come, as far as that can be told in advance. None is accepted."""

    def rewind(self, n_tokens: int) -> None:
        """Take back the last tokens that were accepted.

        Raises:
            BadGrammarError: there were not so many.
        """


class Matcher:
    """A Constraint: where one answer is in its grammar; compile_grammar() makes it.

    End tokens may come where the grammar may end, and no control token ever.

    Attributes:
        tokens: the vocabulary.
    """

    def __init__(self, matcher: Any, tokens: Tokens, vocabulary: Vocabulary) -> None:
        self.tokens = tokens
        self._matcher = matcher
        self._vocabulary = vocabulary  # the matcher asks it, but does not keep it
        self._mask = Mask(tokens.n_vocab)
        self._known = False  # whether the mask is the one of this place
        self._ended = False

    def copy(self) -> Matcher:
        """Another one at the same place, which goes its own way."""
        twin = Matcher(self._matcher.deep_copy(), self.tokens, self._vocabulary)
        twin._ended = self._ended
        return twin

    def mask(self, besides: Collection[int] = ()) -> int:
        """See Constraint; some tokens may be allowed besides."""
        if not self._known:
            words = self._mask.words
            with _explained(self._matcher):
                self._matcher.unsafe_compute_mask_ptr(self._mask.address, ctypes.sizeof(words))
            if bytes(words) == bytes(ctypes.sizeof(words)):
                raise BadGrammarError("the grammar can't be followed any further", why="no token of the model fits")
        self._known = not besides
        self._mask.allow(besides)
        return self._mask.address

    def accept(self, token: int) -> None:
        """See Constraint."""
        self._known = False
        if token in self.tokens.ends:
            self._ended = True
            return
        with _explained(self._matcher):
            self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        """See Constraint: the tokens of the text that the grammar leaves no choice about."""
        if self._ended or not self.tokens.canonical:
            return []
        with _explained(self._matcher):
            return list(self._matcher.compute_ff_tokens())

    def allowed(self, tokens: list[int]) -> int:
        """See Constraint. An end token is left to the mask."""
        if self._ended:
            return 0
        before_end = list(takewhile(lambda token: token not in self.tokens.ends, tokens))
        valid = int(self._matcher.validate_tokens(before_end))
        return valid + (valid == len(before_end) < len(tokens))

    def rewind(self, n_tokens: int) -> None:
        """See Constraint."""
        self._known = False
        n_tokens -= self._ended
        self._ended = False
        with _explained(self._matcher):
            self._matcher.rollback(n_tokens)


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
    """A constraint at the beginning of an answer.

    Raises:
        BadGrammarError: the grammar is broken, or asks for too much.
    """
    native = import_submodule("llguidance", "_lib")
    tokens = known_tokens(vocabulary)
    return Matcher(_compiled(grammar, _source(grammar, native), tokens), tokens, vocabulary)


def compile_lark(text: str, vocabulary: Vocabulary, shown: Collection[int]) -> Matcher:
    """A constraint for a grammar of our own making.

    Args:
        shown: control tokens that stand for their texts in it.

    Raises:
        BadGrammarError: what was put into it asks for too much.
    """
    native = import_submodule("llguidance", "_lib")
    tokens = known_tokens(vocabulary, frozenset(shown))
    source = str(native.LLMatcher.grammar_from_lark(text))
    return Matcher(_compiled(Grammar("lark", text), source, tokens), tokens, vocabulary)


def followed(schema_text: str) -> str:
    """A JSON schema as llguidance follows it, for `%json` in a grammar of our own making.

    Raises:
        BadGrammarError: it is broken, can't be met, or can't be enforced.
    """
    import json

    return json.dumps({**json.loads(narrowed(schema.parse(schema_text))), "x-guidance": _JSON_LAYOUT})


def _compiled(grammar: Grammar, source: str, tokens: Tokens) -> Any:
    native = import_submodule("llguidance", "_lib")
    limits = native.LLParserLimits(**_LIMITS)
    matcher = _with_room(lambda: native.LLMatcher(tokens.native, source, log_level=0, limits=limits))
    if matcher.is_error():
        raise _broken(grammar, matcher.get_error())
    return matcher


def _source(grammar: Grammar, native: Any) -> str:
    """The grammar as llguidance reads it; nothing is taken on trust from the front."""
    if grammar.kind == "json_schema":
        text = narrowed(schema.parse(grammar.text))
        try:
            return str(native.LLMatcher.grammar_from_json_schema(text, overrides=_JSON_LAYOUT))
        except ValueError as error:
            raise _broken(grammar, str(error)) from None
    if grammar.kind == "gbnf":
        from llmrun.engine.constraint.lexemes import to_lark

        text = to_lark(gbnf.parse(grammar.text))
    else:
        lark.check(grammar.text)
        text = grammar.text
    return str(native.LLMatcher.grammar_from_lark(text))


class Tokens:
    """A vocabulary as llguidance wants it: what its LLTokenizer asks for by these names.

    Attributes:
        n_vocab: how many tokens there are.
        tokens: the bytes of each.
        ends: those that end an answer.
        native: the LLTokenizer.
        canonical: whether the model's own tokenizer gives back any text unchanged; only then tokens are forced.
    """

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, shown: Collection[int] = ()) -> None:
        """Look through a vocabulary, some of whose control tokens stand for their texts."""
        self._vocabulary = weakref.ref(vocabulary)
        self._has_shown = bool(shown)
        self.n_vocab = vocabulary.n_tokens
        self.tokens = [vocabulary.piece(token) for token in range(self.n_vocab)]
        for token in shown:
            self.tokens[token] = vocabulary.control_piece(token)
        self.ends = frozenset(token for token in range(self.n_vocab) if vocabulary.is_end(token))
        if not self.ends:
            raise BadGrammarError("this model can't follow a grammar", why="it has no token that ends an answer")
        self.special_token_ids = sorted(self.ends)
        self.eos_token_id = self.special_token_ids[0]
        self.canonical = all(self._encode(text) is not None for text in _SAMPLES)
        native = import_submodule("llguidance", "_lib")
        self.native = native.LLTokenizer(self, n_vocab=self.n_vocab, eos_token=self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text; llguidance asks for them to force tokens as the model would have cut the text itself."""
        tokens = self._encode(text)
        return self.native.greedy_tokenize(text) if tokens is None else tokens

    def _encode(self, text: str) -> list[int] | None:
        """Token ids that are certainly this text; None where the model's tokenizer gives others.

        Some put a space before everything, so it is tried again behind a line break.
        """
        vocabulary = self._vocabulary()
        assert vocabulary is not None, "a constraint outlived its model"
        data = text.encode()
        tokens = vocabulary.tokenize(text, special=self._has_shown)
        if self._bytes(tokens) == data:
            return tokens
        before = vocabulary.tokenize("\n", special=False)
        tokens = vocabulary.tokenize("\n" + text, special=self._has_shown)
        behind = tokens[len(before) :]
        return behind if tokens[: len(before)] == before and self._bytes(behind) == data else None

    def _bytes(self, tokens: list[int]) -> bytes:
        return b"".join(self.tokens[token] for token in tokens)


_SAMPLES = ('{"name": "', "the quick brown fox", " 12.5", "größer\n\n", "]}, {")
_known: WeakKeyDictionary[Vocabulary, dict[frozenset[int], Tokens]] = WeakKeyDictionary()


def known_tokens(vocabulary: Vocabulary, shown: frozenset[int] = frozenset()) -> Tokens:
    """A vocabulary as llguidance wants it; the first call looks through all of it, which takes tenths of a second.

    Args:
        shown: control tokens that stand for their texts.

    Raises:
        BadGrammarError: no answer of the model has an end.
    """
    known = _known.setdefault(vocabulary, {})
    if shown not in known:
        known[shown] = Tokens(vocabulary, shown)
    return known[shown]


_runaways: list[threading.Thread] = []


def runaways() -> int:
    """How many grammars are still being read though nobody waits any more."""
    _runaways[:] = [thread for thread in _runaways if thread.is_alive()]
    return len(_runaways)


def _with_room(call: Callable[[], _Result]) -> _Result:
    """What a call gives, made where the stack can grow; its pages are only taken when they are used.

    Raises:
        BadGrammarError: it fails, or takes too long.
    """
    if runaways() >= _MOST_RUNAWAYS:
        raise BadGrammarError("no grammar can be read now", why=f"{_MOST_RUNAWAYS} that ask for too much still are")
    results: list[_Result] = []
    errors: list[BaseException] = []
    clocks: list[Callable[[], float]] = []

    def run() -> None:
        clocks.append(_own_clock())
        try:
            results.append(call())
        except BaseException as error:  # a panic in Rust is not an Exception
            errors.append(error)

    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
    except RuntimeError:
        raise OutOfMemoryError("there is no memory to read the grammar") from None
    finally:
        threading.stack_size(before)
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        if thread.is_alive() and clocks and clocks[0]() > _MOST_SECONDS:
            _runaways.append(thread)
            raise BadGrammarError(
                f"the {GRAMMAR} asks for too much", why=f"it takes more than {_MOST_SECONDS:g} seconds to read"
            )
    if errors:
        raise BadGrammarError(f"the {GRAMMAR} can't be followed", why=_first_line(str(errors[0]))) from errors[0]
    return results[0]


def _own_clock() -> Callable[[], float]:
    """Tells for how long this thread has computed; where the system does not say that, for how long it has lived."""
    began = time.monotonic()
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: time.monotonic() - began
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def computed() -> float:
        try:
            return time.clock_gettime(clock)
        except OSError:  # it has just ended
            return 0.0

    return computed


@contextmanager
def _explained(matcher: Any) -> Iterator[None]:
    """Whatever goes wrong in a matcher becomes BadGrammarError."""
    yield
    if matcher.is_error():
        raise BadGrammarError("the grammar can't be followed any further", why=_first_line(matcher.get_error()))


def _broken(grammar: Grammar, message: str) -> BadGrammarError:
    """The error for what llguidance says about a grammar."""
    why = _first_line(message)
    if grammar.kind == "json_schema":
        return BadGrammarError(f"the {SCHEMA} can't be followed{_place_in_schema(grammar.text, message)}", why=why)
    found = _PLACE.match(message)
    why = why.removeprefix(found[0].strip()).strip() if found else why
    if found and grammar.kind == "lark":
        return BadGrammarError(f"the {GRAMMAR} is broken at {_place_in_lark(grammar.text, found, message)}", why=why)
    return BadGrammarError(f"the {GRAMMAR} can't be followed", why=why)


def _place_in_lark(text: str, found: re.Match[str], message: str) -> str:
    """Where the mistake is: llguidance names the beginning of the rule's body, and quotes what stands behind it."""
    line, column = int(found[1]), int(found[2])
    quoted = _QUOTED.search(message)
    body = sum(len(before) for before in text.splitlines(keepends=True)[: line - 1]) + column - 1
    offset = text.find(_unquoted(quoted[1]), body) if quoted else -1
    return place(text, offset) if offset >= 0 else f"line {line}, column {column}"


def _unquoted(written: str) -> str:
    return re.sub(r"\\(.)", r"\1", written)


def _place_in_schema(text: str, message: str) -> str:
    """Where the regular expression is that a message shows, or the keyword that it names; "" if it shows none."""
    import json

    keyword = re.search(r'"(?:min|max)Properties"', text) if "min/maxProperties" in message else None
    if keyword:
        return f" at {place(text, keyword.start())}"
    for match in re.finditer(r'"(?:pattern|patternProperties)"\s*:\s*(?:\{\s*)?("(?:[^"\\]|\\.)*")', text):
        if json.loads(match[1]) in message:
            return f" at {place(text, match.start(1))}"
    return ""


def _first_line(message: str) -> str:
    """The message without the source lines that llguidance shows under it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("error:")]
    return (causes or lines or ["llguidance does not say why"])[0].removeprefix("error:").strip()[:300]
