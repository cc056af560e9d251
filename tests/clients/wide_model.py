"""Makes a small llama of random weights with a window of 131,072 tokens and another model's vocabulary and template.

It prefills an agent's 25,000 tokens within seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

SPARE = 3  # first of 13 control tokens of SmolLM2 that chat templates do not have
WIDTH, FEED_FORWARD, LAYERS = 64, 128, 2
FACTS = {
    "context_length": 131_072, "block_count": LAYERS, "embedding_length": WIDTH, "attention.head_count": 1,
    "attention.head_count_kv": 1, "feed_forward_length": FEED_FORWARD, "rope.dimension_count": WIDTH,
}  # fmt: skip


def write_wide_model(source: Path, target: Path, template: str = "", controls: Sequence[str] = ()) -> Path:
    """Write the model.

    Args:
        source: a llama's file.
        template: chat template instead of the source's.
        controls: texts of control tokens that replace those of the source that no template has.
    """
    reader, writer, draw = GGUFReader(source), GGUFWriter(target, "llama"), np.random.default_rng(1)
    changed: dict[str, Any] = {f"llama.{name}": value for name, value in FACTS.items()}
    if template:
        changed["tokenizer.chat_template"] = template
    if controls:
        tokens = list(reader.fields["tokenizer.ggml.tokens"].contents())
        tokens[SPARE : SPARE + len(controls)] = controls
        changed["tokenizer.ggml.tokens"] = tokens
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            items = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, changed.get(name, field.contents()), kind, items)
    square, up = (WIDTH, WIDTH), (FEED_FORWARD, WIDTH)
    shapes = {"token_embd.weight": (len(reader.fields["tokenizer.ggml.tokens"].data), WIDTH)}
    for layer in range(LAYERS):
        block = {**dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square), "ffn_gate": up, "ffn_up": up}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
        shapes[f"blk.{layer}.ffn_down.weight"] = (WIDTH, FEED_FORWARD)
    for name, shape in shapes.items():
        writer.add_tensor(name, draw.normal(0, 0.05, shape).astype(np.float32))
    for name in ("output_norm", *(f"blk.{layer}.{part}_norm" for layer in range(LAYERS) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
