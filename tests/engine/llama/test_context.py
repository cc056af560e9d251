"""A llama_context: one pool of cells for several sequences, copying, and what a full cache says."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_writer import runnable_model
from support.gguf_writer import write as write_file
from support.hf_writer import files_of, write

from llmrun import _native
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence as Request
from llmrun.engine.core.threads import MachineLoad, ThreadChooser
from llmrun.engine.llama import context as context_module
from llmrun.engine.llama import library as library_module
from llmrun.engine.llama.base import Aborted, CacheFull, DecodeError, Entry, Run, RunLimit, RunRow, RunSteps
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.lab.convert.job import convert_folder
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.params import Limits, SamplingParams

STEP = 256  # llama.cpp's caches are multiples of this


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    folder = tmp_path_factory.mktemp("model")
    files = files_of("LlamaForCausalLM", max_position_embeddings=2048)
    convert_folder(write(folder / "Tiny-1B", files), folder / "tiny.gguf")
    loaded = LlamaModel(str(folder / "tiny.gguf"), 0, _native.CancelFlag())
    yield loaded
    loaded.close()


@contextmanager
def opened(model: LlamaModel, n_ctx: int = STEP, **settings: Any) -> Iterator[LlamaContext]:
    context = LlamaContext(model, Load(model.path, n_ctx, **{"n_batch": 64, **settings}))
    try:
        yield context
    finally:
        context.close()


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 100), k=count)


def entries(ids: list[int], start: int = 0, sequence: int = 0) -> list[Entry]:
    """The last token's logits are wanted."""
    last = len(ids) - 1
    return [Entry(token, start + index, sequence, index == last) for index, token in enumerate(ids)]


def read(context: LlamaContext, ids: list[int], start: int = 0, sequence: int = 0) -> Any:
    """Logits after tokens that go through the model in batches."""
    for begin in range(0, len(ids), context.n_batch):
        context.decode(entries(ids[begin : begin + context.n_batch], start + begin, sequence))
    return row(context, -1)


def row(context: LlamaContext, index: int) -> Any:
    n_tokens = context.vocabulary.n_tokens
    return np.array((ctypes.c_float * n_tokens).from_address(context.logits(index)), dtype=np.float64)


def same(one: Any, other: Any) -> bool:
    """Batches of other shapes round differently; another context changes much more."""
    return bool(np.abs(one - other).max() < 0.05 * other.std())


def alone(model: LlamaModel, ids: list[int]) -> Any:
    return alone_in(2048, model, ids)


def alone_in(n_ctx: int, model: LlamaModel, ids: list[int]) -> Any:
    with opened(model, n_ctx) as context:
        return read(context, ids)


# ---- one cache


def test_one_sequence_has_its_whole_window(model: LlamaModel) -> None:
    ids = tokens(1, 900)
    with opened(model, 1024) as context:
        assert (context.shares_cells, context.n_cells) == (False, 1024)
        assert same(read(context, ids), alone(model, ids))
        read(context, tokens(2, 124), 900)
        with pytest.raises(CacheFull):
            context.decode(entries([5], 1024))


def test_several_sequences_share_one_pool(model: LlamaModel) -> None:
    prompts = [tokens(seed, 200 + seed) for seed in range(4)]
    with opened(model, 1024, n_seq_max=4, n_cells=1100) as context:
        assert (context.shares_cells, context.n_cells, context.n_ctx) == (True, 1100, 1024)
        for sequence, prompt in enumerate(prompts):
            read(context, prompt[:-1], 0, sequence)
        context.decode([Entry(prompt[-1], len(prompt) - 1, i, True) for i, prompt in enumerate(prompts)])
        found = [row(context, index) for index in range(4)]
    for prompt, logits in zip(prompts, found, strict=True):
        assert same(logits, alone(model, prompt))


def test_without_room_nothing_is_written_and_what_is_evicted_makes_some(model: LlamaModel) -> None:
    prompts = [tokens(seed, 120) for seed in range(3)]
    with opened(model, STEP, n_seq_max=4, n_cells=STEP) as context:
        for sequence, prompt in enumerate(prompts[:2]):
            read(context, prompt, 0, sequence)
        with pytest.raises(CacheFull):
            context.decode(entries(prompts[2][:64], 0, 2))
        assert context.forget(0, 0)
        assert same(read(context, prompts[2], 0, 2), alone(model, prompts[2]))
        assert same(read(context, [9], 120, 1), alone(model, [*prompts[1], 9]))


