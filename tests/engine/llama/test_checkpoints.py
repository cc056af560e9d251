"""Models whose memory can't be cut go on from a checkpoint: few tokens are computed, with a fresh engine's logits."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hybrid_models import CASES, HYBRIDS, write_models

from llmrun import _native
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.prefix import NO_SALT
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.core.states import KVStore
from llmrun.engine.llama import zeroing
from llmrun.engine.llama.base import Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import UsageError
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Failed, Finished
from llmrun.protocol.params import Limits, SamplingParams

N_CTX, N_BATCH, END = 2048, 64, 2
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("tiny"), tuple(CASES))


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[LlamaModel]:
    loaded = LlamaModel(str(files[request.param]), 0, _native.CancelFlag())
    yield loaded
    loaded.close()


@contextmanager
def engine(model: LlamaModel, states: KVStore | None = None, parallel: int = 1) -> Iterator[tuple[Engine, Any]]:
    load = Load(model.path, N_CTX, n_batch=N_BATCH, n_seq_max=parallel, n_cells=N_CTX)
    context = LlamaContext(model, load)
    try:
        yield Engine(context, states=states), context
    finally:
        context.close()


def ask(
    talk: tuple[Engine, Any], prompt: list[int], n_tokens: int = 1, request: int = 1, *, moves: bool = False
) -> tuple[Any, Finished]:
    """The logits of the answer's last token, and how the answer ended."""
    loop, context = talk
    sampler = SequenceSampler(GREEDY, context.vocabulary, prompt)
    loop.add(Sequence(request, prompt, sampler, AnswerRequest(limits=Limits(n_tokens), moves=moves)))
    ended = None
    while loop.busy:
        for event in loop.step():
            assert not isinstance(event, Failed), event
            ended = event if isinstance(event, Finished) else ended
    assert ended is not None
    n_vocab = context.vocabulary.n_tokens
    return np.array((ctypes.c_float * n_vocab).from_address(context.logits(-1)), dtype=np.float64), ended


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 100), k=count)


def assert_as_fresh(model: LlamaModel, found: Any, prompt: list[int]) -> None:
    with engine(model) as fresh:
        expected, _ = ask(fresh, prompt)
    assert expected.std() > 0.01, "the weights do nothing"
    off = float(np.abs(found - expected).max() / expected.std())
    assert off < 0.05, f"{len(prompt)} tokens"


def computed(ended: Finished) -> int:
    return ended.stats.prompt_tokens - ended.stats.reused_tokens


def test_a_turn_costs_its_own_length_when_the_answer_comes_back_changed(model: LlamaModel) -> None:
    """As a chat whose template drops the reasoning of earlier turns."""
    with engine(model) as talk:
        conversation = [*tokens(1, 300), END]
        for turn in range(20):
            prompt = [*conversation, *tokens(99, 4)]  # the same words begin each answer
            found, ended = ask(talk, prompt, request=turn)
            if turn:
                assert computed(ended) <= 30 + 20 + 1 + 4 + 1
            ask(talk, prompt, 20, request=100 + turn)
            conversation += [*tokens(10 + turn, 30), *tokens(50 + turn, 20), END]
        assert_as_fresh(model, found, prompt)


@pytest.mark.parametrize("length", [100, 200, 390])
def test_a_prompt_with_another_end(model: LlamaModel, length: int) -> None:
    with engine(model) as talk:
        first = tokens(3, 400)
        ask(talk, first, 8)
        changed = [*first[:length], *tokens(4, 50)]
        found, ended = ask(talk, changed, request=2)
        assert computed(ended) <= 50 + N_BATCH + 1
        assert_as_fresh(model, found, changed)


@pytest.mark.parametrize("model", HYBRIDS, indirect=True)
def test_no_checkpoint_from_before_the_oldest_turns_were_dropped_is_used_after_it(model: LlamaModel) -> None:
    with engine(model) as talk:
        system, oldest, turns = tokens(3, 100), tokens(4, 150), tokens(5, 300)
        ask(talk, [*system, *oldest, *turns], 8)
        truncated = [*system, *turns, *tokens(6, 20)]
        found, ended = ask(talk, truncated, request=2, moves=True)
        assert 0 < ended.stats.reused_tokens <= len(system)
        assert_as_fresh(model, found, truncated)


