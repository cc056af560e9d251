"""Tiny projectors with random weights, as llama.cpp's libmtmd reads them, and images and audio for them."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from llmrun.lab.convert.job import convert_folder
from support.gguf_copy import like
from support.hf_writer import N_BYTE_LEVEL, files_of, llama_like, safetensors, write

WIDTH, HEADS, LAYERS, FEED_FORWARD = 32, 2, 2, 48
PATCH, SIDE, MERGE = 8, 64, 2
AROUND = {
    "gemma3": (),
    "idefics3": ("<fake_token_around_image>", "<global-img>"),
    "qwen2vl_merger": ("<|vision_start|>", "<|vision_end|>"),
    "ultravox": (),
    "qwen2a": ("<|audio_bos|>", "<|audio_eos|>"),
}
MERGED = WIDTH * MERGE * MERGE
TILE_TOKENS = (SIDE // PATCH // MERGE) ** 2
MEL_BINS, FRAMES, STACK = 80, 1500, 60  # of half a minute, as Whisper has it
AUDIO_TOKENS = FRAMES // STACK
RATE = 16_000


def projector(path: Path, n_embd: int, kind: str = "idefics3", *, seed: int = 1) -> Path:
    """A SigLIP of two layers and the kind's projection to vectors of a text model.

    Args:
        n_embd: width of the text model.
        kind: "idefics3", whose pictures are cut into tiles, "gemma3", whose pictures are computed at once, or
            "qwen2vl_merger", whose pictures take as many positions as their longer side has patches.
    """
    numbers = {
        "image_size": SIDE,
        "patch_size": PATCH,
        "projector.scale_factor": MERGE,
        "preproc_image_size": 2 * SIDE,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH),
        "v.post_ln.weight": (WIDTH,),
        "v.post_ln.bias": (WIDTH,),
    }
    if kind == "qwen2vl_merger":
        shapes["v.patch_embd.weight.1"] = shapes["v.patch_embd.weight"]  # of a second frame
    else:
        shapes |= {"v.patch_embd.bias": (WIDTH,), "v.position_embd.weight": ((SIDE // PATCH) ** 2, WIDTH)}
    shapes |= _layers("v", k_bias=True)
    if kind == "idefics3":
        shapes["mm.model.fc.weight"] = (n_embd, MERGED)
    elif kind == "qwen2vl_merger":
        shapes |= {"mm.0.weight": (MERGED, MERGED), "mm.0.bias": (MERGED,)}
        shapes |= {"mm.2.weight": (n_embd, MERGED), "mm.2.bias": (n_embd,)}
    else:
        shapes |= {"mm.input_projection.weight": (WIDTH, n_embd), "mm.soft_emb_norm.weight": (WIDTH,)}
    return _written(path, n_embd, "vision", kind, numbers, shapes, seed)


def audio_projector(path: Path, n_embd: int, kind: str = "ultravox", *, seed: int = 1) -> Path:
    """A Whisper encoder of two layers and the kind's projection to vectors of a text model.

    Args:
        n_embd: width of the text model.
        kind: "ultravox", which joins STACK frames to a token, or "qwen2a", whose audio is between two tokens.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "a.conv1d.1.weight": (WIDTH, MEL_BINS, 3),
        "a.conv1d.1.bias": (WIDTH, 1),
        "a.conv1d.2.weight": (WIDTH, WIDTH, 3),
        "a.conv1d.2.bias": (WIDTH, 1),
        "a.position_embd.weight": (FRAMES, WIDTH),
        "a.post_ln.weight": (WIDTH,),
        "a.post_ln.bias": (WIDTH,),
        **_layers("a", k_bias=False),
    }
    if kind == "ultravox":
        shapes |= {"mm.a.norm_pre.weight": (WIDTH * STACK,), "mm.a.mlp.1.weight": (2 * FEED_FORWARD, WIDTH * STACK)}
        shapes |= {"mm.a.norm_mid.weight": (FEED_FORWARD,), "mm.a.mlp.2.weight": (n_embd, FEED_FORWARD)}
    else:
        shapes |= {"mm.a.fc.weight": (n_embd, WIDTH), "mm.a.fc.bias": (n_embd,)}
    numbers = {"num_mel_bins": MEL_BINS, "projector.stack_factor": STACK}
    return _written(path, n_embd, "audio", kind, numbers, shapes, seed)


