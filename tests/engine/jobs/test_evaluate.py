"""The way through a text: chunks, batches, two models side by side, facts to be found, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import gguf_writer
from support.fake_context import BEGIN, N_VOCAB, FakeContext, tokens_of
from support.noisy import TEXT, nll_of, noisy

from llmrun.engine.jobs import needles
from llmrun.engine.jobs.evaluate import Evaluation, Layout, check_vocabulary
from llmrun.engine.jobs.scores import Rows
from llmrun.errors import BadLogitsError, OutOfMemoryError, UsageError
from llmrun.gguf.header import Header
from llmrun.lab.quantize import evaluate
from llmrun.planning.hardware import Hardware
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.jobs.evaluate import (
    EVALUATE,
    Divergence,
    Evaluate,
    EvaluateResult,
    EvaluateUpdate,
    Figure,
    Needle,
    PositionRange,
    least_chunks,
)

pytestmark = pytest.mark.usefixtures("package_on_path")


def measured(
    command: Evaluate, backends: Sequence[FakeContext], begin: list[int] | None = None
) -> tuple[EvaluateResult, list[EvaluateUpdate]]:
    updates: list[EvaluateUpdate] = []
    tokens = [*(begin or []), *tokens_of(command.text)]
    return Evaluation(command, backends, tokens, begin or [], updates.append).run(), updates


# ---- chunks ----------------------------------------------------------------------------------------


def test_chunks_begin_with_the_begin_token_and_only_their_second_half_is_scored() -> None:
    layout = Layout([BEGIN, *range(100, 121)], [BEGIN], n_ctx=8, first=4)
    assert layout.chunks == 2
    assert layout.chunk(0) == [BEGIN, *range(100, 107)]
    assert layout.chunk(1) == [BEGIN, *range(108, 115)]  # in place of 107, which llama-perplexity loses too
    first, second, third = layout.batches(1, 3)
    assert [entry.token for entry in first] == [BEGIN, 108, 109]
    assert [entry.position for entry in (*first, *second, *third)] == list(range(8))
    assert [entry.wants_logits for entry in (*first, *second, *third)] == [False] * 4 + [True] * 3 + [False]


def test_without_a_begin_token_chunks_are_the_text() -> None:
    layout = Layout(list(range(20)), [], n_ctx=10, first=5)
    assert layout.chunk(1) == list(range(10, 20))


@pytest.mark.parametrize("begin", [[], [BEGIN]])
@pytest.mark.parametrize("n_batch", [64, 16, 5])
def test_perplexity_is_that_of_a_slow_twin(begin: list[int], n_batch: int) -> None:
    model, n_ctx, chunks = noisy(1), 32, 4
    command = Evaluate("m", TEXT, n_ctx=n_ctx, chunks=chunks)
    found, _ = measured(command, [FakeContext(model, n_ctx=n_ctx, n_batch=n_batch)], begin)
    tokens = [*begin, *tokens_of(TEXT)]
    nlls = []
    for chunk in range(chunks):
        own = tokens[chunk * n_ctx : (chunk + 1) * n_ctx]
        seen = [*begin, *own[len(begin) :]]
        nlls += [nll_of(model, seen[: index + 1], own[index + 1]) for index in range(n_ctx // 2, n_ctx - 1)]
    assert found.perplexity is not None
    assert found.perplexity.value == pytest.approx(math.exp(sum(nlls) / len(nlls)), rel=1e-6)
    assert (found.chunks, found.positions, found.chunks_there) == (4, len(nlls), len(tokens) // n_ctx)
    assert found.bits_per_byte == pytest.approx(sum(nlls) / len(nlls) / math.log(2), rel=1e-6)  # tokens are bytes
    assert found.divergence is None


@pytest.mark.parametrize("n_ctx", [32, 64, 300])
def test_intervals_begin_with_the_chunks_that_they_need(n_ctx: int) -> None:
    least = least_chunks(n_ctx)
    for chunks in (least - 1, least):
        backends = [FakeContext(noisy(seed), n_ctx=n_ctx, n_batch=64, n_outputs=64) for seed in (1, 2)]
        found, _ = measured(Evaluate("m", 40 * TEXT, "r", n_ctx=n_ctx, chunks=chunks), backends)
        assert found.perplexity is not None
        assert found.divergence is not None
        assert (found.chunks, found.perplexity.half is None) == (chunks, chunks < least)
        assert (found.divergence.mean.low is None) == (chunks < least)
    assert least_chunks(512) == 3
    assert least_chunks(8192) == 1


@pytest.mark.parametrize("n_batch", [64, 7])
def test_two_models_are_compared_position_by_position(n_batch: int) -> None:
    model, reference, n_ctx = noisy(1), noisy(2), 24
    backends = [FakeContext(each, n_ctx=n_ctx, n_batch=n_batch) for each in (model, reference)]
    found, _ = measured(Evaluate("m", TEXT, "r", n_ctx=n_ctx, chunks=2), backends)
    tokens, divergences, same = tokens_of(TEXT), [], []
    for chunk in range(2):
        own = tokens[chunk * n_ctx : (chunk + 1) * n_ctx]
        for index in range(n_ctx // 2, n_ctx - 1):
            q, p = ([-nll_of(each, own[: index + 1], token) for token in range(N_VOCAB)] for each in (model, reference))
            divergences.append(math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
            same.append(p.index(max(p)) == q.index(max(q)))
    assert found.divergence is not None
    assert found.divergence.mean.value == pytest.approx(sum(divergences) / len(divergences), rel=1e-4)
    assert found.divergence.maximum == pytest.approx(max(divergences), rel=1e-4)
    assert found.divergence.same_top.value == pytest.approx(sum(same) / len(same))


def test_time_on_a_device_is_the_time_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    context = FakeContext(noisy(3), n_ctx=32, n_batch=16)
    context.is_asynchronous = True
    monkeypatch.setattr("llmrun.engine.jobs.evaluate.time.perf_counter", lambda: float(context.n_computed))
    found, _ = measured(Evaluate("m", TEXT, n_ctx=32, chunks=3), [context])
    assert (found.decode_seconds, found.score_seconds) == (96.0, 0.0)


def test_a_model_beside_itself() -> None:
    backends = [FakeContext(noisy(3), n_ctx=32, n_batch=16) for _ in range(2)]
    found, _ = measured(Evaluate("m", TEXT, "m", n_ctx=32, chunks=3), backends)
    assert found.divergence is not None
    assert found.divergence.mean.value == found.divergence.maximum == 0.0
    assert found.divergence.ratio.value == found.divergence.same_top.value == 1.0


def test_positions_of_the_whole_chunk_change_no_other_figure() -> None:
    half, _ = measured(Evaluate("m", TEXT, n_ctx=64, chunks=2), [FakeContext(noisy(1), n_batch=64, n_outputs=64)])
    whole, _ = measured(
        Evaluate("m", TEXT, n_ctx=64, chunks=2, every_position=True), [FakeContext(noisy(1), n_batch=64, n_outputs=64)]
    )
    assert whole.perplexity == half.perplexity
    assert whole.positions == half.positions
    assert not half.by_position
    assert [(stretch.start, stretch.end, stretch.positions) for stretch in whole.by_position] == [(0, 64, 126)]


def test_figures_come_as_chunks_are_done() -> None:
    backends = [FakeContext(noisy(seed), n_ctx=32, n_batch=16) for seed in (1, 2)]
    found, updates = measured(Evaluate("m", TEXT, "r", n_ctx=32, chunks=3), backends)
    total = 2 * 3 * 32
    assert [update.done for update in updates] == sorted(update.done for update in updates)
    assert (updates[0].done, updates[-1].done) == (0, total)
    assert {update.total for update in updates} == {total}
    partial = [update.so_far for update in updates if update.so_far]
    assert [each.chunks for each in partial] == [1, 2, 3]
    assert partial[-1].divergence == found.divergence
    one, _ = measured(
        Evaluate("m", TEXT, "r", n_ctx=32, chunks=1), [FakeContext(noisy(seed), n_ctx=32) for seed in (1, 2)]
    )
    assert partial[0].perplexity == one.perplexity


def test_no_more_chunks_than_there_are() -> None:
    found, updates = measured(Evaluate("m", "x" * 100, n_ctx=40, chunks=1000), [FakeContext(noisy(1), n_ctx=40)])
    assert found.chunks == found.chunks_there == 2
    assert updates[-1].done == updates[-1].total == 80


def test_logits_that_are_no_numbers_are_named() -> None:
    def broken(tokens: Sequence[int]) -> list[float]:
        return [math.nan if len(tokens) > 20 else 0.0] * N_VOCAB

    with pytest.raises(BadLogitsError, match="the reference"):
        measured(
            Evaluate("m", TEXT, "r", n_ctx=32, chunks=2), [FakeContext(each, n_ctx=32) for each in (noisy(1), broken)]
        )


def test_logits_that_go_wrong_far_after_are_named_too() -> None:
    def broken(tokens: Sequence[int]) -> list[float]:
        return [math.nan if len(tokens) > 800 else 0.0] * N_VOCAB

    command = Evaluate("m", "no whole chunk", n_ctx=1024, chunks=1, needles=True)
    with pytest.raises(BadLogitsError, match="the model") as refused:
        measured(command, [FakeContext(broken, n_ctx=1024, n_batch=512)])
    assert refused.value.why == "in a text of 1,024 tokens"


# ---- vocabularies ----------------------------------------------------------------------------------


class FakeModel:
    def __init__(self, n_vocab: int = N_VOCAB, shift: int = 0, other: int = -1) -> None:
        self.n_tokens, self._shift, self._other = n_vocab, shift, other

    def tokenize(self, text: str, *, special: bool, begins: bool = True) -> list[int]:
        return [(token + self._shift) % 256 for token in tokens_of(text)]

    def with_bos(self, tokens: list[int]) -> list[int]:
        return tokens

    def piece(self, token: int) -> bytes:
        return b"?" if token == self._other else bytes([token % 256])


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        (FakeModel(n_vocab=300), "has 260 tokens and the reference 300"),
        (FakeModel(shift=1), "split the text differently"),
        (FakeModel(other=ord("s")), "token 115 has another text"),
    ],
)
def test_models_of_different_vocabularies_are_not_compared(reference: Any, why: str) -> None:
    model: Any = FakeModel()
    check_vocabulary(model, model, tokens_of(TEXT), TEXT)
    with pytest.raises(UsageError) as refused:
        check_vocabulary(model, reference, tokens_of(TEXT), TEXT)
    assert why in refused.value.why


# ---- facts in long texts ---------------------------------------------------------------------------


def remembering(far: int) -> Callable[[Sequence[int]], list[float]]:
    """A model that continues as the same 12 tokens were continued before, if that is not farther away than `far`."""

    def logits(tokens: Sequence[int]) -> list[float]:
        values = [0.0] * N_VOCAB
        end = bytes(tokens[-12:])
        place = bytes(token % 256 for token in tokens[:-1]).rfind(end)
        if place >= 0 and len(tokens) - place < far:
            values[tokens[place + 12]] = 20.0
        return values

    return logits


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("begin", [[], [BEGIN]])
def test_facts_are_found_as_far_back_as_a_model_remembers(cuts: bool, begin: list[int]) -> None:
    length = 2000
    backend = FakeContext(remembering(900), n_ctx=length, n_batch=512, cuts=cuts)
    haystack = needles.Haystack(backend.vocabulary, begin, length)
    answers = needles.ask(backend, haystack, Rows(N_VOCAB), lambda backend, batch: backend.decode(batch))
    assert [found for found, _ in answers] == [depth > 0.55 for depth in needles.DEPTHS]
    for found, probability in answers:
        assert (probability > 0.99) == found
        assert found or probability < 1e-4


def test_a_haystack_is_as_long_as_it_should_be() -> None:
    vocabulary = FakeContext(noisy(1)).vocabulary
    for length in (1024, 4096):
        haystack = needles.Haystack(vocabulary, [BEGIN], length)
        text = bytes(haystack.tokens[1:]).decode()
        longest = max(len(tokens) for tokens, _ in haystack.questions)
        assert length - 150 < len(haystack.tokens) + longest <= length
        for question, answer in needles.FACTS:
            assert text.count(f"{question}{answer}.\n") == 1
        for tokens, answer_at in haystack.questions:
            assert (bytes(tokens[:answer_at]).decode(), bytes(tokens[answer_at:]).decode()) in needles.FACTS
    assert haystack.tokens == needles.Haystack(vocabulary, [BEGIN], length).tokens


def test_lengths() -> None:
    assert needles.lengths(8192) == [2048, 4096, 8192]
    assert needles.lengths(1024) == [512, 1024]
    assert len(needles.FACTS) == len(needles.DEPTHS)


def test_needles_of_both_models_stand_side_by_side() -> None:
    n_ctx = 1024
    backends = [FakeContext(remembering(far), n_ctx=n_ctx, n_batch=512, n_outputs=512) for far in (500, 2000)]
    command = Evaluate("m", TEXT, "r", n_ctx=n_ctx, chunks=1, needles=True)
    found, updates = measured(command, backends)
    assert found.perplexity is not None
    assert [needle.n_tokens for needle in found.needles] == [512] * 11 + [1024] * 11
    assert all(needle.reference_found for needle in found.needles)
    assert 0 < sum(needle.found for needle in found.needles) < len(found.needles)
    assert updates[-1].done == updates[-1].total


# ---- what crosses the pipe -------------------------------------------------------------------------


def test_figures_survive_the_pipe() -> None:
    figure = Figure(1.5, 0.1, 1.3, 1.7)
    divergence = Divergence(*[figure] * 6, 2.0, *[figure] * 6, 0.9)
    stretches = (PositionRange(0, 512, 100, figure), PositionRange(512, 600, 5, figure, figure, figure, figure))
    found = (Needle(512, 0.5, True, 0.9), Needle(512, 1.0, False, 0.1, True, 0.8))
    whole = EvaluateResult(1, 2, 600, 300, figure, 0.8, divergence, stretches, found, 1.0, 0.1)
    for update in (
        EvaluateUpdate(1, 2),
        EvaluateUpdate(2, 2, whole),
        EvaluateUpdate(0, 1, EvaluateResult(0, 0, 512, 0)),
    ):
        assert from_json(EVALUATE.update, as_dict(update)) == update


# ---- the front -------------------------------------------------------------------------------------


def header(**changes: Any) -> Header:
    return Header(Path("m.gguf"), 1, changes, ())


def test_text_files(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n")
    text = evaluate.read_text(path)
    assert (text.name, text.content) == ("text.txt", "café\r\n")
    path.write_bytes(b"caf\xe9")
    text = evaluate.read_text(path)
    assert (text.name, text.content) == ("text.txt (read as windows-1252)", "café")
    with pytest.raises(UsageError, match="can't be read"):
        evaluate.read_text(tmp_path)
    with pytest.raises(UsageError, match="can't be read") as refused:
        evaluate.read_text(tmp_path / "none")
    assert refused.value.why == "No such file or directory"


def test_the_default_text_is_there_and_long_enough() -> None:
    text = evaluate.default_text()
    assert len(text.content) > 20 * evaluate.TOKENS // 2
    assert text.sha256 == evaluate.default_text().sha256
    assert "Python" in text.name


def test_python_without_its_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UsageError, match="--text is missing"):
        evaluate.default_text()


@pytest.mark.parametrize(
    ("trained", "wish", "long", "chosen"),
    [
        ((8192,), None, False, 512),
        ((8192,), None, True, 8192),
        ((131_072, 4096), None, True, 4096),
        ((256,), None, False, 256),
        ((0,), None, True, 8192),
        ((8192,), 8192, False, 8192),
        ((8192,), 32, False, 32),
    ],
)
def test_chunks_are_as_long_as_wished_or_usual(
    trained: tuple[int, ...], wish: int | None, long: bool, chosen: int
) -> None:
    assert evaluate.choose_context([_Trained(n_ctx) for n_ctx in trained], wish, long=long) == chosen  # type: ignore[list-item]


class _Trained:
    def __init__(self, n_ctx_train: int) -> None:
        self.n_ctx_train = n_ctx_train


@pytest.mark.parametrize(
    ("wish", "long", "words"),
    [(8193, False, "trained on 8,192"), (31, False, "between 32"), (0, False, "32"), (512, True, "between 1,024")],
)
def test_chunks_of_an_invalid_length(wish: int, long: bool, words: str) -> None:
    trained: Any = _Trained(8192)

    def choose() -> None:
        evaluate.check_sample(wish, None, long=long)
        evaluate.choose_context([trained], wish, long=long)

    with pytest.raises(UsageError) as refused:
        choose()
    assert words in refused.value.why


def test_a_model_that_knows_no_long_texts() -> None:
    trained: Any = _Trained(256)
    with pytest.raises(UsageError, match="can't be measured with --long"):
        evaluate.choose_context([trained], None, long=True)


@pytest.mark.parametrize("wish", [{"chunks": 0}, {"chunks": -3}, {"n_ctx": 1 << 20}])
def test_senseless_wishes_start_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: dict[str, int]
) -> None:
    model = gguf_writer.write(tmp_path / "m.gguf", gguf_writer.runnable_model())
    monkeypatch.setattr(evaluate, "EngineClient", None)
    with pytest.raises(UsageError, match="invalid --"):
        evaluate.evaluate(model, **wish)  # type: ignore[arg-type]


def test_two_models_that_do_not_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gguf_writer.write(tmp_path / "m.gguf", gguf_writer.runnable_model())
    small = Hardware("", (), 2, 2, None, memory_total=60 << 20, memory_available=50 << 20)
    monkeypatch.setattr(evaluate, "probe", lambda: small)
    monkeypatch.setattr(evaluate, "EngineClient", None)
    with pytest.raises(OutOfMemoryError, match="both models together") as refused:
        evaluate.evaluate(model, reference=model, n_ctx=32)
    assert "52.4 MB are free" in refused.value.why


def test_verdicts() -> None:
    def compared(kld: float, same: float) -> EvaluateResult:
        rest = Figure(0, 0, 0, 0)
        divergence = Divergence(
            Figure(kld, 0, kld, kld), rest, rest, rest, rest, rest, 0, Figure(same, 0, same, same), *[rest] * 5, 0
        )
        return EvaluateResult(1, 1, 512, 255, rest, 0, divergence)

    assert evaluate.verdict(compared(0.0, 1.0)) == "the same as the reference"
    assert evaluate.verdict(compared(0.012, 0.9731)) == (
        "hardly different from the reference: the same likeliest token 97.3 % of the time"
    )
    assert "hardly related" in evaluate.verdict(compared(3.0, 0.1))
    assert "21.3 equally likely" in evaluate.verdict(EvaluateResult(1, 1, 512, 255, Figure(21.34, 0, 0, 0)))
    assert evaluate.verdict(EvaluateResult(0, 0, 512, 0)) == ""
    few, unsure = compared(0.25, 0.6), Figure(21.34, 0)
    assert evaluate.verdict(replace(few, perplexity=unsure)) == ""
    assert evaluate.verdict(EvaluateResult(2, 9, 512, 510, unsure)) == ""
    found = (Needle(512, 0.0, True, 0.9, True, 0.9), Needle(512, 1.0, False, 0.1, True, 0.9))
    long = evaluate.verdict(EvaluateResult(1, 1, 512, 255, Figure(21.34, 0, 0, 0), needles=found))
    assert long.endswith("; 1 of 2 facts found in long texts, 2 by the reference")
