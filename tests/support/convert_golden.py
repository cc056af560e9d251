"""Tiny models whose conversion is known, and what is compared of it: every key and tensor, whatever their order."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from support.hf_writer import ARCHITECTURES, N_PIECES, files_of, write

_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [2.0] * 8}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LINEAR = {"rope_type": "linear", "factor": 8.0}
# Name -> architecture, and what else than usual its config.json says.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "tied, yet with a head of its own": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "llama3 positions": ("LlamaForCausalLM", {"rope_scaling": _LLAMA3}),
    "yarn": ("Qwen3ForCausalLM", {"rope_scaling": _YARN}),
    "linear positions": ("Gemma3ForCausalLM", {"rope_scaling": _LINEAR}),
    "longrope": (
        "Phi3ForCausalLM",
        {"rope_scaling": {"type": "longrope", **_FACTORS}, "original_max_position_embeddings": 256,
         "max_position_embeddings": 1024},
    ),
    "capped logits": ("Gemma2ForCausalLM", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0}),
}  # fmt: skip
GOLDENS = Path(__file__).parents[1] / "lab/convert/goldens.json"
IDS = (3, 70, 71, 260, 9, 42, 13, 5, 80, 81, 11, 100)  # longer than the windows of the tiny models
COLUMNS = 16  # every so many logits are kept


def types_of(case: str) -> tuple[str, ...]:
    """What it is converted to."""
    return ("f32", "f16", "bf16", "q8_0") if case == "LlamaForCausalLM" else ("f16",)


def folder_of(case: str, place: Path) -> Path:
    """Its files."""
    architecture, changes = CASES[case]
    return write(place / "Tiny-1B", files_of(architecture, **changes))


def ids_of(case: str) -> list[int]:
    """What its logits are computed of."""
    n_vocab = 12 if case.startswith("Bert") else N_PIECES
    return [token % n_vocab for token in IDS]


def contents(path: Path) -> dict[str, Any]:
    """Key -> value (long ones as a hash), and tensor -> type, shape and hash; read by gguf-py."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    keys = {
        name: [field.types[0].name, _short(field.contents())]
        for name, field in reader.fields.items()
        if not name.startswith(("GGUF.", "llmrun."))  # ours is beside llama.cpp's converter's
    }
    tensors = {
        tensor.name: f"{tensor.tensor_type.name} {[int(n) for n in tensor.shape]} {_hash(tensor.data.tobytes())}"
        for tensor in reader.tensors
    }
    return {"keys": dict(sorted(keys.items())), "tensors": dict(sorted(tensors.items()))}


def _short(value: Any) -> Any:
    return f"sha256 {_hash(repr(value).encode())}" if isinstance(value, list) and len(value) > 8 else value


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
