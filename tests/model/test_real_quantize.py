"""The real thing: files equal to llama-quantize's, and targets that survive whatever kills the command."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from support import hf_writer, plain_llama
from support.gguf_writer import runnable_model, runnable_tensors, write
from support.installed import SECONDS, Installed, engine_of, eventually, gone, only_error_line
from support.plain_llama import assert_greedy, smollm2_prompt
from support.random_model import write_random_model

from llmrun.gguf.reader import read_header
from llmrun.lab.quantize.job import QuantizeRequest, quantize
from llmrun.lab.quantize.types import NEED_IMATRIX
from llmrun.runner.client import EngineClient

# benchmarks/quantize.py compares all types with llama-quantize, those that take long too.
SMOLLM2 = ("F16", "Q4_0", "Q8_0", "Q4_K_M")
RANDOM = (
    "BF16", "F16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS",
    "MXFP4_MOE", "Q3_K_M", "Q2_K", "TQ1_0", "Q2_K_S", "IQ2_XXS",
)  # fmt: skip
SUMS, ROWS = ".in_sum2", 1536


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in F32 of random weights whose rows divide into all blocks."""
    return write_random_model(tmp_path_factory.mktemp("small") / "small-F32.gguf", layers=1, inner=512)


@pytest.fixture(scope="module")
def imatrix(small: Path) -> Path:
    """An importance matrix for it of random numbers."""
    random = np.random.RandomState(2)
    path = small.with_name("small.imatrix.gguf")
    writer = GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["noise"])
    writer.add_uint32("imatrix.chunk_count", 3)
    writer.add_uint32("imatrix.chunk_size", 512)
    for tensor in read_header(small).tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            sums = random.gamma(1.0, 100.0, (1, tensor.shape[0])).astype(np.float32)
            writer.add_tensor(f"{tensor.name}{SUMS}", sums)
            writer.add_tensor(f"{tensor.name}.counts", np.full((1, 1), ROWS, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def data_hash(path: Path) -> str:
    """Of everything behind the header."""
    start = min(tensor.offset for tensor in read_header(path).tensors)
    return hashlib.sha256(memoryview(path.read_bytes())[start:]).hexdigest()[:16]


@pytest.fixture(scope="module")
def half(command: str, pulled: None, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 in F16, made by the command itself."""
    path = tmp_path_factory.mktemp("half") / "smollm2-F16.gguf"
    done = subprocess.run(
        [command, "quantize", "smollm2", str(path), "--type", "f16"], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "F16 is larger, but not better" in done.stderr
    return path


@pytest.fixture(scope="module")
def k_quant(command: str, half: Path) -> tuple[Path, str]:
    """SmolLM2 in Q4_K_M, and what the command said."""
    path = half.with_name("smollm2-Q4_K_M.gguf")
    words = [command, "quantize", str(half), str(path), "--type", "Q4_K_M"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, "")
    return path, done.stderr


@pytest.mark.parametrize("kind", SMOLLM2)
def test_smollm2_as_llama_quantize_writes_it(
    llmrun: Installed, model_path: Path, half: Path, k_quant: tuple[Path, str], tmp_path: Path, kind: str
) -> None:
    path = {"F16": half, "Q4_K_M": k_quant[0]}.get(kind) or tmp_path / f"{kind}.gguf"
    if path.parent == tmp_path:
        quantized(llmrun, half, path, kind)
    plain_llama.quantize(model_path if kind == "F16" else half, {kind: tmp_path / "plain.gguf"})
    assert data_hash(path) == data_hash(tmp_path / "plain.gguf")


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    """An engine that quantizes, as the command's does."""
    with closing(EngineClient()) as client:
        yield client


@pytest.fixture(scope="module")
def plain(small: Path, imatrix: Path) -> dict[str, Path]:
    """The random model in each type, written by llama.cpp."""
    paths = {kind: small.with_name(f"{kind}.gguf") for kind in RANDOM}
    weights = weights_of(imatrix)
    plain_llama.quantize(small, paths, {kind: weights for kind in RANDOM if kind in NEED_IMATRIX})
    return paths


@pytest.mark.parametrize("kind", RANDOM)
def test_random_weights_as_llama_quantize_writes_it(
    engine: EngineClient, plain: dict[str, Path], small: Path, imatrix: Path, tmp_path: Path, kind: str
) -> None:
    request = QuantizeRequest(small, tmp_path / "out.gguf", kind, imatrix=imatrix if kind in NEED_IMATRIX else None)
    done = quantize(request, engine=engine)
    assert data_hash(request.target) == data_hash(plain[kind])
    assert done.n_bytes == request.target.stat().st_size


def weights_of(imatrix: Path) -> dict[str, list[float]]:
    """Tensor -> what llama-quantize makes of its sums."""
    sums = (tensor for tensor in GGUFReader(imatrix).tensors if tensor.name.endswith(SUMS))
    return {tensor.name.removesuffix(SUMS): (tensor.data / np.float32(ROWS)).reshape(-1).tolist() for tensor in sums}


def quantized(llmrun: Installed, source: Path, target: Path, kind: str, *options: str) -> dict[str, Any]:
    """Quantize; gives the JSON."""
    done = llmrun.run("quantize", str(source), str(target), "--type", kind, "--json", *options)
    assert done.returncode == 0, done.stderr.decode()
    return dict(json.loads(done.stdout))


def test_what_comes_out_answers(llmrun: Installed, k_quant: tuple[Path, str]) -> None:
    path, said = k_quant
    assert "F16 270.9 MB -> Q4_K_M 105.5 MB, 6.17 bits per weight" in said
    assert "180 of 272 tensors get another type" in said
    question = "What is the capital of France?"
    answer = llmrun.run("run", str(path), "--temp", "0", "-n", "16", question)
    assert_greedy(path, (smollm2_prompt(question), answer.stdout.decode().removesuffix("\n")))


def test_the_best_4_bit_type_of_smollm2(llmrun: Installed, half: Path) -> None:
    done = llmrun.run("quantize", str(half), "--dry-run", "--json")
    assert json.loads(done.stdout)["type"] in ("IQ4_NL", "Q4_0")  # its rows of 576 don't divide into K-quants' blocks
    assert b"576" in done.stderr


def test_single_tensors(llmrun: Installed, small: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    quantized(
        llmrun, small, target, "Q4_0",
        "--tensor-type", "ffn_(up|gate)=q8_0", "--tensor-type", "attn_v=Q6_K", "--embedding-type", "q5_k",
    )  # fmt: skip
    found = {tensor.name: tensor.type for tensor in read_header(target).tensors if len(tensor.shape) > 1}
    assert found["blk.0.ffn_up.weight"] == found["blk.0.ffn_gate.weight"] == "Q8_0"
    assert found["blk.0.attn_v.weight"] == "Q6_K"
    assert found["token_embd.weight"] == "Q5_K"
    assert found["blk.0.attn_q.weight"] == "Q4_0"


def test_a_pattern_that_is_none(llmrun: Installed, small: Path, tmp_path: Path) -> None:
    done = llmrun.run("quantize", str(small), str(tmp_path / "o.gguf"), "--type", "q4_0", "--tensor-type", "(=q8_0")
    assert done.returncode == 2
    assert "can't read a --tensor-type pattern" in only_error_line(done.stderr.decode())


def test_a_folder_of_hugging_face(llmrun: Installed, tmp_path: Path) -> None:
    folder = hf_writer.write(tmp_path / "tiny", hf_writer.files_of("LlamaForCausalLM"))
    done = llmrun.run("quantize", str(folder), str(tmp_path), "--type", "int8")
    assert done.returncode == 0, done.stderr.decode()
    assert {tensor.type for tensor in read_header(tmp_path / "tiny-Q8_0.gguf").tensors} == {"Q8_0", "F32"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny", "tiny-Q8_0.gguf"]


# ---- whatever happens, the target is old or complete, the source as it was --------------------------


OLD = b"an old file"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes long enough to be disturbed, in F32."""
    return write_random_model(tmp_path_factory.mktemp("source") / "source-F32.gguf", width=512, layers=4)


@pytest.fixture(scope="module")
def whole(source: Path) -> Path:
    """It in Q4_0, made by llama.cpp."""
    path = source.with_name("Q4_0.gguf")
    plain_llama.quantize(source, {"Q4_0": path})
    return path


class Scene:
    """A quantization that is going to be disturbed."""

    def __init__(self, llmrun: Installed, source: Path, folder: Path, whole: Path) -> None:
        self.llmrun, self.source, self.target = llmrun, source, folder / "out.gguf"
        self.whole, self.size = data_hash(whole), whole.stat().st_size
        self.target.write_bytes(OLD)
        self._before = (source.stat().st_mtime_ns, source.stat().st_size, data_hash(source))

    def start(self, **more: Any) -> subprocess.Popen[bytes]:
        """Begin."""
        command = [self.llmrun.command, "quantize", "-y", str(self.source), str(self.target), "--type", "Q4_0"]
        return subprocess.Popen(
            command, env=self.llmrun.environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, **more
        )

    def temporaries(self) -> list[Path]:
        return list(self.target.parent.glob(".*.tmp"))

    def written(self) -> int:
        """Bytes so far."""
        return max((path.stat().st_size for path in self.temporaries()), default=0)

    def check(self) -> None:
        """Old or complete, and the source as it was."""
        if self.target.read_bytes() != OLD:
            assert data_hash(self.target) == self.whole
        assert (self.source.stat().st_mtime_ns, self.source.stat().st_size, data_hash(self.source)) == self._before


@pytest.fixture
def scene(llmrun: Installed, source: Path, whole: Path, tmp_path: Path) -> Scene:
    return Scene(llmrun, source, tmp_path, whole)


@pytest.mark.parametrize(
    ("number", "share"),
    [(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGINT, 0.7), (signal.SIGTERM, 0.3), (signal.SIGHUP, 0.3)],
)
def test_a_signal_when_a_share_is_written(scene: Scene, number: signal.Signals, share: float) -> None:
    process = scene.start()
    engine = engine_of(process.pid)
    eventually(lambda: scene.written() >= max(1, share * scene.size) or process.poll() is not None, SECONDS)
    process.send_signal(number)
    status = process.wait(SECONDS)
    ends = {each: -each for each in (signal.SIGKILL, signal.SIGINT)} | {signal.SIGHUP: 128 + signal.SIGTERM}
    assert status in (0, ends.get(number, 128 + number))
    assert eventually(lambda: gone(engine), SECONDS)
    scene.check()
    if number != signal.SIGKILL:
        assert not scene.temporaries()
        return
    # The next run tidies up.
    assert scene.start().wait(SECONDS) == 0
    assert data_hash(scene.target) == scene.whole
    assert not scene.temporaries()


def test_the_engine_dies(scene: Scene) -> None:
    process = scene.start()
    eventually(lambda: scene.written() > scene.size / 10, SECONDS)
    os.kill(engine_of(process.pid).pid, signal.SIGKILL)
    assert process.wait(SECONDS) == 8
    assert scene.target.read_bytes() == OLD
    assert not scene.temporaries()


@pytest.mark.parametrize("is_nearly_whole", [False, True])
def test_a_disk_that_takes_no_more(scene: Scene, is_nearly_whole: bool) -> None:
    limit = scene.size - 1 if is_nearly_whole else 4096
    process = scene.start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 6, stderr
    assert "is not allowed there" in only_error_line(stderr.decode())
    assert b"ulimit -f" in stderr
    assert scene.target.read_bytes() == OLD
    assert not scene.temporaries()
    scene.check()


def test_source_and_target_are_one_file(llmrun: Installed, small: Path, tmp_path: Path) -> None:
    before = small.read_bytes()
    link, hard = tmp_path / "link.gguf", tmp_path / "hard.gguf"
    link.symlink_to(small)
    hard.hardlink_to(small)
    for target in (small, link, hard):
        done = llmrun.run("quantize", "-y", str(small), str(target), "--type", "Q4_0")
        assert done.returncode == 2
        assert "would be overwritten while it is read" in only_error_line(done.stderr.decode())
    assert small.read_bytes() == before


def test_a_source_that_llama_cpp_does_not_load(llmrun: Installed, tmp_path: Path) -> None:
    tensors = [tensor for tensor in runnable_tensors() if tensor.name != "blk.0.ffn_up.weight"]
    source = write(tmp_path / "bad.gguf", runnable_model({}, tensors))
    done = llmrun.run("quantize", str(source), str(tmp_path / "out.gguf"), "--type", "q8_0")
    assert done.returncode == 7
    assert "can't load bad.gguf" in only_error_line(done.stderr.decode())
    assert b"ffn_up" in done.stderr
    assert not (tmp_path / "out.gguf").exists()


def test_weights_that_are_no_numbers(llmrun: Installed, small: Path, tmp_path: Path) -> None:
    content = bytearray(small.read_bytes())
    tensor = next(tensor for tensor in read_header(small).tensors if tensor.name == "blk.0.ffn_down.weight")
    content[tensor.offset + 4000 : tensor.offset + 4004] = np.float32(np.nan).tobytes()
    source = write(tmp_path / "nan.gguf", bytes(content))
    done = llmrun.run("quantize", str(source), str(tmp_path / "out.gguf"), "--type", "q8_0")
    assert done.returncode == 7
    assert b"blk.0.ffn_down.weight" in done.stderr
    assert not (tmp_path / "out.gguf").exists()
