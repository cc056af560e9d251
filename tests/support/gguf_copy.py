"""GGUF files made of other ones: the same metadata under another architecture, with other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter


def like(
    plain: Path,
    target: Path,
    architecture: str,
    own: dict[str, Any],
    tensors: Mapping[str, Any] | None = None,
    more: Mapping[str, str] | None = None,
) -> Path:
    """A file with another one's metadata and these tensors.

    Args:
        own: settings of the architecture that are more, or another one's.
        tensors: None are the other file's.
        more: other keys.
    """
    reader = GGUFReader(plain)
    if tensors is None:
        tensors = {each.name: each.data for each in reader.tensors}
    before = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        renamed = name.replace(f"{before}.", f"{architecture}.", 1) if name.startswith(f"{before}.") else name
        if (
            not name.startswith("GGUF.")
            and name != "general.architecture"
            and renamed != f"{architecture}.pooling_type"
        ):
            kind = field.types[0]
            writer.add_key_value(
                renamed, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None
            )
    for name, value in {**{f"{architecture}.{name}": value for name, value in own.items()}, **(more or {})}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](name, value)
    for name, values in tensors.items():
        writer.add_tensor(name, np.asarray(values, np.float32), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
