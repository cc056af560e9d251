"""Makes tests/engine/jobs/explain_goldens.json: what transformers says that tiny random models do, layer by layer.

It needs torch and transformers 4:

    PYTHONPATH=tests python tests/upstream/explain_goldens.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from support.convert_golden import folder_of, ids_of
from support.explain_golden import CANDIDATES, CASES, GOLDENS

_DIGITS = 5


def main() -> None:
    torch.set_grad_enabled(False)
    goldens = {"transformers": transformers.__version__, "cases": {case: explained(case) for case in CASES}}
    GOLDENS.write_text(json.dumps(goldens, separators=(",", ":")).replace('{"embedding', '\n{"embedding') + "\n")


def explained(case: str) -> dict[str, Any]:
    """Of each layer and position: norms, attention of each head up to the position, the lens, experts."""
    with tempfile.TemporaryDirectory() as place:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder_of(case, Path(place)), dtype=torch.float32, attn_implementation="eager"
        )
    behind: list[torch.Tensor] = []
    for layer in model.model.layers:  # hidden_states has the last layer's only behind the last norm
        layer.register_forward_hook(lambda _, __, out: behind.append((out[0] if isinstance(out, tuple) else out)[-1:]))
    options = {"output_router_logits": True} if "Mo" in case or "Mix" in case else {}
    ids = ids_of(case)
    output = model(torch.tensor([ids]), output_attentions=True, output_hidden_states=True, **options)
    streams = [each.reshape(len(ids), -1) for each in behind]
    shares = [ended(model.config, model.lm_head(model.model.norm(stream))).softmax(-1) for stream in streams]
    best = [each.topk(CANDIDATES) for each in shares]
    return {
        "embedding": rounded(output.hidden_states[0][0].norm(dim=-1)),
        "residual": [rounded(stream.norm(dim=-1)) for stream in streams],
        "attention": [
            [[rounded(row[: place + 1]) for place, row in enumerate(head)] for head in layer[0]]
            for layer in output.attentions
        ],
        "lens": [[row.tolist() for row in found.indices] for found in best],
        "probabilities": [[rounded(row) for row in found.values] for found in best],
        "experts": [
            [row.tolist() for row in logits.topk(model.config.num_experts_per_tok).indices]
            for logits in (output.router_logits if options else ())
        ],
    }


def ended(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """What a model does to its logits at last, as its own forward() has it."""
    logits = logits / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def rounded(values: torch.Tensor) -> list[float]:
    return [round(float(value), _DIGITS) for value in values]


if __name__ == "__main__":
    main()
