"""Holding tokens to a grammar: against a plain twin, over a vocabulary of bytes and a few longer tokens."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import pytest
from support.byte_vocabulary import allowed_tokens
from support.effort import loop_seconds
from support.fake_context import BEGIN, END, N_VOCAB, TURN, FakeVocabulary, tokens_of
from support.grammar_cases import BROKEN_FOR_LLGUIDANCE, BROKEN_GRAMMARS, BROKEN_SCHEMAS, GRAMMARS, SCHEMAS
from support.grammar_twin import Twin
from support.mutations import mutations

from llmrun.engine import environment
from llmrun.engine.constraint import matcher
from llmrun.engine.constraint.matcher import Matcher, compile_grammar
from llmrun.errors import BadGrammarError
from llmrun.grammar import Grammar, gbnf, read_grammar, read_json_schema

MOST_LOOPS = 200  # about a second on an idle machine
WORDS = [b"ab", b"abc", b"bc", b"aa", b"ab", b'{"', b'": ', b", ", "ü".encode(), "ü".encode()[:1] + b"a"]
STOP = N_VOCAB + len(WORDS)  # a second token that ends answers


class Vocabulary:
    """The fake's bytes and control tokens, tokens of several bytes, and two that end an answer."""

    n_tokens = STOP + 1

    def __init__(self, *, greedy: bool = True, space_first: bool = False) -> None:
        self._greedy = greedy
        self._space_first = space_first

    def tokenize(self, text: str, *, special: bool, begins: bool = True) -> list[int]:
        """The longest tokens first; maybe after a space, as models of SentencePiece do it."""
        assert not special
        rest = (b" " if self._space_first else b"") + text.encode()
        found = []
        while rest:
            longest = (
                max((word for word in WORDS if rest.startswith(word)), key=len, default=b"") if self._greedy else b""
            )
            found.append(N_VOCAB + WORDS.index(longest) if longest else rest[0])
            rest = rest[len(longest) or 1 :]
        return found

    def piece(self, token: int) -> bytes:
        if N_VOCAB <= token < STOP:
            return WORDS[token - N_VOCAB]
        return bytes([token]) if token < 256 else b""

    @property
    def ends(self) -> tuple[int, ...]:
        return (END, STOP)

    def is_end(self, token: int) -> bool:
        return token in self.ends


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary()


@pytest.fixture(scope="module")
def plain() -> FakeVocabulary:
    return FakeVocabulary()


def allowed(constraint: Matcher, n_vocab: int = Vocabulary.n_tokens) -> list[int]:
    return allowed_tokens(constraint, n_vocab)


def follows(constraint: Matcher, text: str) -> bool:
    """Return whether a text is a complete answer, byte by byte, and rewind the constraint."""
    accepted = 0
    try:
        for token in tokens_of(text):
            if token not in allowed(constraint, N_VOCAB):
                return False
            constraint.accept(token)
            accepted += 1
        return END in allowed(constraint, N_VOCAB)
    finally:
        constraint.rewind(accepted)


