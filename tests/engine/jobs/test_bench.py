"""The job `bench` in a real engine process, with a model so small that nothing takes time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gguf_writer import runnable_model, write

from llmrun.errors import BadModelError, LlmrunError
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.bench import BENCH, Bench, BenchResult, BenchTest, BenchUpdate
from llmrun.protocol.jobs.machine import BUILD, CPU_VARIANTS
from llmrun.protocol.llama_folder import has_variants
from llmrun.protocol.loading import Load
from llmrun.runner.client import EngineClient

TESTS = [
    BenchTest(32),
    BenchTest(33),  # not a whole number of batches
    BenchTest(0, 8),
    BenchTest(20, 4),
    BenchTest(8, 0, 24),
    BenchTest(0, 4, 24),
    BenchTest(8, 6, chat=True),
    BenchTest(8, 6, 24, chat=True),
    BenchTest(1, 1, chat=True),
    BenchTest(1),
    BenchTest(0, 1),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bench") / "tiny.gguf", runnable_model())


@pytest.fixture
def engine() -> Iterator[EngineClient]:
    runner = EngineClient()
    yield runner
    runner.close()


def measure(
    engine: EngineClient, path: Path, test: BenchTest, repetitions: int = 2, **load: object
) -> tuple[BenchResult, list[str]]:
    phases: list[str] = []

    def hear(update: BenchUpdate) -> None:
        phases.append(update.phase)
        assert (update.repetition is not None) == (update.phase == "measured")

    asked = Load(str(path), 0, **{"n_batch": 16, "n_ubatch": 16, **load})  # type: ignore[arg-type]
    return engine.do(BENCH, Bench(asked, test, repetitions), hear), phases


def test_every_kind_of_test_in_one_engine(engine: EngineClient, model: Path) -> None:
    loads = set()
    for number, test in enumerate(TESTS):
        done, phases = measure(engine, model, test)
        assert phases.count("measured") == 2, test.name
        assert ("loading" in phases) is (number == 0), "the model stays loaded"
        assert all(0 < repetition.ns < 10**9 for repetition in done.repetitions)
        loads.add(done.load_ns)
        assert (done.peak_bytes or 1 << 20) > 1 << 18
    assert len(loads) == 1
    assert done.model.n_layers == 1
    assert done.model.size > 0
    assert done.model.n_ctx_train == 64
    assert done.model.build_commit


@pytest.mark.skipif(not has_variants(), reason="only the wheel of a release has variants of the processor's backend")
def test_variants_of_the_processors_backend_in_one_engine(
    engine: EngineClient, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLMRUN_CPU", raising=False)
    names = engine.do(CPU_VARIANTS, Empty()).names
    for name in (*names, "", "no_such_variant"):
        _, phases = measure(engine, model, BenchTest(8, 4), cpu_variant=name)
        assert "loading" in phases
        features = engine.do(BUILD, Empty())
        assert features.cpu_variant == (name if name in names else names[0])
        assert features.backends.count("CPU") == 1


def test_a_depth_is_filled_once_and_then_restored(engine: EngineClient, model: Path) -> None:
    _, phases = measure(engine, model, BenchTest(8, 0, 24), repetitions=3)
    assert phases.count("depth") == 1
    _, phases = measure(engine, model, BenchTest(0, 4, 24), repetitions=3)
    assert phases.count("depth") == 0, "the next test at that depth uses it as well"
    _, phases = measure(engine, model, BenchTest(0, 4, 16))
    assert phases.count("depth") == 1
    _, phases = measure(engine, model, BenchTest(0, 4, 16), kv_type_k="f32", kv_type_v="f32")
    assert phases.count("depth") == 1, "of another KV type, the state does not fit"


def test_an_answer_is_as_long_as_asked_and_says_where_its_time_went(engine: EngineClient, model: Path) -> None:
    done, phases = measure(engine, model, BenchTest(8, 6, chat=True), repetitions=3)
    assert "answering" in phases
    for repetition in done.repetitions:
        answer = repetition.answer
        assert answer is not None
        assert len(answer.token_ns) == 5
        assert 0 < answer.ttft_ns <= repetition.ns
        assert 0 < answer.sampling_ns + answer.text_ns < repetition.ns


def test_other_settings_of_the_weights_load_them_again(engine: EngineClient, model: Path) -> None:
    measure(engine, model, BenchTest(4))
    assert "loading" not in measure(engine, model, BenchTest(4), threads=2)[1]
    assert "loading" in measure(engine, model, BenchTest(4), repack=False)[1]


def test_a_file_that_is_no_model(engine: EngineClient, tmp_path: Path) -> None:
    with pytest.raises(BadModelError):
        measure(engine, write(tmp_path / "bad.gguf", b"GGUF nonsense"), BenchTest(4))


def test_what_the_front_raises_ends_the_engine(engine: EngineClient, model: Path) -> None:
    def stop(update: BenchUpdate) -> None:
        raise LlmrunError("enough")

    with pytest.raises(LlmrunError, match="enough"):
        engine.do(BENCH, Bench(Load(str(model), 0), BenchTest(4)), stop)
    assert not engine.alive


def test_the_same_seed_decodes_the_same_tokens(model: Path) -> None:
    from llmrun import _native
    from llmrun.engine.jobs.bench import BenchContext
    from llmrun.engine.llama.model import LlamaModel

    weights = LlamaModel(str(model), 0, _native.CancelFlag())
    load = Load(str(model), 64, n_batch=16)
    contexts = [BenchContext(weights, load, seed) for seed in (1, 1, 2)]
    works = [context.prompt(40, 8) for context in contexts]
    tokens = [[entry.token for batch in work.batches for entry in batch] for work in works]
    assert tokens[0] == tokens[1] != tokens[2]
    assert tokens[0][0] == weights.vocabulary.bos, "as llama-bench, a prompt begins with the begin-of-sequence token"
    assert [len(batch) for batch in works[0].batches] == [16, 16, 8]
    entries = [entry for batch in works[0].batches for entry in batch]
    assert [entry.position for entry in entries] == list(range(8, 48))
    assert [entry.position for entry in entries if entry.wants_logits] == [23, 39, 47], "of each batch's last token"


def test_the_cache_holds_what_a_test_says(model: Path) -> None:
    from llmrun import _native
    from llmrun.engine.jobs.bench import BenchContext
    from llmrun.engine.llama.model import LlamaModel

    weights = LlamaModel(str(model), 0, _native.CancelFlag())
    bench = BenchContext(weights, Load(str(model), 64, n_batch=16), 1)
    context = bench.context

    def held() -> int:
        return int(weights.llama.llama_memory_seq_pos_max(context._memory, 0)) + 1

    bench.do(bench.prompt(24))
    assert held() == 24
    state = context.state(0)
    bench.do(bench.answer(4, 24))
    assert held() == 28
    context.clear()
    assert held() == 0
    assert context.set_state(0, state, 24)
    bench.do(bench.prompt(20, 24))
    assert held() == 44
    context.close()
    weights.close()
