"""Positions of tokens after images that take fewer positions than tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from llmrun.engine.llama.base import Entry, MediaSpan
from llmrun.engine.llama.batch import Positions

FIRST, SECOND = MediaSpan(4, 14, 5), MediaSpan(20, 26, 3)


class Part(NamedTuple):
    """Part of an image that takes one position."""

    span: MediaSpan
    sequence_id: int = 0
    n_tokens: int = 2
    causal: bool = True
    encoded: float = 1.0

    def positions(self, first: int) -> Sequence[int]:
        return [first, first]

    def address(self) -> int:
        return 0


@pytest.fixture
def positions() -> Positions:
    """Return the positions after two images, the first one in two parts."""
    found = Positions()
    assert [*found.of_media(Part(FIRST))] == [*found.of_media(Part(FIRST))] == [4, 4]
    assert [*found.of_media(Part(SECOND))] == [15, 15]
    return found


def test_what_follows_an_image_moves_up(positions: Positions) -> None:
    wanted = {0: 0, 4: 4, 14: 9, 20: 15, 26: 18, 30: 22}
    assert {index: positions.at(0, index) for index in wanted} == wanted
    assert {positions.n_tokens(0, position): position for position in wanted.values()} == wanted
    assert positions.of_entries([Entry(7, 26, 0, True), Entry(7, 26, 1, False)]) == [
        Entry(7, 18, 0, True),
        Entry(7, 26, 1, False),
    ]


def test_an_image_has_no_cut(positions: Positions) -> None:
    assert positions.at(0, 5) is positions.at(0, 25) is None


def test_a_cut_takes_the_images_after_it(positions: Positions) -> None:
    positions.cut(0, 20, 15, 7)
    assert positions.at(0, 26) == 21
    positions.cut(0, 4, 4, 11)
    assert (positions.can_save(0), positions.at(0, 26)) == (True, 26)


def test_a_copy_goes_its_own_way(positions: Positions) -> None:
    positions.copied(0, 1)
    positions.cut(1, 20, 15, 7)
    assert (positions.at(0, 26), positions.at(1, 26)) == (18, 21)
    positions.cut(0, 0, 0, 22)
    assert positions.can_save(0)
    assert not positions.can_save(1)


def test_images_that_are_counted_by_their_tokens_are_not_remembered() -> None:
    found = Positions()
    found.of_media(Part(MediaSpan(4, 14, 10)))
    entries = [Entry(7, 14, 0, True)]
    assert found.can_save(0)
    assert found.of_entries(entries) is entries
