"""The importance matrix: what is summed while llama.cpp computes, beside slow twins, and what becomes of it."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hf_writer import HEAD, N_BYTE_LEVEL, Tensors, byte_level, config, llama_like, safetensors
from support.numpy_llama import logits

from llmrun import _native
from llmrun.engine.jobs.importance import PARALLEL, Activations, run_importance
from llmrun.engine.llama.ggml import GgmlTensor, TensorNumbers, operation_numbers
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import BadModelError, ModelNotFoundError, ResourceError, UsageError
from llmrun.gguf.imatrix import read_imatrix
from llmrun.lab.convert.job import convert_folder
from llmrun.lab.quantize import calibration
from llmrun.lab.quantize.calibration import OPENINGS, QUESTIONS, collect
from llmrun.protocol.jobs.importance import Importance, ImportanceUpdate

TEXT = "hello world the thing 12 ab <|im_start|> \n\n" * 40
N_CTX = 128  # of the tiny model
# llama.cpp's name of a matrix -> transformers', in layer 0
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("package_on_path")


def settings(**changes: Any) -> dict[str, Any]:
    return config("LlamaForCausalLM", N_BYTE_LEVEL, head_dim=HEAD, **changes)


def model_file(folder: Path, tensors: Tensors, template: str = "") -> Path:
    """A tiny random llama with a byte-level vocabulary, in F32."""
    source = folder / "hf"
    source.mkdir()
    if template:
        (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (source / "config.json").write_text(json.dumps(settings(tie_word_embeddings="lm_head.weight" not in tensors)))
    (source / "tokenizer.json").write_text(json.dumps(byte_level()))
    (source / "model.safetensors").write_bytes(safetensors(tensors))
    return convert_folder(source, folder / "tiny.gguf", type="f32").path


def text_file(folder: Path, text: str = TEXT) -> Path:
    path = folder / "calibration.txt"
    path.write_text(text, encoding="utf-8")
    return path


# ---- the sums of a whole model, beside numpy's


class Watched(np.ndarray[Any, Any]):
    """A matrix that remembers what is multiplied with it, also when it is turned round."""

    seen: list[Any]

    def __array_finalize__(self, source: Any) -> None:
        self.seen = getattr(source, "seen", [])

    def __rmatmul__(self, left: Any) -> Any:
        self.seen.append(np.asarray(left))
        return np.asarray(left) @ np.asarray(self)


def sums_of_the_twin(tensors: Tensors, pieces: list[list[int]]) -> dict[str, Any]:
    """transformers' name of a tensor -> sums of squares of what it is multiplied with."""
    watched = dict(tensors)
    for name, values in tensors.items():
        if values.ndim == 2 and name != "model.embed_tokens.weight":  # what is read from these is not multiplied
            watched[name] = values.view(Watched)
            watched[name].seen = []
    for piece in pieces:
        logits(settings(), watched, piece)
    matrices = {name: values for name, values in watched.items() if isinstance(values, Watched)}
    return {name: sum((rows**2).sum(0) for rows in matrix.seen) for name, matrix in matrices.items()}


def tokens_of(model: Path, text: str) -> list[int]:
    loaded = LlamaModel(str(model), 0, _native.CancelFlag())
    try:
        return loaded.vocabulary.with_bos(loaded.vocabulary.tokenize(text, special=False))
    finally:
        loaded.close()


