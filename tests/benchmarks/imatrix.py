"""What an importance matrix is worth: the divergence of quantized files from the model they were made of.

    python imatrix.py MODEL.gguf HELD_OUT.txt [--types Q4_K_S Q4_0] [--tokens 4096] [--calibration FILE] [--padded]

Each type is made without one, with one on the text that the model writes itself (for each of --tokens), with --random
on words drawn at random, and on the user's own text; all are compared with the model on the held-out text.
Everything goes through llmrun's own functions. --padded first puts zeros around a llama: every dimension becomes a
multiple of 256, which K-quants need, and the function stays the same. So a small real model shows what large ones do.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize

from llmrun.gguf.reader import read_header
from llmrun.lab.quantize.calibration import collect
from llmrun.lab.quantize.evaluate import evaluate, read_text
from llmrun.lab.quantize.job import QuantizeRequest, quantize
from llmrun.planning.preferences import LoadPreferences

_BLOCK = 256
_WIDTH, _HEADS, _KV_HEADS = "llama.embedding_length", "llama.attention.head_count", "llama.attention.head_count_kv"
_EPSILON = "llama.attention.layer_norm_rms_epsilon"
_DERIVED = ("general.architecture", "general.file_type", "general.quantization_version")


def main() -> None:
    """Measure, and print a line for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--types", nargs="+", default=["Q4_K_S", "Q4_0"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096])
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--random", action="store_true", help="also tokens drawn at random")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--padded", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.model.resolve().parent) as name:
        folder = Path(name)
        model = padded(arguments.model, folder / "padded.gguf") if arguments.padded else arguments.model
        matrices = dict(collected(model, folder, arguments))
        text = read_text(arguments.held_out)
        print(
            f"\n{'type':8} {'importance matrix':24} {'bytes':>13} {'KLD':>9} {'95 %':>19} {'median':>9} {'same top':>9}"
        )
        for kind in arguments.types:
            for label, imatrix in matrices.items():
                made = folder / "made.gguf"
                quantize(QuantizeRequest(model, made, kind, imatrix=imatrix, threads=arguments.threads))
                found = evaluate(
                    made,
                    reference=model,
                    text=text,
                    n_ctx=512,
                    chunks=arguments.chunks,
                    preferences=LoadPreferences(threads=arguments.threads),
                ).divergence
                assert found is not None
                mean, interval = found.mean.value, f"{found.mean.low:.5f}..{found.mean.high:.5f}"
                print(
                    f"{kind:8} {label:24} {read_header(made).file_size:13,} {mean:9.5f} {interval:>19} "
                    f"{found.median.value:9.5f} {found.same_top.value:9.2%}",
                    flush=True,
                )


def collected(model: Path, folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, Path | None]]:
    """The importance matrices, each with what to call it."""
    yield "none", None
    texts: list[tuple[str, Path | None, int]] = [(f"auto, {count:,} tokens", None, count) for count in arguments.tokens]
    most = max(arguments.tokens)
    if arguments.random:
        texts.append((f"random, {most:,} tokens", random_text(model, folder / "random.txt", most), most))
    if arguments.calibration:
        texts.append((f"file, {most:,} tokens", arguments.calibration, most))
    for number, (label, text, count) in enumerate(texts):
        target = folder / f"{number}.imatrix.gguf"
        began = time.monotonic()
        done, _ = collect(model, target, text=text, n_tokens=count, seconds=3600, threads=arguments.threads)
        print(
            f"{label}: {done.n_tokens:,} tokens in {time.monotonic() - began:.0f} s "
            f"(writing {done.writing_seconds:.0f}, reading {done.reading_seconds:.0f})",
            flush=True,
        )
        yield label, target


def random_text(model: Path, target: Path, n_tokens: int) -> Path:
    """Words of the vocabulary in no order."""
    words = [word for word in GGUFReader(model).fields["tokenizer.ggml.tokens"].contents() if word.isascii()]
    chosen = np.random.default_rng(0).choice(words, n_tokens * 2)
    target.write_text("".join(chosen).replace("\u0120", " ").replace("\u010a", "\n"), encoding="utf-8")
    return target


# ---- zeros around a model


def padded(source: Path, target: Path) -> Path:
    """Write a llama in F16 with every dimension rounded up to whole blocks, which computes the same."""
    reader = GGUFReader(source)
    values = {name: field.contents() for name, field in reader.fields.items()}
    width, heads, kv_heads = (int(values[key]) for key in (_WIDTH, _HEADS, _KV_HEADS))
    head, group = width // heads, heads // kv_heads
    kv_after = next(count for count in range(kv_heads, 99 * kv_heads) if count * group * head % _BLOCK == 0)
    sizes = {_WIDTH: -(-width // _BLOCK) * _BLOCK, _HEADS: kv_after * group, _KV_HEADS: kv_after}
    # The mean of squares is over more columns.
    changes = {**sizes, _EPSILON: values[_EPSILON] * width / sizes[_WIDTH], "llama.rope.dimension_count": head}
    changes |= {"llama.attention.key_length": head, "llama.attention.value_length": head}
    writer = GGUFWriter(target, "llama")
    writer.add_file_type(int(LlamaFileType.MOSTLY_F16))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _DERIVED or name in changes:
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, values[name])
        else:
            writer.add_key_value(name, values[name], field.types[0])
    for name, value in changes.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    for tensor in reader.tensors:
        matrix = dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in tensor.shape[::-1]])
        writer.add_tensor(tensor.name, _around(tensor.name, matrix, width, sizes, head))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _around(name: str, values: Any, width: int, sizes: dict[str, int], head: int) -> Any:
    """Return a tensor padded with zeros after its rows and columns."""
    after = sizes[_WIDTH]
    if values.ndim == 1:
        out = np.zeros(after, np.float32)
        out[:width] = values * np.sqrt(width / after)
        return out
    rows = {"attn_q": sizes[_HEADS] * head, "attn_k": sizes[_KV_HEADS] * head, "attn_v": sizes[_KV_HEADS] * head}
    rows |= {"attn_output": after, "ffn_down": after}
    columns = {"attn_output": sizes[_HEADS] * head, "ffn_down": values.shape[1]}
    part = name.split(".")[-2]
    out = np.zeros((rows.get(part, values.shape[0]), columns.get(part, after)), np.float16)
    out[: values.shape[0], : values.shape[1]] = values
    return out


if __name__ == "__main__":
    main()
