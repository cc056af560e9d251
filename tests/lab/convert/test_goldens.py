"""Converted files against those of llama.cpp's own converter, and their logits against those of transformers.

goldens.json was made by tests/upstream/convert_goldens.py. Keys and tensors stand in another order in our files: ours
is that of the tables in architectures.py, theirs that of the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.convert_golden import CASES, COLUMNS, GOLDENS, contents, folder_of, ids_of, types_of
from support.hf_writer import WIDTH
from support.plain_logits import computed, loaded

from llmrun.engine.llama.library import import_llama
from llmrun.lab.convert.architectures import FAMILIES
from llmrun.lab.convert.job import convert_folder

FOUND: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))


def converted(place: Path, case: str, kind: str) -> Path:
    convert_folder(folder_of(case, place), place / "out.gguf", type=kind)
    return place / "out.gguf"


def test_every_architecture_has_its_goldens() -> None:
    assert set(FOUND["files"]) == set(FOUND["logits"]) == set(CASES) > set(FAMILIES)


@pytest.mark.parametrize(("case", "kind"), [(case, kind) for case in CASES for kind in types_of(case)])
def test_files_are_those_of_llama_cpp(case: str, kind: str, tmp_path: Path) -> None:
    assert json.loads(json.dumps(contents(converted(tmp_path, case, kind)))) == FOUND["files"][case][kind]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    path, wanted = converted(tmp_path, case, "f32"), np.array(FOUND["logits"][case])
    with loaded(path) as model:
        find = encoded if case.startswith("Bert") else computed
        found = find(model, ids_of(case), model.vocabulary.n_tokens)
    # Keys and values are kept as float16; a wrong order, window or scale would differ a thousand times as much.
    assert np.linalg.norm(found[:, ::COLUMNS] - wanted) < 2e-3 * np.linalg.norm(wanted)


def encoded(model: Any, ids: list[int], n_vocab: int) -> Any:
    """Return the last layer's outputs of an encoder, which the engine does not run."""
    llama = import_llama()
    params = llama.llama_context_default_params()
    params.embeddings, params.pooling_type = True, llama.LLAMA_POOLING_TYPE_NONE
    context = llama.llama_init_from_model(model.pointer, params)
    tokens = (llama.llama_token * len(ids))(*ids)
    assert llama.llama_encode(context, llama.llama_batch_get_one(tokens, len(ids))) == 0
    rows = [np.ctypeslib.as_array(llama.llama_get_embeddings_ith(context, n), (WIDTH,)) for n in range(len(ids))]
    found = np.stack(rows)
    llama.llama_free(context)
    return found