@pytest.mark.parametrize("tied", [False, True])
def test_sums_are_those_of_the_plain_twin(tied: bool, tmp_path: Path) -> None:
    tensors = llama_like(N_BYTE_LEVEL, tied=tied)
    model, text = model_file(tmp_path, tensors), text_file(tmp_path)
    updates: list[ImportanceUpdate] = []
    target = tmp_path / "im.gguf"
    collected, _ = collect(model, target, text=text, threads=1, on_update=updates.append, includes_output=True)
    tokens = tokens_of(model, TEXT)
    pieces = [tokens[start : start + N_CTX] for start in range(0, len(tokens) - N_CTX + 1, N_CTX)]
    assert len(pieces) > 2
    assert collected.n_tokens == len(pieces) * N_CTX
    wanted, found = sums_of_the_twin(tensors, pieces), read_imatrix(target)
    assert (found.n_chunks, found.chunk_size, found.datasets) == (len(pieces), N_CTX, (text.name,))
    assert set(found.entries) == {f"blk.{layer}.{name}.weight" for layer in (0, 1) for name in NAMES} | (
        set() if tied else {"output.weight"}
    )
    for name, entry in found.entries.items():
        _, layer, part, _ = name.split(".") if name.startswith("blk.") else ("", "", "", "")
        theirs = f"model.layers.{layer}.{NAMES[part]}.weight" if part else "lm_head.weight"
        assert entry.counts.tolist() == [collected.n_tokens]
        # Keys and values are kept as float16.
        assert np.linalg.norm(entry.sums[0] - wanted[theirs]) < 2e-3 * np.linalg.norm(wanted[theirs]), name
    assert [update.phase for update in updates if update.share == 1.0] == ["reading"]
    assert {update.phase for update in updates} == {"loading", "reading"}


def test_what_is_on_a_gpu_is_copied_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = model_file(tmp_path, llama_like(N_BYTE_LEVEL)), text_file(tmp_path)
    for name, is_here in (("here", True), ("copied", False)):
        if not is_here:  # ggml copies from a processor's memory just as well
            monkeypatch.setattr(TensorNumbers, "_is_readable", lambda self, tensor: False)
        command = Importance(str(model), str(tmp_path / name), str(text), gpu_layers=0)
        run_importance(command, lambda update: None, _native.CancelFlag())
    assert (tmp_path / "here").read_bytes() == (tmp_path / "copied").read_bytes()


def test_the_output_matrix_is_left_out_as_in_llama_cpp(tmp_path: Path) -> None:
    model = model_file(tmp_path, llama_like(N_BYTE_LEVEL))
    collect(model, tmp_path / "im.gguf", text=text_file(tmp_path), threads=1)
    assert "output.weight" not in read_imatrix(tmp_path / "im.gguf").entries


def test_a_short_text_is_read_as_it_is(tmp_path: Path) -> None:
    model = model_file(tmp_path, llama_like(N_BYTE_LEVEL))
    collected, notes = collect(model, tmp_path / "im.gguf", text=text_file(tmp_path, "abcdefgh" * 4), threads=1)
    assert 16 <= collected.n_tokens <= 32
    assert "only" in notes[0]


# ---- what a model writes itself


def test_a_model_writes_its_own_text_and_the_same_one_again(tmp_path: Path) -> None:
    model = model_file(tmp_path, llama_like(N_BYTE_LEVEL))
    updates: list[ImportanceUpdate] = []
    made = [
        collect(model, tmp_path / name, text=None, threads=1, n_tokens=1500, on_update=updates.append)[0]
        for name in ("a.gguf", "b.gguf")
    ]
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert made[0].written_tokens >= 1500
    assert made[0].n_tokens == 1500 // N_CTX * N_CTX
    assert sum(opening in made[0].text for opening in OPENINGS) > PARALLEL, "others follow those that are done"
    assert not any(question in made[0].text for question in QUESTIONS)  # it has no chat template
    assert [update.phase for update in updates if update.phase != "writing"][:2] == ["loading", "reading"]
    other, _ = collect(model, tmp_path / "c.gguf", text=None, threads=1, n_tokens=1500, seed=1)
    assert other.text != made[0].text


@pytest.mark.parametrize(
    ("template", "is_good"),
    [("U:{{ messages[0].content }}A:", True), ("x" * 80 + "{{ messages[0].content }}", False), ("{{ 1 / 0 }}", False)],
)
def test_questions_are_asked_where_the_chat_template_leaves_room(template: str, is_good: bool, tmp_path: Path) -> None:
    model = model_file(tmp_path, llama_like(N_BYTE_LEVEL), template)
    text = collect(model, tmp_path / "im.gguf", text=None, threads=1, n_tokens=600)[0].text
    assert (QUESTIONS[0] in text) == is_good
    assert OPENINGS[0] in text


