"""Searches on tiny models that transformers did once: their settings, and how they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

GOLDENS = Path(__file__).parents[1] / "engine/jobs/beams.json"
ENDS = {"LlamaForCausalLM": (2,), "Qwen2ForCausalLM": (275, 277), "Gemma2ForCausalLM": (2,)}
"""Model -> the tokens that end its answers."""
MODELS = tuple(ENDS)
LONGEST = 12
"""Tokens of an answer at most; some end sooner, some don't."""
LAST_N = 64  # more than any prompt with its answer: transformers' penalty looks at all of it


class BeamCase(NamedTuple):
    """One search.

    Attributes:
        end_bias: added to the end token's log-probability, which tiny random models would hardly ever choose.
    """

    model: str
    beams: int
    length_penalty: float
    early_stopping: str
    repetition: float
    end_bias: float

    @property
    def name(self) -> str:
        """As it is called in the goldens."""
        return " ".join(map(str, self))


def cases() -> list[BeamCase]:
    """All of them."""
    return [
        BeamCase(model, beams, penalty, stopping, repetition, 4.0)
        for model in MODELS
        for beams in (2, 4)
        for penalty in (0.0, 1.0, 2.0)
        for stopping in ("true", "false", "never")
        for repetition in (1.0, 1.3)
    ]


def prompt_of(seed: int, n_vocab: int) -> list[int]:
    """Some token ids."""
    import numpy as np

    return [int(token) for token in np.random.default_rng(seed).integers(4, n_vocab - 4, 6)]


def settings_of(case: BeamCase) -> dict[str, Any]:
    """The same for transformers."""
    stopping = {"true": True, "false": False}.get(case.early_stopping, case.early_stopping)
    found: dict[str, Any] = {
        "num_beams": case.beams, "num_return_sequences": case.beams, "length_penalty": case.length_penalty,
        "early_stopping": stopping, "repetition_penalty": case.repetition, "max_new_tokens": LONGEST,
    }  # fmt: skip
    return found
