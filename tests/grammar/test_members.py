"""Objects' properties: every sequence of names is judged by a slow twin, and none is a dead end."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

from support.fake_context import END, FakeVocabulary
from support.schema_answers import allowed
from support.seeds import for_seeds

from llmrun.engine.constraint.matcher import Matcher, compile_lark
from llmrun.grammar.members import MAX_BITS, Members, members_rules

VOCABULARY = FakeVocabulary()
OTHER = "o"


def constraint(members: Members) -> Matcher:
    expression, lines = members_rules("n", members)
    return compile_lark("\n".join([f'start: "{{" {expression} "}}"', *lines]), VOCABULARY, ())


def is_complete(written: Sequence[str], names: str, members: Members) -> bool:
    """The slow twin."""
    listed, further = [name for name in written if name != OTHER], written.count(OTHER)
    n_different = len(listed) + bool(further)
    most = len(written) if members.maximum is None else members.maximum
    in_order = [*sorted(listed, key=names.index)] == listed or members.any_order
    return (
        len(set(listed)) == len(listed)
        and in_order
        and OTHER not in written[: len(written) - further]
        and (not further or bool(members.other))
        and {names[index] for index in members.required} <= set(listed)
        and n_different >= members.minimum
        and len(written) <= most
    )


def random_members(choose: random.Random) -> tuple[str, Members]:
    names = "abcd"[: choose.randint(0, 4)]
    required = frozenset(index for index in range(len(names)) if choose.random() < 0.4)
    other = choose.choice(("", '"o"'))
    minimum = choose.choice((0, 0, 0, 1, 2, 3))
    minimum = min(minimum, len(names) + bool(other))
    maximum = choose.choice((None, None, max(minimum, len(required), 1) + choose.randint(0, 2)))
    pairs = [f'"{name}"' for name in names]
    return names, Members(pairs, required, other, minimum, maximum, any_order=choose.random() < 0.5)


def sequences(names: str) -> Iterator[tuple[str, ...]]:
    for size in range(5):
        yield from product((*names, OTHER), repeat=size)


@for_seeds(40)
def test_names_are_allowed_as_the_twin_says(seed: int) -> None:
    names, members = random_members(random.Random(seed))
    grammar = constraint(members)
    for written in sequences(names):
        text = [ord(character) for character in "{" + ", ".join(written) + "}"]
        assert (grammar.allowed(text) == len(text)) == is_complete(written, names, members), (members, written)


@for_seeds(40)
def test_no_way_is_a_dead_end(seed: int) -> None:
    choose = random.Random(seed)
    _, members = random_members(choose)
    for _ in range(10):
        grammar = constraint(members)
        for _ in range(60):
            tokens = allowed(grammar)
            assert tokens, members
            if END in tokens:
                break
            grammar.accept(choose.choice(tokens))
        assert grammar.closing(100) is not None


def test_more_properties_than_a_parameter_has_bits_are_in_order_of_their_groups() -> None:
    names = [chr(ord("A") + index) for index in range(MAX_BITS + 5)]
    pairs = ['"' + name.replace("\\", "\\\\") + '"' for name in names]
    grammar = constraint(Members(pairs, frozenset((1, MAX_BITS + 1)), any_order=True))

    def holds(*indices: int) -> bool:
        text = [ord(character) for character in "{" + ", ".join(names[index] for index in indices) + "}"]
        return grammar.allowed(text) == len(text)

    last = MAX_BITS + 1
    assert holds(*range(len(names)))
    assert holds(3, 1, last + 1, last)
    assert holds(1, last)
    assert not holds(1)
    assert not holds(last)
    assert not holds(last, 1)
    assert not holds(1, 1, last)