def test_the_rest_of_a_very_long_text_is_left_out_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "MAX_READ_TOKENS", 2 * N_CTX)
    model = model_file(tmp_path, llama_like(N_BYTE_LEVEL))
    collected, notes = collect(model, tmp_path / "im.gguf", text=text_file(tmp_path), threads=1)
    assert collected.n_tokens == 2 * N_CTX
    assert "only the first 256 tokens" in notes[-1]


def test_writing_ends_when_its_time_is_over(tmp_path: Path) -> None:
    model = model_file(tmp_path, llama_like(N_BYTE_LEVEL))
    collected, _ = collect(model, tmp_path / "im.gguf", text=None, threads=1, n_tokens=10**7, seconds=0.3)
    assert collected.written_tokens < 10**6


def test_prompts_are_as_many_of_each_kind() -> None:
    assert len(QUESTIONS) == len(OPENINGS) == len(set(QUESTIONS)) == len(set(OPENINGS))


# ---- what can go wrong


def test_what_makes_no_sense_is_refused_in_words(tmp_path: Path) -> None:
    model, target = model_file(tmp_path, llama_like(N_BYTE_LEVEL)), tmp_path / "im.gguf"
    with pytest.raises(UsageError, match=r"too short: it has \d tokens"):
        collect(model, target, text=text_file(tmp_path, "ab"), threads=1)
    with pytest.raises(ModelNotFoundError, match=r"can't read .*nothing.txt"):
        collect(model, target, text=tmp_path / "nothing.txt", threads=1)
    with pytest.raises(ModelNotFoundError):
        collect(tmp_path / "nothing.gguf", target, text=text_file(tmp_path), threads=1)
    with pytest.raises(UsageError, match="would be overwritten"):
        collect(model, model, text=text_file(tmp_path), threads=1)
    with pytest.raises(ResourceError, match=r"can't write .*nowhere.*im.gguf"):
        collect(model, tmp_path / "nowhere" / "im.gguf", text=text_file(tmp_path), threads=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.txt", "hf", "tiny.gguf"]


def test_a_model_that_overflows_is_named_by_its_tensor(tmp_path: Path) -> None:
    tensors = llama_like(N_BYTE_LEVEL)
    tensors["model.layers.1.input_layernorm.weight"][:] = 3e38
    model = model_file(tmp_path, tensors)
    with pytest.raises(BadModelError, match=r"blk\.1\.attn_\w+\.weight are not finite"):
        collect(model, tmp_path / "im.gguf", text=text_file(tmp_path), threads=1)


def test_what_is_raised_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    model, target = model_file(tmp_path, llama_like(N_BYTE_LEVEL)), tmp_path / "im.gguf"
    target.write_bytes(b"old")

    def stop(update: ImportanceUpdate) -> None:
        if update.phase == "reading":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(model, target, text=text_file(tmp_path), threads=1, on_update=stop)
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.txt", "hf", "im.gguf", "tiny.gguf"]


# ---- single matrix products, as ggml has them in memory


class Product:
    """A finished matrix product in memory: what ggml shows its callback."""

    def __init__(self, activations: Activations, name: str) -> None:
        self.activations, self.kept = activations, list[Any]()
        self.result = GgmlTensor()
        self.weights = GgmlTensor(type=0, name=name.encode())
        self.result.src[0] = ctypes.addressof(self.weights)

    def give(self, place: int, values: Any) -> None:
        """A source; values are an array of four dimensions in ggml's order turned round, maybe not contiguous."""
        tensor = GgmlTensor(type=0, data=values.ctypes.data)
        tensor.ne[:], tensor.nb[:] = values.shape[::-1], values.strides[::-1]
        self.kept += [values, tensor]
        self.result.src[place] = ctypes.addressof(tensor)

    def show(self, operation: int) -> bool:
        """Offer a tensor to the callback; show it if requested."""
        self.result.op = operation
        return self.activations.watch(self.result, True) and self.activations.watch(self.result, False)


MUL_MAT, MUL_MAT_ID = (operation_numbers()[name] for name in ("MUL_MAT", "MUL_MAT_ID"))


@pytest.fixture
def activations() -> Activations:
    return Activations(includes_output=False)


def test_stacked_matrices_take_their_own_inputs(activations: Activations) -> None:
    random = np.random.default_rng(1)
    inputs = random.standard_normal((2, 6, 20, 8)).astype("f4")[:, :, :, ::1]
    product = Product(activations, "CUDA0#blk.0.attn_k_b.weight#0")
    product.weights.ne[:] = [8, 5, 3, 1]
    product.give(1, inputs)
    assert product.show(MUL_MAT)
    wanted = np.zeros((3, 8))
    for outer in range(2):
        for inner in range(6):
            for row in range(20):
                wanted[inner % 3] += inputs[outer, inner, row].astype("f8") ** 2
    found = activations.sums["blk.0.attn_k_b.weight"]
    assert found.squares == pytest.approx(wanted, rel=1e-6)
    assert found.counts.tolist() == [2 * 6 * 20 // 3]


@pytest.mark.parametrize("own_inputs", [False, True])
def test_experts_count_the_tokens_they_are_given(activations: Activations, own_inputs: bool) -> None:
    random = np.random.default_rng(2)
    n_tokens, n_used, n_experts = 50, 3, 8
    rows = random.standard_normal((1, n_tokens, n_used if own_inputs else 1, 16)).astype("f4")
    ranked = np.argsort(random.random((n_tokens, n_experts)), axis=1).astype("i4")
    ranked[ranked == 7] = 6  # nobody asks the last one
    product = Product(activations, "blk.1.ffn_up_exps.weight")
    product.weights.ne[:] = [16, 4, n_experts, 1]
    for _ in range(2):
        activations.begin()
        product.give(1, rows)
        product.give(2, ranked[None, None, :, :n_used])  # a view of longer rows, as in llama.cpp
        product.show(MUL_MAT_ID)
    wanted, counts = np.zeros((n_experts, 16)), np.zeros(n_experts)
    for token in range(n_tokens):
        for place in range(n_used):
            expert = ranked[token, place]
            wanted[expert] += 2 * rows[0, token, place if own_inputs else 0].astype("f8") ** 2
            counts[expert] += 2
    found = activations.sums["blk.1.ffn_up_exps.weight"]
    assert found.squares == pytest.approx(wanted, rel=1e-6)
    assert found.counts.tolist() == counts.tolist()
    assert counts[7] == 0


def test_what_llama_cpp_does_not_count_is_not_counted(activations: Activations) -> None:
    few = np.ones((1, 1, 15, 4), "f4")
    for name, inputs, operation in (
        ("blk.0.attn_q.weight", few, MUL_MAT),  # fewer rows than any text
        ("output.weight", np.ones((1, 1, 16, 4), "f4"), MUL_MAT),
        ("blk.0.attn_q.weight", np.ones((1, 1, 16, 4), "f4"), MUL_MAT + 40),
    ):
        product = Product(activations, name)
        product.weights.ne[:] = [4, 4, 1, 1]
        product.give(1, inputs)
        assert not product.show(operation)
    assert not activations.sums


def test_a_computation_ends_after_the_last_matrix(activations: Activations) -> None:
    product = Product(activations, "blk.0.ffn_down.weight")
    product.weights.ne[:] = [4, 4, 1, 1]
    product.give(1, np.ones((1, 1, 16, 4), "f4"))
    went_on = []
    for _ in range(3):
        activations.begin()
        went_on.append(product.show(MUL_MAT))
    assert went_on == [True, False, False]
    assert activations.sums["blk.0.ffn_down.weight"].squares.tolist() == [[48.0] * 4]
