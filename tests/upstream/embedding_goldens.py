"""Makes tests/engine/jobs/embed_goldens.json: what transformers makes of tiny random embedding models and rerankers.

Pooling is that of sentence-transformers, without its normalization. Needs torch and transformers 5:

    PYTHONPATH=tests python tests/upstream/embedding_goldens.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from support.embedding_models import (
    EMBEDDING_CASES,
    GOLDENS,
    NO,
    QUERY,
    RANK_TEMPLATE,
    RANKING_CASES,
    TEXTS,
    YES,
    bert_with_head,
    folder_of,
)
from tokenizers import Tokenizer

CLS, SEP = 2, 3  # of hf_writer.word_piece()


def main() -> None:
    torch.set_grad_enabled(False)
    found = {"transformers": transformers.__version__}
    found |= {case: vectors(case) for case in EMBEDDING_CASES}
    found |= {case: scores(case) for case in RANKING_CASES}
    GOLDENS.write_text(json.dumps(found, indent=1) + "\n")


def vectors(case: str) -> list[list[float]]:
    """A text's outputs of the last layer, pooled."""
    with tempfile.TemporaryDirectory() as place:
        folder = folder_of(case, Path(place))
        model = loaded(transformers.AutoModel, folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        pooling = EMBEDDING_CASES[case][1]
        return [rounded(pooled(outputs(model, tokens(tokenizer, text, case)), pooling)) for text in TEXTS]


def tokens(tokenizer: Any, text: str, case: str) -> list[int]:
    """As the model's own tokenizer class lays a text out."""
    found = tokenizer.encode(text).ids
    return [CLS, *found, SEP] if case.startswith(("bert", "nomic")) else found


def outputs(model: Any, ids: list[int]) -> Any:
    return model(torch.tensor([ids])).last_hidden_state[0]


def pooled(hidden: Any, pooling: str) -> Any:
    """What sentence-transformers' Pooling does with one text's outputs."""
    if pooling == "pooling_mode_mean_tokens":
        return hidden.mean(0)
    return hidden[0 if pooling == "pooling_mode_cls_token" else -1]


def scores(case: str) -> list[float]:
    """How well the texts answer the query."""
    with tempfile.TemporaryDirectory() as place:
        if case.startswith("bert"):
            folder = bert_with_head(Path(place))
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            model = loaded(transformers.BertForSequenceClassification, folder)
            query, *documents = ([*tokenizer.encode(text).ids, SEP] for text in (QUERY, *TEXTS))
            return rounded(torch.stack([model(torch.tensor([[CLS, *query, *one]])).logits[0, 0] for one in documents]))
        folder = folder_of(case, Path(place))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        model = loaded(transformers.AutoModelForCausalLM, folder)
        prompts = [RANK_TEMPLATE.replace("{query}", QUERY).replace("{document}", text) for text in TEXTS]
        logits = [model(torch.tensor([tokenizer.encode(prompt).ids])).logits[0, -1] for prompt in prompts]
        return rounded(torch.stack([row[[YES, NO]].softmax(0)[0] for row in logits]))


def loaded(kind: Any, folder: Path) -> Any:
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def rounded(values: Any) -> list[float]:
    return [round(float(value), 6) for value in values]


if __name__ == "__main__":
    main()
