"""The job `beams`: beam search in a second context on the loaded weights.

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
from llmrun.engine.prompt.thinking import lead_in, opens
from llmrun.errors import CancelledError, ContextOverflowError, OutOfMemoryError, UsageError
from llmrun.protocol.jobs.beams import ROOT, BeamAnswer, BeamsFound, BeamStep, SearchBeams, TreeNode
from llmrun.protocol.messages import AnswerRequest, Generate

_INITIAL_STEPS = 64  # that fit into the KV cache before it grows


def run(
    command: SearchBeams, report: Callable[[BeamStep], None], flag: _native.CancelFlag, loaded: LoadedModel
) -> BeamsFound:
    """Search.

    Raises:
        UsageError: this model's sequences can't be copied, the prompt has images, or a grammar meets reasoning.
        ContextOverflowError: the prompt alone fills the context window.
        OutOfMemoryError: a second context does not fit.
        CancelledError: the search was cancelled before the first token.
    """
    weights, settings, request = loaded.weights, command.settings, command.asked
    if weights.is_recurrent or weights.rope_depends_on_window or weights.translates:
        raise _cant_fork()
    prompt = _prompt(loaded, request)
    room = loaded.load.n_ctx - len(prompt)
    if room < 1:
        raise ContextOverflowError(
            f"the prompt is {len(prompt):,} tokens long, the context window {loaded.load.n_ctx:,}",
            hint="shorten it, or set a larger context window with --ctx",
        )
    root = BeamState(0)
    if request.grammar is not None:
        from llmrun.engine.constraint.matcher import compile_grammar

        root.matcher = compile_grammar(request.grammar, weights.vocabulary)
    branches = Branches(prompt, weights.vocabulary, request.sampling, request.limits, root)
    max_tokens = min(request.limits.max_tokens or room, room)
    is_whole = request.grammar is not None
    search = BeamSearch(settings, max_tokens, n_ends=len(branches.end_tokens), whole=is_whole)
    load = replace(
        loaded.load,
        n_ctx_start=len(prompt) + settings.beams * min(max_tokens, _INITIAL_STEPS),
        n_cells=loaded.load.n_ctx,
        n_seq_max=settings.beams,
        n_parked=0,
        warm_up=False,
    )
    adapters = loaded.preparer.adapters_for(request.adapters)
    with closing(LlamaContext(weights, load)) as context:
        context.adapt(adapters)
        return BeamDecoder(context, search, branches, report).run(prompt)


def _cant_fork() -> UsageError:
    return UsageError("this model does not support --beams", why="its KV cache can't be shared between sequences")


def _prompt(loaded: LoadedModel, request: AnswerRequest) -> list[int]:
    """Return the token ids before the answer itself, empty reasoning included if a grammar starts there."""
    text, tokens, images, *_ = loaded.preparer.prompt(Generate(0, request))
    if images is not None:
        raise UsageError("--beams does not support images", hint="leave out --beams, or --image")
    if request.grammar is not None and request.prompt is None:
        reasoning = loaded.preparer.reasoning(request)
        if reasoning is not None and opens(text, reasoning):
            reason = "this model's answers begin with reasoning, which no grammar describes"
            raise UsageError("--beams can't be combined with a grammar for this model", why=reason)
        tokens += loaded.weights.vocabulary.tokenize(lead_in(reasoning, thinks=False), special=True, begins=False)
    return tokens


class BeamDecoder:
    """The decode loop of a search, in a context whose sequences are all empty."""

    def __init__(
        self, context: LlamaContext, search: BeamSearch, branches: Branches, report: Callable[[BeamStep], None]
    ) -> None:
        self._context, self._search, self._branches, self._report = context, search, branches, report
        self._rows = self._steps = 0

    def run(self, prompt: Sequence[int]) -> BeamsFound:
        """Search until no better answer is possible, the limit, a full cache, or a cancel."""
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
        self._branches.by_node[ROOT].logits = self._context.logits(len(entries) - 1)

    def _step(self, n_prompt: int) -> None:
        """Choose the next tokens, report them, and decode them."""
        search = self._search
        n_before = len(search.tree)
        search.step(self._branches)
        running = [beam.node for beam in search.running]
        self._report(BeamStep(tuple(map(self._tree_node, search.tree[n_before:])), tuple(running)))
        self._fork(running, n_prompt + search.length - 1)
        if not running:
            return
        entries = [
            Entry(search.tree[node].token, n_prompt + search.length - 1, self._branches.by_node[node].sequence_id, True)
            for node in running
        ]
        self._context.decode(entries)
        self._steps += 1
        self._rows += len(entries)
        for row, node in enumerate(running):
            self._branches.by_node[node].logits = self._context.logits(row)

    def _fork(self, running: Sequence[int], length: int) -> None:
        """Give each running branch a sequence: a first child takes its parent's, others copy into free ones."""
        tree, before = self._search.tree, self._branches.by_node
        parents = [before[tree[node].parent] for node in running]
        inherited = {parent.sequence_id for parent in parents}
        free = [each for each in range(self._context.n_seq_max) if each not in inherited]
        for each in free:
            self._context.forget(each, 0)
        after: dict[int, BeamState] = {}
        for node, parent in zip(running, parents, strict=True):
            sequence_id = parent.sequence_id
            if sequence_id in inherited:
                inherited.remove(sequence_id)
            else:
                sequence_id = free.pop()
                if not self._context.copy(parent.sequence_id, sequence_id, length):
                    raise _cant_fork()
            after[node] = self._branches.child(parent, tree[node].token, sequence_id)
        self._branches.by_node = after

    def _answer(self, answer: Hypothesis) -> BeamAnswer:
        tree = self._search.tree
        tokens = tuple(tree[node].token for node in self._search.path(answer.node))
        text = self._branches.without_stop(b"".join(map(self._vocabulary.piece, tokens)))
        reason = "stop" if tree[answer.node].ended else "length"
        return BeamAnswer(tokens, text, answer.total, answer.score, reason, answer.node)

    @property
    def _vocabulary(self) -> Vocabulary:
        return self._context.vocabulary

    def _tree_node(self, node: Node) -> TreeNode:
        data = self._vocabulary.piece(node.token) or self._vocabulary.control_piece(node.token)
        text = data.decode("utf-8", "replace")
        return TreeNode(node.parent, node.token, text, node.logprob, node.total, node.ended)
