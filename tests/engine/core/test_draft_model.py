"""A draft model: guesses for any number of sequences, and answers that are the same whatever becomes of it."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence

import pytest
from support.conversation import Conversation
from support.fake_context import END, FakeContext, Model, endless, favouring, hashed, tokens_of
from support.seeds import for_seeds

from llmrun._native import CancelFlag
from llmrun.engine.core.draft_model import DraftModel
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.steps import StepCosts
from llmrun.engine.llama.base import Aborted, CacheFull, DecodeError, RunLimit
from llmrun.protocol.messages import Finished
from llmrun.protocol.speculation import Speculation

CHEAP = tuple((width, 1 + width / 16) for width in (1, 4, 8, 16))
PIECE = 128


def paying(most: int, cost: float = 0.01) -> Speculation:
    """Return the speculation that drafts if it pays, with a draft model whose steps cost so much."""
    return Speculation(most, only_if_it_pays=True, draft_cost=cost)


def likeliest(model: Model, tokens: Sequence[int]) -> int:
    logits = list(model(tokens))
    return logits.index(max(logits))


def imitating(model: Model, wrong: float = 0.0, unsure: float = 0.0) -> Model:
    """Return a model that favors another one's likeliest token, but is wrong or unsure with these probabilities."""

    def logits(tokens: Sequence[int]) -> Sequence[float]:
        luck = random.Random(zlib.crc32(bytes(token % 256 for token in tokens)))
        token = ord("z") if luck.random() < wrong else likeliest(model, tokens)
        found = favouring(token)
        if luck.random() < unsure:
            found[ord("y")] = found[token] - 0.1
        return found

    return logits


class Pair(Conversation):
    """An engine with a draft model, whose context is `small`."""

    def __init__(self, model: Model, imitation: Model | None = None, *, n_known: int = 260, **context: int) -> None:
        shared = {key: context[key] for key in ("n_ctx", "n_seq_max") if key in context}
        self.small = FakeContext(imitation or imitating(model), n_batch=256, **shared)
        self.draft_model = DraftModel(self.small, n_known)
        super().__init__(model, draft_model=self.draft_model, **context)

    def drafting(self, prompt: str, speculation: Speculation) -> Drafting:
        return Drafting(speculation, tokens_of(prompt), self.draft_model, StepCosts(CHEAP), is_repeatable=True)

    def say(self, prompt: str, most: int, speculation: Speculation = Speculation(7)) -> Finished:  # noqa: B008
        self.events.clear()
        self.ask(prompt, most=most, drafting=self.drafting(prompt, speculation))
        self.run()
        assert_consistent(self)
        return self.finished()


def assert_consistent(pair: Pair) -> None:
    """Check the draft model's record of cached tokens against the tokens it decoded."""
    for slot in pair.draft_model._slots:
        assert pair.small.cached(slot.number) == slot.tokens
        assert slot.owner is None


def ending(tokens: Sequence[int]) -> Sequence[float]:
    """As hashed(), and it may end."""
    logits = list(hashed(tokens))
    logits[END] = 1.9
    return logits


@for_seeds(150)
def test_answers_are_those_of_the_plain_loop(seed: int) -> None:
    draws = random.Random(seed)
    prompts = ["".join(draws.choices("abcdef", k=draws.randint(1, 30))) for _ in range(draws.choice((1, 1, 4)))]
    imitation = imitating(ending, draws.choice((0, 0.2, 1)), draws.choice((0, 0.3)))
    bans = tuple("".join(draws.choices("abcdefgh", k=2)) for _ in range(4))
    pair = Pair(ending, imitation, n_ctx=80, n_seq_max=draws.choice((1, 3)), n_batch=draws.choice((16, 5)))
    if draws.random() < 0.5:
        pair.small.before_decode = breaking(pair.small, draws)
    tables = draws.choice((Speculation(7), paying(15)))
    for number, prompt in enumerate(prompts):
        pair.ask(prompt, most=40, ban=bans, request=number, drafting=pair.drafting(prompt, tables))
    pair.run()
    assert_consistent(pair)
    for number, prompt in enumerate(prompts):
        plain = Conversation(ending, n_ctx=80)
        plain.ask(prompt, most=40, ban=bans)
        plain.run()
        assert pair.text(number) == plain.text()
        assert pair.finished(number).stats.completion_tokens == plain.finished().stats.completion_tokens


def breaking(context: FakeContext, draws: random.Random):  # type: ignore[no-untyped-def]
    """Some steps of the draft model fail, at last for good."""

    def before_decode(call: int) -> None:
        if draws.random() < 0.2:
            context.faults[call] = draws.choice(
                (Aborted(), Aborted(), CacheFull(), CacheFull(), DecodeError("it failed"))
            )

    return before_decode


def test_what_it_guesses_right_takes_one_step() -> None:
    pair = Pair(endless)
    stats = pair.say("Hi", 17).stats
    assert (stats.completion_tokens, stats.decode_steps) == (17, 3), "one with the prompt, and two of eight rows"
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.draft_steps) == (14, 14, 14)
    assert [len(call) for call in pair.small.calls] == [3, *[1] * 6, 2, *[1] * 6], "nothing is computed twice"


