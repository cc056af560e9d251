"""Makes tests/lab/convert/goldens.json: what llama.cpp's own converter and transformers make of tiny random models.

The files need torch, sentencepiece, the transformers that llama.cpp wants, its gguf-py, and its folder as it lies in
llama-cpp-python's source archive (vendor/llama.cpp); the logits torch and transformers 5:

    PYTHONPATH=tests python tests/upstream/convert_goldens.py files LLAMA_CPP VERSION
    PYTHONPATH=tests python tests/upstream/convert_goldens.py logits
    PYTHONPATH=tests python tests/upstream/convert_goldens.py logprobs
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

from support.convert_golden import CASES, COLUMNS, GOLDENS, contents, folder_of, ids_of, types_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    files = commands.add_parser("files")
    files.add_argument("llama_cpp", type=Path)
    files.add_argument("version", help="of llama-cpp-python")
    commands.add_parser("logits")
    commands.add_parser("logprobs")
    options = parser.parse_args()
    logging.disable()
    goldens = json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}
    if options.command == "files":
        sys.path.insert(0, str(options.llama_cpp))
        script = options.llama_cpp / "convert_hf_to_gguf.py"
        goldens |= {"llama-cpp-python": options.version, "files": {case: converted(script, case) for case in CASES}}
    elif options.command == "logprobs":
        goldens |= {"logprobs": {case: logprobs(case) for case in SCORED}}
    else:
        import transformers

        goldens |= {"transformers": transformers.__version__, "logits": {case: logits(case) for case in CASES}}
    GOLDENS.write_text(json.dumps(goldens, indent=1) + "\n")


# Not Gemma: ggml looks GELU up in a table of float16, which differs in the fourth digit.
SCORED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def converted(script: Path, case: str) -> dict[str, Any]:
    """Type -> what llama.cpp's converter writes."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        folder, target = folder_of(case, Path(place)), Path(place) / "out.gguf"
        for kind in types_of(case):
            convert(script, folder, target, kind, pre="default" if case.startswith("Bert") else "qwen2")
            found[kind] = contents(target)
    return found


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


def logits(case: str) -> list[list[float]]:
    """Some of transformers' logits at each position; of BERT the last layer's outputs."""
    return [[round(float(value), 5) for value in row[::COLUMNS]] for row in output_of(case)]


def logprobs(case: str) -> list[float]:
    """The log-probability of each token but the first, behind those before it."""
    ids, rows = ids_of(case), output_of(case).log_softmax(-1)
    return [round(float(row[token]), 6) for row, token in zip(rows, ids[1:], strict=False)]


def output_of(case: str) -> Any:
    """A row for each position."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    torch.set_grad_enabled(False)
    kind = AutoModel if case.startswith("Bert") else AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as place:
        folder = folder_of(case, Path(place))
        if case.endswith("ConditionalGeneration"):
            stated = json.loads((folder / "config.json").read_text())["text_config"]
            model = with_text(kind.from_config(AutoConfig.for_model(**stated), attn_implementation="eager"), folder)
        else:
            model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    output = model(torch.tensor([ids_of(case)]))
    return (output.last_hidden_state if kind is AutoModel else output.logits)[0]


def with_text(model: Any, folder: Path) -> Any:
    """A text model with the weights of one that sees."""
    from safetensors.torch import load_file

    start = "language_model."
    tensors = load_file(folder / "model.safetensors").items()
    text = {name.removeprefix(start): one for name, one in tensors if name.startswith(start)}
    missing = model.load_state_dict(text, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.eval()


if __name__ == "__main__":
    main()