def test_a_grammar_that_takes_too_long_to_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pattern that one text has to match doubles the time: these take a moment, a few more of them hours."""
    monkeypatch.setattr(matcher, "_MAX_SECONDS", 0)
    monkeypatch.setattr(matcher, "_POLL_SECONDS", 0.001)
    patterns = [{"type": "string", "pattern": f"[a-z]{{{number}}}"} for number in range(17)]
    bomb = read_json_schema(json.dumps({"allOf": patterns}))
    for _ in range(2):
        with pytest.raises(BadGrammarError, match="is too complex"):
            compile_grammar(bomb, FakeVocabulary())
    assert matcher.n_runaways() == 2
    with pytest.raises(BadGrammarError, match="no grammar can be compiled now"):
        compile_grammar(read_json_schema('{"const": 1}'), FakeVocabulary())
    for thread in list(matcher._runaways):
        thread.join()
    assert matcher.n_runaways() == 0
    monkeypatch.undo()
    compile_grammar(read_json_schema('{"const": 1}'), FakeVocabulary())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness of threads")
@pytest.mark.parametrize("is_decoding", [False, True])
def test_a_grammar_gives_way_to_answers_and_to_nothing_else(
    monkeypatch: pytest.MonkeyPatch, *, is_decoding: bool
) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    monkeypatch.setattr(environment, "is_decoding", lambda: is_decoding)
    own = niceness()
    assert matcher._in_large_stack(niceness) == (max(own, environment._NICENESS) if is_decoding else own)
    assert niceness() == own


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, compiled = FakeVocabulary(), list[str]()
    compiler = matcher._compiled
    monkeypatch.setattr(matcher, "_compiled", lambda *given: compiled.append(given[1]) or compiler(*given))
    schema = read_json_schema('{"enum": ["ab", "ac"]}')
    one, other = compile_grammar(schema, vocabulary), compile_grammar(schema, vocabulary)
    assert len(compiled) == 1
    one.accept(ord('"'))
    assert follows(other, '"ab"'), "another answer is at its own place"
    for number in range(matcher._MAX_COMPILED):
        compile_grammar(read_json_schema(f'{{"const": {number}}}'), vocabulary)
    compile_grammar(schema, vocabulary)
    assert len(compiled) == 2 + matcher._MAX_COMPILED


@pytest.mark.parametrize("name", GRAMMARS)
def test_gbnf_allows_what_it_says(name: str, plain: FakeVocabulary) -> None:
    text, good, bad = GRAMMARS[name]
    constraint, rules = compile_grammar(read_grammar(text), plain), gbnf.parse(text)
    for answer in [*good, *bad]:
        assert Twin(rules, answer).follows == (answer in good), answer
        assert follows(constraint, answer) == (answer in good), answer


def random_grammar(choose: random.Random) -> str:
    """A few rules over three letters, some of them recursive."""
    names = ["root", "x", "y", "z"][: choose.randint(1, 4)]
    leaves = ['"a"', '"b"', '"ab"', '"abc"', '"c"', "[ab]", "[^a]", "[bc]", '""']

    def node(depth: int) -> str:
        kind = choose.random()
        if depth == 0 or kind < 0.3:
            return choose.choice(leaves + names)
        if kind < 0.55:
            return " ".join(node(depth - 1) for _ in range(choose.randint(1, 3)))
        if kind < 0.75:
            return f"({' | '.join(node(depth - 1) for _ in range(choose.randint(2, 3)))})"
        return f"({node(depth - 1)}){choose.choice(['*', '+', '?', '{2}', '{1,2}', '{0,3}', '{2,}'])}"

    rules = [f"{name} ::= {node(3)} | {choose.choice(leaves)} {node(2)}" for name in names]
    # Recursion in the middle of a rule, which a lexer alone can't follow.
    return "\n".join([*rules, f"w ::= {choose.choice(leaves[:5])} w {choose.choice(leaves[:8])} | root", ""])


def good_random_grammars(count: int) -> Iterator[str]:
    seeds = itertools.count()
    while count:
        text = (
            random_grammar(random.Random(next(seeds))).replace("root ::=", "root ::= w2 |", 1)
            + 'w2 ::= "c" w2 "a" | "b"\n'
        )
        try:
            gbnf.parse(text)
        except BadGrammarError:
            continue
        count -= 1
        yield text


def test_random_grammars_allow_exactly_what_their_twin_does(plain: FakeVocabulary) -> None:
    answers = ["".join(letters) for size in range(5) for letters in itertools.product("abc", repeat=size)]
    for text in good_random_grammars(50):
        constraint, rules = compile_grammar(Grammar("gbnf", text), plain), gbnf.parse(text)
        for answer in answers:
            assert follows(constraint, answer) == Twin(rules, answer).follows, (text, answer)


def all_answers(constraint: Matcher, vocabulary: Vocabulary, longest: int, force: bool) -> set[bytes]:
    """Every answer of a, b and c up to some length that can be drawn, in every way to cut it into tokens."""
    found: set[bytes] = set()

    def go_on(text: bytes) -> None:
        tokens = constraint.forced() if force else []
        forced = b"".join(vocabulary.piece(token) for token in tokens)
        if tokens and len(text + forced) <= longest and not forced.strip(b"abc"):
            go_with(text, tokens)
            return
        for token in allowed(constraint):
            word = vocabulary.piece(token)
            if vocabulary.is_end(token):
                found.add(text)
            elif len(text + word) <= longest and not word.strip(b"abc"):
                go_with(text, [token])

    def go_with(text: bytes, tokens: Sequence[int]) -> None:
        for token in tokens:
            constraint.accept(token)
        go_on(text + b"".join(vocabulary.piece(token) for token in tokens))
        constraint.rewind(len(tokens))

    go_on(b"")
    return found


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
def test_every_answer_can_be_drawn_whatever_is_forced(force: bool, greedy: bool) -> None:
    vocabulary = Vocabulary(greedy=greedy)
    answers = ["".join(letters) for size in range(5) for letters in itertools.product("abc", repeat=size)]
    for text in good_random_grammars(12):
        rules = gbnf.parse(text)
        drawn = all_answers(compile_grammar(Grammar("gbnf", text), vocabulary), vocabulary, 4, force)
        assert drawn == {answer.encode() for answer in answers if Twin(rules, answer).follows}, text


def test_what_is_forced_is_cut_as_the_model_cuts_it(vocabulary: Vocabulary) -> None:
    constraint = compile_grammar(
        read_json_schema('{"properties": {"abc": {}}, "required": ["abc"], "type": "object"}'), vocabulary
    )
    tokens = constraint.forced()
    text = b"".join(map(vocabulary.piece, tokens))
    assert b'{"abc": '.startswith(text)
    assert tokens == vocabulary.tokenize('{"abc": ', special=False)[: len(tokens)]
    assert len(tokens) >= 2
    assert constraint.forced() == tokens


def test_nothing_is_forced_where_the_answer_may_end_or_go_on(plain: FakeVocabulary) -> None:
    constraint = compile_grammar(read_grammar('root ::= "a" "b"? | "ax" | [x-y]'), plain)
    assert constraint.forced() == []
    constraint.accept(ord("a"))
    assert constraint.forced() == []
    constraint.accept(ord("b"))
    assert constraint.forced() == []
    constraint.accept(END)
    assert constraint.forced() == []


def test_a_tokenizer_that_puts_a_space_first_forces_all_the_same() -> None:
    vocabulary = Vocabulary(space_first=True)
    constraint = compile_grammar(read_grammar('root ::= "abcab" [0-9]'), vocabulary)
    assert b"".join(map(vocabulary.piece, constraint.forced())).startswith(b"abc")


def test_a_tokenizer_that_changes_texts_forces_nothing() -> None:
    class Lossy(Vocabulary):
        def tokenize(self, text: str, *, special: bool, begins: bool = True) -> list[int]:
            return super().tokenize(text.lower().replace(" ", ""), special=special)

    constraint = compile_grammar(read_grammar('root ::= "abcab" [0-9]'), Lossy())
    assert constraint.forced() == []
    assert allowed(constraint)


def test_control_tokens_are_never_allowed_and_all_ends_at_the_end(vocabulary: Vocabulary) -> None:
    constraint = compile_grammar(read_grammar("root ::= .*"), vocabulary)
    tokens = allowed(constraint)
    assert {END, STOP, N_VOCAB, ord("a")} <= set(tokens)
    assert not {BEGIN, TURN} & set(tokens)
    constraint = compile_grammar(read_grammar('root ::= "a"'), vocabulary)
    assert allowed(constraint) == [ord("a")]
    constraint.accept(ord("a"))
    assert allowed(constraint) == [END, STOP]


def test_rewinding_goes_back_token_by_token(vocabulary: Vocabulary) -> None:
    constraint = compile_grammar(read_json_schema('{"enum": ["abc", "abd", 17]}'), vocabulary)
    states = [allowed(constraint)]
    tokens = [ord('"'), N_VOCAB, ord("d"), ord('"'), END]
    for token in tokens[:-1]:
        constraint.accept(token)
        states.append(allowed(constraint))
    constraint.accept(tokens[-1])
    for steps in (1, 1, 2, 1):
        constraint.rewind(steps)
        del states[-1 if len(states) < 5 or steps > 1 else len(states) :]
    constraint.rewind(0)
    assert allowed(constraint) == states[0]
    for token in tokens:
        assert token in allowed(constraint)
        constraint.accept(token)
    constraint.rewind(len(tokens))
    assert allowed(constraint) == states[0]
    with pytest.raises(BadGrammarError, match="can't be followed any further"):
        constraint.rewind(1)


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (b"abce", 4),
        (b"abx", 2),
        (b"x", 0),
        (b"", 0),
        ([*b"abc", END, TURN], 4),
        ([ord("a"), END], 2),  # whether it may end there is for the mask to say
        ([TURN, ord("a")], 0),
    ],
)
def test_a_draft_is_cut_where_the_grammar_forbids_it(
    draft: Sequence[int], expected: int, vocabulary: Vocabulary
) -> None:
    constraint = compile_grammar(read_grammar('root ::= "ab" [cd] "e"?'), vocabulary)
    before = allowed(constraint)
    assert constraint.allowed(list(draft)) == expected
    assert allowed(constraint) == before
    for token in [*b"abd", END]:
        constraint.accept(token)
    assert constraint.allowed(list(draft)) == 0


@pytest.mark.parametrize("seed", range(10))
def test_what_may_be_drawn_may_be_drafted(seed: int, vocabulary: Vocabulary) -> None:
    draws = random.Random(seed)
    constraint = compile_grammar(
        read_json_schema('{"type": "object", "additionalProperties": {"type": "integer"}}'), vocabulary
    )
    drawn: list[int] = []
    while len(drawn) < 30 and (END not in drawn and STOP not in drawn):
        drawn.append(draws.choice(allowed(constraint)))
        constraint.accept(drawn[-1])
    constraint.rewind(len(drawn))
    ended = next((place + 1 for place, token in enumerate(drawn) if token in (END, STOP)), len(drawn))
    assert constraint.allowed([*drawn, BEGIN]) == ended


def test_a_character_can_come_in_halves(vocabulary: Vocabulary) -> None:
    constraint = compile_grammar(read_grammar('root ::= [üx] "a"'), vocabulary)
    first, second = "ü".encode()
    whole = N_VOCAB + WORDS.index("ü".encode())
    assert allowed(constraint) == [ord("x"), first, whole]
    constraint.accept(first)
    assert allowed(constraint) == [second]


def test_a_token_that_is_not_allowed_is_refused(vocabulary: Vocabulary) -> None:
    constraint = compile_grammar(read_grammar('root ::= "a"'), vocabulary)
    with pytest.raises(BadGrammarError, match="can't be followed any further"):
        constraint.accept(ord("b"))
    with pytest.raises(BadGrammarError, match="can't be followed any further"):
        constraint.mask()


def test_a_model_without_end_tokens_can_follow_none() -> None:
    class Endless(Vocabulary):
        @property
        def ends(self) -> tuple[int, ...]:
            return ()

    with pytest.raises(BadGrammarError, match="no token that ends an answer"):
        compile_grammar(read_grammar('root ::= "a"'), Endless())


def test_a_grammar_without_a_way_out_is_refused_when_it_shows(plain: FakeVocabulary) -> None:
    with pytest.raises(BadGrammarError, match="can't be followed any further"):
        compile_grammar(read_grammar("start: a\na: a\n"), plain).mask()


@pytest.mark.parametrize("name", BROKEN_FOR_LLGUIDANCE)
def test_what_only_the_engine_finds_is_named_too(name: str, plain: FakeVocabulary) -> None:
    kind, case = BROKEN_FOR_LLGUIDANCE[name]
    grammar = (read_json_schema if kind == "json_schema" else read_grammar)(case.text)
    assert grammar.kind == kind
    began = time.process_time()
    with pytest.raises(BadGrammarError) as caught:
        compile_grammar(grammar, plain)
    assert time.process_time() - began < 2 * MOST_LOOPS * loop_seconds()
    assert case.place in str(caught.value)
    assert case.why in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", [*BROKEN_GRAMMARS, *BROKEN_SCHEMAS])
def test_the_engine_trusts_nothing_that_the_front_would_refuse(name: str, plain: FakeVocabulary) -> None:
    for cases, kind in ((BROKEN_GRAMMARS, "gbnf"), (BROKEN_SCHEMAS, "json_schema")):
        if name in cases:
            kind = "lark" if name.startswith("Lark") else kind
            with pytest.raises(BadGrammarError):
                compile_grammar(Grammar(kind, cases[name].text), plain)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_good_schema_compiles_and_begins(name: str, plain: FakeVocabulary) -> None:
    constraint = compile_grammar(read_json_schema(json.dumps(SCHEMAS[name])), plain)
    assert allowed(constraint, N_VOCAB)


DEEP = 3_000
GREEDY = {
    "rules in a chain": "".join(f'r{n} ::= "a" r{n + 1} "b" | "x"\n' for n in range(DEEP))
    + f'r{DEEP} ::= r0 | "z"\nroot ::= r0\n',
    "terminals in a chain": "".join(f'r{n} ::= "a" r{n + 1} "b" | "x"\n' for n in range(DEEP))
    + f'r{DEEP} ::= "z"\nroot ::= r0\n',
    "nested repetitions": 'root ::= (((("a"{1,1000}){1,1000}){1,1000} "b"){1,1000} root?){0,1000}',
    "ambiguity": 'root ::= a\na ::= "x" a a a | "x"* | "x"{0,500} "y"',
    "a wide choice": "root ::= " + " | ".join(f'"v{n}"' for n in range(15_000)),
    "looking back far": 'root ::= ([ab]* "a" [ab]{25} "c")+ root?',
    "many letters alike": "root ::= " + " | ".join(f'[a-z]+ "{n}" root?' for n in range(300)),
}


@pytest.mark.parametrize("name", GREEDY)
def test_a_grammar_that_asks_for_much_takes_little_or_is_refused(name: str, vocabulary: Vocabulary) -> None:
    began = time.process_time()
    with contextlib.suppress(BadGrammarError):
        constraint = compile_grammar(Grammar("gbnf", GREEDY[name]), vocabulary)
        for _ in range(20):
            constraint.accept(allowed(constraint)[0])
    assert time.process_time() - began < 5 * MOST_LOOPS * loop_seconds()


@pytest.mark.parametrize("kind", ["gbnf", "lark", "json_schema"])
def test_whatever_is_written_the_engine_lives(kind: str, plain: FakeVocabulary) -> None:
    texts = {
        "gbnf": [text for text, _, _ in GRAMMARS.values()],
        "json_schema": [json.dumps(schema) for schema in SCHEMAS.values()],
        "lark": [
            'start: "a" thing* END\nthing: /[a-z]+/ | "(" thing ")"\nEND: /\\.+/ | "!"{2,3}\n',
            '%llguidance {}\nstart: A | b\nA[max_tokens=5]: /x/i\nb: %json {"type": "object"}\n%ignore / /\n',
        ],
    }[kind]
    slowest = 0.0
    for text in mutations(texts, seed=5):
        began = time.process_time()
        try:
            constraint = compile_grammar(Grammar(kind, text), plain)
            constraint.accept(allowed(constraint, N_VOCAB)[0])
            constraint.forced()
        except BadGrammarError:
            pass
        slowest = max(slowest, time.process_time() - began)
    assert slowest < MOST_LOOPS * loop_seconds()


def test_a_vocabulary_is_looked_through_once_and_forgotten_with_its_model() -> None:
    class Counting(Vocabulary):
        asked = 0

        def piece(self, token: int) -> bytes:
            self.asked += 1
            return super().piece(token)

    vocabulary = Counting()
    grammar = read_grammar('root ::= "abc"')
    compile_grammar(grammar, vocabulary)
    compile_grammar(grammar, vocabulary).forced()
    assert vocabulary.asked == vocabulary.n_tokens
    gone = weakref.ref(vocabulary)
    del vocabulary
    gc.collect()
    assert gone() is None


def test_a_recursive_grammar_may_have_thousands_of_literals(plain: FakeVocabulary) -> None:
    """As in llama.cpp. Equal beginnings of literals are no conflict, and literals without recursion are one lexeme."""
    choose = random.Random(1)
    words = sorted({"".join(choose.choices("abcdefghij", k=choose.randint(3, 11))) for _ in range(4000)})
    literals = " | ".join(f'"{word}"' for word in words)
    rules = "".join(f'w{index} ::= "{word}"\n' for index, word in enumerate(words))
    names = " | ".join(f"w{index}" for index in range(len(words)))
    for text in (
        f'root ::= "(" root ("," root)* ")" | {literals}\n',
        f'root ::= "(" root ("," root)* ")" | word\nword ::= {literals}\n',
        f'root ::= "(" root ("," root)* ")" | word\nword ::= {names}\n{rules}',
    ):
        constraint = compile_grammar(read_grammar(text), plain)
        for answer, is_right in (
            (words[7], True),
            (f"(({words[0]},{words[-1]}))", True),
            ("k", False),
            ("(abc", False),
        ):
            assert follows(constraint, answer) == is_right, answer


def test_a_choice_with_and_without_recursion_follows_its_twin(plain: FakeVocabulary) -> None:
    text = 'root ::= "a" | "ab" | "abc" root | [b-c] | "(" root ")" | "b"\n'
    constraint, rules = compile_grammar(read_grammar(text), plain), gbnf.parse(text)
    for size in range(6):
        for letters in itertools.product("abc(", repeat=size):
            answer = "".join(letters) + ")" * letters.count("(")
            assert follows(constraint, answer) == Twin(rules, answer).follows, answer


def test_a_vocabulary_is_kept_for_few_sets_of_control_tokens() -> None:
    """A client chooses them, and each set takes as much memory as the vocabulary."""
    vocabulary = FakeVocabulary()
    first = matcher.tokens_of(vocabulary)
    for token in range(10):
        matcher.tokens_of(vocabulary, frozenset({token}))
        assert matcher.tokens_of(vocabulary) is first, "the usual one stays"
    assert len(matcher._cache[vocabulary]) <= 4
