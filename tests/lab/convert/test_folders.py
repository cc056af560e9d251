"""Invalid, hostile and unsupported folders: refused with an explanation, without leftovers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from support.hf_writer import (
    N_BYTE_LEVEL,
    bert,
    bfloat16,
    byte_level,
    config,
    files_of,
    llama_like,
    raw_safetensors,
    safetensors,
    tokenizer_model,
    write,
)
from typer.testing import CliRunner

from llmrun import _native
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import BadModelError, DiskFullError, LlmrunError, UsageError
from llmrun.gguf.pooling import stated_pooling
from llmrun.gguf.reader import read_header
from llmrun.lab.cli.convert import convert
from llmrun.lab.convert import gguf_file as writing
from llmrun.lab.convert.checkpoint import all_finite, to_float32
from llmrun.lab.convert.job import convert_folder

QWEN = "Qwen3ForCausalLM"


def refused(folder: Path, files: dict[str, Any], kind: type[LlmrunError] = LlmrunError) -> str:
    """Return the error for a folder with these files, after checking that nothing was written."""
    source = write(folder / "in", files)
    (folder / "out").mkdir()
    with pytest.raises(kind) as caught:
        convert_folder(source, folder / "out" / "x.gguf")
    assert list((folder / "out").iterdir()) == []
    return f"{caught.value.what} {caught.value.why} {caught.value.hint}"


def tensors_in(path: Path) -> dict[str, Any]:
    """Return name -> float32 values of a file of F32 tensors."""
    header, data = read_header(path), path.read_bytes()
    return {
        row.name: np.frombuffer(data, "<f4", row.n_elements, row.offset).reshape(row.shape[::-1])
        for row in header.tensors
    }


# ---- safetensors


def one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (raw_safetensors([], b""), "no JSON object"),
        (raw_safetensors(one(), b"\0" * 15), "end at byte"),
        (raw_safetensors(one(), b"\0" * 17), "end at byte"),
        (raw_safetensors(one(data_offsets=[4, 20]), b"\0" * 20), "should be at"),
        (raw_safetensors(one(data_offsets=[0, 8]), b"\0" * 16), "its shape needs 16"),
        (raw_safetensors(one(data_offsets=[16, 0]), b"\0" * 16), "its shape needs 16"),
        (raw_safetensors(one(shape=[2**40, 2**40]), b"\0" * 16), "impossible shape"),
        (raw_safetensors(one(shape=[-1, 4]), b"\0" * 16), "impossible shape"),
        (raw_safetensors(one(shape=[True, 4]), b"\0" * 16), "impossible shape"),
        (raw_safetensors(one(dtype="F4"), b"\0" * 16), "'F4'"),
        (raw_safetensors({**one(), "b": one()["a"]}, b"\0" * 16), "should be at"),
        ((lambda t: len(t).to_bytes(8, "little") + t)(b'{"a":' * 100_000), "damaged"),
        ((lambda t: len(t).to_bytes(8, "little") + t)(b'{"a":1,"a":2}'), "appears twice"),
    ],
)
def test_damaged_weights_are_refused(content: bytes, said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path, files_of(QWEN) | {"model.safetensors": content}, BadModelError)


def test_a_sharded_model_is_read_by_its_index(tmp_path: Path) -> None:
    tensors = llama_like(N_BYTE_LEVEL, head_norms=True)
    names = list(tensors)
    files = files_of(QWEN)
    del files["model.safetensors"]
    index: dict[str, str] = {}
    for number, part in enumerate((names[:7], names[7:])):
        files[f"model-{number}.safetensors"] = safetensors({name: tensors[name] for name in part})
        index |= dict.fromkeys(part, f"model-{number}.safetensors")
    whole, parts = tmp_path / "whole.gguf", tmp_path / "parts.gguf"
    convert_folder(write(tmp_path / "a" / "m", files_of(QWEN)), whole)
    convert_folder(write(tmp_path / "b" / "m", files | {"model.safetensors.index.json": {"weight_map": index}}), parts)
    assert whole.read_bytes() == parts.read_bytes()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/x.safetensors", "model.bin", 3])
def test_an_index_leads_nowhere_else(name: Any, tmp_path: Path) -> None:
    index = {"weight_map": {"a": name}}
    assert "it lists tensor" in refused(tmp_path, files_of(QWEN) | {"model.safetensors.index.json": index})


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-2.safetensors"}}
    assert "model-2.safetensors" in refused(tmp_path, files_of(QWEN) | {"model.safetensors.index.json": index})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pytorch_model.bin", "pickle"),
        ("model.pt", "pickle"),
        ("adapter_model.safetensors", "adapter"),
        ("consolidated.safetensors", "Mistral"),
        ("model.gguf", "no conversion"),
    ],
)
def test_other_kinds_of_weights_are_refused_by_name(name: str, said: str, tmp_path: Path) -> None:
    files = {"config.json": config(QWEN, N_BYTE_LEVEL), name: b"x"}
    assert said in refused(tmp_path, files, UsageError)


# ---- what can't be converted


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        (QWEN, {"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        (QWEN, {"architectures": None}, "names no architecture"),
        (QWEN, {"hidden_act": "relu"}, "relu"),
        (QWEN, {"num_hidden_layers": 3}, "no tensor 'layers.2."),
        (QWEN, {"num_hidden_layers": 1}, "layers.1."),
        (QWEN, {"num_hidden_layers": -1}, "num_hidden_layers"),
        (QWEN, {"num_attention_heads": "4"}, "num_attention_heads"),
        (QWEN, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (QWEN, {"rope_theta": 1e300}, "rope_theta is '1e+300'"),
        (QWEN, {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        (QWEN, {"partial_rotary_factor": 0.5}, "partial rotation"),
        (QWEN, {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 7}, "query_pre_attn_scalar"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [0, 1]}, "no_rope_layers"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}, "dense layers"),
        ("MixtralForCausalLM", {"num_local_experts": 5}, "with 5 experts each"),
        ("MixtralForCausalLM", {"num_local_experts": 3}, "experts.3."),
        ("MixtralForCausalLM", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("GraniteForCausalLM", {"head_dim": 32}, "head_dim"),
    ],
)
def test_what_llama_cpp_would_compute_differently_is_refused(
    architecture: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, files_of(architecture, **changes))


def sentence_model(folder: Path, kinds: str, architecture: str = "BertModel", **pooling: Any) -> Path:
    """A model of sentence-transformers with these modules, of which each has a folder of its own."""
    rows = [
        {"path": f"{number}_{kind}" if number else "", "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(kinds.split())
    ]
    dense = {"bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
    files = {f"{row['path']}/config.json": pooling if row["path"].endswith("Pooling") else dense for row in rows[1:]}
    return write(folder / "Tiny", {**files_of(architecture), "modules.json": json.dumps(rows), **files})


@pytest.mark.parametrize(
    ("kinds", "pooling", "said"),
    [
        ("Transformer Pooling Dense", {"pooling_mode_mean_tokens": True}, "Dense (2_Dense)"),
        ("Transformer Pooling LayerNorm", {"pooling_mode_mean_tokens": True}, "LayerNorm (2_LayerNorm)"),
        ("Transformer Pooling Dense Normalize", {"pooling_mode": "mean"}, "Dense (2_Dense)"),
        ("Transformer CNN Pooling", {"pooling_mode": "mean"}, "CNN (1_CNN)"),
        ("Transformer Pooling Pooling", {"pooling_mode": "mean"}, "it has 2 Pooling modules"),
        ("Transformer Pooling", {"pooling_mode_max_tokens": True}, "it is max_tokens"),
        (
            "Transformer Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "it is cls_token and mean_tokens",
        ),
        ("Transformer Pooling", {"pooling_mode": ["cls", "mean"]}, "it is cls and mean"),
        ("Transformer Pooling", {}, "1_Pooling/config.json states none"),
    ],
)  # fmt: skip
def test_modules_that_llama_cpp_does_not_compute_are_refused(
    kinds: str, pooling: dict[str, Any], said: str, tmp_path: Path
) -> None:
    for architecture in ("BertModel", "Qwen3ForCausalLM", "LlamaForCausalLM"):
        with pytest.raises(UsageError) as caught:
            convert_folder(sentence_model(tmp_path, kinds, architecture, **pooling), tmp_path / "x.gguf")
        assert said in str(caught.value)
        assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("architecture", ["BertModel", "Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_the_pooling_of_every_architecture_is_written(architecture: str, tmp_path: Path) -> None:
    folder = sentence_model(
        tmp_path, "Transformer Pooling Dropout Normalize", architecture, pooling_mode="lasttoken", include_prompt=False
    )
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    done = convert_folder(folder, tmp_path / "x.gguf")
    assert stated_pooling(read_header(done.path)) == "last"
    assert "include_prompt" in done.notes[0]
    assert "puts 'query: ' before each text" in done.notes[1]


@pytest.mark.parametrize(
    "modules",
    [
        "{", "{}", "[7]", '[{"path": ""}]', '[{"type": "a.Pooling", "path": 7}]', "[" * 100_000,
        '[{"type": "a.Pooling", "path": "../other"}]', '[{"type": "a.Dense", "path": "/etc"}]',
        json.dumps([{"type": "a.Dropout"}] * 101),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_damaged_modules_are_refused(modules: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "Tiny", {**files_of("BertModel"), "modules.json": modules})
    with pytest.raises(BadModelError, match=r"modules\.json is damaged"):
        convert_folder(folder, tmp_path / "x.gguf")


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    tensors = {**llama_like(N_BYTE_LEVEL, head_norms=True), "model.layers.0.extra.weight": np.zeros((2, 2), "<f4")}
    files = files_of(QWEN) | {"model.safetensors": safetensors(tensors)}
    assert "layers.0.extra.weight" in refused(tmp_path, files, UsageError)


def test_an_unknown_pre_tokenizer_is_shown(tmp_path: Path) -> None:
    files = files_of(QWEN) | {"tokenizer.json": byte_level(regex=r"\S+|\s+")}
    assert r"\S+|\s+" in refused(tmp_path, files, UsageError)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\x0a\xff\xff\x03", "bytes long"), (b"\xff" * 20, "does not end"), (b"", "0 pieces"), (b"\x0b", "wire type")],
)
def test_a_damaged_sentencepiece_file_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path, files_of("LlamaForCausalLM") | {"tokenizer.model": content}, BadModelError)


@pytest.mark.parametrize("junk", [[], 3, "x", {"a": 1}, {"-1": {"content": "x"}}])
def test_added_tokens_of_another_form_are_refused(junk: Any, tmp_path: Path) -> None:
    files = files_of(QWEN) | {"tokenizer_config.json": {"added_tokens_decoder": junk}}
    assert "tokenizer_config.json is damaged" in refused(tmp_path, files, BadModelError)


def test_a_unigram_vocabulary_is_refused(tmp_path: Path) -> None:
    assert "unigram" in refused(tmp_path, files_of("LlamaForCausalLM") | {"tokenizer.model": tokenizer_model(kind=1)})


# ---- types


def test_float8_is_read_by_its_definition() -> None:
    found = to_float32(np.array([0x38, 0xB8, 0x01, 0x7E, 0x7F], np.uint8), "F8_E4M3")
    assert found[:4].tolist() == [1.0, -1.0, 2.0**-9, 448.0]
    assert np.isnan(found[4])
    assert not all_finite(np.array([0x7F80], np.uint16), "BF16")


@pytest.mark.parametrize(("value", "said"), [(1e6, "--type bf16"), (np.inf, "NaN"), (np.nan, "NaN")])
def test_values_that_do_not_fit_are_refused(value: float, said: str, tmp_path: Path) -> None:
    tensors = llama_like(N_BYTE_LEVEL, head_norms=True)
    tensors["lm_head.weight"][3, 4] = value
    assert said in refused(tmp_path, files_of(QWEN) | {"model.safetensors": safetensors(tensors)}, BadModelError)


def test_bfloat16_is_copied_as_it_is(tmp_path: Path) -> None:
    tensors = {name: bfloat16(values) for name, values in llama_like(N_BYTE_LEVEL, head_norms=True).items()}
    out = tmp_path / "x.gguf"
    files = files_of(QWEN) | {"model.safetensors": safetensors(tensors)}
    assert convert_folder(write(tmp_path / "in", files), out).type == "BF16"
    row = next(row for row in read_header(out).tensors if row.name == "output.weight")
    assert out.read_bytes()[row.offset :][: row.n_bytes] == tensors["lm_head.weight"].tobytes()


def test_a_head_that_repeats_the_embeddings_is_left_out(tmp_path: Path) -> None:
    tensors = llama_like(N_BYTE_LEVEL, head_norms=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    files = files_of(QWEN, tie_word_embeddings=True) | {"model.safetensors": safetensors(tensors)}
    convert_folder(write(tmp_path / "in", files), tmp_path / "x.gguf")
    assert "output.weight" not in {row.name for row in read_header(tmp_path / "x.gguf").tensors}


# ---- quantized checkpoints


def packed(method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return files whose down_proj is quantized, and its dequantized values."""
    random = np.random.default_rng(1)
    tensors = llama_like(N_BYTE_LEVEL, head_norms=True)
    name = "model.layers.0.mlp.down_proj"
    n_out, n_in = tensors.pop(f"{name}.weight").shape
    if method == "fp8":
        codes = random.integers(0, 0x7E, (n_out, n_in)).astype(np.uint8)
        scales = random.random((-(-n_out // 32), -(-n_in // 48))).astype("<f4")
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}
        wanted = to_float32(codes, "F8_E4M3") * np.kron(scales, np.ones((32, 48)))[:n_out, :n_in].astype("<f4")
        quantization: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [32, 48]}
    else:
        numbers = random.integers(0, 16, (n_in, n_out)).astype(np.uint32)
        zeros = random.integers(1, 16, (n_in // 32, n_out)).astype(np.uint32)
        scales = random.random((n_in // 32, n_out)).astype("<f2")
        places = range(8) if method == "gptq" else (0, 2, 4, 6, 1, 3, 5, 7)

        def pack(values: Any) -> Any:
            return sum(values[:, column::8] << np.uint32(4 * place) for place, column in enumerate(places)).view("<i4")

        weight = pack(numbers.T).T if method == "gptq" else pack(numbers)
        stored_zeros = zeros - 1 if method == "gptq" else zeros
        tensors |= {f"{name}.qweight": weight, f"{name}.qzeros": pack(stored_zeros), f"{name}.scales": scales}
        group = np.arange(n_in) // 32
        wanted = ((numbers.astype("<f4") - zeros[group]) * scales.astype("<f4")[group]).T.astype("<f4")
        quantization = {"quant_method": method, "bits": 4, "group_size": 32, "version": "gemm"}
    files = files_of(QWEN, quantization_config=quantization) | {"model.safetensors": safetensors(tensors)}
    return files, wanted


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_quantized_checkpoints_are_unpacked(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.lab.convert.checkpoint.CHUNK_ELEMENTS", 5 * 96)  # chunks that begin inside a word
    files, wanted = packed(method)
    convert_folder(write(tmp_path / "in", files), tmp_path / "x.gguf", type="f32")
    assert np.array_equal(tensors_in(tmp_path / "x.gguf")["blk.0.ffn_down.weight"], wanted)


# ---- metadata


def test_metadata_tell_who_made_it_and_how_to_sample(tmp_path: Path) -> None:
    card = "---\nlicense: apache-2.0\nlanguage:\n- no\nbase_model: owner/Base-1B\ntags: [x]\n---\n# Hi\n"
    files = files_of(QWEN, eos_token_id=[278, 5]) | {
        "README.md": card,
        "generation_config.json": {"temperature": 0.6, "top_k": 20, "top_p": "much"},
        "chat_template.jinja": "{{ messages }}",
    }
    files["tokenizer_config.json"] = {**as_json(files["tokenizer_config.json"]), "chat_template": "an older one"}
    convert_folder(write(tmp_path / "Tiny-1B-Instruct", files), tmp_path / "x.gguf")
    header = read_header(tmp_path / "x.gguf", arrays=("general.languages",))
    assert (header.license, header.base_model, header.chat_template) == (
        "apache-2.0",
        "owner/Base-1B",
        "{{ messages }}",
    )
    assert header.recommended_sampling == {"temperature": pytest.approx(0.6), "top_k": 20}
    assert header.metadata["general.languages"] == (b"no",)
    assert header.metadata["general.name"] == "Tiny 1B Instruct"
    assert header.special_token("eos") == "<|im_end|>"


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_rope_is_read_in_both_forms(form: str, tmp_path: Path) -> None:
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5e5}
    changes: dict[str, Any] = {form: settings, "rope_theta": None}
    convert_folder(write(tmp_path / "in", files_of(QWEN, **changes)), tmp_path / "x.gguf")
    header = read_header(tmp_path / "x.gguf")
    found = (header.rope_base, header.rope_scaling, header.rope_factor, header.rope_original_context)
    assert found == (5e5, "yarn", 4.0, 32)


def test_llama3_frequencies_are_a_tensor(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    convert_folder(write(tmp_path / "in", files_of("LlamaForCausalLM", rope_scaling=scaling)), tmp_path / "x.gguf")
    row = read_header(tmp_path / "x.gguf").tensors[0]
    factors = np.frombuffer((tmp_path / "x.gguf").read_bytes(), "<f4", row.n_elements, row.offset)
    assert (row.name, factors[0], factors[-1]) == ("rope_freqs.weight", 1.0, 8.0)


# ---- the file


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in", files_of(QWEN))
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "x.gguf"
    target.write_bytes(b"old")
    monkeypatch.setattr("llmrun.storage.free_bytes", lambda folder: 1000)
    with pytest.raises(DiskFullError):
        convert_folder(source, target)
    assert (target.read_bytes(), list(target.parent.iterdir())) == (b"old", [target])


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "in", files_of(QWEN))
    (tmp_path / "out").mkdir()

    def press(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_folder(source, tmp_path / "out" / "x.gguf", on_progress=press)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_that_reads_back_differently_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "header_bytes", lambda metadata, tensors: b"GGUF" + b"\0" * 60)
    refused(tmp_path, files_of(QWEN), BadModelError)


def test_the_command_asks_before_it_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    app = typer.Typer()
    app.command()(convert)
    source = write(tmp_path / "Tiny", files_of(QWEN))
    monkeypatch.chdir(tmp_path)
    first = CliRunner().invoke(app, [str(source), "--json"])
    assert json.loads(first.stdout)["path"] == "Tiny-F16.gguf"
    again = CliRunner().invoke(app, [str(source)])
    assert isinstance(again.exception, UsageError)
    assert "-y" in again.exception.hint
    done = CliRunner().invoke(app, [str(source), "-y", "--type", "q8_0"])
    assert "try: llmrun run Tiny-Q8_0.gguf" in done.stderr
    assert read_header(tmp_path / "Tiny-Q8_0.gguf").quant == "Q8_0"
    encoder = write(tmp_path / "Bert", files_of("BertModel"))
    assert "try: llmrun embed Bert-F16.gguf TEXT" in CliRunner().invoke(app, [str(encoder)]).stderr


def as_json(file: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file if isinstance(file, (str, bytes)) else json.dumps(file))
    return found


def test_whole_numbers_are_refused_only_where_they_are_weights(tmp_path: Path) -> None:
    """Checkpoints of BERT, such as all-MiniLM-L6-v2, hold a buffer of positions that nobody uses."""
    files, numbers = files_of("BertModel"), np.arange(32, dtype=np.int64)[None]
    plain = convert_folder(write(tmp_path / "plain", files), tmp_path / "plain.gguf", type="f32").path
    weights = {"model.safetensors": safetensors({**bert(12), "embeddings.position_ids": numbers})}
    other = convert_folder(write(tmp_path / "other", files | weights), tmp_path / "other.gguf", type="f32").path
    expected, found = tensors_in(plain), tensors_in(other)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    weights = {"model.safetensors": safetensors({**bert(12), "embeddings.position_embeddings.weight": numbers})}
    assert "holds I64 numbers" in refused(tmp_path, files | weights, BadModelError)


def test_what_a_file_can_not_say_of_its_tokens_is_named(tmp_path: Path) -> None:
    files = files_of(QWEN, eos_token_id=[278, 1, 2, 3, 4])
    (ends,) = convert_folder(write(tmp_path / "in", files), tmp_path / "x.gguf").notes
    assert "end no answer" in ends


@pytest.mark.parametrize("architecture", [QWEN, "BertModel"])
def test_text_is_normalized_as_the_tokenizer_does(architecture: str, tmp_path: Path) -> None:
    """Qwen's composes characters. Uncased BERT's divides them, of which llama.cpp would take the first part only."""
    files = files_of(architecture)
    tokenizer = as_json(files["tokenizer.json"])
    if architecture == "BertModel":
        jamo = ["\u1100", "##\u1161", "##\u11ab"]
        words = list(tokenizer["model"]["vocab"])[: len(tokenizer["model"]["vocab"]) - len(jamo)] + jamo
        tokenizer["model"]["vocab"] = {word: number for number, word in enumerate(words)}
        files["vocab.txt"] = "\n".join(words)
    convert_folder(write(tmp_path / "in", files | {"tokenizer.json": tokenizer}), tmp_path / "x.gguf")
    judge = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
    model = LlamaModel(str(tmp_path / "x.gguf"), 0, _native.CancelFlag())
    try:
        for text in ("cafe\u0301", "caf\u00e9", "\uac00", "\uac04", "\u1100\u1161", "A\u030angstro\u0308m", "a b"):
            expected = judge.encode(text, add_special_tokens=False).ids
            assert model.vocabulary.tokenize(text, special=False) == expected, text
    finally:
        model.close()
