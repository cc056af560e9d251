"""The layout of one batch: waiting tokens of the scheduled sequences, and their drafts if there is space.

Must not know scheduling or sampling. A draft only takes rows, cells and positions that remain after every sequence has
its own tokens. An image or audio has a batch to itself, because llama.cpp does not mix vectors and tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from llmrun._native import StepShape
from llmrun.engine.core.cell_budget import CellBudget
from llmrun.engine.core.draft_source import DraftedSequence, DraftWeights
from llmrun.engine.core.drafts import Drafting, choose_together
from llmrun.engine.core.media import MediaPart
from llmrun.engine.core.sequence import Sequence, blame
from llmrun.engine.llama.base import Context, Entry

Batch = list[Entry] | MediaPart  # The input of one decode call


class BatchPart(NamedTuple):
    """A sequence's part of a batch."""

    sequence: Sequence  # the sequence; its draft follows its tokens
    end: int  # the number of its tokens that are in the KV cache after the batch, not counting the draft
    rows: range  # the batch's entries with logits for it: its last token and its draft


class BatchCapacity(NamedTuple):
    """The limits for the drafts in a batch."""

    rows: int  # maximum number of entries in a batch with drafts
    cells: int  # free cells of the KV cache, beyond those for the sequences' own tokens
    window: int  # maximum length of a sequence
    draft: int  # maximum number of drafted tokens of a sequence
    are_equal: bool  # all sequences have to have equally many entries in a batch with drafts

    @classmethod
    def of(cls, context: Context, budget: CellBudget, n_tokens: int, window: int) -> BatchCapacity:
        """Return what remains beside n_tokens of the sequences' own tokens."""
        rows, cells = min(context.n_batch, context.n_outputs), budget.n_cells - budget.used - n_tokens
        return cls(rows, cells, window, context.max_draft, not context.cuts or context.splits_batches)


def fill(
    chosen: Collection[tuple[Sequence, int]], spare: BatchCapacity | None, model: DraftWeights | None
) -> tuple[list[BatchPart], Batch]:
    """Build the next batch: a chunk of an image or audio, or the tokens of every chosen sequence that is not at one.

    Args:
        spare: limits for drafts; None for a batch without drafts.
    """
    at_media = [pair for pair in chosen if pair[0].media is not None and pair[0].is_at_media]
    if at_media:
        sequence, share = at_media[0]
        media = sequence.media
        assert media is not None
        with blame(sequence):
            part = media.next_part(sequence.n_cached, share, sequence.slot)
        if part is not None and (len(at_media) == len(chosen) or media.takes_turn()):
            return [BatchPart(sequence, sequence.n_cached + part.n_tokens, range(0))], part
        chosen = [pair for pair in chosen if pair not in at_media]
    if spare is not None:
        _draft(chosen, spare, model)
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


def _draft(chosen: Collection[tuple[Sequence, int]], spare: BatchCapacity, model: DraftWeights | None) -> None:
    """Draft for each sequence in turn, or for all with the model's heads, unless one of them still prefills."""
    if any(share < sequence.n_waiting or not sequence.n_completion for sequence, share in chosen):
        return
    planned: list[tuple[Sequence, Drafting]] = []
    is_together = model is not None and model.drafts_together
    if model is not None and is_together and len(chosen) > 1:
        planned += _plan_together(chosen, spare, model)
    if not planned and (len(chosen) == 1 or not (spare.are_equal and is_together)):
        rows = n_tokens = sum(share for _, share in chosen)
        for sequence, share in chosen:
            if sequence.drafting is not None:
                end = sequence.n_cached + share
                limit = min(spare.rows - rows, spare.cells - (rows - n_tokens), spare.window - end, spare.draft)
                with blame(sequence):
                    rows += sequence.plan_draft(sequence.drafting, limit, StepShape(rows, len(chosen)))
                planned.append((sequence, sequence.drafting))
    asked: dict[DraftedSequence, int] = {
        sequence: drafting.n_requested for sequence, drafting in planned if drafting.n_requested is not None
    }
    by_model = model.propose(asked) if model is not None and asked else {}
    for sequence, drafting in planned:
        with blame(sequence):
            sequence.draft = drafting.take(by_model.get(sequence), sequence.sampler.allowed)
    if spare.are_equal and len(chosen) > 1:
        has_equal_shares = len({share for _, share in chosen}) == 1
        length = min(len(sequence.draft) for sequence, _ in chosen) if has_equal_shares else 0
        for sequence, drafting in planned:
            sequence.draft = drafting.shorten(length)


def _plan_together(
    chosen: Collection[tuple[Sequence, int]], spare: BatchCapacity, model: DraftWeights
) -> list[tuple[Sequence, Drafting]]:
    """Plan drafts of one length by the heads, for the sequences that can have them; nothing if they don't pay."""
    asking: list[tuple[Sequence, Drafting]] = []
    for sequence, _ in chosen:
        drafting = sequence.drafting
        if drafting is not None and drafting.model is not None and drafting.can_ask_model:
            drafting.refuse()  # until it is planned
            if drafting.model.count_missing(sequence) == 0:
                asking.append((sequence, drafting))
    if not asking or (spare.are_equal and len(asking) < len(chosen)):
        return []
    n_tokens, n = sum(share for _, share in chosen), len(asking)
    depth = max(sequence.n_cached for sequence, _ in asking)
    limit = min(
        model.n_most or 0, spare.draft, (spare.rows - n_tokens) // n, spare.cells // n, spare.window - depth - 1
    )
    length, cost = choose_together([drafting for _, drafting in asking], len(chosen), limit)
    if length <= 0:
        return []
    step = StepShape(n_tokens, len(chosen))
    for sequence, drafting in asking:
        drafting.plan_together(sequence, length, cost, step)
    return asking
