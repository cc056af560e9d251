"""The numbers by which the engine decides, each with its unit and reason.

A number that a user, a model or a machine sets is in Load or in the request instead. Versions of formats, limits of
llama.cpp, and the numbers that define what a repetition or a measurement is, stand in their modules.
"""

from __future__ import annotations

from typing import NamedTuple


class Policy(NamedTuple):
    """The limits, shares, waits and thresholds of an engine.

    An Engine hands its policy on to scheduler, slots and what is saved; drafts, costs of steps and threads, which are
    made outside of it, have POLICY.
    """

    # ---- batches: see scheduler.py
    wide_batch: int = 64  # tokens from which on all threads compute a batch, and ggml has a much faster flash attention
    # A sequence with so few to compute decodes: they are the sampled one, and those that a grammar forced after it.
    few_tokens: int = 8  # tokens that cost hardly more than one, since they read all weights too
    device_seconds: float = 0.5  # of a prompt's piece on a device, so that it can soon be cancelled ...
    device_tokens: int = 512  # ... which has at least so many tokens, for a device computes fewer ones hardly faster
    mixed_seconds: float = 0.1  # of a mixed batch beyond a plain step: prefill adds it to the others' latency
    mixed_steps: int = 10  # plain steps instead, if they are shorter, on a device: a tenth of the time is decode
    pause_seconds: float = 0.25  # of a mixed batch that holds a whole piece, or all waiting prefill: few notice it
    short_seconds: float = 1.0  # of a prompt that is computed in pieces of a whole pause while few sequences decode
    few_decoding: int = 3  # sequences, all of them in a step that reads all weights for few tokens
    level_tokens: int = 2  # a piece is cut to the length of another one that is shorter by so many tokens, ...
    level_part: int = 4  # ... or by 1/N: llama.cpp then passes over the weights once instead of twice
    change_steps: int = 4  # before a change that costs about one: of adapters, or of a slot that is apart from others

    # ---- admission
    candidates: int = 8  # of them, the one with the longest cached prefix is admitted; so often others pass the oldest
    spare_part: int = 32  # 1/N of the cells stays free at an admission, because running sequences grow

    # ---- cached prefixes: see slots.py, checkpoints.py and states.py
    min_reused: int = 64  # tokens of a prefix: fewer are prefilled faster than waited for, copied or read from a file
    min_gap: int = 32  # tokens: fewer are prefilled again rather than moved, or checkpointed for the next prompt
    min_saved: int = 256  # tokens that are not on disk yet: each save writes the whole conversation
    most_saved: float = 0.75  # of a parked conversation that may be on disk already, for the same reason
    cheap_cells: int = 256  # of parked prefixes, without effect on speed: llama.cpp reads this many at a time
    piece_bytes: int = 64 << 20  # of a state that is copied between two steps: a slow machine's share of mixed_seconds
    most_copied: int = 16  # cells for each token of a prefix: prefill takes 40 times as long as a copy, or longer
    scattered_batches: int = 2  # of free cells that llama.cpp may skip where sequences share them, to use others
    most_moved: int = 4096  # cells of a sequence: beyond, steps are mostly attention, which a gap does not slow down
    checkpoint_bytes: int = 512 << 20  # of all checkpoints, where the load has no limit
    checkpoint_batch_bytes: int = 16 << 20  # each that a checkpoint has makes them rarer by a batch of prefill
    saved_checkpoints: int = 4  # of a sequence on disk

    # ---- drafts: see drafts.py
    draft_prefill: int = 128  # tokens that a draft model reads in a step: the target model waits meanwhile
    draft_gain: float = 1.1  # expected of drafts together, as in gate.cpp
    draft_trials: int = 2  # steps with drafts together of one length before a longer one is tried
    draft_refusals: int = 8  # consecutive steps in which the model's drafts do not pay, after which it rests
    draft_rest: int = 64  # tokens without it; each rest is twice as long as the last one, up to eight times this
    draft_warm_up: int = 16  # tokens after a rest whose hidden states the heads see before they draft

    # ---- costs of steps: see steps.py
    cost_prior: int = 2  # drafted steps that weigh as much as the table
    cost_memory: int = 32  # drafted steps that count, and plain ones whose median is the time of a step
    most_cost: float = 4.0  # times the table's cost, of one step: another program interrupted it

    # ---- threads on a busy machine: see threads.py
    load_seconds: float = 0.25  # of a measurement of the load, and at most eight times as long, ...
    first_load_seconds: float = 0.1  # ... and of the first one; the kernel counts in hundredths of a second
    most_others: float = 0.6  # of the last thread's core that others may use; else a thread less computes, ...
    few_others: float = 0.2  # ... until they use less than this
    step_memory: float = 0.9  # weight of the earlier steps in the mean time of a step
    trial_steps: int = 3  # of a trial of another number of threads at least, and ...
    trial_seconds: float = 0.05  # ... its seconds at least
    trial_cost: int = 20  # times what a trial lost, or its least time if that is more, pass until the next one
    trial_hopeless: float = 3.0  # times the usual step: one step that takes longer ends a trial
    trial_gain: float = 0.95  # of the usual time of a step, with which a trial wins

    @property
    def piece(self) -> int:
        """Tokens of a prompt's piece beside others: llama.cpp computes the first one with their tokens."""
        return self.wide_batch + 1


POLICY = Policy()
