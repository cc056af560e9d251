"""Where --rpc has no meaning it is refused by name, and a measured model is loaded over the workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gguf_writer import tiny_model

from llmrun.cli.app import call
from llmrun.errors import UsageError
from llmrun.gguf.reader import read_header
from llmrun.lab.bench.cases import Case, bench_settings
from llmrun.lab.bench.run import BenchedModel
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.loading import Load


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("explain", "m", "hi"), "explain needs all layers on this machine"),
        (("bench", "m", "-ngl", "3"), "--rpc and -ngl can't be used together"),
    ],
)
def test_what_goes_without_workers_only(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        call((*words, "--rpc", "10.0.0.2"))


def test_workers_do_not_go_with_ray(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hi"}\n')
    with pytest.raises(UsageError, match="--ray and --rpc can't be used together"):
        call(("batch", "m", str(rows), "-o", str(tmp_path / "out.jsonl"), "--ray", "local", "--rpc", "10.0.0.2"))


def test_every_test_of_a_measured_model_lies_over_the_workers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model())
    spread = Load("other", 0, gpu_layers=2, workers=("a:1",), layer_counts=(2,))
    model = BenchedModel("m", path, read_header(path), spread=spread)
    load = model.loading(Case(bench_settings(threads=3, n_batch=64), BenchTest(n_gen=1)), {}).load
    assert (load.workers, load.layer_counts, load.gpu_layers) == (("a:1",), (2,), 2)
    assert (load.path, load.threads, load.n_batch) == (str(path), 3, 64)
