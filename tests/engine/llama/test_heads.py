"""Drafts by a model's own prediction heads: every answer is the one without, and heads that are right are accepted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from support.drafters import NoDrafts
from support.mtp_models import write_mtp_model

from llmrun import _native
from llmrun.engine.constraint.matcher import compile_grammar
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.mtp_model import HeadModel
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence as Answer
from llmrun.engine.core.states import KVStore
from llmrun.engine.core.steps import StepCosts
from llmrun.engine.llama.base import DecodeError, Entry, MediaSpan
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.grammar import Grammar
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Failed, Finished
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation

N_CTX = 1024
Q8_0 = {"kv_type_k": "q8_0", "kv_type_v": "q8_0"}
MODELS = {
    f"{arch}-{rate}": (arch, rate, heads)
    for arch, heads, rates in (("qwen35", 1, (1.0, 0.7, 0.0)), ("glm4moe", 1, (1.0, 0.7, 0.0)), ("step35", 3, (1.0,)))
    for rate in rates
}
HYBRID_AND_NOT = ("qwen35-0.7", "glm4moe-0.7")
PROMPTS = (
    "the cat sat on a mat. ", "no, we go to rome by bus ", "a b c d e f g h i j k l m n o p q ", "lorem ipsum dolor ",
    "one two three four ", "she sells sea shells ", "how much wood ", "peter piper picked ",
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LlamaModel]]:
    folder = tmp_path_factory.mktemp("mtp")
    loaded: dict[str, LlamaModel] = {}
    for name, (arch, rate, heads) in MODELS.items():
        path = write_mtp_model(folder / f"{name}.gguf", arch, rate, heads=heads)
        loaded[name] = LlamaModel(str(path), 0, _native.CancelFlag(), draft_heads=True)
    yield loaded
    for model in loaded.values():
        model.close()


class Talk:
    """An engine over a model; with heads or without."""

    def __init__(
        self,
        model: LlamaModel,
        *,
        heads: bool,
        states: KVStore | None = None,
        speculation: Speculation | None = None,
        costs: StepCosts | None = None,
        **settings: Any,
    ) -> None:
        options = {"n_batch": 64, "n_rollback": 7, "draft_heads": heads, **settings}
        self.load = Load(model.path, N_CTX, **options)
        self.context = LlamaContext(model, self.load)
        self.heads = HeadModel(self.context, self.context.open_heads()) if heads else None
        self.engine = Engine(self.context, states=states, draft_model=self.heads)
        self._speculation, self._costs = speculation or Speculation(3), costs
        self.accepted = self.drafted = self.steps = 0
        self._number = 0

    def add(
        self,
        prompt: Sequence[int],
        n_tokens: int = 60,
        ban: str = "",
        sampling: SamplingParams | None = None,
        constraint: Any = None,
    ) -> Answer:
        tokens = list(prompt)
        drafting = None
        if self.heads is not None:
            drafting = Drafting(self._speculation, tokens, self.heads, self._costs, text=NoDrafts())
        sampling = sampling or SamplingParams(temperature=0)
        sampler = SequenceSampler(sampling, self.context.vocabulary, tokens, constraint)
        self._number += 1
        asked = AnswerRequest(sampling=sampling, limits=Limits(n_tokens, (), (ban,) if ban else ()))
        self.engine.add(Answer(self._number, tokens, sampler, asked, drafting=drafting))
        return self.engine._waiting[-1]

    def run(self, n_steps: int = 10_000) -> None:
        for _ in range(n_steps):
            if not self.engine.busy:
                return
            for event in self.engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Finished):
                    self.accepted += event.stats.accepted_tokens
                    self.drafted += event.stats.drafted_tokens
                    self.steps += event.stats.decode_steps
                    stats = event.stats
                    assert (stats.model_drafted, stats.model_accepted) == (stats.drafted_tokens, stats.accepted_tokens)

    def answers(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        sequences = [self.add(prompt, **options) for prompt in prompts]
        self.run()
        return [sequence.tokens[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


@contextmanager
def talking(model: LlamaModel, *, heads: bool, **settings: Any) -> Iterator[Talk]:
    talk = Talk(model, heads=heads, **settings)
    try:
        yield talk
    finally:
        talk.context.close()


def prompts_of(model: LlamaModel, count: int) -> list[list[int]]:
    return [model.vocabulary.tokenize(text, special=False) for text in PROMPTS[:count]]


def together(count: int) -> dict[str, Any]:
    return {"n_seq_max": count, "n_cells": count * N_CTX} if count > 1 else {}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in MODELS),
        *((name, Q8_0) for name in HYBRID_AND_NOT),
    ],
    ids=repr,
)
@pytest.mark.parametrize("count", [1, 8])
def test_answers_are_those_without_heads(
    models: dict[str, LlamaModel], name: str, count: int, settings: dict[str, Any]
) -> None:
    model, rate = models[name], MODELS[name][1]
    prompts = prompts_of(model, count)
    with talking(model, heads=False, **together(count), **settings) as plain:
        expected = plain.answers(prompts)
    with talking(model, heads=True, **together(count), **settings) as talk:
        assert talk.answers(prompts) == expected
        assert talk.drafted > 10 * count
        if rate == 1.0 and settings.get("kv_type_k") is None:
            assert talk.accepted >= 0.9 * talk.drafted, (talk.accepted, talk.drafted)
        elif rate == 0.0:
            assert talk.accepted == 0


# ---- beside what else happens to a sequence -----------------------------------------------------------


@pytest.mark.parametrize("name", HYBRID_AND_NOT)
def test_turns_of_a_conversation_and_shared_prefixes(models: dict[str, LlamaModel], name: str) -> None:
    model = models[name]
    first, second = prompts_of(model, 2)
    answered: list[list[list[int]]] = []
    for heads in (False, True):
        with talking(model, heads=heads, **together(3)) as talk:
            one = talk.answers([first * 6])[0]
            turn = [*first * 6, *one, *second]
            two = talk.answers([turn])[0]  # goes on in the same slot
            forks = talk.answers([[*first * 6, *second], [*turn, *first], second])  # others begin with a copy
            answered.append([one, two, *forks])
            if heads:
                assert talk.accepted > 0.3 * talk.drafted > 0
    assert answered[0] == answered[1]


@pytest.mark.parametrize("name", HYBRID_AND_NOT)
def test_retracted_tokens(models: dict[str, LlamaModel], name: str) -> None:
    model = models[name]
    prompts = prompts_of(model, 4)
    with talking(model, heads=False, **together(4)) as plain:
        expected = plain.answers(prompts, ban="q")
    with talking(model, heads=True, **together(4)) as talk:
        assert talk.answers(prompts, ban="q") == expected
        assert talk.accepted > 0


@pytest.mark.parametrize("settings", [{}, Q8_0], ids=repr)
@pytest.mark.parametrize("name", HYBRID_AND_NOT)
def test_preemption(models: dict[str, LlamaModel], name: str, settings: dict[str, Any]) -> None:
    """There are fewer cells than the answers need, so that some begin again."""
    model = models[name]
    prompts = [prompt * 3 for prompt in prompts_of(model, 4)]
    cells = {"n_seq_max": 4, "n_cells": sum(map(len, prompts)) + 120, "n_batch": 32}
    with talking(model, heads=False, **together(4), **settings) as plain:
        expected = plain.answers(prompts)
    with talking(model, heads=True, **cells, **settings) as talk:
        assert talk.answers(prompts) == expected
        assert talk.drafted > 0


def two_turns(model: LlamaModel, **settings: Any) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return a long question, its answer without heads, a second question, and the answer to that."""
    first, second = prompts_of(model, 2)
    long = first * 30
    with talking(model, heads=False, **settings) as plain:
        one = plain.answers([long])[0]
        return long, one, second, plain.answers([[*long, *one, *second]])[0]


