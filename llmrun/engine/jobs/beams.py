"""The job `beams`: beam search in a second context on the loaded weights.

Scores and stop rules are those of transformers' GenerationMixin._beam_search; as there, penalties act on
log-probabilities, which are not normalized again. All branches share the KV cells, so that a fork copies
nothing.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun import _native
from llmrun.engine.core.sampler import logit_biases
from llmrun.engine.llama.base import Aborted, CacheFull, Entry, Vocabulary
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.loaded import LoadedModel
from llmrun.engine.prompt.thinking import lead_in, opens
from llmrun.errors import BadLogitsError, CancelledError, ContextOverflowError, OutOfMemoryError, UsageError
from llmrun.protocol.jobs.beams import ROOT, BeamAnswer, BeamSettings, BeamsFound, BeamStep, SearchBeams, TreeNode
from llmrun.protocol.messages import AnswerRequest, Generate
from llmrun.protocol.params import Limits, SamplingParams

if TYPE_CHECKING:
    from llmrun.engine.constraint.matcher import Matcher


_SPARE = 64  # additional candidates, because some may be banned


def run_beams(
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
        raise ContextOverflowError.of_prompt(len(prompt), loaded.load.n_ctx)
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
        n_cells=min(loaded.load.n_ctx, len(prompt) + settings.beams * max_tokens),
        n_seq_max=settings.beams,
        n_parked=0,
        warm_up=False,
    )
    adapters = loaded.preparer.prompts.adapters_for(request.adapters)
    with closing(LlamaContext(weights, load)) as context:
        context.adapt(adapters)
        return BeamDecoder(context, search, branches, report).run(prompt)


def _cant_fork() -> UsageError:
    return UsageError("this model does not support --beams", why="its KV cache can't be shared between sequences")


def _prompt(loaded: LoadedModel, request: AnswerRequest) -> list[int]:
    """Return the token ids before the answer itself, empty reasoning included if a grammar starts there."""
    text, tokens, media, *_ = loaded.preparer.prompts.prompt(Generate(0, request))
    if media is not None:
        raise UsageError("--beams does not support images", hint="leave out --beams, or --image")
    if request.grammar is not None and request.prompt is None:
        reasoning = loaded.preparer.prompts.reasoning(request)
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
            cells=min(len(prompt) + self._rows, self._context.n_cells),  # free cells are used before freed ones
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
        running = search.running
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
        free = [sequence_id for sequence_id in range(self._context.n_seq_max) if sequence_id not in inherited]
        for sequence_id in free:
            self._context.forget(sequence_id, 0)
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
        tree, last = self._search.tree, self._search.tree[answer.node]
        tokens = tuple(tree[node].token for node in self._search.path(answer.node))
        text = self._branches.without_stop(b"".join(map(self._context.vocabulary.piece, tokens)))
        return BeamAnswer(tokens, text, last.total, answer.score, "stop" if last.ended else "length", answer.node)

    def _tree_node(self, node: Node) -> TreeNode:
        text = self._context.vocabulary.control_piece(node.token).decode("utf-8", "replace")
        return TreeNode(node.parent, node.token, text, node.logprob, node.total, node.ended)


class Node(NamedTuple):
    """A token of the tree, as in the protocol's TreeNode."""

    parent: int
    token: int
    logprob: float
    total: float
    ended: bool


class Hypothesis(NamedTuple):
    """A finished branch: by an end token or a stop text, as its node says, or by the maximum length."""

    node: int
    score: float


