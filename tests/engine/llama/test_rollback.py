"""Recurrent models take back the last tokens of a batch, and only those that llama.cpp has a snapshot before."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.drafters import Foreseeing
from support.hybrid_models import write_models
from support.mtp_models import write_mtp_model

from llmrun import _native
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.llama.base import Aborted, Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.followers import SavedHeads
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.llama.rollback import Rollback
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Failed, Finished
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation

N_CTX, MOST = 512, 3
MODELS = ("qwen35", "lfm2", "nemotron_h")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    files = write_models(tmp_path_factory.mktemp("tiny"), (request.param,), **{"attention.sliding_window": 0})
    loaded = LlamaModel(str(files[request.param]), 0, _native.CancelFlag())
    yield loaded
    loaded.close()


def opened(model: LlamaModel, **settings: Any) -> Any:
    options = {"n_batch": 64, "n_rollback": MOST, **settings}
    return closing(LlamaContext(model, Load(model.path, N_CTX, **options)))


def decode(context: LlamaContext, rows: dict[int, tuple[int, list[int]]]) -> dict[int, Any]:
    """Decode tokens of several sequences from a position on; return the logits after each sequence's last one."""
    batch = [
        Entry(token, position, sequence, position == start + len(tokens) - 1)
        for sequence, (start, tokens) in sorted(rows.items())
        for position, token in enumerate(tokens, start)
    ]
    context.decode(batch)
    last = {entry.sequence_id: index for index, entry in enumerate(batch)}
    n_vocab = context.vocabulary.n_tokens
    return {
        sequence: np.array((ctypes.c_float * n_vocab).from_address(context.logits(index)), dtype=np.float64)
        for sequence, index in last.items()
    }


def assert_as_fresh(model: LlamaModel, found: Any, tokens: list[int]) -> None:
    """Check logits after some tokens against a new context's, which computes them one after the other."""
    with opened(model, n_rollback=0) as fresh:
        for position, token in enumerate(tokens):
            expected = decode(fresh, {0: (position, [token])})[0]
    assert expected.std() > 0.01, "the weights do nothing"
    assert float(np.abs(found - expected).max() / expected.std()) < 0.05


def drawn(draws: random.Random, count: int) -> list[int]:
    return draws.choices(range(3, 100), k=count)


@pytest.mark.parametrize("n_dropped", range(1, MOST + 1))
def test_the_last_tokens_of_a_batch_can_be_dropped(model: LlamaModel, n_dropped: int) -> None:
    draws = random.Random(n_dropped)
    tokens = drawn(draws, 20)
    with opened(model) as context:
        assert context.max_draft == MOST
        decode(context, {0: (0, tokens[:16])})
        decode(context, {0: (16, tokens[16:])})
        left = len(tokens) - n_dropped
        assert context.can_forget(0, left)
        assert context.forget(0, left)
        assert not context.can_forget(0, left - 1), "one rollback for each batch"
        assert context.can_forget(0, left)
        assert_as_fresh(model, decode(context, {0: (left, [7])})[0], [*tokens[:left], 7])


def test_what_llama_cpp_would_drop_wrongly_is_refused(model: LlamaModel) -> None:
    tokens = drawn(random.Random(1), 20)
    with opened(model) as context:
        for position, token in enumerate(tokens):
            decode(context, {0: (position, [token])})
        assert not context.forget(0, 19), "there is no snapshot before the only token of a batch"
        context.decode([Entry(5, 20, 0, True), Entry(6, 21, 0, True)])
        assert not context.forget(0, 20), "nor before the first one"
        state = context.state(0)
        assert context.set_state(0, state, 22)
        assert not context.forget(0, 21), "nor of a state that was read"
        assert_as_fresh(model, decode(context, {0: (22, [7])})[0], [*tokens, 5, 6, 7])


def test_without_snapshots_nothing_can_be_dropped(model: LlamaModel) -> None:
    with opened(model, n_rollback=0) as context:
        decode(context, {0: (0, [5, 6, 7])})
        assert context.max_draft == 0
        assert not context.forget(0, 2)


def test_snapshots_that_do_not_fit_into_a_micro_batch_are_left_out(model: LlamaModel) -> None:
    with opened(model, n_batch=4, n_rollback=15) as context:
        assert context.max_draft == 2
        decode(context, {0: (0, [4])})
        decode(context, {0: (1, [5, 6, 7, 8])})
        assert context.forget(0, 3)
        assert_as_fresh(model, decode(context, {0: (3, [9])})[0], [4, 5, 6, 9])


