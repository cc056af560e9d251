"""Makes tests/convert/goldens.json: what llama.cpp's own converter and transformers make of tiny random models.

Run it where torch, transformers, sentencepiece and llama.cpp's gguf-py are installed, with the folder of llama.cpp
that lies in llama-cpp-python's source archive (vendor/llama.cpp):

    PYTHONPATH=tests python tests/upstream/convert_goldens.py LLAMA_CPP VERSION
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.convert_golden import COLUMNS, GOLDENS, IDS, contents
from support.hf_writer import ARCHITECTURES, files_of, write

TYPES = ("f32", "f16", "bf16", "q8_0")
# transformers 4 does not know them.
NOT_IN_TRANSFORMERS = {"Ministral3ForCausalLM"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("version", help="of llama-cpp-python")
    options = parser.parse_args()
    sys.path.insert(0, str(options.llama_cpp))
    import torch
    import transformers

    logging.disable()
    torch.set_grad_enabled(False)
    goldens: dict[str, Any] = {"llama-cpp-python": options.version, "transformers": transformers.__version__}
    goldens["files"] = {}
    goldens["logits"] = {}
    for architecture in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as place:
            folder = write(Path(place) / "Tiny-1B", files_of(architecture))
            for kind in TYPES if architecture == "LlamaForCausalLM" else ("f16",):
                target = Path(place) / "out.gguf"
                pre = "default" if architecture.startswith("Bert") else "qwen2"
                convert(options.llama_cpp / "convert_hf_to_gguf.py", folder, target, kind, pre)
                goldens["files"][f"{architecture} {kind}"] = contents(target)
            if architecture not in NOT_IN_TRANSFORMERS:
                goldens["logits"][architecture] = logits(folder, architecture)
        print(architecture)
    GOLDENS.write_text(json.dumps(goldens, indent=1) + "\n")


def convert(script: Path, folder: Path, target: Path, kind: str, pre: str) -> None:
    """Run the converter in this process.

    Args:
        pre: the vocabulary's way to cut words: it is recognized by a checksum of a real one's ids, tiny ones have none.
    """
    import runpy

    with arguments(script, folder, target, kind):
        from conversion import base

        base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
        runpy.run_path(str(script), run_name="__main__")


@contextmanager
def arguments(script: Path, folder: Path, target: Path, kind: str) -> Iterator[None]:
    before = sys.argv
    sys.argv = [str(script), str(folder), "--outfile", str(target), "--outtype", kind]
    try:
        yield
    finally:
        sys.argv = before


def logits(folder: Path, architecture: str) -> list[list[float]]:
    """Some of transformers' logits at each position; of BERT the last layer's outputs."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    kind = AutoModel if architecture.startswith("Bert") else AutoModelForCausalLM
    if architecture.endswith("ConditionalGeneration"):
        model = text_part(folder)
    else:
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    output = model(torch.tensor([[token % model.config.vocab_size for token in IDS]]))
    found = output.last_hidden_state if kind is AutoModel else output.logits
    return [[round(float(value), 5) for value in row[::COLUMNS]] for row in found[0]]


def text_part(folder: Path) -> Any:
    """A model that sees, without its eyes."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    stated = json.loads((folder / "config.json").read_text())["text_config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**stated), attn_implementation="eager")
    start = "language_model."
    tensors = load_file(folder / "model.safetensors").items()
    text = {name.removeprefix(start): one for name, one in tensors if name.startswith(start)}
    missing = model.load_state_dict(text, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.eval()


if __name__ == "__main__":
    main()