def test_an_early_change_after_another_conversation_came_between(model: LlamaModel) -> None:
    """As an agent's old result that is cleared after a title request: the conversation was in host memory."""
    with engine(model, parallel=3) as talk:
        first = tokens(3, 400)
        ask(talk, first, 8)
        ask(talk, tokens(9, 80), 8, request=2)
        changed = [*first[:150], *tokens(4, 50)]
        found, ended = ask(talk, changed, request=3)
        assert computed(ended) <= 50 + N_BATCH + 1
        assert_as_fresh(model, found, changed)


def test_conversations_that_alternate_over_one_system_prompt(model: LlamaModel) -> None:
    system = tokens(5, 500)
    with engine(model, parallel=3) as talk:
        ask(talk, [*system, *tokens(6, 40)], 4)
        for request, seed in enumerate((7, 8, 9, 6, 7), 2):
            prompt = [*system, *tokens(seed, 40)]
            found, ended = ask(talk, prompt, 4, request=request)
            if request > 2:  # from the second one on, it is known where they differ
                assert computed(ended) <= 41
        found, _ = ask(talk, prompt, request=20)
        assert_as_fresh(model, found, prompt)


def test_a_second_conversation_computes_its_own_words_only(model: LlamaModel) -> None:
    """The system prompt ends where the first turn ends."""
    system = [*tokens(5, 300), END]
    with engine(model, parallel=3) as talk:
        ask(talk, [*system, *tokens(6, 40), END, *tokens(99, 4)], 4)
        prompt = [*system, *tokens(7, 40), END, *tokens(99, 4)]
        found, ended = ask(talk, prompt, request=2)
        assert computed(ended) <= 45
        assert_as_fresh(model, found, prompt)


def test_two_that_start_together_share_their_prefix(model: LlamaModel) -> None:
    system = tokens(5, 500)
    with engine(model, parallel=2) as (loop, context):
        prompts = [[*system, *tokens(seed, 40)] for seed in (6, 7)]
        for request, prompt in enumerate(prompts):
            sampler = SequenceSampler(GREEDY, context.vocabulary, prompt)
            loop.add(Sequence(request, prompt, sampler, AnswerRequest(limits=Limits(2))))
        ended = []
        while loop.busy:
            ended += [event for event in loop.step() if isinstance(event, Finished)]
        assert sum(map(computed, ended)) <= len(prompts[0]) + 41


def test_a_saved_prompt_is_found_after_a_restart(model: LlamaModel, tmp_path: Path) -> None:
    store, prompt = KVStore(tmp_path, "key", 1 << 30), [*tokens(5, 300), END, *tokens(99, 4)]
    with engine(model, store) as talk:
        ask(talk, prompt, 4)
        assert talk[0].save(1, prompt_only=True)[0] >= 300
    with engine(model, store) as talk:
        found, ended = ask(talk, prompt)
        assert computed(ended) <= 5
        assert_as_fresh(model, found, prompt)


def test_a_parked_conversation_is_found_after_a_restart(model: LlamaModel, tmp_path: Path) -> None:
    """Both its next turn and another conversation with its system prompt go on from what an idle engine saved."""
    store, system = KVStore(tmp_path, "key", 1 << 30), [*tokens(5, 300), END]
    first = [*system, *tokens(6, 40), END, *tokens(99, 4)]
    second = [*first, *tokens(8, 30), END, *tokens(9, 30), END, *tokens(99, 4)]
    with engine(model, store, parallel=3) as talk:
        ask(talk, first, 8)
        ask(talk, second, 8, request=2)
        talk[0].save_parked()
        talk[0]._slots.saver.wait()
    for prompt in ([*second, *tokens(10, 30), END, *tokens(99, 4)], [*system, *tokens(7, 40), END, *tokens(99, 4)]):
        with engine(model, store, parallel=3) as talk:
            found, ended = ask(talk, prompt)
            assert computed(ended) <= 45
            assert_as_fresh(model, found, prompt)


