"""How a model is loaded for several clients at once: their number, and how much of the KV cache they share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from llmrun.gguf.header import Header
from llmrun.model import Located, Model, prepare
from llmrun.planning.hardware import Hardware, probe
from llmrun.planning.memory import largest_context, memory
from llmrun.planning.plan import Wishes, margin
from llmrun.protocol.messages import Load

_MOST_PARKED = 64  # prefixes; llama.cpp's sequence ids end at 255


@dataclass(frozen=True, slots=True)
class Sharing:
    """How an engine is shared.

    Attributes:
        wishes: what the user asked for.
        parallel: answers at the same time.
        exact: they share nothing.
        verbose: llama.cpp's log goes to stderr.
    """

    wishes: Wishes
    parallel: int = 8
    exact: bool = False
    verbose: bool = False

    def prepare(self, located: Located, path: Path) -> Model:
        """A model's header, and the plan for so many clients.

        Raises:
            BadModelError: the file is damaged, or no model that llama.cpp can run.
            OutOfMemoryError: it does not fit.
        """
        model = prepare(located.spec, path, self.wishes, verbose=self.verbose, keeps_states=True)
        model.load = shared_load(model.load, model.header, probe(), self.parallel, exact=self.exact)
        return model


def shared_load(load: Load, header: Header, hardware: Hardware, parallel: int, *, exact: bool) -> Load:
    """What an engine is told to load a model for several clients.

    A client's context window is the plan's, of one user: cells are only taken when they are used. Where sequences
    can't share cells, each gets the window that fits for all of them.
    """
    if parallel == 1:
        return replace(load, warm_up=True)
    room = hardware.memory_available - margin(hardware.memory_available)

    def fits(n_cells: int) -> bool:
        return not hardware.memory_total or memory(header, n_cells, kv_type=load.kv_type_k).needed <= room

    cells = max(largest_context(fits, parallel * load.n_ctx), load.n_ctx)
    if exact or header.rope_depends_on_window:
        n_ctx = min(load.n_ctx, max(cells // parallel // 256 * 256, 256))
        return replace(load, warm_up=True, n_seq_max=parallel, n_ctx=n_ctx, exact=exact)
    return replace(load, warm_up=True, n_seq_max=parallel, n_cells=cells, n_parked=_MOST_PARKED)