def test_copies_take_no_cells_of_a_pool(model: LlamaModel) -> None:
    prompt = tokens(3, 200)
    with opened(model, STEP, n_seq_max=16, n_cells=2 * STEP) as context:
        read(context, prompt)
        for sequence in range(1, 16):
            assert context.copy(0, sequence, 190)
        read(context, tokens(4, 290), 200)  # all but the cells for the next sequence are used
        found = read(context, tokens(5, 20), 190, 15)
        assert same(found, alone(model, prompt[:190] + tokens(5, 20)))


def test_keys_that_moved_are_turned_by_the_next_decode(model: LlamaModel) -> None:
    """What is copied before would stay unturned."""
    with opened(model, 1024) as context:
        read(context, tokens(9, 240))
        assert context.drop(0, 20, 40)
        assert not context.state(0)
        assert not context.copy(0, 1, 100)
        read(context, tokens(10, 120), 220)
        assert context.state(0)


# ---- several sequences at once


def ubatches(model: LlamaModel, n_sequences: int) -> tuple[list[int], bool]:
    """Return the number of passes over the weights in each step, with sequences ending and starting, and the layout.

    Every sequence has a token a step, and a prompt of some in its first; the ids in use have gaps.
    """
    outputs = 0

    def watch(tensor: Any, ask: bool) -> bool:
        nonlocal outputs
        outputs += tensor.plain_name == "result_output"
        return False

    chance, found = random.Random(n_sequences), []
    load = Load(model.path, 2 * STEP, n_batch=512, n_seq_max=n_sequences, n_cells=2 * STEP)
    context = LlamaContext(model, load, watch=watch)
    lengths = dict.fromkeys(range(n_sequences), 0)
    for _ in range(40):
        for sequence in [sequence for sequence, length in lengths.items() if length > chance.randint(2, 30)]:
            context.forget(sequence, 0)
            del lengths[sequence]
        for sequence in set(range(n_sequences)) - set(lengths):
            if chance.random() < 0.5 or not lengths:
                lengths[sequence] = 0
        batch = []
        for sequence, length in sorted(lengths.items()):
            batch += entries(tokens(length, 1 if length else chance.randint(2, 20)), length, sequence)
            lengths[sequence] = batch[-1].position + 1
        outputs = 0
        context.decode(batch)
        found.append(outputs)
    context.close()
    return found, context.shares_cells


@pytest.mark.parametrize("n_sequences", [2, 4, 8, 16])
def test_any_mix_of_sequences_goes_through_the_model_at_once(model: LlamaModel, n_sequences: int) -> None:
    steps, unified = ubatches(model, n_sequences)
    assert unified
    assert set(steps) == {1}


def test_where_positions_depend_on_the_window_each_sequence_has_its_own(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model.__dict__, "rope_depends_on_window", True)
    steps, unified = ubatches(model, 8)
    assert not unified
    assert max(steps) > 1, "the price of it, and what this comparison can see"


# ---- copying, states


@pytest.mark.parametrize("n_cells", [2 * STEP, 0])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_copy_goes_on_by_itself(
    model: LlamaModel, n_cells: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "_is_on_device", lambda load: on_device)
    prompt, other = tokens(11, 100), tokens(12, 30)
    with opened(model, STEP, n_seq_max=3, n_cells=n_cells) as context:
        assert context.shares_cells == (n_cells > 0)
        read(context, prompt)
        assert context.copy(0, 2, 70)
        assert same(read(context, other, 70, 2), alone(model, prompt[:70] + other))
        assert same(read(context, other, 100), alone(model, prompt + other))
        assert context.copy(0, 1, 110), "from memory that is used again"
        assert same(read(context, [5], 110, 1), alone(model, [*prompt, *other[:10], 5]))
        assert context.forget(0, 0)
        assert same(read(context, [5], 100, 2), alone(model, [*prompt[:70], *other, 5]))
    with opened(model) as context:
        assert not context.copy(0, 0, 10)


def test_a_state_moves_between_caches_of_either_layout(model: LlamaModel) -> None:
    prompt = tokens(13, 200)
    with opened(model, 512) as context:
        read(context, prompt)
        state = context.state(0)
    with opened(model, 512, n_seq_max=3, n_cells=2 * STEP) as context:
        read(context, tokens(14, 100), 0, 1)
        assert context.set_state(2, state, 200)
        assert same(read(context, [5], 200, 2), alone(model, [*prompt, 5]))
        assert same(read(context, [5], 100, 1), alone(model, [*tokens(14, 100), 5]))


