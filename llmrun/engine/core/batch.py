"""What goes into a batch: the waiting tokens of whoever has a share, and drafts behind them where they fit.

Owns the batch's layout; must not know who runs, nor what is drawn from its logits. A draft takes what nobody else
needs: rows, cells and positions that are left when everybody's own tokens have theirs. A picture has a batch to itself:
vectors and tokens don't mix.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from llmrun.engine.core.draft_model import DraftModel
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.gate import StepShape
from llmrun.engine.core.images import ImagePart
from llmrun.engine.core.room import CellBudget
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.llama.base import Context, Entry

Batch = list[Entry] | ImagePart
"""What goes through the model at once."""


class BatchPart(NamedTuple):
    """A sequence's part of a batch.

    Attributes:
        sequence: whose tokens they are; its draft comes behind them.
        end: how many of its tokens are in the KV cache when the batch is computed, the draft not counted.
        rows: which of the batch's entries have logits for it: its last token and its draft.
    """

    sequence: Sequence
    end: int
    rows: range


class BatchCapacity(NamedTuple):
    """What a batch has room for.

    Attributes:
        rows: entries in all that a batch with a draft may have.
        cells: of the KV cache that are free besides.
        window: positions of each sequence.
    """

    rows: int
    cells: int
    window: int

    @classmethod
    def of(cls, context: Context, room: CellBudget, n_tokens: int, window: int) -> BatchCapacity:
        """What there is beside so many tokens."""
        return cls(min(context.n_batch, context.n_outputs), room.n_cells - room.used - n_tokens, window)


def fill(
    chosen: Collection[tuple[Sequence, int]], spare: BatchCapacity | None, model: DraftModel | None
) -> tuple[list[BatchPart], Batch]:
    """Lay a batch out of all that were chosen; where some stand at a picture, of the others, or of one of those.

    Args:
        chosen: who has a share of it, and how many tokens.
        spare: room for drafts; None where there are to be none.
        model: guesses for those that want it.
    """
    seeing = [pair for pair in chosen if pair[0].extras.pictures is not None and pair[0].is_at_image]
    if seeing:
        sequence, share = seeing[0]
        pictures = sequence.extras.pictures
        assert pictures is not None
        part = pictures.next_part(sequence.n_cached, share, sequence.slot)
        if part is not None and (len(seeing) == len(chosen) or pictures.takes_turn()):
            return [BatchPart(sequence, sequence.n_cached + part.n_tokens, range(0))], part
        chosen = [pair for pair in chosen if pair not in seeing]
    if spare is not None:
        _guess(chosen, spare, model)
    parts: list[BatchPart] = []
    batch: list[Entry] = []
    for sequence, share in chosen:
        tokens, draft, slot, start = sequence.tokens, sequence.draft, sequence.slot, sequence.n_cached
        end, last = start + share, len(tokens) - 1
        for position in range(start, end):
            batch.append(Entry(tokens[position], position, slot, position == last))
        if draft:
            batch += [Entry(token, position, slot, True) for position, token in enumerate(draft, end)]
        parts.append(BatchPart(sequence, end, range(len(batch) - len(draft) - (end > last), len(batch))))
    return parts, batch


def _guess(chosen: Collection[tuple[Sequence, int]], spare: BatchCapacity, model: DraftModel | None) -> None:
    """Draft for each in turn. Where somebody prefills, for nobody."""
    if any(share < sequence.n_waiting or not sequence.n_completion for sequence, share in chosen):
        return
    rows = n_tokens = sum(share for _, share in chosen)
    planned: list[tuple[Sequence, Drafting]] = []
    for sequence, share in chosen:
        if sequence.extras.drafting is not None:
            end = sequence.n_cached + share
            most = min(spare.rows - rows, spare.cells - (rows - n_tokens), spare.window - end)
            rows += sequence.plan_draft(sequence.extras.drafting, most, StepShape(rows, len(chosen), end - 1))
            planned.append((sequence, sequence.extras.drafting))
    if model is not None:
        drafters = (drafting.model for _, drafting in planned)
        wishing = [drafter for drafter in drafters if drafter is not None and drafter.wish is not None]
        if wishing:
            model.work(wishing)
    for sequence, drafting in planned:
        sequence.draft = drafting.take(sequence.sampler.allowed)
