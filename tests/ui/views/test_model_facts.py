"""`llmrun show` for people: what a header says becomes words, what it does not say is left out."""

from __future__ import annotations

import io
from typing import Any

from llmrun.ui.terminal.output import Output
from llmrun.ui.views.model_facts import show_model


def shown(**facts: Any) -> dict[str, str]:
    """Name -> words."""
    output = Output(stdin=io.StringIO(), stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    show_model(output, facts)
    assert isinstance(output.stdout, io.StringIO)
    lines = output.stdout.getvalue().splitlines()
    start = max((len(line) - len(line[line.index("  ") :].lstrip()) for line in lines), default=0)
    return {line[:start].strip(): line[start:] for line in lines}


def test_nothing_known_says_nothing() -> None:
    assert shown() == {}


def test_a_file_that_only_drafts() -> None:
    drafter = {"kind": "eagle3", "is_usable": False, "target_width": 4096, "target_layers": (2, 18, 33)}
    assert shown(drafter=drafter)["drafter"] == (
        "an EAGLE-3 head, made for a model of width 4,096, reads its layers 2, 18, 33; llmrun can't draft with it yet"
    )
    heads = {"kind": "mtp", "is_usable": True, "target_width": None, "target_layers": ()}
    assert shown(drafter=heads)["drafter"] == ("prediction heads (MTP) without a model; llmrun run MODEL --draft FILE")


def test_a_mixture_with_windows_and_stretched_positions() -> None:
    facts = shown(
        parameters=30_000_000_000,
        active_parameters=3_000_000_000,
        experts=128,
        experts_used=8,
        heads=(32, 16, 32),
        kv_heads=4,
        key_length=128,
        latent_attention=True,
        sliding_window=1024,
        window_layers=2,
        rope_base=1e6,
        rope_dimensions=64,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_original_context=32768,
        kv_bytes_per_token=1000,
        kv_bytes=131_072_000,
        context_window=131072,
        recurrent_bytes=5_000_000,
    )
    assert facts == {
        "parameters": "30B (30,000,000,000), of which a token uses 3B",
        "heads": "16 to 32 by layer, 4 for keys and values of 128, stored in compressed form",
        "experts": "128, of which a token uses 8",
        "context": "131,072 tokens",
        "positions": "RoPE, base 1,000,000, 64 elements of a head; yarn ×4 from 32,768 tokens",
        "sliding window": "1,024 tokens in 2 layers",
        "KV cache": "1.0 kB per token, 131.1 MB for the whole context (f16)",
        "recurrent state": "5.0 MB",
    }


def test_sizes_and_types() -> None:
    facts = shown(
        quant="Q4_K_M",
        bits_per_weight=4.85,
        file_bytes=4_700_000_000,
        files=2,
        bytes_per_type={"Q4_K": 4_000_000_000, "Q6_K": 700_000_000},
        tensors_per_type={"Q4_K": 200, "Q6_K": 30},
    )
    assert facts == {
        "quant": "Q4_K_M, 4.85 bits per weight",
        "size": "4.7 GB in 2 files",
        "tensors": "200 Q4_K (4.0 GB) · 30 Q6_K (700.0 MB)",
    }


def test_texts() -> None:
    facts = shown(
        repository="a/b",
        gated=True,
        tokenizer="gpt2",
        tokenizer_pre="qwen2",
        vocabulary=151936,
        special_tokens={"bos": "<s>", "eos": "</s>\x1b[2J"},
        chat_template=True,
        template_kind="chatml",
        recommended_sampling={"temperature": 0.7, "top_k": 20},
        quants={"Q8_0": 8_000_000_000},
    )
    assert facts == {
        "repository": "a/b (accept its terms on the hub first)",
        "tokenizer": "gpt2 (qwen2), 151,936 tokens",
        "special tokens": "bos <s> · eos </s>",
        "chat template": "chatml",
        "sampling advice": "temperature 0.7 · top_k 20",
        "other quants": "Q8_0 (8.0 GB)",
    }
    assert shown(quants=["Q4_0", "Q8_0"], chat_template=False) == {
        "chat template": "none: try `--template chatml`",
        "other quants": "Q4_0, Q8_0",
    }
