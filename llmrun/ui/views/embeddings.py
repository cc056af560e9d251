"""The similarities of a few texts on a terminal, and documents ranked for a query."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmrun.model.embeddings import RankedDocument, TextVectors
from llmrun.ui.terminal.cells import cut
from llmrun.ui.terminal.format import counted
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, right, show_table

_SHOWN_NUMBERS = 4
_SHORT_TEXT = 28  # cells


def show_similarities(output: Output, texts: Sequence[str], found: TextVectors) -> None:
    """Print the cosine similarity of each pair of texts, or the beginning of a single text's vector."""
    vectors = found.vectors
    size = f"{counted(vectors.shape[1], 'dimension')} of {counted(sum(found.tokens), 'token')}"
    if len(texts) == 1:
        start = ", ".join(f"{value:.4f}" for value in vectors[0, :_SHOWN_NUMBERS])
        output.text(f"{size}: {start}, … (in a pipe or with --json all of them)")
        return
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    cosines = unit @ unit.T
    columns = (Column("#", right=True, style="cyan"), Column("TEXT"), *right(*map(str, range(1, len(texts) + 1))))
    rows = [
        (str(number + 1), _short(text), *(f"{cosine:.2f}" for cosine in cosines[number]))
        for number, text in enumerate(texts)
    ]
    show_table(output, columns, rows)
    output.note(f"Cosine similarity; vectors of {size}.")


def show_ranked(output: Output, documents: Sequence[str], ranked: Sequence[RankedDocument]) -> None:
    """Print scores and documents, the best one first."""
    columns = (Column("SCORE", right=True, style="cyan"), Column("#", right=True, style="dim"), Column("DOCUMENT"))
    rows = [(f"{one.score:.4f}", str(one.index + 1), documents[one.index]) for one in ranked]
    show_table(output, columns, rows)


def _short(text: str) -> str:
    shown = cut(text, _SHORT_TEXT)
    return shown if shown == text else f"{shown}…"
