"""What torch and transformers make of watermarks, beside what we make of them.

    PYTHONPATH=.:tests python tests/upstream/watermarks.py goldens   # writes tests/native/watermark_goldens.json
    PYTHONPATH=.:tests python tests/upstream/watermarks.py compare   # a thousand permutations; texts judged by both

Needs torch and transformers besides llmrun.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from support.watermark_case import CASES, GOLDENS, N_VOCAB, Case, digest, logits_of, our_text
from transformers.generation.logits_process import WatermarkLogitsProcessor
from transformers.generation.watermarking import WatermarkDetector

from llmrun import _native
from llmrun.lab.insight.watermark import WatermarkFinding, find_watermark
from llmrun.protocol.watermark import native_key

SIZES = (49_152, 151_936)
SEEDS = (0, 1, 42, 15485863, 650406246, 2**31, 2**32 - 1)
MANY_SEEDS = 1000
LENGTH = 120


def processor(case: Case, n_vocab: int = N_VOCAB) -> Any:
    """Of transformers."""
    mark, key = case.watermark, native_key(case.key)
    seeding = "selfhash" if mark.selfhash else "lefthash"
    return WatermarkLogitsProcessor(n_vocab, "cpu", mark.gamma, mark.bias, key, seeding, max(mark.selfhash, 1))


def their_text(case: Case, length: int, generator: torch.Generator | None = None) -> list[int]:
    """What transformers' processor makes of the logits: the largest each time, or drawn."""
    marks, tokens = processor(case), list(case.prompt)
    for step in range(length):
        scores = marks(torch.tensor([tokens]), torch.tensor(logits_of(step))[None])[0]
        drawn = torch.multinomial(scores.softmax(0), 1, generator=generator) if generator else scores.argmax()
        tokens.append(int(drawn))
    return tokens[len(case.prompt) :]


def their_verdict(case: Case, tokens: Sequence[int]) -> dict[str, float]:
    """The number of judged and of green tokens, and z, by transformers' detector."""
    text = torch.tensor([list(tokens)])
    config = transformers.PretrainedConfig(vocab_size=N_VOCAB, bos_token_id=N_VOCAB)
    mark, key = case.watermark, native_key(case.key)
    values = {
        "greenlist_ratio": mark.gamma,
        "bias": mark.bias,
        "hashing_key": key,
        "seeding_scheme": "selfhash" if mark.selfhash else "lefthash",
        "context_width": max(mark.selfhash, 1),
    }
    found = WatermarkDetector(config, "cpu", values)(text, return_dict=True)
    judged, hits = int(found.num_tokens_scored[0]), int(found.num_green_tokens[0])
    return {"judged": judged, "hits": hits, "z": float(found.z_score[0])}


def our_verdict(case: Case, tokens: Sequence[int]) -> WatermarkFinding:
    return find_watermark(case.watermark, case.key, N_VOCAB, tokens, repeats=True)


def permutation(seed: int, size: int, count: int) -> Any:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count].numpy()


def write_goldens() -> None:
    permutations = [
        {"seed": seed, "size": size, "digest": digest(permutation(seed, size, size // 4))}
        for size in SIZES
        for seed in SEEDS
    ]
    texts = {}
    for name, case in CASES.items():
        text = their_text(case, LENGTH)
        texts[name] = {"tokens": text, "verdict": their_verdict(case, text)}
    goldens = {
        "transformers": transformers.__version__,
        "permutations": permutations,
        "texts": texts,
    }
    GOLDENS.write_text(json.dumps(goldens, separators=(",", ":")).replace("],", "],\n").replace("},", "},\n") + "\n")


def compare() -> None:
    for size in SIZES:
        wrong = 0
        for number in range(MANY_SEEDS):
            seed = (number * 15485863) % 2**32
            wrong += not np.array_equal(permutation(seed, size, size // 4), _native.permuted(seed, size, size // 4))
        print(f"{size:,} tokens: {MANY_SEEDS - wrong:,} of {MANY_SEEDS:,} green lists are torch's")
    for name, case in CASES.items():
        theirs = their_text(case, 400, torch.Generator().manual_seed(1))
        ours = our_text(case, 400, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        for whose, text in (("their", theirs), ("our", ours)):
            found, verdict = our_verdict(case, text), their_verdict(case, text)
            same = (found.judged, found.hits) == (verdict["judged"], verdict["hits"])
            print(f"{name}: {whose} text, z {found.z:.2f}, {'both say so' if same else f'THEY SAY {verdict}'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["goldens", "compare"])
    (write_goldens if parser.parse_args().what == "goldens" else compare)()


if __name__ == "__main__":
    main()
