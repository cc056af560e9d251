"""Token masks by a grammar: llguidance's matcher with our own grammars and errors.

Owns llguidance, which no other module imports; must not know sampling or the loop. A user's grammar is untrusted: its
size is limited before llguidance reads it, llguidance limits time and memory, and all of its errors become
BadGrammarError.
"""

from __future__ import annotations

import ctypes
import json
import re
import string
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from llmrun.engine import environment
from llmrun.engine.constraint.distinct import DistinctItems
from llmrun.engine.constraint.lexemes import to_lark
from llmrun.engine.llama.library import import_submodule
from llmrun.errors import BadGrammarError, OutOfMemoryError
from llmrun.grammar import Grammar, gbnf, lark
from llmrun.grammar.json_lark import Rules, rules_of
from llmrun.grammar.place import GRAMMAR, SCHEMA, dotted, place

if TYPE_CHECKING:
    from llmrun.engine.llama.base import Vocabulary

SCHEMA_NAME = "json_schema"  # of the schema of an answer, where a part of it is named
_WORD_BITS = 32
_STACK_BYTES = 256 * 1024 * 1024  # llguidance compiles recursively, a few hundred bytes for each nested name
# llguidance can't be stopped, and its time may double with every pattern that one text has to match.
_MAX_SECONDS = 5.0
_POLL_SECONDS = 0.05
_MAX_RUNAWAYS = 2
_MAX_COMPILED = 8
_MAX_TOKENS = 4  # of a vocabulary, with other control tokens shown: each has the bytes of all tokens
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 1_000_000,  # about 70 ms for one token
    "step_max_items": 1_000_000,  # about 50 ms for one token
    "max_lexer_states": 100_000,  # about 200 MB
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
_LETTERS = string.printable.encode()[:94]  # without blanks

_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): *")
_QUOTED = re.compile(r'(?:unknown name:|invalid regex) "((?:[^"\\]|\\.)+)"')

_Result = TypeVar("_Result")