@pytest.mark.parametrize("seed", range(2))
def test_random_conversations_with_idle_jobs_saves_and_restarts(model: LlamaModel, tmp_path: Path, seed: int) -> None:
    """Whatever happens between the turns of several conversations, each answer is that of a fresh engine."""
    rng, store = random.Random(seed), KVStore(tmp_path, "key", 1 << 30)
    system = [*tokens(5, 200), END]
    conversations = [[*system, *tokens(each, 30)] for each in (6, 7)] + [tokens(8, 250)]
    request = reused = 0
    for _ in range(3):  # processes
        with engine(model, store, parallel=rng.choice([1, 3])) as talk:
            for _ in range(4):
                request += 1
                conversation = rng.choice(conversations)
                if rng.random() < 0.4:  # an earlier turn is changed
                    del conversation[rng.randint(len(conversation) // 2, len(conversation) - 1) :]
                conversation += [END, *rng.choices(range(3, 100), k=rng.randint(1, 120))]
                if rng.random() < 0.5:
                    talk[0].read_ahead(conversation, NO_SALT)
                found, ended = ask(talk, conversation, request=request)
                reused += ended.stats.reused_tokens
                assert_as_fresh(model, found, conversation)
                if rng.random() < 0.3:
                    ask(talk, conversation, 8, request=100 + request)
                job = rng.choice(["save", "park", ""])
                if job == "save":
                    with suppress(UsageError):  # another answer took its slot
                        talk[0].save(request, prompt_only=True)
                elif job == "park":
                    talk[0].save_parked()
                    talk[0]._slots.saver.wait()
    assert reused > 0


def stepped(loop: Engine) -> list[Sequence]:
    """Step; return the sequences that ended."""
    events = loop.step()
    assert not [event for event in events if isinstance(event, Failed)]
    ended = [event.request for event in events if isinstance(event, Finished) and event.reason != "cancelled"]
    return [loop.finished(request) for request in ended]


def assert_likeliest(model: LlamaModel, tokens: list[int], n_prompt: int) -> None:
    """Check that a fresh engine finds no other token much likelier than each of an answer's."""
    with engine(model) as fresh:
        for length in range(n_prompt, len(tokens)):
            logits, _ = ask(fresh, tokens[:length], request=length)
            assert (logits.max() - logits[tokens[length]]) / logits.std() < 0.05, f"token {length - n_prompt}"


@pytest.mark.parametrize("seed", range(2))
def test_random_crowds_with_idle_jobs_saves_and_restarts(model: LlamaModel, tmp_path: Path, seed: int) -> None:
    """Whatever several conversations do at once, each token of an answer is the likeliest one for a fresh engine."""
    rng, store = random.Random(seed), KVStore(tmp_path, "key", 1 << 30)
    system = [*tokens(5, 150), END]
    conversations = [[*system, *tokens(each, 30)] for each in range(6, 10)]
    number = reused = 0
    for _ in range(2):  # processes
        with engine(model, store, parallel=3) as (loop, context):
            for _ in range(2):
                ended: list[Sequence] = []
                for conversation in rng.sample(conversations, k=rng.randint(2, 4)):
                    number += 1
                    conversation += [END, *rng.choices(range(3, 100), k=rng.randint(1, 90))]
                    sampler = SequenceSampler(GREEDY, context.vocabulary, conversation)
                    asked = AnswerRequest(limits=Limits(rng.randint(1, 8)))
                    loop.add(Sequence(number, list(conversation), sampler, asked))
                    for _ in range(rng.choice([0, 1, 3])):
                        ended += stepped(loop)
                    if rng.random() < 0.2:
                        loop.cancel(number)
                while loop.busy:
                    ended += stepped(loop)
                for sequence in ended:
                    reused += sequence.n_reused
                    assert_likeliest(model, sequence.tokens, sequence.n_prompt)
                if rng.random() < 0.5:
                    loop.save_parked()
                    loop._slots.saver.wait()
    assert reused > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere, reads can't be noted")
@pytest.mark.parametrize("n_cells", [N_CTX, 3 * N_CTX])
def test_a_state_is_copied_in_pieces_while_other_sequences_are_decoded(
    model: LlamaModel, n_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pool, or in streams; recurrent states and cells of windows move meanwhile."""
    monkeypatch.setattr(zeroing, "_SMALL", 1)  # reads of small buffers are noted, too
    load = Load(model.path, N_CTX, n_batch=N_BATCH, n_seq_max=3, n_cells=n_cells)
    with closing(LlamaContext(model, load)) as context:
        lengths, copies, n_pieces = [0, 0, 0], list[Any](), 0

        def decode(*sequences: int, count: int = 1) -> None:
            for sequence in sequences:
                parts = tokens(sequence + lengths[sequence], count)
                context.decode([Entry(token, lengths[sequence] + i, sequence, False) for i, token in enumerate(parts)])
                lengths[sequence] += count

        def copy() -> Iterator[None]:
            copies.append((yield from context.state_in_pieces(1, 500)))

        for _ in range(8):
            decode(0, 1, 2, count=16)
        expected = context.state(1)
        for _ in copy():
            n_pieces += 1
            decode(*((0,), (2,), (2, 0))[n_pieces % 3])
        assert bytes(copies[0]) == expected
        assert (n_pieces > 3) is ("mamba2" not in Path(model.path).name), "it has no keys and values"
