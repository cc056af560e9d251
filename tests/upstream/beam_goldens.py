"""Makes tests/engine/jobs/beams.json: what transformers' beam search finds on tiny random models.

Needs torch and transformers:

    PYTHONPATH=tests python tests/upstream/beam_goldens.py
"""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from support.beam_cases import ENDS, GOLDENS, MODELS, BeamCase, cases, prompt_of, settings_of
from support.convert_golden import folder_of

_NOISE = 2e-3  # on log-probabilities; llama.cpp's differ by a hundredth of that
_REPEATS = 4


def main() -> None:
    logging.disable()
    import torch
    import transformers

    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    found: dict[str, dict[str, Any]] = {}
    for model in MODELS:
        with tempfile.TemporaryDirectory() as place:
            network = transformers.AutoModelForCausalLM.from_pretrained(
                folder_of(model, Path(place)), torch_dtype=torch.float32, attn_implementation="eager"
            )
            for case in cases():
                if case.model == model:
                    found[case.name] = golden(network, case)
    goldens = {"transformers": transformers.__version__, "cases": found}
    GOLDENS.write_text(json.dumps(goldens, indent=None, separators=(",", ":")).replace('"],"', '"],\n"') + "\n")


def golden(network: Any, case: BeamCase) -> dict[str, Any]:
    """The first prompt whose search no rounding can change, and what is found."""
    for seed in itertools.count():
        prompt = prompt_of(seed, network.config.vocab_size)
        found = searched(network, case, prompt, 0.0)
        noisy = [searched(network, case, prompt, _NOISE) for _ in range(_REPEATS)]
        if all(each["tokens"] == found["tokens"] for each in noisy):
            return {"prompt": prompt, **found}
    raise AssertionError


def searched(network: Any, case: BeamCase, prompt: list[int], noise: float) -> dict[str, Any]:
    """Answers of one search, the best first, and their scores."""
    import torch
    from transformers import LogitsProcessorList

    def shaken(ids: Any, scores: Any) -> Any:
        return scores + noise * torch.randn_like(scores)

    ends = ENDS[case.model]
    output = network.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        pad_token_id=0,
        eos_token_id=list(ends),
        sequence_bias={(end,): case.end_bias for end in ends},
        logits_processor=LogitsProcessorList([shaken]),
        return_dict_in_generate=True,
        output_scores=True,
        **settings_of(case),
    )
    answers = [cut(row[len(prompt) :].tolist(), ends) for row in output.sequences]
    return {"tokens": answers, "scores": [round(float(score), 4) for score in output.sequences_scores]}


def cut(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """Without the padding behind the end token."""
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tokens[: places[0] + 1] if places else tokens


if __name__ == "__main__":
    main()
