"""Which adapters a request is computed with, and what keeps the prefixes of different ones apart."""

from __future__ import annotations

import itertools

import pytest
from support.fake_context import FakeVocabulary

from llmrun.engine.core.prefix import NO_SALT, Salt
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.service import Preparer
from llmrun.errors import UsageError
from llmrun.protocol.adapters import Adapter, AdapterScale
from llmrun.protocol.messages import AnswerRequest, Generate

USUAL = (AdapterScale(0, 1.0),)
Chosen = tuple[AdapterScale, ...] | None


def prepared(adapters: Chosen, salt: str = "", loaded: bool = True) -> Sequence:
    """Return a request for a model with two adapters, one of them active by default."""
    known = (Adapter("a", "/a", 1.0), Adapter("b", "/b", 0.0)) if loaded else ()
    preparer = Preparer(FakeVocabulary(), None, 100, adapters=known)
    asked = AnswerRequest(prompt="x", salt=salt, adapters=adapters)
    return preparer.prepare(Generate(1, asked), lambda event: None)


@pytest.mark.parametrize("asked", [None, USUAL, (AdapterScale(1, 0.0), AdapterScale(0, 1.0))])
def test_what_is_not_said_is_as_loaded(asked: Chosen) -> None:
    """And only that may be saved: it has no salt."""
    assert (prepared(asked).adapters, prepared(asked).salt) == (USUAL, NO_SALT)


@pytest.mark.parametrize("number", [-1, 2])
def test_there_is_no_other_adapter(number: int) -> None:
    with pytest.raises(UsageError, match=f"no adapter {number}"):
        prepared((AdapterScale(number, 1.0),))


def test_no_salt_of_a_client_means_other_adapters() -> None:
    chosen = (USUAL, (), (AdapterScale(1, 1.0),), (AdapterScale(0, 0.5),))
    said = ("", "x", "|", "[]|", "[(1, 1.0)]|", "[(0, 0.5)]|x")
    salts = [prepared(each, text).salt for text, each in itertools.product(said, chosen)]
    assert len(set(salts)) == len(salts)


def test_without_adapters_a_salt_is_what_the_client_says() -> None:
    mine = Salt(private="x")
    assert (prepared(None, "x", loaded=False).salt, prepared((), "x", loaded=False).salt) == (mine, mine)
