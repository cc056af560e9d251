"""A loaded model: its request preparer, its loop, its embedder, and its KV store. Must not know the pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.engine.core.draft_model import DraftModel
from llmrun.engine.core.draft_source import DraftWeights
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.mtp_model import HeadModel
from llmrun.engine.core.policy import POLICY
from llmrun.engine.core.states import KVStore, StateKey
from llmrun.engine.core.steps import ATTENTION_CELLS, ON_DEVICE, ON_PROCESSOR, StepCosts, measure_attention
from llmrun.engine.core.threads import MachineLoad, ThreadChooser
from llmrun.engine.embedding import Embedder
from llmrun.engine.llama.base import DecodeError
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.library import build, cpu_variant, kernels
from llmrun.engine.llama.media import Projector
from llmrun.engine.service import Preparer
from llmrun.errors import LlmrunError, OutOfMemoryError
from llmrun.gguf.filenames import all_parts
from llmrun.protocol.adapters import by_default
from llmrun.protocol.loading import DeviceBuffer, Load
from llmrun.protocol.questions import SaveState, StateSaved
from llmrun.protocol.speculation import AttentionTime, VariantTime
from llmrun.system import usable_cpus

if TYPE_CHECKING:
    from llmrun.engine.core.prefix import Prefix
    from llmrun.engine.llama.base import Context
    from llmrun.engine.llama.model import LlamaModel


class LoadedModel:
    """The components that serve one model; only `preparer` may be used beside the loop's thread.

    Attributes:
        prefixes: copies of those in the KV cache when the context was closed for another one.
    """

    def __init__(
        self,
        weights: LlamaModel,
        context: Context,
        load: Load,
        draft_model: DraftWeights | None = None,
        before: LoadedModel | None = None,
    ) -> None:
        """Combine the components of a loaded model.

        Args:
            draft_model: drafts with a smaller model, or with the model's own prediction heads.
            before: the same weights with another context, which is closed.
        """
        self.weights, self.context, self.load = weights, context, load
        self.prefixes: list[Prefix] = []
        self._contexts, self._models = ExitStack(), [weights]
        self._projector: Projector | None = None
        if before is not None and before.load.projector == load.projector:
            self._projector = before._projector  # its file is read once
        elif load.projector:
            self._projector = Projector(weights, load)
        self.preparer = Preparer(
            weights.vocabulary,
            weights.chat_template,
            context.n_ctx,
            draft_model,
            projector=self._projector,
            adapters=load.adapters,
            predicts=context.predicts,
            costs=StepCosts(ON_DEVICE if context.on_device else ON_PROCESSOR),
        )
        if before is not None:
            self.preparer.prompts.history = before.preparer.prompts.history
        states = _states(load, weights)
        if states is not None:
            history = self.preparer.prompts.history
            states.turns_of, history.saved = history.turns_of, states.saved_turns
        self.engine = Engine(
            context,
            states=states,
            draft_model=draft_model,
            adapts=bool(load.adapters),
            threads=_thread_chooser(load),
            throughput=load.throughput,
            copy_bytes=load.copy_bytes,
            cell_bytes=load.cell_bytes,
            prefixes=before.prefixes if before is not None else None,
            policy=POLICY._replace(checkpoint_bytes=load.checkpoint_bytes or POLICY.checkpoint_bytes),
        )
        self.embedder = Embedder(weights, load)
        self._is_shared = load.n_seq_max > 1

    @classmethod
    def open(
        cls, weights: LlamaModel, draft_weights: LlamaModel | None, load: Load, before: LoadedModel | None
    ) -> LoadedModel:
        """Create the contexts of a model; arguments as in the constructor.

        Raises:
            LlmrunError: a context can't be created.
        """
        draft_model: DraftWeights | None = None
        with ExitStack() as contexts:
            context = contexts.enter_context(closing(LlamaContext(weights, load, encodes=True)))
            context.synchronize()  # its warm-up is a part of loading
            if load.draft_heads or (load.draft is not None and load.draft.draft_heads):
                with suppress(OutOfMemoryError, DecodeError):  # without them, answers are the same
                    draft_model = HeadModel(context, context.open_heads(draft_weights))
            elif load.draft is not None and draft_weights is not None:
                drafts = contexts.enter_context(closing(LlamaContext(draft_weights, load.draft)))
                draft_model = DraftModel(drafts, weights.vocabulary.n_tokens)
            model = cls(weights, context, load, draft_model, before)
            model._contexts = contexts.pop_all()
            if draft_model is not None and draft_model.contexts and draft_weights is not None:
                model._models.append(draft_weights)
        return model

    @property
    def buffers(self) -> tuple[DeviceBuffer, ...]:
        """The memory that llama.cpp allocated for the model, and for one that drafts for it."""
        return tuple(buffer for model in self._models for buffer in model.buffers)

    def close(self, *, keeps_prefixes: bool = False) -> None:
        """Free the contexts.

        Args:
            keeps_prefixes: copy them, for another context with the same weights.
        """
        self.prefixes = self.engine.prefixes() if keeps_prefixes else []
        self.embedder.close()
        self._contexts.close()

    @property
    def is_worn_out(self) -> bool:
        """A new process would serve better: an abandoned grammar compilation occupies a core and can't be stopped."""
        # Imported by the first grammar, maybe in another thread at this moment.
        n_runaways = getattr(sys.modules.get("llmrun.engine.constraint.matcher"), "n_runaways", None)
        return self._is_shared and n_runaways is not None and n_runaways() > 0

    def load_for(self, n_tokens: int, n_batch: int) -> Load:
        """Return the settings of a second context for one sequence of n_tokens, decoded in batches of n_batch."""
        return replace(
            self.load,
            n_ctx=max(n_tokens, self.load.n_ctx if self.weights.rope_depends_on_window else 0),
            n_batch=n_batch,
            n_ubatch=n_batch,
            n_seq_max=1,
            n_parked=0,
            n_cells=0,
            warm_up=False,
        )

    def compare_attention(self, is_interrupted: Callable[[], bool]) -> tuple[AttentionTime, ...]:
        """Measure flash attention on and off, see core/steps.py; return nothing if the engine is busy."""
        if self.engine.busy:
            return ()
        n_ctx = ATTENTION_CELLS
        load = replace(self.load, n_ctx=n_ctx, n_seq_max=1, n_cells=0, n_parked=0)
        try:
            with (
                closing(LlamaContext(self.weights, replace(load, flash_attention="on"))) as on,
                closing(LlamaContext(self.weights, replace(load, flash_attention="off"))) as off,
            ):
                return measure_attention(on, off, time.perf_counter, is_interrupted)
        except LlmrunError:  # there is no memory for them
            return ()

    def compare_variants(self, types: Sequence[str], is_interrupted: Callable[[], bool]) -> tuple[VariantTime, ...]:
        """Measure the processor's variants, see jobs/machine.py; return nothing if the engine is busy."""
        if self.engine.busy or not types:
            return ()
        from llmrun.engine.jobs.machine import compare_variants

        return compare_variants(types, self.load.threads, is_interrupted)

    def save(self, save: SaveState) -> StateSaved:
        """Save an answer's KV state. A failure is only reported as zeros, because the file is only a cache.

        Raises:
            UsageError: another answer has taken its slot.
        """
        tokens = n_bytes = 0
        with suppress(OSError, MemoryError):
            tokens, n_bytes = self.engine.save(save.answer, prompt_only=save.prompt_only)
        return StateSaved(tokens, n_bytes)


