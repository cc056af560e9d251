"""A grammar for a model that thinks before it answers: it sleeps while the model thinks, and binds the answer.

Owns where the answer begins; must not know grammars. The blanks behind the closing tag belong to the thoughts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from llmrun.engine.constraint.matcher import Mask, Matcher, Tokens
from llmrun.engine.prompt.thinking import ReasoningStage, ReasoningTracker, Tags

if TYPE_CHECKING:
    from llmrun.engine.llama.base import Vocabulary

_MOST_BLANKS = 2  # tokens between the thoughts and the answer


class _Place(NamedTuple):
    """Where an answer is.

    Attributes:
        thoughts: whether it thinks.
        blanks: tokens since it stopped thinking.
        bound: whether its last token was one of the grammar's.
    """

    thoughts: ReasoningTracker
    blanks: int = 0
    bound: bool = False


class AfterReasoning:
    """A Constraint that begins where the thoughts end."""

    def __init__(
        self, grammar: Matcher, vocabulary: Vocabulary, tags: Tags, *, inside: bool, may_think: bool = True
    ) -> None:
        """At the beginning of an answer.

        Args:
            grammar: what binds the answer itself.
            tags: what the thoughts are enclosed in.
            inside: the answer begins inside of them.
            may_think: the model may open them itself, which takes an opening tag that is one token.
        """
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._unbound = unbound(grammar.tokens, tags[1])
        opening = vocabulary.tokenize(tags[0], special=True) if may_think else []
        self._opening = opening if len(opening) == 1 else []
        begin = ReasoningTracker.begin(tags, inside=inside)
        self._places = [_Place(begin if inside or self._opening else begin._replace(stage=ReasoningStage.ANSWER))]

    def mask(self) -> int:
        """See Constraint."""
        place = self._places[-1]
        stage = place.thoughts.stage
        if stage is ReasoningStage.INSIDE:
            return self._unbound.mask(place.thoughts.tail).address
        if stage is ReasoningStage.BEFORE:
            return self._grammar.mask(self._opening)
        blank = stage is ReasoningStage.AFTER and place.blanks < _MOST_BLANKS
        return self._grammar.mask(self._unbound.blanks if blank else ())

    def accept(self, token: int) -> None:
        """See Constraint."""
        self._places.append(self._after(self._places[-1], token))

    def _after(self, place: _Place, token: int) -> _Place:
        thoughts = place.thoughts
        if thoughts.stage is ReasoningStage.INSIDE or (
            thoughts.stage is ReasoningStage.BEFORE and token in self._opening
        ):
            return _Place(thoughts.after(self._vocabulary.control_piece(token).decode("utf-8", "replace")))
        if thoughts.stage is ReasoningStage.AFTER and token in self._unbound.blanks:
            return place._replace(blanks=place.blanks + 1)
        self._grammar.accept(token)
        return _Place(thoughts._replace(stage=ReasoningStage.ANSWER), bound=True)

    def forced(self) -> list[int]:
        """See Constraint."""
        return self._grammar.forced() if self._places[-1].thoughts.stage is ReasoningStage.ANSWER else []

    def allowed(self, tokens: list[int]) -> int:
        """See Constraint."""
        return (
            self._grammar.allowed(tokens) if self._places[-1].thoughts.stage is ReasoningStage.ANSWER else len(tokens)
        )

    def rewind(self, n_tokens: int) -> None:
        """See Constraint."""
        left = len(self._places) - n_tokens
        bound = sum(place.bound for place in self._places[left:])
        del self._places[left:]
        if bound:
            self._grammar.rewind(bound)


class UnconstrainedMask:
    """What may come up to a tag: all but what ends the answer, and tokens in which the tag and what follows it meet.

    Attributes:
        blanks: tokens of nothing but blanks.
    """

    def __init__(self, tokens: Tokens, closing: str, *, may_end: bool = False) -> None:
        """Up to this tag. Where the answer may end before it, not even blanks may follow the tag in one token."""
        self._tokens = tokens
        self._closing = closing
        self._forbidden = frozenset() if may_end else tokens.ends
        self.blanks = frozenset(token for token, piece in enumerate(tokens.tokens) if piece.isspace())
        self._any = self._all_but(())
        tag = closing.encode()
        behind = bytes if may_end else bytes.strip
        whole = [token for token, piece in enumerate(tokens.tokens) if behind(piece.partition(tag)[2])]
        near = [(token, piece) for token, piece in enumerate(tokens.tokens) if piece[:1] in tag]
        # Where so many characters of the tag are there: the tokens that complete it, and go on.
        self._beyond = [whole] + [
            [token for token, piece in near if piece.startswith(rest) and behind(piece[len(rest) :])]
            for rest in (tag[length:] for length in range(1, len(tag)))
        ]
        self._masks: dict[str, Mask] = {}

    def mask(self, tail: str) -> Mask:
        """For thoughts that end with this text."""
        begun = [length for length in range(len(self._closing)) if tail.endswith(self._closing[:length])]
        beyond = [token for length in begun for token in self._beyond[length]]
        if not beyond:
            return self._any
        end = self._closing[: max(begun)]
        if end not in self._masks:
            self._masks[end] = self._all_but(beyond)
        return self._masks[end]

    def _all_but(self, tokens: Iterable[int]) -> Mask:
        mask = Mask(self._tokens.n_vocab)
        mask.allow_all()
        mask.forbid(self._forbidden.union(tokens))
        return mask


_known: WeakKeyDictionary[Tokens, dict[tuple[str, bool], UnconstrainedMask]] = WeakKeyDictionary()


def unbound(tokens: Tokens, closing: str, *, may_end: bool = False) -> UnconstrainedMask:
    """See Unbound; the first call looks through the vocabulary."""
    known = _known.setdefault(tokens, {})
    if (closing, may_end) not in known:
        known[closing, may_end] = UnconstrainedMask(tokens, closing, may_end=may_end)
    return known[closing, may_end]
