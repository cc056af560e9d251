"""Tiny models of which transformers told what they do on their way to an answer, and where that is kept."""

from __future__ import annotations

from pathlib import Path

CASES = (
    "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM",
    "Qwen3MoeForCausalLM", "GraniteForCausalLM", "capped logits",
)  # fmt: skip
"""Some of convert_golden's: with norms of heads, a window shorter than the text, joined matrices, experts, logits that
are scaled or capped."""
GOLDENS = Path(__file__).parents[1] / "engine/jobs/explain_goldens.json"
CANDIDATES = 5
"""Of the logit lens."""
