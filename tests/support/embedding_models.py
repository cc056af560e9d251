"""Tiny embedding models and rerankers: Hugging Face folders for transformers, and the files that llmrun makes of them.

What our converter does not write (ranking heads, nomic-bert), gguf-py does here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from llmrun.lab.convert.job import convert_folder
from support.gguf_copy import like
from support.hf_writer import (
    FEED_FORWARD,
    LAYERS,
    N_BYTE_LEVEL,
    WIDTH,
    Tensors,
    bert,
    config,
    files_of,
    safetensors,
    write,
)

GOLDENS = Path(__file__).parents[1] / "engine/jobs/embed_goldens.json"
TEXTS = ("the model runs", "a b", "runs bb the the model a run b model", "b")
QUERY = "the model"
RANK_TEMPLATE = "<|im_start|>Judge.<|im_end|>\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>"
YES, NO = 60, 70  # the tokens that a ranking Qwen3 chooses from
EMBEDDING_CASES = {
    "bert, first token": ("BertModel", "pooling_mode_cls_token"),
    "bert, mean": ("BertModel", "pooling_mode_mean_tokens"),
    "qwen3, last token": ("Qwen3ForCausalLM", "pooling_mode_lasttoken"),
    "nomic-bert, mean": ("NomicBertModel", "pooling_mode_mean_tokens"),
}
"""Name -> architecture, and how sentence-transformers calls its pooling."""
RANKING_CASES = ("bert reranker", "qwen3 reranker")

_END = "<|im_end|>"
_ENDS = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": _END, "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {_END: {"id": _END, "ids": [N_BYTE_LEVEL - 1], "tokens": [_END]}},
}


def folder_of(case: str, place: Path) -> Path:
    """The Hugging Face folder."""
    if case in RANKING_CASES:
        architecture = "BertModel" if case.startswith("bert") else "Qwen3ForCausalLM"
        return write(place / "Tiny-1B", files_of(architecture))
    architecture, pooling = EMBEDDING_CASES[case]
    if architecture == "NomicBertModel":
        return _nomic_folder(place)
    files = files_of(architecture)
    files |= {
        "modules.json": '[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]',
        "1_Pooling/config.json": {pooling: True},
    }
    if architecture == "Qwen3ForCausalLM":
        files["tokenizer.json"] = {**files["tokenizer.json"], "post_processor": _ENDS}
    return write(place / "Tiny-1B", files)


def gguf_of(case: str, place: Path) -> Path:
    """The GGUF file."""
    if case.startswith("nomic"):
        return _nomic_gguf(place)
    plain = convert_folder(folder_of(case, place), place / "plain.gguf", type="f32").path
    if case in EMBEDDING_CASES:
        return plain
    return _with_head(plain, place / "ranking.gguf", is_bert=case.startswith("bert"))


def head() -> dict[str, Any]:
    """A classifier with one label, for the vector that BERT's pooler gives."""
    generator = np.random.default_rng(11)
    return {
        "classifier.weight": generator.standard_normal((1, WIDTH)).astype(np.float32),
        "classifier.bias": generator.standard_normal(1).astype(np.float32),
    }


def _with_head(plain: Path, target: Path, *, is_bert: bool) -> Path:
    """The same file with a ranking head: BERT's pooler and classifier, or the two rows of Qwen3's output matrix."""
    tensors: Tensors = {tensor.name: np.asarray(tensor.data) for tensor in GGUFReader(plain).tensors}
    if is_bert:
        body, last = bert(12), head()
        tensors |= {"cls.weight": body["pooler.dense.weight"], "cls.bias": body["pooler.dense.bias"]}
        tensors |= {"cls.output.weight": last["classifier.weight"], "cls.output.bias": last["classifier.bias"]}
        return like(plain, target, "bert", {"pooling_type": 4, "classifier.output_labels": ["relevant"]}, tensors)
    tensors["cls.output.weight"] = np.ascontiguousarray(tensors["output.weight"][[YES, NO]])
    own = {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
    return like(plain, target, "qwen3", own, tensors, {"tokenizer.chat_template.rerank": RANK_TEMPLATE})


_NOMIC_OUTER = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
}
_NOMIC_LAYER = {
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "attn_output_norm.weight",
    "post_attention_layernorm.bias": "attn_output_norm.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "post_mlp_layernorm.weight": "layer_output_norm.weight",
    "post_mlp_layernorm.bias": "layer_output_norm.bias",
}


def _nomic_weights() -> Tensors:
    """Weights of nomic-bert as transformers names them."""
    generator = np.random.default_rng(12)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (12, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
    }
    for layer in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {f"self_attn.{part}_proj.weight": (WIDTH, WIDTH) for part in "qkvo"}
        own |= {f"mlp.{part}_proj.weight": (FEED_FORWARD, WIDTH) for part in ("gate", "up")}
        own |= {"mlp.down_proj.weight": (WIDTH, FEED_FORWARD)}
        own |= {
            f"post_{part}_layernorm.{kind}": (WIDTH,) for part in ("attention", "mlp") for kind in ("weight", "bias")
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return {name: generator.normal(0.0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def _nomic_folder(place: Path) -> Path:
    settings = {
        "hidden_act": "silu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}, "rope_theta": None,
        "num_key_value_heads": None, "rms_norm_eps": None, "max_position_embeddings": 64,
    }  # fmt: skip
    return write(
        place / "Tiny-1B",
        {
            **files_of("BertModel"),
            "config.json": config("NomicBertModel", 12, model_type="nomic_bert", **settings),
            "model.safetensors": safetensors(_nomic_weights()),
        },
    )


def _nomic_gguf(place: Path) -> Path:
    """As llama.cpp's converter lays it out, with the tokenizer of our BERT."""
    weights = _nomic_weights()
    tensors = {ours: weights[theirs] for theirs, ours in _NOMIC_OUTER.items()}
    for layer in range(LAYERS):
        start = f"layers.{layer}."
        joined = np.concatenate([weights[f"{start}self_attn.{part}_proj.weight"] for part in "qkv"])
        tensors |= {f"blk.{layer}.attn_qkv.weight": joined}
        tensors |= {f"blk.{layer}.{ours}": weights[start + theirs] for theirs, ours in _NOMIC_LAYER.items()}
    plain = convert_folder(write(place / "bert", files_of("BertModel")), place / "bert.gguf", type="f32").path
    return like(plain, place / "nomic.gguf", "nomic-bert", {"pooling_type": 1, "rope.freq_base": 1000.0}, tensors)


def bert_with_head(place: Path) -> Path:
    """The folder of a BertForSequenceClassification."""
    files = files_of("BertModel", architectures=["BertForSequenceClassification"], num_labels=1)
    body = {f"bert.{name}": values for name, values in bert(12).items()}
    return write(place / "Tiny-1B", {**files, "model.safetensors": safetensors(body | head())})


assert max(YES, NO) < N_BYTE_LEVEL
