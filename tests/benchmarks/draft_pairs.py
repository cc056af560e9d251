"""Makes a large model of a small one that answers alike, so that the small one can draft for it.

    python tests/benchmarks/draft_pairs.py SMALL.gguf LARGE.gguf [--times N] [--type F16]

Layers whose last matrices are zeros add nothing to what goes through them: N times as many layers compute the same
function, at N times the cost. Another type of weights than the file has makes a larger file, too, of nearly the same
function. So acceptance is that of a good draft model, and the gain is what the machine makes of it.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_LAST = ("attn_output.weight", "ffn_down.weight")  # what a layer adds to the residual stream comes out of these


def write_large(small: Path, large: Path, times: int, kind: str | None) -> None:
    """Write the model.

    Args:
        times: as many layers.
        kind: of all matrices; None leaves their types.
    """
    reader = GGUFReader(small)
    n_layers = int(reader.fields["llama.block_count"].contents())
    writer = GGUFWriter(large, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "llama.block_count"):
            inner = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    writer.add_block_count(n_layers * times)
    for tensor in reader.tensors:
        data, type_ = _as(kind, tensor)
        writer.add_tensor(tensor.name, data, raw_dtype=type_)
        if found := _LAYER.fullmatch(tensor.name):
            added = np.zeros_like(data) if found[2] in _LAST else data
            for copy in range(1, times):
                writer.add_tensor(f"blk.{int(found[1]) + copy * n_layers}.{found[2]}", added, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as(kind: str | None, tensor: Any) -> tuple[Any, GGMLQuantizationType]:
    if kind is None or len(tensor.shape) == 1:
        return tensor.data, tensor.tensor_type
    type_ = GGMLQuantizationType[kind]
    return quantize(dequantize(tensor.data, tensor.tensor_type), type_), type_


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", type=Path)
    parser.add_argument("large", type=Path)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--type")
    arguments = parser.parse_args()
    write_large(arguments.small, arguments.large, arguments.times, arguments.type)


if __name__ == "__main__":
    main()
