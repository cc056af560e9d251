"""`convert --with` against llama.cpp's own script, on architectures that our own converter does not know.

Needs LLAMA_CPP, the folder of llama.cpp in llama-cpp-python's source archive, and TORCH_PYTHON, an interpreter that has
what the script needs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hf_writer import files_of, llama_like, safetensors, write
from support.plain_logits import computed, loaded

from llmrun.gguf.reader import read_header
from llmrun.lab.convert.architectures import FAMILIES
from llmrun.lab.convert.llama_cpp_converter import convert_with

LLAMA_CPP, PYTHON = os.environ.get("LLAMA_CPP", ""), os.environ.get("TORCH_PYTHON", "")

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.slow,
    pytest.mark.skipif(not LLAMA_CPP or not PYTHON, reason="LLAMA_CPP and TORCH_PYTHON are not set"),
]


def without_gates(files: dict[str, Any]) -> dict[str, Any]:
    """Weights of Arcee: no gate in the feed-forward part."""
    n_vocab = files["config.json"]["vocab_size"]
    kept = {name: values for name, values in llama_like(n_vocab).items() if "gate_proj" not in name}
    return files | {"model.safetensors": safetensors(kept)}


@pytest.mark.parametrize(
    ("architecture", "written"), [("ArceeForCausalLM", "arcee"), ("InternLM3ForCausalLM", "llama")]
)
def test_the_real_script(architecture: str, written: str, tmp_path: Path) -> None:
    assert architecture not in FAMILIES
    files = files_of("LlamaForCausalLM", architectures=[architecture], model_type="llama", head_dim=16)
    files = without_gates(files) if written == "arcee" else files
    target = tmp_path / "x.gguf"
    script = Path(LLAMA_CPP) / "convert_hf_to_gguf.py"
    done = convert_with(script, write(tmp_path / "Tiny-1B", files), target, python=PYTHON, type="f16")
    assert (done.architecture, done.type) == (architecture, "F16")
    assert read_header(target).architecture == written
    with loaded(target) as model:
        assert np.isfinite(computed(model, [3, 70, 71], model.vocabulary.n_tokens)).all()
