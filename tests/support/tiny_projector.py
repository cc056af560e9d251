"""Tiny projectors with random weights, as llama.cpp's libmtmd reads them, and pictures for them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from llmrun.convert.job import convert_folder
from support.gguf_copy import like
from support.hf_writer import N_BYTE_LEVEL, files_of, llama_like, safetensors, write

WIDTH, HEADS, LAYERS, FEED_FORWARD = 32, 2, 2, 48
PATCH, SIDE, MERGE = 8, 64, 2
AROUND = {
    "gemma3": (),
    "idefics3": ("<fake_token_around_image>", "<global-img>"),
    "qwen2vl_merger": ("<|vision_start|>", "<|vision_end|>"),
}
MERGED = WIDTH * MERGE * MERGE
TILE_TOKENS = (SIDE // PATCH // MERGE) ** 2


def projector(path: Path, n_embd: int, kind: str = "idefics3", *, seed: int = 1) -> Path:
    """A SigLIP of two layers and the kind's projection to vectors of a text model.

    Args:
        n_embd: width of the text model.
        kind: "idefics3", whose pictures are cut into tiles, "gemma3", whose pictures are computed at once, or
            "qwen2vl_merger", whose pictures take as many positions as their longer side has patches.
    """
    writer, random = GGUFWriter(path, "clip"), np.random.default_rng(seed)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": SIDE,
        "patch_size": PATCH,
        "embedding_length": WIDTH,
        "feed_forward_length": FEED_FORWARD,
        "projection_dim": n_embd,
        "block_count": LAYERS,
        "attention.head_count": HEADS,
        "projector.scale_factor": MERGE,
        "preproc_image_size": 2 * SIDE,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH),
        "v.post_ln.weight": (WIDTH,),
        "v.post_ln.bias": (WIDTH,),
    }
    if kind == "qwen2vl_merger":
        shapes["v.patch_embd.weight.1"] = shapes["v.patch_embd.weight"]  # of a second frame
    else:
        shapes |= {"v.patch_embd.bias": (WIDTH,), "v.position_embd.weight": ((SIDE // PATCH) ** 2, WIDTH)}
    for layer in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {f"attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        own |= {"ffn_up": (FEED_FORWARD, WIDTH), "ffn_down": (WIDTH, FEED_FORWARD), "ln1": (WIDTH,), "ln2": (WIDTH,)}
        for name, shape in own.items():
            shapes[f"v.blk.{layer}.{name}.weight"] = shape
            shapes[f"v.blk.{layer}.{name}.bias"] = shape[:1]
    if kind == "idefics3":
        shapes["mm.model.fc.weight"] = (n_embd, MERGED)
    elif kind == "qwen2vl_merger":
        shapes |= {"mm.0.weight": (MERGED, MERGED), "mm.0.bias": (MERGED,)}
        shapes |= {"mm.2.weight": (n_embd, MERGED), "mm.2.bias": (n_embd,)}
    else:
        shapes |= {"mm.input_projection.weight": (WIDTH, n_embd), "mm.soft_emb_norm.weight": (WIDTH,)}
    for name, shape in shapes.items():
        values = random.normal(1.0 if "ln" in name or "norm" in name else 0.0, 0.2, shape)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text_model(path: Path, kind: str, chat_template: str = "") -> Path:
    """A tiny text model for such a projector: with the tokens that enclose its pictures."""
    around = AROUND[kind]
    if not around:
        files = files_of("LlamaForCausalLM", max_position_embeddings=4096)
    else:
        files = files_of("Qwen2ForCausalLM", max_position_embeddings=4096, vocab_size=N_BYTE_LEVEL + len(around))
        files["model.safetensors"] = safetensors(llama_like(N_BYTE_LEVEL + len(around), bias=True))
        added = files["tokenizer.json"]["added_tokens"]
        added += [{**added[0], "id": N_BYTE_LEVEL + index, "content": text} for index, text in enumerate(around)]
    if chat_template:
        files["tokenizer_config.json"]["chat_template"] = chat_template
    plain = path if kind != "qwen2vl_merger" else path.with_suffix(".plain")
    convert_folder(write(path.with_suffix(""), files), plain, type="f32")
    return path if plain == path else like(plain, path, "qwen2vl", {"rope.dimension_sections": [4, 2, 2, 0]})


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A picture of large random squares."""
    random = np.random.default_rng(seed)
    squares = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    rows, columns = np.arange(height) * 8 // height, np.arange(width) * 8 // width
    pixels: Any = squares[rows][:, columns]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_png_part, parts))


def _png_part(part: tuple[bytes, bytes]) -> bytes:
    kind, data = part
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
