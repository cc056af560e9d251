"""Converted files hold what llama.cpp's own converter writes, and compute what transformers computes.

goldens.json was made by tests/upstream/convert_goldens.py. Keys and tensors stand in another order in our files: ours
is that of the tables in architectures.py, theirs that of the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.convert_golden import COLUMNS, GOLDENS, IDS, contents
from support.hf_writer import ARCHITECTURES, WIDTH, files_of, write
from support.plain_logits import computed, loaded

from llmrun.convert.architectures import FAMILIES
from llmrun.convert.job import convert_folder
from llmrun.engine.llama.library import import_llama

FOUND: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))


def converted(folder: Path, architecture: str, kind: str) -> Path:
    convert_folder(write(folder / "Tiny-1B", files_of(architecture)), folder / "out.gguf", type=kind)
    return folder / "out.gguf"


def test_every_architecture_has_its_goldens() -> None:
    assert set(ARCHITECTURES) == set(FAMILIES)
    assert {name.split()[0] for name in FOUND["files"]} == set(FAMILIES)
    assert set(FAMILIES) - set(FOUND["logits"]) == {"Ministral3ForCausalLM"}  # transformers 4 does not know it


@pytest.mark.parametrize("name", FOUND["files"])
def test_files_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    architecture, kind = name.split()
    assert json.loads(json.dumps(contents(converted(tmp_path, architecture, kind)))) == FOUND["files"][name]


@pytest.mark.parametrize("architecture", FOUND["logits"])
def test_logits_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    path, wanted = converted(tmp_path, architecture, "f32"), np.array(FOUND["logits"][architecture])
    if architecture.startswith("Bert"):
        found = encoded(path, [token % 12 for token in IDS])
    else:
        with loaded(path) as model:
            n_vocab = model.vocabulary.n_tokens
            found = computed(model, [token % n_vocab for token in IDS], n_vocab)
    # Keys and values are kept as float16; a wrong order, window or scale would differ a thousand times as much.
    assert np.linalg.norm(found[:, ::COLUMNS] - wanted) < 2e-3 * np.linalg.norm(wanted)


def encoded(path: Path, ids: list[int]) -> Any:
    """The last layer's outputs of an encoder, which our engine does not run."""
    llama = import_llama()
    with loaded(path) as model:
        params = llama.llama_context_default_params()
        params.embeddings, params.pooling_type = True, llama.LLAMA_POOLING_TYPE_NONE
        context = llama.llama_init_from_model(model.pointer, params)
        tokens = (llama.llama_token * len(ids))(*ids)
        assert llama.llama_encode(context, llama.llama_batch_get_one(tokens, len(ids))) == 0
        rows = [np.ctypeslib.as_array(llama.llama_get_embeddings_ith(context, n), (WIDTH,)) for n in range(len(ids))]
        found = np.stack(rows)
        llama.llama_free(context)
    return found
