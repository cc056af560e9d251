"""An answer explained: what the engine saw, what the sampler did, and what the machine could do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.hf_writer import files_of, write

from llmrun.errors import UsageError
from llmrun.lab.convert.job import convert_folder
from llmrun.lab.insight.explain import explain_answer
from llmrun.model import Model
from llmrun.model.loading import load
from llmrun.planning.hardware import this_machine
from llmrun.protocol.devices import Gpu

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    source = write(tmp_path / "hf", files_of("Gemma3ForCausalLM"))
    with load(str(convert_folder(source, tmp_path / "tiny.gguf", type="f32").path), threads=1) as loaded:
        yield loaded


def test_explaining_an_answer_leaves_the_conversation_as_it_was(model: Model) -> None:
    def answered() -> str:
        return model.generate("hello", max_tokens=4, temperature=0.0, remember=3).text

    with pytest.raises(UsageError):
        explain_answer(model)
    first = answered()
    found = explain_answer(model)
    assert explain_answer(model).run.lens == found.run.lens
    assert answered() == first
    assert len(found.choices) == 3, "as many as were remembered"
    assert found.run.lens_refused == ""
    assert found.model == "tiny", "where a file lies is nobody's business who is shown this"


def test_windows_and_shared_heads_are_counted(model: Model) -> None:
    assert model.generate("hello", max_tokens=1, temperature=0.0, remember=1).text is not None
    cache = explain_answer(model).cache
    assert cache.window == model.header.sliding_window > 0
    assert cache.window_layers == model.header.n_window_layers > 0
    assert cache.unshared_bytes_per_token == 2 * cache.bytes_per_token
    assert cache.n_ctx == model.loaded.n_ctx


def test_what_a_gpu_could_do_at_most_is_unknown(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.generate("hello", max_tokens=1, temperature=0.0, remember=1).text is not None
    assert explain_answer(model).decode_limit is not None
    machine = replace(this_machine(), gpus=(Gpu("CUDA0", "card", 8 << 30, 8 << 30, shared=False),))
    monkeypatch.setattr("llmrun.lab.insight.explain.this_machine", lambda: machine)
    found = explain_answer(model)
    assert (found.prefill_limit, found.decode_limit) == (None, None)
