"""Needles in a haystack: facts hidden in a long text, and questions about them.

Owns the text, which is generated (always the same), and the questions; must not know the computation of probabilities.
All facts are in one text, at depths from its beginning to its end, so that the text is decoded once. Each question
follows the text and begins like its fact, so that a model without instruction tuning can answer too. The answer is not
generated: the right answer is decoded, and found if greedy decoding would give the same tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from llmrun.engine.core.prefix import common_prefix
from llmrun.engine.jobs.scores import Rows
from llmrun.engine.llama.base import Context, Entry, Vocabulary

SHORTEST = 512  # Minimum tokens of a text; a shorter one would consist mostly of facts
DEPTHS = tuple(tenth / 10 for tenth in range(11))

FACTS = (
    ("The ship in the harbour is called", " Esmeralda"),
    ("The key to the cellar lies under the", " violin"),
    ("The code of the bank's safe is", " 4731"),
    ("The spy came to town dressed as a", " gardener"),
    ("The treasure of the island is guarded by a", " tortoise"),
    ("The king's favourite dish is", " pumpkin soup"),
    ("The secret word of the club is", " marmalade"),
    ("The train to the mountains leaves from platform", " 19"),
    ("The stolen painting shows a", " red umbrella"),
    ("The name of the judge's parrot is", " Napoleon"),
    ("The doctor's telephone number is", " 58206"),
)
"""Beginning of each question, and its answer, which can't be guessed. As many as there are depths."""

_SEED = 20_480
_TIMES = ("In the morning", "At noon", "Late at night", "Every autumn", "On a quiet day", "After the rain", "In winter")
_PEOPLE = (
    "the baker", "an old sailor", "the youngest teacher", "a tired farmer", "the new doctor", "a painter", "the miller",
    "somebody's uncle", "the postman", "a careful engineer",
)  # fmt: skip
_DEEDS = (
    "walks slowly along", "thinks about", "forgets to lock", "sweeps the snow from", "tells a long story about",
    "draws a picture of", "is afraid of", "wants to sell", "remembers",
)  # fmt: skip
_THINGS = (
    "the wooden bridge", "a house with green windows", "the station", "the garden behind the school", "an empty barn",
    "the market", "the narrow road to the harbour", "a boat without sails", "the library",
)  # fmt: skip
_ENDS = (
    "and nobody asks why.", "as it has always been.", "while the bells ring.", "because there is nothing else to do.",
    "and then goes home.", "without saying a word.", "until the lamps are lit.",
)  # fmt: skip

Decode = Callable[[Context, list[Entry]], None]
Answer = tuple[bool, float]  # Is the right answer found, and its probability


def lengths(n_ctx: int) -> list[int]:
    """Return the lengths of the texts: a quarter of the context window, half of it, all of it."""
    return [length for length in (n_ctx // 4, n_ctx // 2, n_ctx) if length >= SHORTEST]


def sentences() -> Iterator[str]:
    """Yield random sentences without numbers, endlessly."""
    chance = random.Random(_SEED)  # noqa: S311 - the same text every time is the point
    while True:
        yield " ".join(chance.choice(part) for part in (_TIMES, _PEOPLE, _DEEDS, _THINGS, _ENDS)) + "\n"


class Haystack:
    """The text with its facts, as tokens, and the questions after it.

    Attributes:
        tokens: of the text.
        questions: for each fact the tokens of its question with the right answer, and the index of the answer in them.
    """

    def __init__(self, vocabulary: Vocabulary, begin: list[int], length: int) -> None:
        facts, tokenize = [], vocabulary.tokenize
        self.questions: list[tuple[list[int], int]] = []
        shift = 4 * length.bit_length()  # each length has the facts at other depths, because some are easier
        for question, answer in (FACTS[(number + shift) % len(FACTS)] for number in range(len(DEPTHS))):
            whole, prefix = (tokenize(text, special=False) for text in (question + answer, question))
            self.questions.append((whole, common_prefix(whole, prefix)))
            facts.append(tokenize(f"{question}{answer}.\n", special=False))
        longest = max(len(whole) for whole, _ in self.questions)
        room = length - len(begin) - longest - sum(map(len, facts))
        hay: list[list[int]] = []
        for sentence in sentences():
            tokens = tokenize(sentence, special=False)
            if len(tokens) > room:
                break
            room -= len(tokens)
            hay.append(tokens)
        count = len(hay)
        for depth, fact in reversed(list(zip(DEPTHS, facts, strict=True))):
            hay.insert(round(depth * count), fact)
        self.tokens = [*begin, *(token for tokens in hay for token in tokens)]


def ask(context: Context, haystack: Haystack, rows: Rows, decode: Decode) -> list[Answer]:
    """Decode the text once, and every question after it."""
    answers = []
    context.forget(0, 0)
    _read(context, haystack.tokens, 0, len(haystack.tokens), decode)
    for number, (tokens, answer) in enumerate(haystack.questions):
        start = len(haystack.tokens)
        if number and not context.forget(0, start):  # a recurrent state can't be cut
            context.forget(0, 0)
            _read(context, haystack.tokens, 0, start, decode)
        answers.append(_answer(context, tokens, start, answer, rows, decode))
    return answers


def _read(context: Context, tokens: list[int], start: int, first: int, decode: Decode) -> None:
    """Decode tokens from position `start` on, with logits from index `first` on."""
    for begin in range(0, len(tokens), context.n_batch):
        part = tokens[begin : begin + context.n_batch]
        entries = [Entry(token, start + begin + i, 0, begin + i >= first) for i, token in enumerate(part)]
        decode(context, entries)


def _answer(context: Context, tokens: list[int], start: int, answer: int, rows: Rows, decode: Decode) -> Answer:
    """Decode a question; return whether each token from index `answer` on is the most likely, and their probability.

    A question is shorter than a batch, so the logits of all its tokens are available at the end.
    """
    _read(context, tokens, start, answer - 1, decode)
    scored = [rows.score(context.logits(index - 1), tokens[index]) for index in range(answer, len(tokens))]
    return all(top for _, top in scored), math.exp(-sum(nll for nll, _ in scored))
