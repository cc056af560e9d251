"""The end of a constrained answer before its last token: what is left open is closed while there is room for it.

Must not know grammars. A token after which the answer could no longer be completed is replaced by one on the way to its
end.
"""

from __future__ import annotations

from collections.abc import Collection

from llmrun.engine.constraint.matcher import Constraint, Tokens

_ZONE = 256  # tokens before the limit: further away nothing is checked
_OPENING = frozenset(b'{[,:"\\')  # characters after which JSON may be much longer to close
_CLOSING = (b'"', b"}", b"]", b",", b"")  # characters before which a text or a number may have one more
_GROWTH = 3  # tokens by which others lengthen it: the rest of a character, or of a number


class TimelyEnd:
    """Holds an answer to what can still be completed.

    Attributes:
        is_cut_short: a token was replaced.
    """

    def __init__(
        self, constraint: Constraint, tokens: Tokens, n_tokens: int, endings: Collection[list[int]] = ()
    ) -> None:
        """Start an answer of at most n_tokens.

        Args:
            endings: see Matcher; a token may break one that has begun, and all of it is needed again.
        """
        self._growth = max(_GROWTH, *(len(tokens) + 1 for tokens in endings), 0)
        self._constraint = constraint
        self._tokens = tokens
        self._endings = frozenset(tokens[0] for tokens in endings)
        self._n_left = n_tokens
        self._n_closing: int | None = None  # at most so many tokens complete the answer; None if that is not known
        self._closing: list[int] = []  # those tokens, if no other one was taken since
        self._next_try = _ZONE  # tokens before the limit: after a search without success
        self.is_cut_short = False

    def accept(self, token: int, *, is_forced: bool = False) -> int:
        """Take a token that the constraint has accepted; return it, or the one that replaces it there."""
        self._n_left -= 1
        if self._n_left >= _ZONE or token in self._tokens.ends:
            return token
        n_before, self._n_closing = self._n_closing, None
        if n_before is not None:
            self._n_closing = self._after(token, n_before)
        if is_forced or (self._n_closing is not None and self._n_closing <= self._n_left):
            return token
        if n_before is None and self._n_left > self._next_try:
            return token
        closing = self._constraint.closing(self._n_left)
        if closing is None:
            return self._replacement(token)
        self._expect(closing)
        return token

    def _expect(self, closing: list[int]) -> None:
        self._closing, self._n_closing = closing, len(closing)

    def _after(self, token: int, n_before: int) -> int | None:
        """Return how many tokens complete the answer at most; None if a token may have changed that by much."""
        expected, self._closing = self._closing, []
        if expected[:1] == [token]:
            self._closing = expected[1:]
            return n_before - 1
        # A text, or a number, grows. What else was not expected may be the name of a property that has much in it.
        grows = not expected or expected[0] in self._endings or self._tokens.tokens[expected[0]][:1] in _CLOSING
        if not grows or _OPENING.intersection(self._tokens.tokens[token]):
            return None
        self._closing = expected
        return n_before + self._growth

    def _replacement(self, token: int) -> int:
        self._constraint.rewind(1)
        closing = self._constraint.closing(self._n_left + 1)
        if closing is None:
            self._next_try = self._n_left // 2
            self._constraint.accept(token)
            return token
        self.is_cut_short = True
        replacement = closing[0] if closing else min(self._tokens.ends)
        self._constraint.accept(replacement)
        self._expect(closing[1:])
        return replacement

    def rewind(self, n_tokens: int) -> None:
        """Remove the last accepted tokens."""
        self._n_left += n_tokens
        self._n_closing, self._closing = None, []
