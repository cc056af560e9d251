"""The job `beams` finds what transformers' beam search finds on the same weights.

beams.json was made by tests/upstream/beam_goldens.py; prompts are such that no rounding can change what is found.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.beam_cases import ENDS, GOLDENS, LAST_N, LONGEST, MODELS, BeamCase, cases
from support.beam_twin import Found, TableContinuations, ours, table, transformers
from support.byte_vocabulary import allowed_tokens
from support.convert_golden import folder_of
from support.plain_logits import computed

from llmrun import _native
from llmrun.engine.constraint.matcher import compile_grammar
from llmrun.engine.jobs.beams import BeamDecoder, BeamSearch, BeamState, Branches, run_beams
from llmrun.engine.llama.base import Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import UsageError
from llmrun.grammar import Grammar, read_grammar
from llmrun.lab.convert.job import convert_folder
from llmrun.protocol.jobs.beams import ROOT, BeamSettings, BeamsFound, BeamStep, SearchBeams
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.params import Limits, SamplingParams

FOUND: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))["cases"]
N_CTX = 64
LONG = BeamSettings(4, 2.0, "never")
PROMPT = [5, 260, 17, 99, 42, 7, 130]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LlamaModel]]:
    with ExitStack() as stack:
        found = {}
        for name in MODELS:
            place = tmp_path_factory.mktemp(name)
            path = convert_folder(folder_of(name, place), place / "tiny.gguf", type="f32").path
            found[name] = stack.enter_context(closing(LlamaModel(str(path), 0, _native.CancelFlag())))
        yield found


def load(**changes: Any) -> Load:
    exact = {"kv_type_k": "f32", "kv_type_v": "f32", "flash_attention": "off"}
    return replace(Load("", N_CTX), **{**exact, **changes})


def searched(
    model: LlamaModel,
    prompt: list[int],
    settings: BeamSettings,
    sampling: SamplingParams,
    *,
    limits: Limits | None = None,
    longest: int = LONGEST,
    cells: int = 8 * N_CTX,
    root: BeamState | None = None,
    whole: bool = False,
    steps: list[BeamStep] | None = None,
    told: Callable[[BeamStep], None] | None = None,
) -> BeamsFound:
    kept = steps if steps is not None else []
    branches = Branches(prompt, model.vocabulary, sampling, limits or Limits(longest), root or BeamState(0))
    search = BeamSearch(settings, longest, n_ends=len(branches.end_tokens), whole=whole)
    wanted = load(n_ctx=cells, n_seq_max=settings.beams, n_cells=cells, n_batch=32)
    with closing(LlamaContext(model, wanted)) as context:
        return BeamDecoder(context, search, branches, told or kept.append).run(prompt)


def of_case(model: LlamaModel, case: BeamCase, **others: Any) -> BeamsFound:
    settings = BeamSettings(case.beams, case.length_penalty, case.early_stopping)
    biases = tuple((end, case.end_bias) for end in ENDS[case.model])
    sampling = SamplingParams(repeat_penalty=case.repetition, repeat_last_n=LAST_N, logit_bias=biases)
    return searched(model, FOUND[case.name]["prompt"], settings, sampling, **others)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_finds_what_transformers_finds(case: BeamCase, models: dict[str, LlamaModel]) -> None:
    model, wanted = models[case.model], FOUND[case.name]
    ends = filter(model.vocabulary.is_end, range(model.vocabulary.n_tokens))
    assert tuple(ends) == ENDS[case.model]
    found = of_case(model, case)
    answers = [list(answer.tokens) for answer in found.answers]
    assert answers == wanted["tokens"]
    scores = [answer.score for answer in found.answers]
    assert scores == pytest.approx(wanted["scores"], abs=1e-2)  # llama.cpp looks GELU up in half precision


def test_a_bias_of_a_token_that_the_model_lacks_is_refused(models: dict[str, LlamaModel]) -> None:
    with pytest.raises(UsageError, match="names token 1000000"):
        searched(models["LlamaForCausalLM"], PROMPT, LONG, SamplingParams(logit_bias=((1_000_000, 1.0),)))


def test_a_cache_that_is_full_ends_the_search_with_what_there_is(models: dict[str, LlamaModel]) -> None:
    model = models["Qwen2ForCausalLM"]
    sampling = SamplingParams(logit_bias=tuple((end, -math.inf) for end in ENDS["Qwen2ForCausalLM"]))
    full = searched(model, PROMPT, LONG, sampling, longest=400, cells=256)
    assert full.is_full
    assert not full.is_cancelled
    assert {answer.reason for answer in full.answers} == {"length"}
    assert 256 // 4 - len(PROMPT) <= len(full.answers[0].tokens) < 400


def test_the_cells_that_branches_have_used_are_counted(models: dict[str, LlamaModel]) -> None:
    model = models["LlamaForCausalLM"]
    found = searched(model, PROMPT, LONG, SamplingParams(), cells=2048)
    assert found.cells == len(PROMPT) + found.rows < 2048
    more = searched(model, PROMPT, LONG, SamplingParams(), longest=400, cells=512)
    assert more.cells == 512, "freed cells are used again"


def test_steps_tell_the_whole_tree(models: dict[str, LlamaModel]) -> None:
    steps: list[BeamStep] = []
    found = searched(models["LlamaForCausalLM"], PROMPT, BeamSettings(2), SamplingParams(), steps=steps)
    tree = [node for step in steps for node in step.nodes]
    for answer in found.answers:
        tokens, node, total = [], answer.node, 0.0
        while node != ROOT:
            tokens.append(tree[node].token)
            total += tree[node].logprob
            node = tree[node].parent
        assert tuple(reversed(tokens)) == answer.tokens
        assert total == pytest.approx(answer.total)
    assert found.steps == sum(bool(step.running) for step in steps), "a step decodes the beams that go on"
    assert all(len(step.running) <= 2 for step in steps)


def test_log_probabilities_are_the_models_own(models: dict[str, LlamaModel]) -> None:
    model = models["LlamaForCausalLM"]
    found = searched(model, PROMPT, BeamSettings(2), SamplingParams(), longest=3)
    best = found.answers[0]
    rows = np.vstack(computed(model, [*PROMPT, *best.tokens], model.vocabulary.n_tokens)).astype(np.float64)
    logprobs = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
    own = sum(logprobs[len(PROMPT) - 1 + place, token] for place, token in enumerate(best.tokens))
    assert best.total == pytest.approx(own, abs=0.05)  # these were computed with keys and values in half precision


def test_a_cancel_gives_what_there_is(models: dict[str, LlamaModel]) -> None:
    model, steps = models["LlamaForCausalLM"], list[BeamStep]()

    def told(step: BeamStep) -> None:
        steps.append(step)
        if len(steps) == 2:
            model.flag.set()

    try:
        found = searched(model, PROMPT, BeamSettings(2), SamplingParams(), told=told)
    finally:
        model.flag.clear()
    assert found.is_cancelled
    assert [len(answer.tokens) for answer in found.answers] == [2, 2]


@pytest.mark.parametrize("trait", ["is_recurrent", "rope_depends_on_window", "translates"])
def test_models_whose_memory_cannot_fork_are_refused(trait: str) -> None:
    traits = dict.fromkeys(("is_recurrent", "rope_depends_on_window", "translates"), False) | {trait: True}
    loaded: Any = SimpleNamespace(weights=SimpleNamespace(**traits))
    command = SearchBeams(AnswerRequest(prompt="hello"), BeamSettings(2))
    with pytest.raises(UsageError, match="does not support --beams"):
        run_beams(command, lambda step: None, _native.CancelFlag(), loaded)


def test_stop_texts_and_bans(models: dict[str, LlamaModel]) -> None:
    model = models["LlamaForCausalLM"]
    free = searched(model, PROMPT, BeamSettings(2), SamplingParams(), limits=Limits(LONGEST, ignores_end=True))
    text = free.answers[0].text
    stop = text[2:4]
    stopped = searched(model, PROMPT, BeamSettings(2), SamplingParams(), limits=Limits(LONGEST, stop=(stop,)))
    assert not any(stop in answer.text for answer in stopped.answers)
    banned = searched(model, PROMPT, BeamSettings(2), SamplingParams(), limits=Limits(LONGEST, ban=(stop,)))
    assert not any(stop.casefold() in answer.text.casefold() for answer in banned.answers)
    assert any(stop in answer.text for answer in free.answers)


@pytest.mark.parametrize("beams", [2, 4])
def test_a_grammar_is_followed_as_a_naive_search_does(beams: int, models: dict[str, LlamaModel]) -> None:
    """The naive one computes every prefix anew, and asks a fresh matcher what may come."""
    model = models["Qwen2ForCausalLM"]
    grammar = read_grammar('root ::= ("ab" | "ba" | "aab" [0-9]) ("hello" | "he" | " world"){1,2}')
    settings = BeamSettings(beams, 1.0, "never")
    root = BeamState(0, matcher=compile_grammar(grammar, model.vocabulary))
    found = searched(model, PROMPT, settings, SamplingParams(), root=root, whole=True)
    naive = NaiveGrammar(model, grammar, PROMPT)
    naive.search = search = BeamSearch(settings, LONGEST, n_ends=2, whole=True)
    while not search.over:
        search.step(naive)
    wanted = [tuple(search.tree[node].token for node in search.path(each.node)) for each in search.answers()]
    assert [answer.tokens for answer in found.answers] == wanted
    assert all(re.fullmatch("(ab|ba|aab[0-9])(hello|he| world){1,2}", answer.text) for answer in found.answers)


class NaiveGrammar:
    """beams.Branches without forks."""

    def __init__(self, model: LlamaModel, grammar: Grammar, prompt: list[int]) -> None:
        self.search: BeamSearch
        self._model, self._grammar, self._prompt = model, grammar, prompt

    def likeliest(self, node: int, count: int) -> list[tuple[int, float]]:
        tokens = [self.search.tree[step].token for step in self.search.path(node)]
        matcher, n_vocab = compile_grammar(self._grammar, self._model.vocabulary), self._model.vocabulary.n_tokens
        for token in tokens:
            matcher.accept(token)
        with closing(LlamaContext(self._model, load(), n_outputs=N_CTX)) as context:
            context.decode([Entry(token, place, 0, True) for place, token in enumerate([*self._prompt, *tokens])])
            memory: Any = (ctypes.c_float * n_vocab).from_address(context.logits(-1))
            row = np.array(np.frombuffer(memory, np.float32), np.float64)
        row -= np.logaddexp.reduce(row)
        allowed = [(token, float(row[token])) for token in allowed_tokens(matcher, n_vocab)]
        return sorted(allowed, key=lambda pair: -pair[1])[:count]

    def ends(self, node: int, token: int) -> bool:
        return self._model.vocabulary.is_end(token)


# ---- the search itself, beside twins that do what its makers wrote, on random tables of log-probabilities


END, N_VOCAB, LONGEST_ANSWER = 3, 11, 7


def assert_same(found: Found, wanted: Found) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert [score for _, score in found] == pytest.approx([score for _, score in wanted])


@pytest.mark.parametrize("stopping", ["true", "false", "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("beams", [2, 3, 4])
def test_the_search_finds_what_transformers_finds(beams: int, penalty: float, stopping: str) -> None:
    settings = BeamSettings(beams, penalty, stopping)
    for seed, bias in itertools.product(range(6), (-3.0, 1.0, 3.0)):
        row = table(seed, N_VOCAB, END, bias)
        assert_same(ours(row, END, settings, LONGEST_ANSWER), transformers(row, END, settings, LONGEST_ANSWER))


def test_as_many_beams_as_there_are_answers_find_the_very_best() -> None:
    """Without pruning, the search has to find the best of all answers."""
    n_vocab, end, longest = 3, 0, 3
    row = table(4, n_vocab, end, 0.0)
    found = ours(row, end, BeamSettings(27, 0.0, "never"), longest)
    every: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(n_vocab), repeat=longest):
        answer = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        every[answer] = sum(row(answer[:place])[token] for place, token in enumerate(answer))
    assert found[0][0] == max(every, key=lambda answer: every[answer])


def test_a_cut_search_gives_what_it_has() -> None:
    row = table(2, N_VOCAB, END, -9.0)
    continuations = TableContinuations(row, END)
    continuations.search = search = BeamSearch(BeamSettings(2), LONGEST_ANSWER)
    search.step(continuations)
    search.cut()
    assert search.over
    assert [len(search.path(answer.node)) for answer in search.answers()] == [1, 1]
    assert search.tree[search.answers()[0].node].parent == ROOT


def test_whole_answers_go_before_cut_ones() -> None:
    firsts = set()
    for seed, whole in itertools.product(range(20), (False, True)):
        continuations = TableContinuations(table(seed, N_VOCAB, END, 0.0), END)
        continuations.search = search = BeamSearch(BeamSettings(2, 0.0, "never"), 3, whole=whole)
        while not search.over:
            search.step(continuations)
        ended = [search.tree[answer.node].ended for answer in search.answers()]
        if any(ended) and not all(ended):
            firsts.add((whole, ended[0]))
    assert firsts >= {(False, False), (True, True)}
    assert (True, False) not in firsts


@pytest.mark.parametrize(
    "wrong",
    [
        {"beams": 1},
        {"beams": 65},
        {"length_penalty": float("nan")},
        {"early_stopping": "maybe"},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        BeamSettings(**wrong)  # type: ignore[arg-type]
