"""A grammar that only constrains the answer of a reasoning model, not its reasoning.

Must not know grammars. Blanks after the closing tag belong to the reasoning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from llmrun.engine.constraint.matcher import Mask, Matcher, Tokens
from llmrun.engine.prompt.thinking import ReasoningTracker, Tags
from llmrun.protocol.reasoning import Stage

if TYPE_CHECKING:
    from llmrun.engine.llama.base import Vocabulary

_MAX_MASKS = 32  # of a vocabulary: two for each syntax
_MAX_BLANKS = 2  # tokens between reasoning and answer


class _State(NamedTuple):
    reasoning: ReasoningTracker
    n_blanks: int = 0  # tokens since the end of the reasoning
    is_constrained: bool = False  # the grammar accepted the last token


class AfterReasoning:
    """A Constraint that begins at the end of the reasoning.

    Args:
        inside: the answer begins inside the reasoning.
        may_think: the model may open it, if the opening tag is a single token.
    """

    def __init__(
        self, grammar: Matcher, vocabulary: Vocabulary, tags: Tags, *, inside: bool, may_think: bool = True
    ) -> None:
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._unconstrained = unconstrained_mask(grammar.tokens, tags[1])
        opening = vocabulary.tokenize(tags[0], special=True) if may_think else []
        self._opening = opening if len(opening) == 1 else []
        tracker = ReasoningTracker.begin(tags, inside=inside)
        self._states = [_State(tracker if inside or self._opening else tracker._replace(stage=Stage.ANSWER))]

    def mask(self) -> int:
        state = self._states[-1]
        stage = state.reasoning.stage
        if stage is Stage.INSIDE:
            return self._unconstrained.mask(state.reasoning.tail).address
        if stage is Stage.BEFORE:
            return self._grammar.mask(self._opening)
        may_be_blank = stage is Stage.AFTER and state.n_blanks < _MAX_BLANKS
        return self._grammar.mask(self._unconstrained.blanks if may_be_blank else ())

    def accept(self, token: int) -> None:
        self._states.append(self._after(self._states[-1], token))

    def _after(self, state: _State, token: int) -> _State:
        reasoning = state.reasoning
        stage = reasoning.stage
        if stage is Stage.INSIDE or (stage is Stage.BEFORE and token in self._opening):
            return _State(reasoning.after(self._vocabulary.control_piece(token).decode("utf-8", "replace")))
        if stage is Stage.AFTER and token in self._unconstrained.blanks:
            return state._replace(n_blanks=state.n_blanks + 1)
        self._grammar.accept(token)
        return _State(reasoning._replace(stage=Stage.ANSWER), is_constrained=True)

    def refuses(self, token: int) -> bool:
        return self._is_answer() and self._grammar.refuses(token)

    def forced(self) -> list[int]:
        return self._grammar.forced() if self._is_answer() else []

    def allowed(self, tokens: list[int]) -> int:
        return self._grammar.allowed(tokens) if self._is_answer() else len(tokens)

    def closing(self, limit: int) -> list[int] | None:
        return self._grammar.closing(limit) if self._is_answer() else None

    def _is_answer(self) -> bool:
        return self._states[-1].reasoning.stage is Stage.ANSWER

    def rewind(self, n_tokens: int) -> None:
        n_left = len(self._states) - n_tokens
        n_constrained = sum(state.is_constrained for state in self._states[n_left:])
        del self._states[n_left:]
        if n_constrained:
            self._grammar.rewind(n_constrained)


class UnconstrainedMask:
    """A mask for text before a tag: forbids end tokens, and tokens that contain the end of the tag and text after it.

    Args:
        may_end: the answer may end before the tag; then not even blanks may follow the tag in one token.
        may_close: the tag may be written; else tokens that complete it are forbidden.
    """

    def __init__(self, tokens: Tokens, closing: str, *, may_end: bool = False, may_close: bool = True) -> None:
        self._tokens = tokens
        self._closing = closing
        self._forbidden = frozenset() if may_end else tokens.ends
        self.blanks = frozenset(token for token, piece in enumerate(tokens.tokens) if piece.isspace())
        self._any = self._all_but(())
        tag = closing.encode()

        def after(rest: bytes) -> bool:
            return not may_close or bool(rest if may_end else rest.strip())

        whole = [token for token, piece in enumerate(tokens.tokens) if tag in piece and after(piece.partition(tag)[2])]
        near = [(token, piece) for token, piece in enumerate(tokens.tokens) if piece[:1] in tag]
        # By the number of the tag's characters at the end of the text: tokens that complete the tag, and go on.
        self._beyond = [whole] + [
            [token for token, piece in near if piece.startswith(rest) and after(piece[len(rest) :])]
            for rest in (tag[length:] for length in range(1, len(tag)))
        ]
        self._masks: dict[str, Mask] = {}

    def mask(self, tail: str) -> Mask:
        """Return the mask after a text that ends with this tail."""
        lengths = [length for length in range(len(self._closing)) if tail.endswith(self._closing[:length])]
        beyond = [token for length in lengths for token in self._beyond[length]]
        if not beyond:
            return self._any
        end = self._closing[: max(lengths)]
        if end not in self._masks:
            self._masks[end] = self._all_but(beyond)
        return self._masks[end]

    def _all_but(self, tokens: Iterable[int]) -> Mask:
        mask = Mask(self._tokens.n_vocab)
        mask.allow_all()
        mask.forbid(self._forbidden.union(tokens))
        return mask


_masks: WeakKeyDictionary[Tokens, dict[tuple[str, bool, bool], UnconstrainedMask]] = WeakKeyDictionary()


def unconstrained_mask(
    tokens: Tokens, closing: str, *, may_end: bool = False, may_close: bool = True
) -> UnconstrainedMask:
    """Return the UnconstrainedMask of a vocabulary; the first call reads all of its tokens."""
    masks = _masks.setdefault(tokens, {})
    key = closing, may_end, may_close
    if key not in masks:
        while len(masks) >= _MAX_MASKS:
            del masks[next(iter(masks))]
        masks[key] = UnconstrainedMask(tokens, closing, may_end=may_end, may_close=may_close)
    return masks[key]