def _thread_chooser(load: Load) -> ThreadChooser | None:
    """Return what chooses the threads of decode steps; None if the load has their number."""
    return ThreadChooser(load.threads, len(usable_cpus()), MachineLoad()) if load.adapts_threads else None


def _states(load: Load, weights: LlamaModel) -> KVStore | None:
    """Return the store of this model's KV states; None if disabled, or if a file was removed during the load."""
    if not load.states:
        return None
    with suppress(KeyError):
        return KVStore(Path(load.states), state_key(load, weights), load.states_bytes)
    return None


def state_key(load: Load, weights: LlamaModel) -> StateKey:
    """Return everything that KV states depend on.

    That is the files of model and adapters, the build of llama.cpp, the variant of its processor's backend and our
    kernels in it, the types and the layout of the cache, the scale of each adapter, and with LongRoPE, which has other
    factors for longer windows, the window. Vocabulary and chat template are in the files; all else of position encoding
    too, since a load can't change it.
    """
    path = Path(weights.path)
    adapters = [(load.adapters[number].path, scale) for number, scale in by_default(load.adapters)]
    rest = [
        f"llama.cpp {build()} {cpu_variant()} {kernels().name}".rstrip(),
        f"{load.kv_type_k} {load.kv_type_v} {load.flash_attention}",
    ]
    if weights.rope_depends_on_window:
        rest.append(f"window {load.n_ctx}")
    rest += [f"adapter x {scale}" for _, scale in adapters]
    files = [*(str(path.with_name(name)) for name in all_parts(path.name)), *(adapter for adapter, _ in adapters)]
    return StateKey(Path(load.states), [(file, weights.identities[file]) for file in files], " ".join(rest))
