"""An explained answer of a tiny model, as the engine and the sampler would tell it."""

from __future__ import annotations

from dataclasses import replace

from llmrun.lab.bench.results import Limit
from llmrun.lab.insight.explain import CacheUse, ExplainedAnswer
from llmrun.protocol.jobs.explain import (
    EmbeddedToken,
    EmbeddingPlane,
    HeadAttention,
    HeadFigures,
    LensCell,
    LensColumn,
    Neighbour,
    RunCollected,
    WatchedLayer,
)
from llmrun.protocol.jobs.text import VocabularyPiece
from llmrun.protocol.questions import ChainStep, Choice


def column(position: int, *ranks: int) -> LensColumn:
    cells = (
        LensCell(layer, (1, 2), (0.75, 0.25), 0.5 if rank == 0 else 0.0001, rank) for layer, rank in enumerate(ranks)
    )
    return LensColumn(position, 0.5, tuple(cells))


LAYER = WatchedLayer(
    (1.0, 2.0, 3.0),
    (0.5, 0.5, 0.5),
    (1.5, 1.5, 1.5),
    (HeadFigures(0.7, 0.2, 0.3), HeadFigures(0.1, 0.9, 0.1)),
    (),
    0.004,
    0.001,
)
EMBEDDINGS = EmbeddingPlane(
    576,
    0.375,
    (
        EmbeddedToken(0, 0.0, -2.0, ()),
        EmbeddedToken(1, 1.0, 0.5, (Neighbour(2, 0.75, -1.0, 0.5),)),
        EmbeddedToken(2, -1.0, 0.5, (Neighbour(1, 0.75, 1.0, 0.5),)),
    ),
)
RUN = RunCollected(
    tokens=(0, 1, 2),
    pieces=(
        VocabularyPiece(0, b"<s>\x1b[2J".hex(), True),
        VocabularyPiece(1, b" hi".hex()),
        VocabularyPiece(2, b"you".hex()),
    ),
    n_prompt=2,
    first=0,
    embedding=(1.0, 1.0, 1.0),
    embeddings=EMBEDDINGS,
    layers=(LAYER, replace(LAYER, residual=(1.0, 8.0, 3.0))),
    flash_attention=True,
    pictures=(
        HeadAttention("previous", 0, 0, ((1.0,), (0.6, 0.4), (0.0, 1.0, 0.0))),
        HeadAttention("first", 1, 1, ((1.0,), (0.9, 0.1), (0.9, 0.05, 0.05))),
    ),
    lens=(column(1, 7, 0), column(2, 3, 0)),
    lens_refused="",
    lens_difference=0.004,
    prefill_seconds=0.5,
    decode_seconds=0.25,
)
CHOICE = Choice(
    "you", False, ("you", "me"), 0, (ChainStep("model", 300, (0.6, 0.4)), ChainStep("temperature", 2, (0.8, 0.2)))
)
CACHE = CacheUse(1000.0, 2, 3000.0, 512, 1, 4096, 3_000_000.0)
LIMIT = Limit(8.0, "memory", 8.0, 80.0, 1e9, 1e9, 1.0, 1.0, 1.0)
FOUND = ExplainedAnswer("tiny", RUN, (CHOICE,), CACHE, replace(LIMIT, tokens_per_second=12.0, binds="compute"), LIMIT)
