"""The progress of prefill within a batch: it grows, never says all, and ends with the batch."""

from __future__ import annotations

from support.conversation import Conversation
from support.fake_context import endless

from llmrun.engine.llama.base import Aborted
from llmrun.protocol.messages import Event, PrefillProgress


class Watched(Conversation):
    """A conversation; within the decode calls named, somebody looks at the watch, once for each share."""

    def __init__(self, shares: dict[int, list[float]], **settings: int) -> None:
        super().__init__(endless, **settings)  # type: ignore[arg-type]
        self.told: list[Event] = []
        self.begun = 0
        self.context.before_decode = lambda call: [self.look(share) for share in shares.get(call, ())] and None
        self.engine.watch.on_begin = self.begin

    def look(self, share: float) -> bool | None:
        self.context.computed = share
        return self.engine.watch.tell(lambda *events: self.told.extend(events))

    def begin(self) -> None:
        self.begun += 1

    @property
    def tokens(self) -> list[int]:
        return [event.tokens for event in self.told if isinstance(event, PrefillProgress)]


def test_progress_moves_within_a_batch() -> None:
    talk = Watched({0: [0.25, 0.5], 1: [0.0, 0.5, 15 / 16]}, n_batch=16)
    talk.answer("x" * 32, most=2)
    assert talk.tokens == [4, 8, 24, 31], "of the second batch, and never all"
    assert talk.begun == 2, "steps of decode are not watched"
    assert talk.look(0.9) is None, "the batch has ended"


def test_what_was_told_is_not_taken_back() -> None:
    talk = Watched({0: [0.75], 1: [0.5, 0.875]}, n_batch=16)
    talk.context.faults[0] = Aborted()  # by the cancel of another request: the batch is computed again
    talk.answer("x" * 16, most=2)
    assert talk.tokens == [12, 14]


def test_tokens_that_were_reused_do_not_count() -> None:
    talk = Watched({}, n_batch=64)
    talk.answer("x" * 20, most=2)
    talk.context.before_decode = lambda call: talk.look(0.5) and None  # type: ignore[func-returns-value]
    talk.answer("x" * 20 + "y" * 20, most=2)
    assert talk.started().reused_tokens == 20
    assert talk.tokens == [10]
    assert all(event.seconds > 0 for event in talk.told if isinstance(event, PrefillProgress))