def test_of_sequences_with_unequal_parts_in_a_batch_nothing_can_be_dropped(model: LlamaModel) -> None:
    """They are computed one after the other, and the later ones move the earlier ones' states."""
    with opened(model, n_seq_max=3) as context:
        decode(context, {2: (0, [5, 6, 7])})
        decode(context, {0: (0, [5, 6, 7]), 1: (0, [8]), 2: (3, [8])})
        assert not context.forget(0, 2)
        decode(context, {0: (3, [5, 6, 7]), 1: (1, [8, 9, 8]), 2: (4, [8, 9, 6])})
        assert all(context.forget(each, length) for each, length in ((0, 4), (1, 3), (2, 5)))
        found = decode(context, {0: (4, [4]), 1: (3, [4]), 2: (5, [4])})
        for each, tokens in enumerate(([5, 6, 7, 5, 4], [8, 8, 9, 4], [5, 6, 7, 8, 8, 4])):
            assert_as_fresh(model, found[each], tokens)


def test_after_an_aborted_batch_a_sequence_has_to_be_replaced(model: LlamaModel) -> None:
    tokens = drawn(random.Random(2), 12)
    with opened(model) as context:
        decode(context, {0: (0, tokens)})
        checkpoint = context.checkpoint(0)
        model.flag.set()
        with pytest.raises(Aborted):
            context.decode([Entry(5, 12, 0, True), Entry(6, 13, 0, True)])
        model.flag.clear()
        assert not context.forget(0, 12), "llama.cpp says that it has dropped the batch"
        assert context.go_back(0, checkpoint, 12)
        assert_as_fresh(model, decode(context, {0: (12, [7])})[0], [*tokens, 7])
        model.flag.set()
        with pytest.raises(Aborted):
            context.decode([Entry(5, 13, 0, True)])
        model.flag.clear()
        assert context.forget(0, 0)
        assert_as_fresh(model, decode(context, {0: (0, tokens)})[0], tokens)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_done_each_sequence_has_the_state_of_its_tokens(model: LlamaModel, seed: int) -> None:
    """Batches of unequal lengths, rollbacks, copies, saved states and checkpoints in random order."""
    draws = random.Random(seed)
    texts: dict[int, list[int]] = {sequence: [] for sequence in range(3)}
    checkpoints: dict[int, tuple[int, bytearray]] = {}
    states: list[tuple[list[int], bytearray]] = []
    with opened(model, n_seq_max=3, n_cells=N_CTX) as context:
        for _ in range(30):
            chosen = draws.sample(range(3), draws.randint(1, 3))
            length = draws.choice((0, 1, 2, 3, 4, 9))
            new = {each: drawn(draws, length or draws.choice((1, 2, 4, 9))) for each in chosen}
            found = decode(context, {each: (len(texts[each]), tokens) for each, tokens in new.items()})
            for each, tokens in new.items():
                texts[each] += tokens
            for each in chosen:
                dropped = draws.choice((0, 0, 1, 2, 3, 5))
                start = max(0, len(texts[each]) - dropped)
                if context.forget(each, start):
                    assert dropped <= min(MOST, len(new[each]) - 1) or start == 0
                    del texts[each][start:]
                    if checkpoints.get(each, (0, b""))[0] > start:
                        del checkpoints[each]
            each, other = draws.sample(range(3), 2)
            match draws.choice(("copy", "save", "read", "checkpoint", "go back", "", "")):
                case "copy":
                    context.forget(other, 0)
                    checkpoints.pop(other, None)
                    assert context.copy(each, other, len(texts[each]))
                    texts[other] = list(texts[each])
                case "save":
                    states.append((list(texts[each]), context.state(each)))
                case "read" if states:
                    tokens, state = draws.choice(states)
                    assert context.set_state(each, state, len(tokens))
                    texts[each] = list(tokens)
                    checkpoints.pop(each, None)
                case "checkpoint":
                    checkpoints[each] = len(texts[each]), context.checkpoint(each)
                case "go back" if each in checkpoints:
                    length, checkpoint = checkpoints[each]
                    assert context.go_back(each, checkpoint, length)
                    del texts[each][length:]
        found = decode(context, {each: (len(text), [9]) for each, text in texts.items()})
        for each, text in texts.items():
            assert_as_fresh(model, found[each], [*text, 9])


