"""Makes PEFT folders of random LoRA adapters for the tiny models of hf_writer, and merges them by hand; no torch.

What an adapter means stands here a second time on purpose: W + scale B A.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmrun.lab.convert.job import convert_folder
from llmrun.lab.convert.peft import convert_adapter
from support.hf_writer import Tensors, files_of, safetensors, write

RANK, ALPHA = 4, 6
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
          "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def lora(weights: Tensors, *names: str, rank: int = RANK, seed: int = 1) -> Tensors:
    """Random matrices for all weights whose name holds one of these, as PEFT calls them."""
    random = np.random.default_rng(seed)
    found: Tensors = {}
    for name, values in weights.items():
        if values.ndim != 2 or not any(f"{each}." in name for each in names or LINEAR):
            continue
        n_out, n_in = values.shape
        module = "base_model.model." + name.removesuffix(".weight")
        a, b = (random.standard_normal(shape).astype("<f4") * 0.2 for shape in ((rank, n_in), (n_out, rank)))
        if "embed_tokens" in name:  # [rank, tokens] and [width, rank]
            found |= {f"{module}.lora_embedding_A": np.ascontiguousarray(b.T), f"{module}.lora_embedding_B": a.T.copy()}
        else:
            found |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return found


def write_peft(folder: Path, matrices: Tensors, **changes: Any) -> Path:
    """The folder of an adapter; changes are of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False, "use_rslora": False,
        "modules_to_save": None, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "rank_pattern": {},
        "alpha_pattern": {}, "init_lora_weights": True, "fan_in_fan_out": False, "lora_bias": False,
        "base_model_name_or_path": "somebody/Tiny-1B", **changes,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(safetensors(matrices))
    return folder


def merged(weights: Tensors, matrices: Tensors, *, alpha: float = ALPHA, rslora: bool = False) -> Tensors:
    """The weights with an adapter in them."""
    found = dict(weights)
    for name in weights:
        module = "base_model.model." + name.removesuffix(".weight")
        a, b = matrices.get(f"{module}.lora_A.weight"), matrices.get(f"{module}.lora_B.weight")
        if f"{module}.lora_embedding_A" in matrices:
            a, b = matrices[f"{module}.lora_embedding_B"].T, matrices[f"{module}.lora_embedding_A"].T
        if a is not None and b is not None:
            rank = min(a.shape)
            scale = alpha / (math.sqrt(rank) if rslora else rank)
            found[name] = (weights[name] + scale * (b.astype("<f8") @ a)).astype("<f4")
    return found


def weights_of(files: dict[str, Any]) -> Tensors:
    """The weights of a model's folder that hf_writer made, which are float32."""
    data: bytes = files["model.safetensors"]
    start = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:start])
    found: Tensors = {}
    for name, row in header.items():
        if name != "__metadata__":
            assert row["dtype"] == "F32", name
            first, last = (start + offset for offset in row["data_offsets"])
            found[name] = np.frombuffer(data[first:last], "<f4").reshape(row["shape"])
    return found


class AdaptedModel(NamedTuple):
    """Files of a tiny model, of an adapter for it, and of the model with the adapter merged into it."""

    folder: Path
    base: Path
    adapter: Path
    merged: Path


def adapted_model(place: Path, architecture: str, *names: str, **changes: Any) -> AdaptedModel:
    """A tiny F32 model of random weights, with its adapter; names as in lora(), changes as in write_peft()."""
    files = files_of(architecture, max_position_embeddings=2048)
    weights = weights_of(files)
    matrices = lora(weights, *names)
    alpha, rslora = changes.get("lora_alpha", ALPHA), changes.get("use_rslora", False)
    both = {"model.safetensors": safetensors(merged(weights, matrices, alpha=alpha, rslora=rslora))}
    folder = write(place / "base", files)
    found = AdaptedModel(folder, place / "base.gguf", place / "style.gguf", place / "merged.gguf")
    convert_folder(folder, found.base, type="f32")
    convert_folder(write(place / "merged", {**files, **both}), found.merged, type="f32")
    convert_adapter(write_peft(place / "style", matrices, **changes), folder, found.adapter)
    return found


IDS = [3, 70, 71, 260, 9, 42, 13, 5, 80, 81, 11, 100]
GOLDENS = Path(__file__).parents[1] / "lab/convert/peft_goldens.json"
# Name -> architecture, what is adapted, and what else than usual adapter_config.json says.
GOLDEN_CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LINEAR, {}),
    "llama, embeddings and head": ("LlamaForCausalLM", ("q_proj", "embed_tokens", "lm_head"), {}),
    "llama, rslora": ("LlamaForCausalLM", LINEAR, {"use_rslora": True}),
    "llama, alpha by pattern": (
        "LlamaForCausalLM",
        LINEAR,
        {"alpha_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 9}},
    ),
    "qwen2": ("Qwen2ForCausalLM", LINEAR, {}),
    "gemma3": ("Gemma3ForCausalLM", LINEAR, {}),
}


def adapter_folders(place: Path, case: str) -> tuple[Path, Path]:
    """The folders of a golden case's model and adapter."""
    architecture, names, changes = GOLDEN_CASES[case]
    files = files_of(architecture)
    targets = [name.rpartition(".")[2] for name in names]
    adapter = write_peft(place / "style", lora(weights_of(files), *names), target_modules=targets, **changes)
    return write(place / "base", files), adapter
