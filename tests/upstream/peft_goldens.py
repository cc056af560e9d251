"""Makes tests/lab/convert/peft_goldens.json: what PEFT makes of tiny random models with random adapters.

Needs torch, transformers and peft:

    PYTHONPATH=tests python tests/upstream/peft_goldens.py
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from support.convert_golden import COLUMNS
from support.peft_writer import GOLDEN_CASES, GOLDENS, IDS, adapter_folders


def main() -> None:
    import peft
    import transformers

    logging.disable()
    logits = {case: logits_of(case) for case in GOLDEN_CASES}
    found = {"peft": peft.__version__, "transformers": transformers.__version__, "logits": logits}
    GOLDENS.write_text(json.dumps(found, indent=1) + "\n")


def logits_of(case: str) -> Any:
    """Some of the logits at each position."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as place:
        base, adapter = adapter_folders(Path(place), case)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        output = PeftModel.from_pretrained(model, str(adapter)).eval()(torch.tensor([IDS]))
    return [[round(float(value), 5) for value in row[::COLUMNS]] for row in output.logits[0]]


if __name__ == "__main__":
    main()
