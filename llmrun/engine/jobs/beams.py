"""The job `beams`: beam search in a context of its own, on the weights that are loaded.

Owns the KV cache of the branches and the order of steps; beam_search.py chooses among the candidates of
beam_branches.py. All branches share one pool of cells, in which a fork copies nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

from llmrun import _native
from llmrun.engine.jobs.beam_branches import BeamState, Branches
from llmrun.engine.jobs.beam_search import BeamSearch, Hypothesis, Node
from llmrun.engine.llama.base import Aborted, CacheFull, Entry, Vocabulary
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.loaded import LoadedModel
from llmrun.engine.prompt.thinking import lead_in, opens, thinking_tags
from llmrun.errors import CancelledError, ContextOverflowError, OutOfMemoryError, UsageError
from llmrun.protocol.jobs.beams import ROOT, BeamAnswer, BeamsFound, BeamStep, SearchBeams, TreeNode
from llmrun.protocol.messages import AnswerRequest, Generate

_FIRST_STEPS = 64  # for which the KV cache has room at first


def run(
    command: SearchBeams, report: Callable[[BeamStep], None], flag: _native.CancelFlag, loaded: LoadedModel
) -> BeamsFound:
    """Search.

    Raises:
        UsageError: this model's memory can't fork, the prompt has pictures, or it ends in thoughts that a grammar can't
            follow.
        ContextOverflowError: the prompt alone fills the context window.
        OutOfMemoryError: a second context does not fit.
        CancelledError: it was cancelled before there was a token.
    """
    weights, settings, asked = loaded.weights, command.settings, command.asked
    if weights.is_recurrent or weights.rope_depends_on_window or weights.translates:
        raise UsageError("this model can't search with beams", why="its memory of a text can't be forked")
    prompt = _prompt(loaded, asked)
    room = loaded.load.n_ctx - len(prompt)
    if room < 1:
        raise ContextOverflowError(
            f"the prompt is {len(prompt):,} tokens long, the context window {loaded.load.n_ctx:,}",
            hint="shorten it, or ask for a larger context window with --ctx",
        )
    root = BeamState(0)
    if asked.grammar is not None:
        from llmrun.engine.constraint.matcher import compile_grammar

        root.matcher = compile_grammar(asked.grammar, weights.vocabulary)
    branches = Branches(prompt, weights.vocabulary, asked.sampling, asked.limits, root)
    longest = min(asked.limits.max_tokens or room, room)
    search = BeamSearch(
        settings, len(prompt), longest, n_ends=len(branches.ends_known), whole=asked.grammar is not None
    )
    load = replace(
        loaded.load,
        n_ctx_start=len(prompt) + settings.beams * min(longest, _FIRST_STEPS),
        n_cells=loaded.load.n_ctx,
        n_seq_max=settings.beams,
        n_parked=0,
        n_stream=0,
        exact=False,
        warm_up=False,
    )
    adapters = loaded.preparer.adapters_for(asked.adapters)
    with closing(LlamaContext(weights, load)) as context:
        context.adapt(adapters)
        return BeamDecoder(context, search, branches, report).run(prompt)


def _prompt(loaded: LoadedModel, asked: AnswerRequest) -> list[int]:
    """Token ids of what is asked, up to where the answer itself begins."""
    text, tokens, pictures = loaded.preparer.prompt(Generate(0, asked))
    if pictures is not None:
        raise UsageError("beams can't look at pictures", hint="leave out --beams, or --image")
    if asked.grammar is not None and asked.prompt is None:
        tags = thinking_tags(asked.template) or loaded.preparer.thinking_tags
        if tags is not None and opens(text, tags):
            why = "this model's answers begin with thoughts, which no grammar describes"
            raise UsageError("beams can't follow a grammar here", why=why)
        tokens += loaded.weights.vocabulary.tokenize(lead_in(tags, thinks=False), special=True)
    return tokens


class BeamDecoder:
    """A search in a context whose sequences are all empty."""

    def __init__(
        self, context: LlamaContext, search: BeamSearch, branches: Branches, report: Callable[[BeamStep], None]
    ) -> None:
        self._context, self._search, self._branches, self._report = context, search, branches, report
        self._rows = self._steps = 0

    def run(self, prompt: Sequence[int]) -> BeamsFound:
        """Search until nothing better can come, the limit, a full cache, or a cancel."""
        search, began = self._search, time.perf_counter()
        prefilled, is_full, is_cancelled = began, False, False
        try:
            self._prefill(prompt)
            prefilled = time.perf_counter()
            while not search.over:
                self._step(len(prompt))
        except Aborted:
            if not search.length:
                raise CancelledError("the search was cancelled") from None
            is_cancelled = True
        except CacheFull:
            if not search.length:
                raise OutOfMemoryError("there is no memory for the prompt's KV cache") from None
            is_full = True
        ended = time.perf_counter()
        search.cut()
        answers = tuple(map(self._answer, search.answers()))
        return BeamsFound(
            answers=answers,
            prompt_tokens=len(prompt),
            prefill_seconds=prefilled - began,
            steps=self._steps,
            rows=self._rows,
            decode_seconds=ended - prefilled,
            cells=self._context.room,
            is_full=is_full,
            is_cancelled=is_cancelled,
        )

    def _prefill(self, prompt: Sequence[int]) -> None:
        size = self._context.n_batch
        for start in range(0, len(prompt), size):
            part = prompt[start : start + size]
            entries = [
                Entry(token, start + place, 0, start + place == len(prompt) - 1) for place, token in enumerate(part)
            ]
            self._context.decode(entries)
        self._branches.of[ROOT].logits = self._context.logits(len(entries) - 1)

    def _step(self, n_prompt: int) -> None:
        """Choose, tell, and compute what may come next."""
        search = self._search
        n_before = len(search.tree)
        search.step(self._branches)
        self._steps += 1
        running = [beam.node for beam in search.running]
        self._report(BeamStep(tuple(map(self._shown, search.tree[n_before:])), tuple(running)))
        self._fork(running, n_prompt + search.length - 1)
        if not running:
            return
        entries = [
            Entry(search.tree[node].token, n_prompt + search.length - 1, self._branches.of[node].sequence_id, True)
            for node in running
        ]
        self._context.decode(entries)
        self._rows += len(entries)
        for row, node in enumerate(running):
            self._branches.of[node].logits = self._context.logits(row)

    def _fork(self, running: Sequence[int], length: int) -> None:
        """Give each branch that goes on a sequence: its first child keeps the parent's, others get that of a dead one.

        Args:
            running: nodes.
            length: tokens of each parent.
        """
        tree, before = self._search.tree, self._branches.of
        parents = [before[tree[node].parent] for node in running]
        kept = {parent.sequence_id for parent in parents}
        free = [each for each in range(self._context.n_seq_max) if each not in kept]
        for each in free:
            self._context.forget(each, 0)
        after: dict[int, BeamState] = {}
        for node, parent in zip(running, parents, strict=True):
            sequence_id = parent.sequence_id
            if sequence_id in kept:
                kept.remove(sequence_id)
            else:
                sequence_id = free.pop()
                if not self._context.copy(parent.sequence_id, sequence_id, length):
                    raise UsageError("this model can't search with beams", why="its memory of a text can't be forked")
            after[node] = self._branches.child(parent, tree[node].token, sequence_id)
        self._branches.of = after

    def _answer(self, answer: Hypothesis) -> BeamAnswer:
        tree = self._search.tree
        tokens = tuple(tree[node].token for node in self._search.path(answer.node))
        text = self._branches.shown(b"".join(map(self._vocabulary.piece, tokens)))
        reason = "stop" if tree[answer.node].ended else "length"
        return BeamAnswer(tokens, text, answer.total, answer.score, reason, answer.node)

    @property
    def _vocabulary(self) -> Vocabulary:
        return self._context.vocabulary

    def _shown(self, node: Node) -> TreeNode:
        data = self._vocabulary.piece(node.token) or self._vocabulary.control_piece(node.token)
        text = data.decode("utf-8", "replace")
        return TreeNode(node.parent, node.token, text, node.logprob, node.total, node.ended)
