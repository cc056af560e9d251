"""A loaded model: what prepares its requests, the loop, and what embeds with it.

Owns how these are put together, and where KV states are saved; must not know the pipe.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.engine.core.draft_model import DraftModel
from llmrun.engine.core.loop import Engine
from llmrun.engine.embedding import Embedder
from llmrun.engine.llama.media import Projector
from llmrun.engine.service import Preparer
from llmrun.protocol.adapters import by_default
from llmrun.protocol.finished_answers import SaveState, StateSaved
from llmrun.protocol.loading import Load

if TYPE_CHECKING:
    from llmrun.engine.core.host_prefix_cache import HostPrefix
    from llmrun.engine.core.states import KVStore
    from llmrun.engine.llama.base import Context
    from llmrun.engine.llama.model import LlamaModel


class LoadedModel:
    """The loop over one model, and what prepares its requests.

    Attributes:
        preparer: for a thread of its own.
        engine: the loop.
        embedder: makes vectors of texts.
        weights: what it computes with.
        load: as it was loaded.
    """

    def __init__(
        self,
        weights: LlamaModel,
        context: Context,
        load: Load,
        drafts: Context | None = None,
        *,
        predicts: bool = True,
        before: LoadedModel | None = None,
        prefixes: list[HostPrefix] | None = None,
    ) -> None:
        """Over a model's context, and that of its draft model; one that does not predict text only embeds.

        Args:
            before: the same weights with another context, which is closed.
            prefixes: of that context.
        """
        self.weights, self.load = weights, load
        draft_model = DraftModel(drafts, weights.vocabulary.n_tokens) if drafts is not None else None
        self._projector = Projector(weights, load) if load.projector else None
        if before is not None:
            self._projector = before._projector  # its file is read once
        adapters, template = load.adapters, weights.chat_template
        self.preparer = Preparer(
            weights.vocabulary,
            template,
            context.n_ctx,
            draft_model,
            projector=self._projector,
            adapters=adapters,
            predicts=predicts,
        )
        states = _states(load, weights)
        self.engine = Engine(
            context,
            states=states,
            draft_model=draft_model,
            exact=load.exact,
            adapts=bool(adapters),
            throughput=load.throughput,
            prefixes=prefixes,
        )
        self.embedder = Embedder(weights, load)
        self._is_shared = load.n_seq_max > 1

    @property
    def is_worn_out(self) -> bool:
        """Whether a new engine serves better: a grammar that nobody waits for any more is read on, on a core."""
        matcher = sys.modules.get("llmrun.engine.constraint.matcher")  # where there was a grammar
        return self._is_shared and matcher is not None and matcher.runaways() > 0

    def save(self, save: SaveState) -> StateSaved:
        """Save an answer's KV state; nothing is saved where it can't be written, because it is only a cache.

        Raises:
            UsageError: another answer came after it.
        """
        tokens = n_bytes = 0
        with suppress(OSError):
            tokens, n_bytes = self.engine.save(save.answer, prompt_only=save.prompt_only)
        return StateSaved(save.request, tokens, n_bytes)


def _states(load: Load, weights: LlamaModel) -> KVStore | None:
    """Where this model's KV states are saved; what they depend on is part of the key."""
    if not load.states:
        return None
    from llmrun.engine.core.states import KVStore, model_key
    from llmrun.engine.llama.library import VERSION

    with suppress(OSError):
        cache = f"{load.kv_type_k} {load.kv_type_v} {load.flash_attention}"  # as it lies in memory
        key = f"{model_key(Path(weights.path))} llama-cpp-python {VERSION} {cache}"
        for number, scale in by_default(load.adapters):
            key += f" {model_key(Path(load.adapters[number].path))} x {scale}"
        return KVStore(Path(load.states), key, load.states_bytes)
    return None
