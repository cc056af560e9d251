"""A grammar sleeps while a model thinks, and binds the answer from its first token on."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from support.byte_vocabulary import ByteVocabulary, allowed_tokens

from llmrun.engine.constraint.matcher import compile_grammar
from llmrun.engine.constraint.reasoning import AfterReasoning
from llmrun.errors import BadGrammarError
from llmrun.grammar import read_grammar

TAGS = ("<think>", "</think>")
THINK, UNTHINK, END = 256, 257, 258
CONTROL = {THINK: b"<think>", UNTHINK: b"</think>", END: b"</s>"}
WORDS = [b"\n\n", b" \n", b">{", b">\n\n", b">\n{", b"</think>{", b"nk>", b"nk>x", b"{}", b"\n{"]
VOCABULARY = ByteVocabulary(CONTROL, WORDS)
GRAMMAR = read_grammar('root ::= "{" [a-z<>/]* "}"')


def begin(*, inside: bool, may_think: bool = True, tags: bool = True) -> AfterReasoning:
    vocabulary = VOCABULARY if tags else ByteVocabulary({END: CONTROL[END]}, WORDS)
    return AfterReasoning(compile_grammar(GRAMMAR, vocabulary), vocabulary, TAGS, inside=inside, may_think=may_think)


def allowed(constraint: AfterReasoning) -> set[int]:
    return {*allowed_tokens(constraint, VOCABULARY.n_tokens)}


def accept(constraint: AfterReasoning, tokens: Iterable[int]) -> None:
    """Draw these, each of which has to be allowed."""
    for token in tokens:
        assert token in allowed(constraint), token
        constraint.accept(token)


BLANKS = {ord(blank) for blank in " \t\n\r\v\f"} | {VOCABULARY.word(b"\n\n"), VOCABULARY.word(b" \n")}
FIRST = {ord("{"), VOCABULARY.word(b"{}")}


def test_reasoning_are_free_and_the_answer_is_not() -> None:
    constraint = begin(inside=True)
    accept(constraint, [*b"no grammar here, {", THINK, *b"</thin"])
    accept(constraint, [*b" and on", UNTHINK])
    assert allowed(constraint) == BLANKS | FIRST
    accept(constraint, [VOCABULARY.word(b"\n\n")])
    accept(constraint, b"{abc<think>}")
    assert allowed(constraint) == {END}


def test_a_draft_is_cut_in_the_answer_only() -> None:
    constraint = begin(inside=True)
    assert constraint.allowed([*b"no grammar"]) == len(b"no grammar")
    accept(constraint, [UNTHINK])
    assert constraint.allowed([*b"{ab!"]) == 4, "it may be blanks that come"
    accept(constraint, b"{")
    assert constraint.allowed([*b"ab!"]) == 2


def test_reasoning_do_not_end_the_answer() -> None:
    constraint = begin(inside=True)
    assert allowed(constraint) == set(range(VOCABULARY.n_tokens)) - {END, VOCABULARY.word(b"</think>{")}


def test_blanks_after_the_reasoning_have_an_end() -> None:
    constraint = begin(inside=True)
    accept(constraint, [UNTHINK, ord("\n"), ord("\n")])
    assert allowed(constraint) == FIRST


def test_a_closing_tag_may_be_many_tokens() -> None:
    constraint = begin(inside=True, tags=False)
    accept(constraint, [*b"hm</think", VOCABULARY.word(b">\n\n")])
    accept(constraint, b"{}")
    constraint = begin(inside=True, tags=False)
    accept(constraint, [*b"hm</thi", VOCABULARY.word(b"nk>"), ord("\n"), *b"{}"])


def test_no_token_is_part_of_both_the_reasoning_and_the_answer() -> None:
    """Else the grammar would not see how the answer begins."""
    constraint = begin(inside=True)
    assert VOCABULARY.word(b">{") in allowed(constraint)
    accept(constraint, b"</thi")
    assert VOCABULARY.word(b"nk>") in allowed(constraint)
    assert VOCABULARY.word(b"nk>x") not in allowed(constraint)
    accept(constraint, b"nk")
    assert not allowed(constraint) & {VOCABULARY.word(b">{"), VOCABULARY.word(b">\n{")}
    accept(constraint, b"!")
    assert VOCABULARY.word(b">{") in allowed(constraint)


def test_the_model_may_think_by_itself_but_only_first() -> None:
    constraint = begin(inside=False)
    assert allowed(constraint) == FIRST | {THINK}
    assert constraint.forced() == []
    accept(constraint, [THINK, *b"hm", UNTHINK, VOCABULARY.word(b"\n\n"), *b"{a}", END])
    constraint = begin(inside=False)
    accept(constraint, b"{")
    assert THINK not in allowed(constraint)


@pytest.mark.parametrize(("may_think", "tags"), [(False, True), (True, False)])
def test_the_grammar_binds_at_once_where_it_can_not(may_think: bool, tags: bool) -> None:
    constraint = begin(inside=False, may_think=may_think, tags=tags)
    assert allowed(constraint) == FIRST


def test_what_is_forced_to_close_the_reasoning_fits() -> None:
    constraint = begin(inside=True)
    for token in [*b"hm\n", UNTHINK, VOCABULARY.word(b"\n\n")]:
        constraint.accept(token)
    assert allowed(constraint) == BLANKS | FIRST


def test_a_token_that_the_grammar_does_not_allow_is_refused_after_the_reasoning() -> None:
    constraint = begin(inside=True)
    constraint.accept(UNTHINK)
    with pytest.raises(BadGrammarError):
        constraint.accept(ord("x"))


@pytest.mark.parametrize("seed", range(20))
def test_rewinding_goes_back_token_by_token(seed: int) -> None:
    rng = random.Random(seed)
    inside = bool(seed % 2)
    tokens = [*([] if inside else [THINK]), *b"hm", UNTHINK, VOCABULARY.word(b"\n\n"), *b"{ab}", END]
    constraint = begin(inside=inside)
    seen = [allowed(constraint)]
    position = 0
    for _ in range(60):
        if position and rng.random() < 0.4:
            back = rng.randint(1, position)
            constraint.rewind(back)
            position -= back
        elif position < len(tokens):
            accept(constraint, [tokens[position]])
            position += 1
        if position < len(seen):
            assert position == len(tokens) or allowed(constraint) == seen[position]
        else:
            seen.append(allowed(constraint) if position < len(tokens) else set())