class BeamSearch:
    """One search, a step at a time.

    Attributes:
        tree: all nodes, in order of creation.
        length: tokens of each running branch.
        running: last nodes of the branches that go on, the best first; at first the empty answer.
    """

    def __init__(self, settings: BeamSettings, longest: int, *, n_ends: int = 1, whole: bool = False) -> None:
        """Begin with an empty answer.

        Args:
            longest: tokens of an answer.
            n_ends: tokens of the vocabulary that end an answer.
            whole: rank every finished answer above all truncated ones.
        """
        self.tree: list[Node] = []
        self.length = 0
        self.running = [ROOT]
        self._finished: list[Hypothesis] = []  # the best first
        self._settings, self._longest, self._whole = settings, longest, whole
        self._n_candidates = max(2, 1 + n_ends) * settings.beams  # enough remain if some end

    @property
    def over(self) -> bool:
        return not self.running

    def step(self, branches: Branches) -> None:
        """Extend every branch by a token."""
        self.length += 1
        candidates = [
            Node(parent, token, logprob, self._total(parent) + logprob, branches.ends(parent, token))
            for parent in self.running
            for token, logprob in branches.likeliest(parent, self._n_candidates)
        ]
        candidates.sort(key=lambda node: -node.total)
        self.running = []
        for rank, node in enumerate(candidates[: self._n_candidates]):
            if not node.ended and len(self.running) < self._settings.beams:
                self.running.append(self._add(node))
            elif node.ended and rank < self._settings.beams:  # at a lower rank it is worse than the running ones
                self._finish(self._add(node))
        if self.length >= self._longest:
            self.cut()
        elif self._is_done():
            self.running = []

    def cut(self) -> None:
        """End the search: running branches become answers of reason "length"."""
        for node in self.running:
            self._finish(node)
        self.running = []

    def answers(self) -> list[Hypothesis]:
        """Return the finished answers, the best first."""
        return list(self._finished)

    def path(self, node: int) -> list[int]:
        """Return the numbers of the nodes from the root to this one."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.tree[node].parent
        return nodes[::-1]

    def _add(self, node: Node) -> int:
        self.tree.append(node)
        return len(self.tree) - 1

    def _total(self, node: int) -> float:
        return 0.0 if node == ROOT else self.tree[node].total

    def _finish(self, node: int) -> None:
        self._finished.append(Hypothesis(node, self._score(node, self.length)))
        self._finished.sort(key=self._order)
        del self._finished[self._settings.beams :]

    def _order(self, answer: Hypothesis) -> tuple[bool, float]:
        return self._whole and not self.tree[answer.node].ended, -answer.score

    def _score(self, node: int, length: int) -> float:
        return float(self._total(node) / length**self._settings.length_penalty)

    def _is_done(self) -> bool:
        """Return whether no running branch can become one of the answers, as far as early stopping looks."""
        settings = self._settings
        if not self.running or len(self._finished) < settings.beams:
            return not self.running
        if settings.early_stopping == "true":
            return True
        grows = settings.early_stopping == "never" and settings.length_penalty > 0  # longer answers may score higher
        best = self._score(self.running[0], self._longest if grows else self.length)
        return best <= self._finished[-1].score


@dataclass
class BeamState:
    """One running branch."""

    sequence_id: int  # in the KV cache
    tokens: list[int] = field(default_factory=list)  # of the answer
    text: bytes = b""
    matcher: Matcher | None = None  # its state in the grammar, None without one
    logits: int = 0  # address of the logits after its last token


class Branches:
    """The running branches, and the candidates for their next tokens, from a model's logits.

    Attributes:
        by_node: node -> the branch that ends there.
    """

    def __init__(
        self, prompt: Sequence[int], vocabulary: Vocabulary, sampling: SamplingParams, limits: Limits, root: BeamState
    ) -> None:
        self.by_node = {ROOT: root}
        self.end_tokens = frozenset(vocabulary.ends)
        self._prompt, self._vocabulary, self._sampling = prompt, vocabulary, sampling
        self._native = _native.Sampler(vocabulary.n_tokens, seed=0)
        self._stops = [text.encode() for text in limits.stop]
        self._bans = [text.casefold() for text in limits.ban]
        ends = [(token, -math.inf) for token in self.end_tokens if limits.ignores_end]
        self._biases = [*logit_biases(sampling, vocabulary), *ends]
        penalties = (sampling.repeat_penalty - 1, sampling.frequency_penalty, sampling.presence_penalty)
        self._penalizes = sampling.repeat_last_n > 0 and any(penalties)

    def child(self, branch: BeamState, token: int, sequence_id: int) -> BeamState:
        """Return a copy of the branch with one token more; the branch's own matcher does not change."""
        matcher = branch.matcher.copy() if branch.matcher is not None else None
        if matcher is not None:
            matcher.accept(token)
        return BeamState(sequence_id, [*branch.tokens, token], branch.text + self._vocabulary.piece(token), matcher)

    def ends(self, node: int, token: int) -> bool:
        """Return whether the branch ends with this token: an end token, or the last of a stop text."""
        if token in self.end_tokens:
            return True
        return bool(self._stops) and any(stop in self._text(node, token) for stop in self._stops)

    def without_stop(self, text: bytes) -> str:
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        return text[: min(places, default=len(text))].decode("utf-8", "replace")

    def likeliest(self, node: int, count: int) -> Sequence[tuple[int, float]]:
        """Return up to `count` tokens and their log-probabilities, the most likely first."""
        branch = self.by_node[node]
        limit = count + _SPARE if self._bans or branch.matcher is not None else count
        try:
            candidates = self._native.log_probabilities(branch.logits, 0, limit)[1:]
        except _native.BadLogits as error:
            reason = "its logits are not numbers that can be compared"
            raise BadLogitsError(f"the model produced {error.logit:g} at token {error.token}", why=reason) from None
        if self._penalizes or self._biases or branch.matcher is not None:
            candidates = self._adjusted(branch, candidates[0], limit)
        return list(islice((pair for pair in candidates if not self._is_refused(node, pair[0])), count))

    def _adjusted(self, branch: BeamState, likeliest: tuple[int, float], count: int) -> list[tuple[int, float]]:
        """Return the most likely tokens after biases, penalties and grammar, in transformers' order.

        Args:
            likeliest: token and log-probability of one of the model's tokens, for normalization.
        """
        import numpy as np

        token, logprob = likeliest
        memory: Any = (ctypes.c_float * self._vocabulary.n_tokens).from_address(branch.logits)
        row = np.frombuffer(memory, np.float32)
        values = row - (row[token] - np.float32(logprob))
        for token, bias in self._biases:
            values[token] += bias
        if self._penalizes:
            self._penalize(values, branch)
        if branch.matcher is not None:
            words: Any = (ctypes.c_uint8 * -(-len(values) // 8)).from_address(branch.matcher.mask())
            values[np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")[: len(values)] == 0] = -math.inf
        places = np.argpartition(values, -min(count, len(values)))[-count:].tolist()
        candidates = [(place, float(values[place])) for place in places if values[place] > -math.inf]
        return sorted(candidates, key=lambda pair: (-pair[1], pair[0]))

    def _penalize(self, values: Any, branch: BeamState) -> None:
        """Penalize the tokens among the last repeat_last_n ones, the prompt's included."""
        sampling = self._sampling
        seen = [*self._prompt, *branch.tokens][-sampling.repeat_last_n :]
        for token, count in Counter(seen).items():
            value = values[token]
            value *= sampling.repeat_penalty if value < 0 else 1 / sampling.repeat_penalty
            values[token] = value - count * sampling.frequency_penalty - sampling.presence_penalty

    def _text(self, node: int, token: int) -> bytes:
        return self.by_node[node].text + self._vocabulary.piece(token)

    def _is_refused(self, node: int, token: int) -> bool:
        matcher = self.by_node[node].matcher
        return (bool(self._bans) and self._is_banned(node, token)) or (matcher is not None and matcher.refuses(token))

    def _is_banned(self, node: int, token: int) -> bool:
        text = self._text(node, token).decode("utf-8", "ignore").casefold()
        return any(ban in text for ban in self._bans)
