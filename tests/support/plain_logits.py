"""A file in llama.cpp, token after token: its logits at every position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llmrun import _native
from llmrun.engine.llama.base import Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.protocol.loading import Load


@contextmanager
def loaded(path: Path) -> Iterator[LlamaModel]:
    """The file in llama.cpp."""
    model = LlamaModel(str(path), 0, _native.CancelFlag())
    try:
        yield model
    finally:
        model.close()


def computed(model: LlamaModel, ids: list[int], n_vocab: int, **settings: Any) -> Any:
    """llama.cpp's logits for every position; settings are fields of Load."""
    context = LlamaContext(model, Load("", 32, n_batch=32, **settings))
    found = []
    for position, token in enumerate(ids):
        context.decode([Entry(token, position, 0, True)])
        address = context.logits(0)
        found.append(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * n_vocab).from_address(address)).copy())
    return np.stack(found)