def test_a_state_that_cannot_be_put_back_leaves_an_empty_sequence(model: LlamaModel) -> None:
    prompt = tokens(15, 200)
    with opened(model, 512) as context:
        read(context, prompt)
        state = context.state(0)
    with opened(model, STEP, n_seq_max=2, n_cells=STEP) as context:
        for damaged in (bytearray(), state[: len(state) // 2], bytearray(len(state)), state + b"more"):
            read(context, [5])
            assert not context.set_state(0, damaged, 200)
        assert not context.set_state(0, state, STEP + 1)
        read(context, tokens(16, 100), 0, 1)
        assert not context.set_state(0, state, 200)  # no room
        assert same(read(context, tokens(17, 9)), alone(model, tokens(17, 9)))


# ---- streams: cells of its own for each of several sequences


def test_sequences_have_streams_if_there_are_cells_for_a_window_of_each(model: LlamaModel) -> None:
    prompts = [tokens(seed, 200 + 50 * seed) for seed in range(4)]
    for n_cells in (4 * 1024, 4 * 1024 - STEP):
        with opened(model, 1024, n_seq_max=4, n_cells=n_cells) as context:
            assert (context.shares_cells, context.can_copy, context.n_cells) == (n_cells < 4 * 1024, True, n_cells)
            for sequence, prompt in enumerate(prompts):
                read(context, prompt[:-1], 0, sequence)
            context.decode([Entry(prompt[-1], len(prompt) - 1, i, True) for i, prompt in enumerate(prompts)])
            for index, prompt in enumerate(prompts):
                assert same(row(context, index), alone(model, prompt))


def test_a_stream_that_the_next_decode_copies_is_neither_saved_nor_replaced(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "_is_on_device", lambda load: True)
    prompt = tokens(23, 300)
    with opened(model, 1024, n_seq_max=3) as context:
        read(context, prompt, 0, 1)
        state = context.state(1)
        assert context.copy(1, 2, 270)
        assert context.copy(2, 0, 100)
        assert not context.state(2)
        assert not context.set_state(2, state, 300)
        assert same(read(context, [5], 270, 2), alone(model, [*prompt[:270], 5]))
        assert same(read(context, [5], 100, 0), alone(model, [*prompt[:100], 5]))
        assert context.state(2)


def test_neighbours_in_streams_go_through_the_model_at_once(model: LlamaModel) -> None:
    outputs = 0

    def watch(tensor: Any, ask: bool) -> bool:
        nonlocal outputs
        outputs += tensor.plain_name == "result_output"
        return False

    found = []
    load = Load(model.path, STEP, n_batch=64, n_seq_max=8)
    context = LlamaContext(model, load, watch=watch)
    for sequences in (range(8), range(2, 6), (0, 1, 4)):
        outputs = 0
        context.clear()
        context.decode([Entry(5, 0, sequence, True) for sequence in sequences])
        found.append(outputs)
    context.close()
    assert found == [1, 1, 2]


def test_a_copy_between_streams_goes_on_by_itself(model: LlamaModel) -> None:
    prompt, other = tokens(23, 300), tokens(24, 30)
    with opened(model, 1024, n_seq_max=3) as context:
        read(context, prompt, 0, 1)
        assert context.copy(1, 2, 270)
        assert context.forget(1, 0)
        assert same(read(context, other, 270, 2), alone(model, prompt[:270] + other))
        assert not context.shares_cells


@pytest.mark.parametrize("source", [{}, {"n_seq_max": 2, "n_cells": 1024}, {"n_seq_max": 5}])
@pytest.mark.parametrize("target", [{}, {"n_seq_max": 2, "n_cells": 1024}, {"n_seq_max": 3}])
def test_states_are_the_same_whatever_the_layout(
    model: LlamaModel, source: dict[str, int], target: dict[str, int], tmp_path: Path
) -> None:
    prompt = tokens(25, 100)
    last_of = [settings.get("n_seq_max", 1) - 1 for settings in (source, target)]
    with opened(model, 1024, **source) as context:
        read(context, prompt, 0, last_of[0])
        state = context.state(last_of[0])
        assert len(state) <= context.state_bytes(last_of[0])
        start, content = context.write_state(last_of[0], tmp_path / "state"), (tmp_path / "state").read_bytes()
        assert start is not None
        assert content[start:].rstrip(b"\0") == state.rstrip(b"\0")
    with opened(model, 1024, **target) as context:
        for damaged in (bytearray(), state[: len(state) // 2], bytearray(len(state)), state + b"more"):
            assert not context.set_state(last_of[1], damaged, 100)
        for saved in (state, memoryview(bytearray(content))[start:]):
            assert context.set_state(last_of[1], saved, 100)
            assert same(read(context, [5], 100, last_of[1]), alone(model, [*prompt, 5]))
        assert content[start:].rstrip(b"\0") == state.rstrip(b"\0"), "it can be set again"


def test_a_state_for_which_the_disk_is_full_is_not_written(model: LlamaModel, tmp_path: Path) -> None:
    with opened(model, 1024) as context:
        read(context, tokens(26, 500))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            with pytest.raises(OSError, match="could not write"):
                context.write_state(0, tmp_path / "state")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert context.write_state(0, tmp_path / "state")


def test_caches_of_other_kinds_are_one_pool(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        context_module, "_MAGIC", struct.Struct("=I")
    )  # so that the state seems not to be a plain cache's
    with opened(model, 1024, n_seq_max=2) as context:
        assert context.shares_cells
        assert same(read(context, tokens(28, 300)), alone(model, tokens(28, 300)))


# ---- refusing


def test_more_rows_of_logits_than_there_is_room_for_are_refused(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "_MAX_VERIFIED", 0)
    with opened(model, n_seq_max=2) as context:
        assert context.n_outputs == 2
        with pytest.raises(DecodeError, match="at most 2"):
            context.decode([Entry(5, position, 0, True) for position in range(3)])
        read(context, [5, 6])
    context = LlamaContext(model, Load(model.path, STEP, n_batch=8), n_outputs=8)
    context.decode([Entry(token, position, 0, True) for position, token in enumerate(tokens(19, 8))])
    assert same(row(context, 3), alone(model, tokens(19, 8)[:4]))
    context.close()


@pytest.fixture
def ggml_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without our own kernels."""
    monkeypatch.setattr(library_module, "_no_kernels", "switched off")
    _native.enable_kernels(False)
    yield
    _native.enable_kernels(True)


@pytest.mark.parametrize(("flash_attention", "n_tokens"), [("off", 900), ("on", 240)])
@pytest.mark.usefixtures("ggml_alone")
def test_logits_are_the_same_to_the_bit_with_any_number_of_threads(
    model: LlamaModel, flash_attention: str, n_tokens: int
) -> None:
    """ggml divides rows between threads, not sums; flash attention over 512 cells and more is the exception."""
    first, second = (
        decoded_with(model, threads, flash_attention, n_tokens) for threads in ([3, 3, 3, 3], [1, 2, 3, 1])
    )
    assert first == second


@pytest.mark.parametrize(
    ("settings", "split_from"),
    [
        ({"flash_attention": "on"}, 256),
        ({"flash_attention": "auto"}, 256),
        ({"flash_attention": "off"}, None),
        ({"flash_attention": "on", "kv_type_v": "bf16"}, None),
        ({"flash_attention": "on", "kv_type_k": "bf16", "kv_type_v": "bf16"}, None),
    ],
)
@pytest.mark.usefixtures("ggml_alone")
def test_a_context_tells_from_where_on_threads_change_the_logits(
    model: LlamaModel, settings: dict[str, Any], split_from: int | None
) -> None:
    with opened(model, **settings) as context:
        assert context.split_from == split_from


@pytest.mark.skipif(not _native.available_kernels(), reason="no kernels for this processor")
def test_with_our_kernels_threads_change_no_logits(model: LlamaModel) -> None:
    before = _native.attentions_computed()
    first, second = (decoded_with(model, threads, "on", 900) for threads in ([3, 3, 3, 3], [1, 2, 3, 1]))
    assert first == second
    assert _native.attentions_computed() > before
    with opened(model, flash_attention="on") as context:
        assert context.split_from is None


@pytest.mark.parametrize("flash_attention", ["on", "off"])
def test_an_answer_with_a_seed_is_the_same_on_a_machine_that_gets_busy_and_quiet_again(
    model: LlamaModel, flash_attention: str
) -> None:
    texts, threads = [], []
    for loads in ([0.0], [*[2.0] * 10, *[0.0] * 10]):
        load = itertools.cycle(loads)
        times, busy = itertools.count(step=0.3), itertools.accumulate(load)
        chooser = ThreadChooser(
            2, 2, MachineLoad(lambda busy=busy: 0.3 * next(busy), lambda: 0.0, lambda t=times: next(t))
        )
        with opened(model, 1024, threads=2, flash_attention=flash_attention) as context:
            engine = Engine(context, threads=chooser)
            ends = tuple(filter(context.vocabulary.is_end, range(context.vocabulary.n_tokens)))
            sampling = SamplingParams(temperature=1.0, seed=1)
            sampler = SequenceSampler(sampling, context.vocabulary, tokens(1, 20), banned=ends)
            asked = AnswerRequest(sampling=sampling, limits=Limits(max_tokens=600))
            sequence = Request(1, tokens(1, 20), sampler, asked)
            engine.add(sequence)
            while engine.busy:
                engine.step()
                threads.append(context.n_threads[0])
            texts.append(sequence.tokens)
    assert texts[0] == texts[1]
    assert {1, 2} == set(threads)


def decoded_with(model: LlamaModel, threads: list[int], flash_attention: str, n_tokens: int) -> list[bytes]:
    """The logits of a token each, with these threads."""
    found = []
    with opened(model, 1024, threads=3, flash_attention=flash_attention) as context:
        prompt = tokens(1, n_tokens)
        for start in range(0, n_tokens, 64):
            part = prompt[start : start + 64]
            context.decode([Entry(token, start + index, 0, False) for index, token in enumerate(part)])
        for index, most in enumerate(threads):
            context.limit_threads(most)
            context.decode([Entry(5 + index, n_tokens + index, 0, True)])
            found.append(ctypes.string_at(context.logits(0), context.vocabulary.n_tokens * 4))
    return found


def test_a_cancelled_decode(model: LlamaModel) -> None:
    with opened(model) as context:
        model.flag.set()
        try:
            with pytest.raises(Aborted):
                context.decode(entries(tokens(18, 64)))
        finally:
            model.flag.clear()
        context.forget(0, 0)
        assert same(read(context, tokens(18, 64)), alone(model, tokens(18, 64)))


def test_a_batch_that_llama_cpp_refuses(model: LlamaModel) -> None:
    with opened(model) as context:
        read(context, [5, 6])
        with pytest.raises(DecodeError, match="status"):
            context.decode(entries([5], 7))


def test_what_a_watcher_raises_comes_out_of_decode(model: LlamaModel) -> None:
    seen = []

    def watch(tensor: Any, ask: bool) -> bool:
        seen.append(tensor.plain_name)
        raise KeyError("enough")

    context = LlamaContext(model, Load(model.path, STEP, n_batch=8), watch=watch)
    with pytest.raises(KeyError, match="enough"):
        context.decode(entries([5]))
    assert seen
    context.close()


def test_the_smallest_windows(tmp_path: Path) -> None:
    """A batch is never longer than the cache, which llama.cpp would not survive."""
    model = LlamaModel(str(write_file(tmp_path / "tiny.gguf", runnable_model())), 0, _native.CancelFlag())
    with opened(model, 32, n_batch=512) as context:
        assert context.n_batch == 32
        context.decode(entries([3] * 32))
    model.close()


def test_a_run_gives_the_tokens_of_single_steps(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when steps are taken one by one, and beside the next ones."""
    prompt, answers = tokens(1, 200), list[list[int]]()
    for in_runs, takes, overlaps in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ):
        monkeypatch.setattr(context_module, "_is_on_device", lambda load, overlaps=overlaps: overlaps)
        sampler = SequenceSampler(SamplingParams(seed=3), model.vocabulary, prompt)
        with opened(model, n_ctx=2 * STEP) as context:
            read(context, prompt)
            answer = [sampler.sample(context.logits(-1))]
            found = answer

            def take(steps: RunSteps, found: list[int] = found) -> float:
                found += [token for (token,), *_ in steps]
                return 0.0

            limit = RunLimit(30, 0.0 if takes else math.inf, _native.CancelFlag(), take if takes else None)
            while len(answer) < 120:
                first = Entry(answer[-1], len(prompt) + len(answer) - 1, 0, True)
                if in_runs:
                    run = context.run([RunRow(first, sampler.native)], limit)
                    assert run.failure is None
                    assert not run.failed
                    assert len(run.steps) < 2 or not takes
                    take(run.steps)
                else:
                    context.decode([first])
                    answer.append(sampler.sample(context.logits(0)))
        answers.append(answer[:120])
    assert answers[0] == answers[1] == answers[2] == answers[3]


def test_a_run_of_several_sequences_gives_the_tokens_of_single_steps(model: LlamaModel) -> None:
    answers = []
    for in_runs in (False, True):
        samplers = [SequenceSampler(SamplingParams(seed=seed), model.vocabulary) for seed in range(3)]
        with opened(model, n_seq_max=3) as context:
            rows = [Entry(5 + slot, 0, slot, True) for slot in range(3)]
            steps: list[tuple[int, ...]] = []
            while len(steps) < 12:
                if in_runs:
                    asked = [RunRow(row, sampler.native) for row, sampler in zip(rows, samplers, strict=True)]
                    run = context.run(asked, RunLimit(4, math.inf, _native.CancelFlag()))
                    steps += [sampled for sampled, *_ in run.steps]
                else:
                    context.decode(rows)
                    steps.append(tuple(each.sample(context.logits(row)) for row, each in enumerate(samplers)))
                rows = [Entry(token, len(steps), slot, True) for slot, token in enumerate(steps[-1])]
        answers.append(steps[:12])
    assert answers[0] == answers[1]


def test_a_run_ends_before_a_step_with_a_draft(model: LlamaModel) -> None:
    sampler, lookup = SequenceSampler(SamplingParams(seed=3), model.vocabulary), _native.SuffixAutomaton()
    gate = _native.Gate(3, ((2, 1.3), (4, 2.0)), (), always=True)
    with opened(model) as context:
        lookup.extend([5])
        limit = RunLimit(200, math.inf, _native.CancelFlag())
        run = context.run([RunRow(Entry(5, 0, 0, True), sampler.native, lookup, gate)], limit)
        answer = [5, *(token for (token,), *_ in run.steps)]
        assert len(lookup) == len(answer)
        assert answer.index(answer[-1]) < len(answer) - 1, "its last token occurred before"
        assert len({*answer[:-1]}) == len(answer) - 1, "no other one did"
        last = Entry(answer[-1], len(answer) - 1, 0, True)
        run = context.run([RunRow(last, sampler.native, lookup, gate)], limit)
    assert run == Run([], [], None)


def test_a_cancel_ends_a_run(model: LlamaModel) -> None:
    sampler = SequenceSampler(SamplingParams(seed=3), model.vocabulary)
    with opened(model) as context:
        model.flag.set()
        limit = RunLimit(9, math.inf, _native.CancelFlag())
        run = context.run([RunRow(Entry(5, 0, 0, True), sampler.native)], limit)
        model.flag.clear()
    assert run.steps == []
    assert isinstance(run.failure, Aborted)


def test_the_share_of_a_batch_grows_from_nothing_and_is_never_all(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(model, 1024, n_batch=512, n_ubatch=128) as context:
        guessed, shares, decode = context._n_operations, list[float](), context._batch.decode

        def watched(pointer: Any) -> int:
            before = model.flag.n_computed
            shares.append(context.computed)
            status = decode(pointer)
            n_done = model.flag.n_computed - before
            shares.append(context.computed)
            for part in (0.25, 0.5):  # as if only so much were computed
                context._began_at = model.flag.n_computed - int(part * n_done)
                shares.append(context.computed)
            context._began_at = before
            return status

        monkeypatch.setattr(context._batch, "decode", watched)
        context.decode(entries(tokens(1, 100)))
        exact = context._n_operations
        assert 0 < exact <= guessed <= 1.3 * exact, "the first batch is told by the size of the graph"
        assert shares[0] == 0
        assert shares[0] < shares[2] < shares[3] < shares[1] <= 99 / 100
        del shares[:]
        context.decode(entries(tokens(2, 512), 100))
        assert shares == [0, 511 / 512, pytest.approx(0.25, abs=0.01), pytest.approx(0.5, abs=0.01)]
        assert context._n_operations == exact, "a batch of four micro-batches is not taken for one"
        assert context.computed == 0, "nothing is computed"