class Mask:
    """One bit per token, 1 if it is allowed next: bit t % 32 of 32-bit word t // 32 for token t. Initially all 0."""

    def __init__(self, n_tokens: int) -> None:
        self._n_tokens = n_tokens
        self.words = (ctypes.c_uint32 * -(-n_tokens // _WORD_BITS))()

    @property
    def address(self) -> int:
        return ctypes.addressof(self.words)

    def allow_all(self) -> None:
        n_words = len(self.words)
        self.words[:] = [2**_WORD_BITS - 1] * n_words
        self.forbid(range(self._n_tokens, n_words * _WORD_BITS))

    def allow(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.words[token // _WORD_BITS] |= 1 << token % _WORD_BITS

    def forbid(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.words[token // _WORD_BITS] &= ~(1 << token % _WORD_BITS)


class Constraint(Protocol):
    """The allowed next tokens of one answer. Methods raise BadGrammarError beyond a limit of time or memory."""

    def mask(self) -> int:
        """Return the address of the mask of the next token (see Mask), valid until the next call.

        Raises:
            BadGrammarError: no token is allowed, or a limit is exceeded.
        """

    def accept(self, token: int) -> None:
        """Append a token that the mask allows, or that is forced.

        Raises:
            BadGrammarError: the grammar does not allow it.
        """

    def refuses(self, token: int) -> bool:
        """Return whether a token that the mask allows must not follow nevertheless; mostly none is."""

    def forced(self) -> list[int]:
        """Return the next tokens if the grammar leaves no choice, mostly none; doesn't accept them."""

    def allowed(self, tokens: list[int]) -> int:
        """Return the number of first tokens of a draft that the grammar allows; doesn't accept them."""

    def closing(self, limit: int) -> list[int] | None:
        """Return tokens that complete the answer, without an end token; None if no more than limit are not found."""

    def rewind(self, n_tokens: int) -> None:
        """Remove the last accepted tokens.

        Raises:
            BadGrammarError: fewer tokens were accepted.
        """


class Matcher:
    """A Constraint that follows one grammar, made by compile_grammar().

    End tokens are allowed where the grammar can end, control tokens never.

    Attributes:
        left_out: the paths of what is not enforced of the schema, and of the schemas of the request's tools.
        endings: tokens that end a call of a tool, or a string without quotes; the first ones that fit are preferred.
    """

    def __init__(
        self, matcher: Any, tokens: Tokens, vocabulary: Vocabulary, distinct: DistinctItems | None = None
    ) -> None:
        self.tokens = tokens
        self.left_out: tuple[str, ...] = ()
        self.endings: list[list[int]] = []
        self._matcher = matcher
        self._distinct = distinct
        self._vocabulary = vocabulary  # keeps it alive: the matcher only has a weak reference
        self._mask = Mask(tokens.n_vocab)
        self._is_mask_current = False
        self._ended = False
        self._n_accepted = 0

    def copy(self) -> Matcher:
        distinct = self._distinct.copy() if self._distinct is not None else None
        twin = Matcher(self._matcher.deep_copy(), self.tokens, self._vocabulary, distinct)
        twin._ended, twin.endings, twin._n_accepted = self._ended, self.endings, self._n_accepted
        return twin

    def mask(self, extra: Collection[int] = ()) -> int:
        """Return the address of the mask, with extra tokens allowed; see Constraint."""
        if not self._is_mask_current:
            words = self._mask.words
            with _explained(self._matcher):
                self._matcher.unsafe_compute_mask_ptr(self._mask.address, ctypes.sizeof(words))
            if bytes(words) == bytes(ctypes.sizeof(words)):
                raise BadGrammarError("the grammar can't be followed any further", why="no token of the model fits")
        self._is_mask_current = not extra
        self._mask.allow(extra)
        return self._mask.address

    def accept(self, token: int) -> None:
        self._is_mask_current = False
        if token in self.tokens.ends:
            self._ended = True
            return
        if self._distinct is not None and not self._distinct.accept(self.tokens.tokens[token]):
            raise BadGrammarError("the grammar can't be followed any further", why="an item of a list is repeated")
        with _explained(self._matcher):
            self._matcher.consume_token(token)
        self._n_accepted += 1

    def refuses(self, token: int) -> bool:
        distinct = self._distinct
        if distinct is None or token in self.tokens.ends:
            return False
        if not distinct.accept(self.tokens.tokens[token]):
            return True
        try:
            return (distinct.more is not None or distinct.may_repeat) and self._has_to_repeat(distinct, token)
        finally:
            distinct.rewind(1)

    def _has_to_repeat(self, distinct: DistinctItems, token: int) -> bool:
        """Return whether a token, which `distinct` has accepted, leaves no way but to repeat an item."""
        with _explained(self._matcher):
            self._matcher.consume_token(token)
        if distinct.more is not None:
            more = [self.tokens.single[character] for character in distinct.more if character in self.tokens.single]
            repeats = not any(self._matcher.validate_tokens([token]) for token in more)
        else:
            repeats = not distinct.accept(self._matcher.compute_ff_bytes())
            distinct.rewind(not repeats)
        with _explained(self._matcher):
            self._matcher.rollback(1)
        return repeats

    def forced(self) -> list[int]:
        if self._ended or not self.tokens.canonical:
            return []
        with _explained(self._matcher):
            tokens = list(self._matcher.compute_ff_tokens())
        return tokens[: self._n_distinct(tokens)]

    def _n_distinct(self, tokens: list[int]) -> int:
        """Return how many first tokens repeat no item of a list."""
        if self._distinct is None:
            return len(tokens)
        pieces = map(self.tokens.tokens.__getitem__, tokens)
        n_tokens = sum(1 for _ in takewhile(self._distinct.accept, pieces))
        self._distinct.rewind(n_tokens)
        return n_tokens

    def allowed(self, tokens: list[int]) -> int:
        if self._ended:
            return 0
        before_end = list(takewhile(lambda token: token not in self.tokens.ends, tokens))
        valid = self._n_distinct(before_end[: int(self._matcher.validate_tokens(before_end))])
        return valid + (valid == len(before_end) < len(tokens))

    def closing(self, limit: int) -> list[int] | None:
        twin, tokens = self.copy(), list[int]()
        try:
            while not twin._ended and not twin._allowed_of(self.tokens.ends):
                tokens += (step := twin._closing_step())
                if len(tokens) > limit:
                    return None
                for token in step:
                    twin.accept(token)
        except BadGrammarError:
            return None
        return tokens

    def _closing_step(self) -> list[int]:
        """Return the next tokens on a short way to the end, though maybe not the shortest."""
        forced = self.forced()
        if forced:
            return forced
        is_text, single = self._is_in_text(), self.tokens.single
        for tokens in self.endings:
            # In a text an ending may have begun.
            for start in range(len(tokens) - 1, -1, -1) if is_text else (0,):
                if self._ends(tokens[start:], is_text):
                    return tokens[start:]
        # Only a quote ends a text; elsewhere a quote begins another one.
        order = b'"' if is_text else b'}]",: 0123456789'
        preferred = self._allowed_of(single[character] for character in order if character in single)
        if preferred:
            return preferred[:1]
        # A pattern has to be met: after letters of all kinds in turn it mostly is. By the length of the answer, so that
        # the way from the next token on is the same.
        letters = self._allowed_of(single[letter] for letter in _LETTERS if letter in single)
        letters = letters or self._allowed_of(range(self.tokens.n_vocab), most=1)
        return [letters[self._n_accepted % len(letters)]]

    def _is_in_text(self) -> bool:
        """Return whether the answer goes on with any letter."""
        single = self.tokens.single
        letters = [single[letter] for letter in b"qjz" if letter in single]
        return sum(int(self._matcher.validate_tokens([letter])) for letter in letters) > 1

    def _ends(self, tokens: list[int], is_text: bool) -> bool:
        """Return whether these tokens may follow, and end the text that the answer is in."""
        is_valid = bool(self._matcher.validate_tokens(tokens) == len(tokens))
        if not (is_valid and is_text):
            return is_valid
        for token in tokens:
            self.accept(token)
        ended = not self._is_in_text()
        self.rewind(len(tokens))
        return ended

    def _allowed_of(self, tokens: Iterable[int], most: int | None = None) -> list[int]:
        """Return those of some tokens that the mask allows, in their order."""
        self.mask()
        words = self._mask.words
        masked = (token for token in tokens if words[token // _WORD_BITS] >> token % _WORD_BITS & 1)
        return list(islice((token for token in masked if not self.refuses(token)), most))

    def rewind(self, n_tokens: int) -> None:
        self._is_mask_current = False
        n_tokens -= self._ended
        self._ended = False
        with _explained(self._matcher):
            self._matcher.rollback(n_tokens)
        if self._distinct is not None:
            self._distinct.rewind(n_tokens)
        self._n_accepted -= n_tokens


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
    """Return a matcher at the beginning of an answer.

    Raises:
        BadGrammarError: the grammar is invalid, or too complex.
    """
    matcher = _matcher(grammar, _as_lark(grammar), vocabulary)
    if grammar.kind == "json_schema":
        rules = rules_of(grammar.text, is_strict=grammar.is_strict)
        matcher.left_out = tuple(dotted((SCHEMA_NAME, *path)) for path in rules.ignored)
        if rules.repeating:
            matcher._distinct = DistinctItems(grammar.text, is_strict=grammar.is_strict)
    return matcher


def compile_lark(text: str, vocabulary: Vocabulary, shown: Collection[int]) -> Matcher:
    """Return a matcher for a grammar that llmrun has written.

    Args:
        shown: control tokens that the grammar matches by their texts.

    Raises:
        BadGrammarError: the schemas in it are too complex.
    """
    return _matcher(Grammar("lark", text), text, vocabulary, shown)


def check_rules(rules: Rules) -> None:
    """Raise BadGrammarError for rules of a schema that can't be compiled, whatever the vocabulary is."""
    text = _rules_as_lark(rules)
    _compiled(Grammar("lark", text), text, import_submodule("llguidance", "_lib").LLTokenizer("byte"))


def _matcher(grammar: Grammar, text: str, vocabulary: Vocabulary, shown: Collection[int] = ()) -> Matcher:
    """Return a new matcher. The latest grammars stay compiled: agents send the same tools with every request.

    Args:
        grammar: as the user gave it, for errors.
        text: the same in Lark.
    """
    tokens = tokens_of(vocabulary, frozenset(shown))
    compiled = tokens.compiled.pop(text, None) or _compiled(grammar, text, tokens.native)
    tokens.compiled[text] = compiled
    if len(tokens.compiled) > _MAX_COMPILED:
        del tokens.compiled[next(iter(tokens.compiled))]
    return Matcher(compiled.deep_copy(), tokens, vocabulary)


def _compiled(grammar: Grammar, text: str, tokenizer: Any) -> Any:
    native = import_submodule("llguidance", "_lib")
    source, limits = native.LLMatcher.grammar_from_lark(text), native.LLParserLimits(**_LIMITS)
    matcher = _in_large_stack(lambda: native.LLMatcher(tokenizer, source, log_level=0, limits=limits))
    if matcher.is_error():
        raise _invalid(grammar, matcher.get_error())
    return matcher


def _as_lark(grammar: Grammar) -> str:
    """Translate a grammar for llguidance, with all checks, because the engine doesn't trust the front."""
    if grammar.kind == "json_schema":
        return _rules_as_lark(rules_of(grammar.text, is_strict=grammar.is_strict))
    if grammar.kind == "gbnf":
        return to_lark(gbnf.parse(grammar.text))
    lark.check(grammar.text)
    return grammar.text


def _rules_as_lark(rules: Rules) -> str:
    return "\n".join([f"start: {rules.start}", *rules.lines])


class Tokens:
    """A vocabulary with the attributes that llguidance's LLTokenizer reads.

    Args:
        shown: control tokens that grammars match by their texts.

    Attributes:
        tokens: the bytes of each token.
        single: character -> the token of that byte alone.
        ends: the end tokens.
        canonical: the model's own tokenizer restores all sample texts exactly; only then tokens are forced.
    """

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, shown: Collection[int] = ()) -> None:
        self.compiled: dict[str, Any] = {}  # source -> a matcher at its beginning; the latest is the last
        self._vocabulary = weakref.ref(vocabulary)
        self._has_shown = bool(shown)
        self.n_vocab = vocabulary.n_tokens
        self.tokens = [vocabulary.piece(token) for token in range(self.n_vocab)]
        for token in shown:
            self.tokens[token] = vocabulary.control_piece(token)
        self.single = {piece[0]: token for token, piece in enumerate(self.tokens) if len(piece) == 1}
        self.ends = frozenset(vocabulary.ends)
        if not self.ends:
            raise BadGrammarError("this model can't follow a grammar", why="it has no token that ends an answer")
        self.special_token_ids = sorted(self.ends)
        self.eos_token_id = self.special_token_ids[0]
        self.canonical = all(self._encode(text) is not None for text in _SAMPLES)
        native = import_submodule("llguidance", "_lib")
        self.native = native.LLTokenizer(self, n_vocab=self.n_vocab, eos_token=self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text as the model does; llguidance uses it for forced tokens."""
        tokens = self._encode(text)
        return self.native.greedy_tokenize(text) if tokens is None else tokens

    def _encode(self, text: str) -> list[int] | None:
        """Tokenize a text; None unless the tokens restore it exactly.

        Some tokenizers put a space before everything, so the second try is after a line break.
        """
        vocabulary = self._vocabulary()
        assert vocabulary is not None, "a constraint outlived its model"
        data = text.encode()
        tokens = vocabulary.tokenize(text, special=self._has_shown, begins=False)
        if self._bytes(tokens) == data:
            return tokens
        before = vocabulary.tokenize("\n", special=False, begins=False)
        tokens = vocabulary.tokenize("\n" + text, special=self._has_shown, begins=False)
        after = tokens[len(before) :]
        return after if tokens[: len(before)] == before and self._bytes(after) == data else None

    def _bytes(self, tokens: list[int]) -> bytes:
        return b"".join(self.tokens[token] for token in tokens)


_SAMPLES = ('{"name": "', "the quick brown fox", " 12.5", "größer\n\n", "]}, {")
_cache: WeakKeyDictionary[Vocabulary, dict[frozenset[int], Tokens]] = WeakKeyDictionary()


def tokens_of(vocabulary: Vocabulary, shown: frozenset[int] = frozenset()) -> Tokens:
    """Return the Tokens of a vocabulary; the first call reads all of it, which takes tenths of a second.

    Raises:
        BadGrammarError: the model has no end token.
    """
    cached = _cache.setdefault(vocabulary, {})
    tokens = cached.pop(shown, None) or Tokens(vocabulary, shown)
    cached[shown] = tokens
    while len(cached) > _MAX_TOKENS:
        del cached[next(iter(cached))]
    return tokens


_runaways: list[threading.Thread] = []


def n_runaways() -> int:
    """Return the number of threads that still compile a grammar after its timeout."""
    _runaways[:] = [thread for thread in _runaways if thread.is_alive()]
    return len(_runaways)


def _in_large_stack(call: Callable[[], _Result]) -> _Result:
    """Call a function in a thread with a large stack, of which only used pages take memory.

    Raises:
        BadGrammarError: the call fails, or takes too long.
    """
    if n_runaways() >= _MAX_RUNAWAYS:
        why = f"{_MAX_RUNAWAYS} too complex grammars are still being compiled"
        raise BadGrammarError("no grammar can be compiled now", why=why)
    results: list[_Result] = []
    errors: list[BaseException] = []
    clocks: list[Callable[[], float]] = []

    def run() -> None:
        clocks.append(_own_clock())
        if environment.is_decoding():
            environment.lower_thread_priority()
        try:
            results.append(call())
        except BaseException as error:  # a panic in Rust is not an Exception
            errors.append(error)

    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
    except RuntimeError:
        raise OutOfMemoryError("there is no memory to compile the grammar") from None
    finally:
        threading.stack_size(before)
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        if thread.is_alive() and clocks and clocks[0]() > _MAX_SECONDS:
            _runaways.append(thread)
            why = f"compiling it takes more than {_MAX_SECONDS:g} seconds"
            raise BadGrammarError(f"the {GRAMMAR} is too complex", why=why)
    if errors:
        raise BadGrammarError(f"the {GRAMMAR} can't be followed", why=_first_line(str(errors[0]))) from errors[0]
    return results[0]


def _own_clock() -> Callable[[], float]:
    """Return a clock of this thread's processor time; where the system has none, of the process's, which is at most the
    time that passed."""
    began, used = time.monotonic(), time.process_time()
    if sys.platform != "linux":
        return lambda: min(time.monotonic() - began, time.process_time() - used)
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def computed() -> float:
        try:
            return time.clock_gettime(clock)
        except OSError:  # the thread has just ended
            return 0.0

    return computed


@contextmanager
def _explained(matcher: Any) -> Iterator[None]:
    """Raise a matcher's error as BadGrammarError."""
    yield
    if matcher.is_error():
        raise BadGrammarError("the grammar can't be followed any further", why=_first_line(matcher.get_error()))


def _invalid(grammar: Grammar, message: str) -> BadGrammarError:
    """Return the error for llguidance's message about a grammar."""
    why = _first_line(message)
    if grammar.kind == "json_schema":
        return BadGrammarError(f"the {SCHEMA} can't be followed{_place_in_schema(grammar.text, message)}", why=why)
    match = _PLACE.match(message)
    why = why.removeprefix(match[0].strip()).strip() if match else why
    if match and grammar.kind == "lark":
        return BadGrammarError(f"the {GRAMMAR} is broken at {_place_in_lark(grammar.text, match, message)}", why=why)
    return BadGrammarError(f"the {GRAMMAR} can't be followed", why=why)


def _place_in_lark(text: str, match: re.Match[str], message: str) -> str:
    """Locate an error: llguidance reports the beginning of the rule's body, and quotes the text after the error."""
    line, column = int(match[1]), int(match[2])
    quoted = _QUOTED.search(message)
    body = sum(len(before) for before in text.splitlines(keepends=True)[: line - 1]) + column - 1
    offset = text.find(re.sub(r"\\(.)", r"\1", quoted[1]), body) if quoted else -1
    return place(text, offset) if offset >= 0 else f"line {line}, column {column}"


def _place_in_schema(text: str, message: str) -> str:
    """Locate the regular expression or keyword in llguidance's message; "" if it contains none."""
    keyword = re.search(r'"(?:min|max)Properties"', text) if "min/maxProperties" in message else None
    if keyword:
        return f" at {place(text, keyword.start())}"
    for match in re.finditer(r'"(?:pattern|patternProperties)"\s*:\s*(?:\{\s*)?("(?:[^"\\]|\\.)*")', text):
        if json.loads(match[1]) in message:
            return f" at {place(text, match.start(1))}"
    return ""


def _first_line(message: str) -> str:
    """Return the message without the source lines that llguidance appends."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("error:")]
    return (causes or lines or ["unknown error of llguidance"])[0].removeprefix("error:").strip()[:300]
