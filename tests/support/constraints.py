"""A grammar for the loop, made by hand."""

from __future__ import annotations


class AfterA:
    """See llmrun.engine.constraint.matcher.Constraint: after every "a" comes "bc", whatever the model thinks."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self) -> int:
        """Everything may come where there is a choice."""
        return 0

    def accept(self, token: int) -> None:
        """A token came."""
        self.taken.append(token)

    def refuses(self, token: int) -> bool:
        """Nothing is stepped back from."""
        return False

    def forced(self) -> list[int]:
        """What comes next without a choice."""
        return [ord("b"), ord("c")] if self.taken[-1:] == [ord("a")] else []

    def allowed(self, tokens: list[int]) -> int:
        """Nothing is told in advance."""
        return len(tokens)

    def closing(self, limit: int) -> list[int] | None:
        """It never ends by itself."""
        return None

    def rewind(self, n_tokens: int) -> None:
        """The last tokens did not come."""
        del self.taken[len(self.taken) - n_tokens :]