def test_what_came_otherwise_is_cut_and_only_that_is_read_again() -> None:
    pair = Pair(endless, imitating(endless, wrong=1.0))
    assert pair.say("Hi", 10).stats.accepted_tokens == 0
    assert [len(call) for call in pair.small.calls[:8]] == [3, *[1] * 7]
    assert [call[0].position for call in pair.small.calls[:8]] == [0, 3, 4, 5, 6, 7, 8, 3]
    assert pair.text() == Conversation(endless).answer("Hi", most=10)[0]


def test_the_next_prompt_of_a_chat_is_read_from_where_it_goes_on() -> None:
    pair = Pair(endless)
    pair.say("Hi", 9)
    read = sum(map(len, pair.small.calls))
    pair.say("Hi" + pair.text() + "!", 9)
    assert sum(map(len, pair.small.calls)) - read == 4 + 6, "what is new, and its own guesses"


def test_several_sequences_are_drafted_for_in_one_batch() -> None:
    pair = Pair(endless, n_seq_max=3)
    for number, prompt in enumerate(("A", "B", "C")):
        pair.ask(prompt, most=9, request=number, drafting=pair.drafting(prompt, Speculation(3)))
    pair.run()
    together = [call for call in pair.small.calls if len({entry.sequence_id for entry in call}) == 3]
    assert len(together) >= 2
    assert all(pair.finished(number).stats.accepted_tokens >= 3 for number in range(3))


def test_a_long_prompt_is_read_in_pieces_between_steps() -> None:
    pair = Pair(endless, n_ctx=600, n_batch=512)
    stats = pair.say("x" * 500, 20).stats
    assert [len(call) for call in pair.small.calls[:3]] == [PIECE] * 3
    assert all(entry.wants_logits is False for call in pair.small.calls[:3] for entry in call)
    assert stats.accepted_tokens > 0
    widths = [len(call) for call in pair.context.calls]
    assert widths[:4] == [500, 1, 1, 1], "one token came between two pieces"


@pytest.mark.parametrize(("unsure", "drafted"), [([0], 0), ([1], 3), ([2], 3), ([3], 7), ([], 7)])
def test_being_unsure_ends_a_guess_where_kernels_like_it(unsure: list[int], drafted: int) -> None:
    """Indexes are those of the first guess, which is after four tokens."""

    def model(tokens: Sequence[int]) -> Sequence[float]:
        found = list(endless(tokens))
        if len(tokens) - 4 in unsure:
            found[0] = max(found) - 0.1
        return found

    pair = Pair(endless, model)
    pair.ask("Hey", most=9, drafting=pair.drafting("Hey", Speculation(7)))
    pair.events += pair.engine.step() + pair.engine.step() + pair.engine.step()
    assert len(pair.context.calls[1]) == 1 + drafted


def test_tokens_that_it_does_not_know_are_not_guessed_nor_read() -> None:
    assert Pair(endless, n_known=ord("h")).say("A", 20).stats.drafted_tokens > 0
    pair = Pair(endless, n_known=ord("h"))
    pair.say("xyz", 20)
    assert pair.small.calls == []


def test_it_is_not_asked_again_once_llama_cpp_can_not_compute_with_it() -> None:
    pair = Pair(endless)
    pair.small.faults[2] = DecodeError("it failed")
    assert pair.say("Hi", 30).stats.completion_tokens == 30
    assert len(pair.small.calls) == 3


def test_a_full_cache_evicts_what_no_request_needs() -> None:
    pair = Pair(endless, n_ctx=64, n_seq_max=2)
    pair.small.n_cells = 64
    for number, prompt in enumerate(("A" * 20, "B" * 20)):
        pair.ask(prompt, most=20, request=number, drafting=pair.drafting(prompt, Speculation(3)))
    pair.run()
    assert pair.say("C" * 30, 20).stats.accepted_tokens > 9


def test_it_is_asked_where_the_tables_say_that_it_pays() -> None:
    assert Pair(hashed, imitating(hashed)).say("Hi", 40, paying(15)).stats.accepted_tokens > 30
    for tables in (paying(15, 3.0), paying(15, 0.0)):
        assert Pair(hashed, imitating(hashed)).say("Hi", 40, tables).stats.draft_steps == 0


def test_a_prompt_is_read_only_when_the_answer_is_long_enough_for_it() -> None:
    pair = Pair(hashed, imitating(hashed), n_ctx=1000, n_batch=512)
    tables = paying(7, 0.35)
    assert pair.say("x" * 400, 10, tables).stats.draft_steps == 0
    assert pair.say("y" * 400, 590, tables).stats.accepted_tokens > 0


def test_what_was_decoded_while_it_rested_is_read_afterwards() -> None:
    """It is wrong at first, so that it rests; native code decodes meanwhile."""
    wrong = 200

    def imitation(tokens: Sequence[int]) -> Sequence[float]:
        return favouring(ord("z") if len(tokens) < wrong else likeliest(hashed, tokens))

    pair = Pair(hashed, imitation, n_ctx=1000)
    drafting, limit = pair.drafting("x", paying(7)), RunLimit(16, math.inf, CancelFlag())
    pair.ask("x", most=600, drafting=drafting)
    n_runs = 0
    while pair.engine.busy:
        before = len(pair.context.calls)
        pair.events += pair.engine.step(limit)
        n_runs += len(pair.context.calls) > before + 1
    assert n_runs > 1
    stats = pair.finished().stats
    assert stats.model_accepted > 250