def _layers(prefix: str, *, k_bias: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of an encoder's layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {f"attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        own |= {"ffn_up": (FEED_FORWARD, WIDTH), "ffn_down": (WIDTH, FEED_FORWARD), "ln1": (WIDTH,), "ln2": (WIDTH,)}
        for name, shape in own.items():
            shapes[f"{prefix}.blk.{layer}.{name}.weight"] = shape
            if name != "attn_k" or k_bias:
                shapes[f"{prefix}.blk.{layer}.{name}.bias"] = shape[:1]
    return shapes


def _written(
    path: Path,
    n_embd: int,
    modality: str,
    kind: str,
    numbers: dict[str, int],
    shapes: dict[str, tuple[int, ...]],
    seed: int,
) -> Path:
    """Write a projector with these settings and random tensors of these shapes."""
    writer, random = GGUFWriter(path, "clip"), np.random.default_rng(seed)
    writer.add_bool(f"clip.has_{modality}_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_gelu", True)
    usual = {
        "embedding_length": WIDTH,
        "feed_forward_length": FEED_FORWARD,
        "projection_dim": n_embd,
        "block_count": LAYERS,
        "attention.head_count": HEADS,
    }
    for name, number in {**usual, **numbers}.items():
        writer.add_uint32(f"clip.{modality}.{name}", number)
    writer.add_float32(f"clip.{modality}.attention.layer_norm_epsilon", 1e-6)
    if modality == "vision":
        writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
        writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    for name, shape in shapes.items():
        values = random.normal(1.0 if "ln" in name or "norm" in name else 0.0, 0.2, shape)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text_model(path: Path, kind: str, chat_template: str = "") -> Path:
    """A tiny text model for such a projector: with the tokens that enclose its images or audio.

    With "qwen2vl_merger" and "qwen2a", its positions have several dimensions (M-RoPE).
    """
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
    plain = path if kind not in ("qwen2vl_merger", "qwen2a") else path.with_suffix(".plain")
    convert_folder(write(path.with_suffix(""), files), plain, type="f32")
    return path if plain == path else like(plain, path, "qwen2vl", {"rope.dimension_sections": [4, 2, 2, 0]})


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A picture of large random squares."""
    random = np.random.default_rng(seed)
    squares = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    rows, columns = np.arange(height) * 8 // height, np.arange(width) * 8 // width
    return png_of(squares[rows][:, columns])


def png_of(pixels: Any, orientation: int = 1) -> bytes:
    """A picture of these pixels, shape (rows, columns, 3), with its orientation in Exif."""
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    exif = b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    marked = ((b"eXIf", exif),) if orientation != 1 else ()
    parts = ((b"IHDR", header), *marked, (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_png_part, parts))


def _png_part(part: tuple[bytes, bytes]) -> bytes:
    kind, data = part
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# ---- audio -----------------------------------------------------------------------------------------


# ffmpeg -f lavfi -i sine=frequency=440:duration=0.4:sample_rate=16000 -b:a 8k -write_xing 0 -id3v2_version 0
MP3 = base64.b64decode(
    "//MYxAAE+ALNwUMAAf0AJokPDw8PfA8PDwBxn/4/P/8QSS8v//MYxAMFuGrAAZEwARjXRGNBtoLQDYkhwK8WjIneI3gV/9Ip//MYxAMFqF6IAd"
    "QAABWHJAcJA4QID+igAQAYlC+I+yqy/mTh//MYxAMFcGJwAAG4JDAS+RGFDGXKNHiJcsWLqu3IrPa1upK3//MYxAQF+GJsAAB4IEFVwYGjJ/4N"
    "iCwDANU4IAzWovY7q6k4//MYxAMFqF5oAAJ4JX4QxceCAGqQnBAwPpVkAiT+oblSzGCh//MYxAMFMFp0AAC4JaItKEALMb3k0oGWJSkvM7E6Mt"
    "XakTbg//MYxAUE0Fp4AAY4RSqzEFfMxhdMRyEh4dnFquUjERd1ERzZ//MYxAgE6Fp0AAD2JZNDfcSAGADoe0WpVfVWCypwRCBDG0uN//MYxAsF"
    "CFp4AAD4JSoOZLNF9X3nhardyvHG5jCjCdsMjBhQ//MYxA0E0Fp4AAY4RTctQSHp9WoJOfvPPP9f+FJSTkrT3NGU//MYxBAIuGKUYVoAAQGMYJ"
    "abhHrFJyP0PH8dAAPH5h8QSQuk//MYxAQFcFq4wY0wAO8cYw3hJQA2+AgUz5UG38qwVUxBTUUz//MYxAUAAANIAcAAAC4xMDBVVVVVVVVVVVVV"
    "VVVVVVVVVVVV"
)


def tone(seconds: float = 1.0, pitch: float = 440.0, rate: int = RATE) -> np.ndarray[Any, np.dtype[np.int16]]:
    """The samples of a tone that fades."""
    at = np.arange(round(seconds * rate)) / rate
    return (12_000 * np.sin(2 * np.pi * pitch * at) * np.exp(-at)).astype(np.int16)


def wav(samples: np.ndarray[Any, Any], rate: int = RATE, n_channels: int = 1, tag: int = 1) -> bytes:
    """A WAV file of integers."""
    data = np.repeat(samples, n_channels).tobytes()
    n_bytes = samples.itemsize * n_channels
    kind = struct.pack("<HHIIHH", tag, n_channels, rate, rate * n_bytes, n_bytes, 8 * samples.itemsize)
    parts = b"WAVE" + b"fmt " + struct.pack("<I", len(kind)) + kind + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(parts)) + parts


def flac(samples: np.ndarray[Any, np.dtype[np.int16]], rate: int = RATE) -> bytes:
    """A FLAC file of one channel whose frames hold the samples as they are (RFC 9639)."""
    size = 4096
    info = struct.pack(">HH", size, size) + bytes(6)  # sizes of blocks, and unknown sizes of frames
    info += ((rate << 44) | (0 << 41) | (15 << 36) | len(samples)).to_bytes(8, "big") + bytes(16)
    frames = [_flac_frame(samples[at : at + size], at // size) for at in range(0, len(samples), size)]
    return b"fLaC" + b"\x80" + len(info).to_bytes(3, "big") + info + b"".join(frames)


def _flac_frame(samples: np.ndarray[Any, np.dtype[np.int16]], number: int) -> bytes:
    assert number < 128  # longer numbers would need UTF-8
    # Sync, a size of the block in 16 bits, the rate of the header; one channel of 16 bits.
    head = b"\xff\xf8" + bytes((0x70, 0x08, number)) + (len(samples) - 1).to_bytes(2, "big")
    head += bytes((_crc(head, 8, 0x07),))
    frame = head + b"\x02" + samples.astype(">i2").tobytes()  # a verbatim subframe
    return frame + _crc(frame, 16, 0x8005).to_bytes(2, "big")


def _crc(data: bytes, n_bits: int, polynomial: int) -> int:
    """A checksum of data, the highest bit first."""
    value, top, mask = 0, 1 << (n_bits - 1), (1 << n_bits) - 1
    for byte in data:
        value ^= byte << (n_bits - 8)
        for _ in range(8):
            value = (value << 1 ^ polynomial if value & top else value << 1) & mask
    return value