def test_the_record() -> None:
    record = Rollback(3, n_ubatch=9)

    def decoded(*sequence_ids: int, is_batch: bool = True) -> None:
        record.decoded([Entry(5, 0, sequence_id, False) for sequence_id in sequence_ids], is_batch=is_batch)

    decoded(0, 0, 0)
    assert [record.can_cut(0, n) for n in range(4)] == [True, True, True, False]
    decoded(1, 1, 2, 2)
    assert not record.can_cut(0, 1), "its snapshots may be left behind"
    assert record.can_cut(1, 1)
    assert record.can_cut(2, 1)
    decoded(*[1] * 5, *[2] * 5)
    assert not record.can_cut(1, 1), "they are computed in several micro-batches"
    decoded(0, 0, 0, 1)
    assert not record.can_cut(0, 1)
    decoded(0, 0, 0)
    record.cut(0, 2, 2, 1)
    assert record.is_pending(0)
    assert not record.can_cut(0, 1)
    decoded(*[0] * 10)
    assert record.can_cut(0, 3)
    assert not record.is_pending(0)
    record.copied(0, 1)
    assert not record.can_cut(0, 1)
    for replace in (partial(record.restored, 1, SavedHeads(), is_whole=True), partial(record.cut, 1, 0, 0, 5)):
        record.lost([1])
        assert not record.can_cut(1, 0)
        replace()
        assert record.can_cut(1, 0)
    decoded(0, 0, is_batch=False)
    assert not record.can_cut(0, 1)


# ---- answers ----------------------------------------------------------------------------------------


def answers(
    context: LlamaContext, prompts: list[list[int]], expected: list[list[int]] | None = None, ban: str = ""
) -> tuple[list[list[int]], int]:
    """Return the whole text of each sequence, answered together, and the accepted tokens."""
    loop = Engine(context)
    sequences = []
    for number, prompt in enumerate(prompts):
        drafting = None
        if expected is not None:
            draws = random.Random(number)  # which drafted tokens are wrong
            knowing = Foreseeing(expected[number], lambda token, draws=draws: 7 if draws.random() < 0.3 else token)
            drafting = Drafting(Speculation(MOST), prompt, text=knowing)
        sampler = SequenceSampler(SamplingParams(temperature=0), context.vocabulary, prompt)
        asked = AnswerRequest(limits=Limits(40, (), (ban,) if ban else ()))
        loop.add(Sequence(number, prompt, sampler, asked, drafting=drafting))
        sequences.append(loop._waiting[-1])
    accepted = 0
    while loop.busy:
        for event in loop.step():
            assert not isinstance(event, Failed), event
            accepted += event.stats.accepted_tokens if isinstance(event, Finished) else 0
    return [sequence.tokens for sequence in sequences], accepted


@pytest.fixture(scope="module")
def clear(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    """A hybrid whose logits have a clear winner, so that rounding changes nothing."""
    path = write_mtp_model(tmp_path_factory.mktemp("mtp") / "qwen35.gguf", "qwen35", 1.0, part="trunk")
    loaded = LlamaModel(str(path), 0, _native.CancelFlag())
    yield loaded
    loaded.close()


@pytest.mark.parametrize("settings", [{}, {"kv_type_k": "q8_0", "kv_type_v": "q8_0"}], ids=repr)
@pytest.mark.parametrize("n_sequences", [1, 4])
def test_drafts_of_a_hybrid_change_no_answer(clear: LlamaModel, n_sequences: int, settings: dict[str, Any]) -> None:
    prompts = [clear.vocabulary.tokenize(text, special=False) for text in PROMPTS[:n_sequences]]
    if n_sequences > 1:
        settings = {**settings, "n_seq_max": n_sequences, "n_cells": 4 * N_CTX}
    with opened(clear, **settings) as context:
        plain, _ = answers(context, prompts)
    with opened(clear, **settings) as context:
        found, accepted = answers(context, prompts, plain)
        assert accepted > 10 * n_sequences
        assert found == plain
        again, _ = answers(context, prompts, plain, ban="q")
    with opened(clear, **settings) as context:
        assert again == answers(context, prompts, ban="q")[0], "tokens that were retracted"


PROMPTS = ("the cat sat on a mat. ", "no, we go to rome by bus ", "a b c d e f g h i j k l m n o p q ", "lorem ipsum ")