@pytest.mark.parametrize("settings", [{}, Q8_0], ids=repr)
@pytest.mark.parametrize("name", HYBRID_AND_NOT)
def test_saved_states(models: dict[str, LlamaModel], name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """They hold the heads' cells too; one that was saved without heads is read, and one with heads without."""
    model = models[name]
    long, one, second, expected = two_turns(model, **settings)
    for saved_with, read_with in ((True, True), (False, True), (True, False)):
        states = KVStore(tmp_path / f"{saved_with}-{read_with}", "a key", 1 << 30)
        with talking(model, heads=saved_with, states=states, **settings) as talk:
            assert talk.answers([long])[0] == one
            assert talk.engine.save(1, prompt_only=False)[0] > 0
        with talking(model, heads=read_with, states=states, **settings) as talk:
            sequence = talk.add([*long, *one, *second])
            talk.run()
            assert sequence.n_reused >= len(long)
            assert sequence.tokens[len(long) + len(one) + len(second) :] == expected
            assert talk.accepted > 0 or not read_with


@pytest.mark.parametrize("settings", [{}, Q8_0], ids=repr)
@pytest.mark.parametrize("name", HYBRID_AND_NOT)
def test_the_engine_starts_again_with_the_prefixes_of_the_last(
    models: dict[str, LlamaModel], name: str, settings: dict[str, Any]
) -> None:
    model = models[name]
    long, one, second, expected = two_turns(model, **settings)
    with talking(model, heads=True, **settings) as talk:
        talk.answers([long])
        prefixes = talk.engine.prefixes()
    with talking(model, heads=True, **settings) as talk:
        talk.engine = Engine(talk.context, draft_model=talk.heads, prefixes=prefixes)
        assert talk.answers([[*long, *one, *second]])[0] == expected


@pytest.mark.parametrize("name", HYBRID_AND_NOT)
@pytest.mark.parametrize("seed", range(8))
def test_aborts_anywhere(models: dict[str, LlamaModel], name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel that came too late, or one of another answer, stops the target's batch or the heads'."""
    model, draws = models[name], random.Random(seed)
    prompts = prompts_of(model, 3)
    with talking(model, heads=False, **together(3)) as plain:
        expected = plain.answers(prompts, n_tokens=40)
    with talking(model, heads=True, **together(3)) as talk:
        context, heads = talk.context, talk.context.heads
        assert heads is not None
        for owner, method in ((context, "decode"), (heads, "begin"), (heads, "go_on")):
            inner = getattr(owner, method)

            def aborting(*arguments: Any, inner: Any = inner) -> Any:
                if draws.random() < 0.1:
                    model.flag.set()
                try:
                    return inner(*arguments)
                finally:
                    model.flag.clear()

            monkeypatch.setattr(owner, method, aborting)
        assert talk.answers(prompts, n_tokens=40) == expected


@pytest.mark.parametrize("name", HYBRID_AND_NOT)
def test_a_cancelled_answer_leaves_what_the_next_one_needs(models: dict[str, LlamaModel], name: str) -> None:
    model = models[name]
    first, second = prompts_of(model, 2)
    with talking(model, heads=False) as plain:
        expected = plain.answers([first * 4, [*first * 4, *second]])
    with talking(model, heads=True) as talk:
        talk.add(first * 4)
        talk.run(n_steps=9)
        talk.engine.cancel(1)
        talk.run()
        assert talk.answers([first * 4, [*first * 4, *second]]) == expected


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, method) for name in HYBRID_AND_NOT for method in ("begin", "go_on", "decode")),
        *(("step35-1.0", method) for method in ("begin", "decode")),  # whose first head drafts one token
    ],
)
def test_an_answer_cancelled_within_a_draft_disturbs_no_other(
    models: dict[str, LlamaModel], name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of three is cancelled while the heads draft, or their drafts are verified; its turn then goes on."""
    model = models[name]
    prompts = prompts_of(model, 3)
    with talking(model, heads=False, **together(3)) as plain:
        expected = plain.answers(prompts)
        following = plain.answers([[*prompts[0] * 4, *prompts[1]]])
    with talking(model, heads=True, **together(3)) as talk:
        assert talk.context.heads is not None
        owner = talk.context if method == "decode" else talk.context.heads
        inner, calls = getattr(owner, method), []

        def cancelling(*arguments: Any) -> Any:
            is_of_drafts = method != "decode" or any(answer.draft for answer in talk.engine._active)
            calls.extend([1] * is_of_drafts)
            if len(calls) == 3 and is_of_drafts:
                talk.engine.cancel(1)
                model.flag.set()
            try:
                return inner(*arguments)
            finally:
                model.flag.clear()

        monkeypatch.setattr(owner, method, cancelling)
        sequences = [talk.add(prompt) for prompt in prompts]
        talk.run()
        assert len(calls) >= 3
        answered = [sequence.tokens[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
        assert len(answered[0]) < len(expected[0])
        assert answered[0] == expected[0][: len(answered[0])]
        assert answered[1:] == expected[1:]
        assert talk.answers([[*prompts[0] * 4, *prompts[1]]]) == following


@pytest.mark.parametrize("name", HYBRID_AND_NOT)
@pytest.mark.parametrize("count", [1, 4])
def test_sampled_answers_are_those_of_their_seeds(models: dict[str, LlamaModel], name: str, count: int) -> None:
    """The logits have clear winners, so only a high temperature draws others."""
    model = models[name]
    prompts, sampling = prompts_of(model, count), SamplingParams(temperature=4.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
    with talking(model, heads=False, **together(count)) as plain:
        expected = plain.answers(prompts, sampling=sampling)
    with talking(model, heads=True, **together(count)) as talk:
        assert talk.answers(prompts, sampling=sampling) == expected
        assert 0 < talk.accepted < talk.drafted


def test_a_model_without_heads_has_no_context_for_them(tmp_path: Path) -> None:
    path = write_mtp_model(tmp_path / "trunk.gguf", "glm4moe", 1.0, part="trunk")
    model = LlamaModel(str(path), 0, _native.CancelFlag(), draft_heads=True)
    context = LlamaContext(model, Load(str(path), N_CTX))
    with pytest.raises(DecodeError):
        context.open_heads()
    context.close()
    model.close()


# ---- what pays ----------------------------------------------------------------------------------------


PAYING = Speculation(15, only_if_it_pays=True, draft_cost=0.05)


def costs_of(*, cheap: bool) -> StepCosts:
    """Costs by which wide steps take little longer than single ones, or as long as so many."""
    return StepCosts([(width, 1 + width / 40 if cheap else width) for width in (1, 2, 3, 4, 8, 16)])


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", ["qwen35-1.0", "qwen35-0.0", "glm4moe-1.0", "glm4moe-0.0"])
def test_the_table_decides(models: dict[str, LlamaModel], name: str, count: int) -> None:
    model, rate = models[name], MODELS[name][1]
    prompts = prompts_of(model, count)
    with talking(model, heads=False, **together(count)) as plain:
        expected = plain.answers(prompts, n_tokens=150)
    for cheap in (True, False):
        with talking(model, heads=True, speculation=PAYING, costs=costs_of(cheap=cheap), **together(count)) as talk:
            assert talk.answers(prompts, n_tokens=150) == expected
            tokens_per_step = 150 * count / talk.steps
            if not cheap:
                assert talk.drafted == 0
            elif rate == 1.0:
                assert tokens_per_step > 2.5, tokens_per_step
            else:
                assert talk.drafted < 60 * count, "drafts that are never right end"


# ---- features of requests -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", HYBRID_AND_NOT)
@pytest.mark.parametrize("count", [1, 4])
def test_grammars(models: dict[str, LlamaModel], name: str, count: int) -> None:
    model = models[name]
    grammar = Grammar("gbnf", "root ::= [a-p0-9,. ]+")  # without some of the tokens that the model and its heads want
    prompts, found = prompts_of(model, count), []
    for heads in (False, True):
        with talking(model, heads=heads, **together(count)) as talk:
            vocabulary = talk.context.vocabulary
            sequences = [talk.add(prompt, constraint=compile_grammar(grammar, vocabulary)) for prompt in prompts]
            talk.run()
            found.append([sequence.tokens for sequence in sequences])
            assert talk.drafted > 0 or not heads
    assert found[0] == found[1]


@pytest.mark.parametrize("name", HYBRID_AND_NOT)
def test_adapters(models: dict[str, LlamaModel], name: str, tmp_path: Path) -> None:
    model, arch = models[name], MODELS[name][0]
    generator = np.random.default_rng(3)
    writer = GGUFWriter(tmp_path / "style.gguf", arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for layer in (3, 4):  # the target's last, and the heads'
        writer.add_tensor(f"blk.{layer}.ffn_down.weight.lora_a", generator.normal(0, 1, (4, 320)).astype(np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_down.weight.lora_b", generator.normal(0, 1, (256, 4)).astype(np.float32))
    if arch == "glm4moe":
        writer.tensors[0] = {each: info for each, info in writer.tensors[0].items() if each.startswith("blk.3")}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    prompts, adapters = prompts_of(model, 2), (Adapter("style", str(tmp_path / "style.gguf")),)
    with talking(model, heads=False, **together(2)) as plain:
        without = plain.answers(prompts)
    with talking(model, heads=False, adapters=adapters, **together(2)) as plain:
        expected = plain.answers(prompts)
    assert expected != without, "it makes a difference"
    with talking(model, heads=True, adapters=adapters, **together(2)) as talk:
        assert talk.answers(prompts) == expected
        assert talk.drafted > 0


class Picture:
    """Vectors in the place of tokens; a base.EmbeddedInput."""

    causal, encoded = True, 1.0

    def __init__(self, start: int, n_tokens: int, width: int) -> None:
        self.n_tokens, self.sequence_id, self.span = n_tokens, 0, MediaSpan(start, start + n_tokens, n_tokens)
        self._vectors = np.random.default_rng(1).normal(0, 1, (n_tokens, width)).astype(np.float32)

    def positions(self, first: int) -> list[int]:
        return list(range(first, first + self.n_tokens)) * 4

    def address(self) -> int:
        return int(self._vectors.ctypes.data)


def test_after_an_image_the_heads_begin_again(models: dict[str, LlamaModel]) -> None:
    with talking(models["qwen35-0.7"], heads=True) as talk:
        assert talk.heads is not None
        talk.heads.switch_on()
        context, heads = talk.context, talk.context.heads
        assert heads is not None
        context.decode([Entry(token, token, 0, False) for token in range(20)])
        context.decode(Picture(20, 4, 256))
        assert not context.can_use_heads(0)
        context.decode([Entry(token, 24 + token, 0, token == 9) for token in range(10)])
        assert context.can_use_heads(0)
        assert heads.logits(heads.begin([(0, 7)])[0])
        assert heads.logits(heads.go_on([(0, 8)])[0])
        heads.end([0])
        context.decode([Entry(7, 34, 0, True)])
        assert context.can_use_heads(0)
