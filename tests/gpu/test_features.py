"""Everything that reads or steers the computation: on a GPU the same as on the processor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_writer import TensorSpec, gguf
from support.gpu_loader import Loader
from support.random_model import write_random_model

from llmrun.config import load_settings
from llmrun.gguf.imatrix import read_imatrix
from llmrun.gguf.reader import read_header
from llmrun.grammar import Grammar
from llmrun.lab.insight.explain import explain_answer
from llmrun.lab.quantize.calibration import collect
from llmrun.model import Model
from llmrun.model.loading import prepare
from llmrun.models.adapters import read_adapters
from llmrun.models.location import locate
from llmrun.planning.pairs import DraftFile
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.codec import as_dict
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.beams import BeamSettings, SearchBeams
from llmrun.protocol.jobs.evaluate import EVALUATE, Evaluate
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation
from llmrun.runner.client import EngineClient

NONE = 0
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
TEXT = "The keeper read the letters aloud, one after the other, until the lamp went out. " * 4
Pair = tuple[Model, Model]


@pytest.fixture(scope="module")
def pair(model_path: Path, first_gpu: Gpu) -> Iterator[Pair]:
    """The model on the GPU, and on the processor."""
    spec = locate(str(model_path), load_settings()).spec
    models = tuple(
        prepare(spec, model_path, LoadPreferences(n_ctx=512, device=device)) for device in (first_gpu.name, "none")
    )
    for model in models:
        model.start(EngineClient())
    yield models[0], models[1]
    for model in models:
        model.close()


def both(pair: Pair, prompt: str, **options: Any) -> tuple[str, str]:
    """Return the text of each."""
    first, second = (model.generate(prompt, **{**GREEDY, **options}).text for model in pair)
    return first, second


def test_grammar(pair: Pair) -> None:
    on_gpu, on_processor = both(pair, "Number:", grammar=Grammar("gbnf", "root ::= [0-9]+"), max_tokens=5)
    assert on_gpu == on_processor
    assert on_gpu.isdecimal()


def test_bans_and_stops(pair: Pair) -> None:
    plain, _ = both(pair, "Once")
    banned = tuple(word for word in {plain[2:4]} if word.strip())
    on_gpu, on_processor = both(pair, "Once", limits=Limits(12, ban=banned))
    assert on_gpu == on_processor
    assert not any(word in on_gpu for word in banned)


def test_sampling_with_a_seed_and_probabilities(pair: Pair) -> None:
    replies = [model.generate("Hi", temperature=1.0, seed=3, max_tokens=8, logprobs=3) for model in pair]
    assert replies[0].text == replies[1].text


def test_drafts_of_the_prompt_change_nothing(pair: Pair) -> None:
    plain, _ = both(pair, "abcabcabcabc")
    for model in pair:
        asked = AnswerRequest(
            prompt="abcabcabcabc",
            sampling=SamplingParams(temperature=0),
            limits=Limits(12),
            speculation=Speculation(most=4),
        )
        assert "".join(getattr(event, "text", "") for event in model.answer(asked)) == plain


def test_a_draft_model_on_the_gpu_changes_nothing(load: Loader, model_path: Path, tmp_path: Path, pair: Pair) -> None:
    small = write_random_model(tmp_path / "small.gguf", layers=1, width=128)
    model = load(others={"draft": DraftFile("small", small), "speculate": 3})
    assert model.generate("Hello", **GREEDY).text == both(pair, "Hello")[1]


def test_beams(pair: Pair) -> None:
    asked = AnswerRequest(prompt="Hello", sampling=SamplingParams(temperature=0), limits=Limits(6))
    found = [model.beams(SearchBeams(asked, BeamSettings(beams=3))) for model in pair]
    best = [each.answers[0] for each in found]  # the last ones are as likely as others but for rounding
    assert best[0].tokens == best[1].tokens
    assert best[0].total == pytest.approx(best[1].total, rel=0.01)


def test_embeddings(pair: Pair) -> None:
    vectors = [np.asarray(model.embed(["Paris is a city", "x"], pooling="mean").vectors) for model in pair]
    assert np.abs(vectors[0] - vectors[1]).max() < 1e-3


def write_lora(path: Path, base: Path) -> Path:
    """Write an adapter of random matrices for every query matrix."""
    rank = 4
    shapes = {}
    for tensor in read_header(base).tensors:
        if tensor.name.endswith("attn_q.weight"):
            n_in, n_out = tensor.shape
            shapes |= {f"{tensor.name}.lora_a": (n_in, rank), f"{tensor.name}.lora_b": (rank, n_out)}
    metadata = {
        "general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0,
    }  # fmt: skip
    specs = [TensorSpec(name, shape, 0, 4 * shape[0] * shape[1]) for name, shape in shapes.items()]
    raw = bytearray(gguf(metadata, specs))
    values = np.random.default_rng(5).standard_normal(sum(each.n_bytes for each in specs) // 4).astype("<f4")
    raw[-values.nbytes :] = values.tobytes()
    path.write_bytes(raw)
    return path


def test_lora(load: Loader, model_path: Path, tmp_path: Path, pair: Pair) -> None:
    adapters = read_adapters([str(write_lora(tmp_path / "adapter.gguf", model_path))])
    texts = [load(others={"adapters": adapters}, device=name).generate("Hello", **GREEDY).text for name in names(pair)]
    assert texts[0] == texts[1]
    assert texts[0] != both(pair, "Hello")[1]


def names(pair: Pair) -> list[str]:
    return [model.load.device for model in pair]


def test_explanations(pair: Pair) -> None:
    found = []
    for model in pair:
        asked = AnswerRequest(
            prompt="Hello there", sampling=SamplingParams(temperature=0), limits=Limits(3), remember=8
        )
        list(model.answer(asked))
        found.append(numbers(as_dict(explain_answer(model))))
    assert found[0].keys() == found[1].keys()
    far = {
        name: (value, found[1][name])
        for name, value in found[0].items()
        if value != pytest.approx(found[1][name], rel=0.01, abs=0.01)
    }
    assert not far


def numbers(data: Any, name: str = "") -> dict[str, float]:
    """Return the numbers in JSON data by path, but for times and bytes."""
    if isinstance(data, Mapping):
        parts = [(f"{name}.{key}", value) for key, value in data.items()]
    elif isinstance(data, Sequence) and not isinstance(data, str):
        parts = [(f"{name}.{index}", value) for index, value in enumerate(data)]
    else:
        is_measured = any(word in name for word in ("second", "bytes", "time", "threads", "_ns", "rate"))
        return {name: data} if isinstance(data, float) and not is_measured else {}
    return {path: number for key, value in parts for path, number in numbers(value, key).items()}


def test_importance_matrix(model_path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    sums = []
    for layers in (-1, NONE):
        out = tmp_path / f"{layers}.gguf"
        collect(model_path, out, text=text, gpu_layers=layers)
        sums.append(read_imatrix(out))
    for name, entry in sums[0].entries.items():
        assert entry.sums == pytest.approx(sums[1].entries[name].sums, rel=0.01, abs=1e-4)


def test_perplexity(model_path: Path) -> None:
    found = []
    for layers in (-1, NONE):
        with closing(EngineClient()) as engine:
            command = Evaluate(str(model_path), TEXT, n_ctx=128, threads=2, gpu_layers=layers)
            found.append(engine.do(EVALUATE, command).perplexity.value)
    assert found[0] == pytest.approx(found[1], rel=0.01)


def test_experts_on_the_processor(load: Loader, tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "mixture.gguf", layers=3, width=128, experts=4)
    texts = {
        load(path, device=device, gpu_layers=-1, cpu_experts=experts).generate("Hello", **GREEDY).text
        for device, experts in (("none", None), ("", 0), ("", 1), ("", 3))
    }
    assert len(texts) == 1


def test_a_tensor_that_is_too_large_for_the_device(load: Loader, tmp_path: Path) -> None:
    """Some drivers bind 128 MiB at most: llama.cpp leaves such a matrix to the processor."""
    path = write_random_model(tmp_path / "wide.gguf", layers=1, width=128, inner=270_000)
    texts = {load(path, device=device).generate("Hi", temperature=0, max_tokens=3).text for device in ("", "none")}
    assert len(texts) == 1
