"""Preparation of requests: template, tokens, grammar, reasoning, and refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support import fake_context
from support.answers import split
from support.fake_context import BEGIN, CONTROL, END, TURN, FakeContext, FakeVocabulary, Model, scripted, tokens_of
from support.tool_templates import TOOL_TEMPLATES

from llmrun.engine.core.loop import Engine
from llmrun.engine.core.states import KVStore
from llmrun.engine.loaded import LoadedModel, state_key
from llmrun.engine.prompt import sandbox
from llmrun.engine.prompt.template import ChatTemplate, compile_template
from llmrun.engine.service import Preparer
from llmrun.errors import BadModelError, ContextOverflowError, LlmrunError, UsageError
from llmrun.grammar import Grammar, read_grammar
from llmrun.protocol import toolcalls
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.jobs.text import TokenizeText
from llmrun.protocol.loading import Load
from llmrun.protocol.media import Media
from llmrun.protocol.messages import (
    AnswerPart,
    AnswerRequest,
    Event,
    Failed,
    Finished,
    Generate,
    Message,
    Rendered,
    Rendering,
    Started,
    TextDelta,
    Tool,
)
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.questions import SaveState, StateSaved
from llmrun.system import file_identity

PLAIN = "{{ messages[-1].content }}"
OPENS = PLAIN + "<think>{# </think> #}"
KNOWS = PLAIN + "{# </think> #}"
GRAMMAR = read_grammar('root ::= "{" [a-z]* "}"')
GREEDY = SamplingParams(temperature=0)


def refuse(event: Event) -> None:
    raise AssertionError("nothing is said")


TURNS = "{% for message in messages %}{{ message.content }}{% endfor %}<"


def preparer(template: str | None = PLAIN, vocabulary: Any = None, n_ctx: int = 100) -> Preparer:
    return Preparer(vocabulary or FakeVocabulary(), template, n_ctx)


def chat(text: str, **more: Any) -> Generate:
    return Generate(1, AnswerRequest((Message("user", text),), **more))


# ---- thoughts ------------------------------------------------------------------------------------------------


def answer(model: Model, template: str, **asked: Any) -> tuple[str, Started]:
    """The whole way from a conversation to an answer; its text, and how it began."""
    context = FakeContext(model, n_ctx=200)
    engine = Engine(context)
    defaults: Mapping[str, Any] = {"sampling": GREEDY, "limits": Limits(60)}
    engine.add(preparer(template).prepare(chat("Hi", **{**defaults, **asked}), lambda event: None))
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    assert isinstance(events[-1], Finished), events[-1]
    started = events[0]
    assert isinstance(started, Started)
    return "".join(event.text for event in events if isinstance(event, TextDelta)), started


def test_a_grammar_lets_the_model_think_first() -> None:
    model = scripted({"Hi<think>": "what is asked? {</think>\n\n{yes}"})
    text, started = answer(model, OPENS, grammar=GRAMMAR)
    assert text == "what is asked? {</think>\n\n{yes}"
    assert started.thinking


def test_reasoning_that_are_closed_by_force_fit_any_grammar() -> None:
    text, _ = answer(scripted({"Hi<think>": "what is asked?"}), OPENS, grammar=GRAMMAR, thinking_tokens=3)
    thoughts, closing, said = text.partition("</think>\n\n")
    assert (thoughts, closing) == ("wha\n", "</think>\n\n")
    assert said.strip().startswith("{"), "nothing is scripted here, and the grammar has to be followed"


def test_closing_the_reasoning_does_not_end_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end token of RWKV is an empty line."""
    tokenize = FakeVocabulary.tokenize

    def with_end(self: FakeVocabulary, text: str, *, special: bool, begins: bool = True) -> list[int]:
        is_end = special and text.endswith("\n\n")
        return [*tokenize(self, text[:-2], special=True), END] if is_end else tokenize(self, text, special=special)

    monkeypatch.setattr(FakeVocabulary, "tokenize", with_end)
    model = scripted({"Hi<think>": "what is asked?", "Hi<think>wha\n</think>": "Noon"})
    assert answer(model, OPENS, thinking_tokens=3)[0] == "wha\n</think>Noon"


def test_a_grammar_binds_at_once_where_the_model_does_not_think() -> None:
    assert answer(scripted({"Hi": "{yes}"}), PLAIN, grammar=GRAMMAR)[0] == "{yes}"
    assert answer(scripted({"Hi": "<think>{yes}"}), PLAIN, grammar=GRAMMAR)[0].startswith("{")
    assert answer(scripted({"Hi": "{yes}"}), KNOWS, grammar=GRAMMAR)[0] == "{yes}"


def test_an_answer_goes_on_from_its_given_beginning() -> None:
    said, started = answer(scripted({"HiYes, ": "it is"}), PLAIN, begins="Yes, ")
    assert (said, started.prompt_tokens) == ("it is", len("HiYes, "))
    said, started = answer(scripted({"Hi<think></think>\n\nYes, ": "it is"}), OPENS, begins="Yes, ")
    assert (said, started.thinking) == ("it is", False), "the reasoning is closed before it"


def test_a_grammar_accepts_the_given_beginning_first() -> None:
    said, _ = answer(scripted({"Hi{ye": "s}!"}), PLAIN, begins="{ye", grammar=GRAMMAR)
    assert said == "s}"
    said, _ = answer(scripted({"Hi<think></think>\n\n{": "yes}"}), OPENS, begins="{", grammar=GRAMMAR)
    assert said == "yes}", "the reasoning is closed, and the grammar holds at once"
    with pytest.raises(UsageError, match="begins with 'Yes' can't be continued"):
        preparer().prepare(chat("Hi", begins="Yes", grammar=GRAMMAR), lambda event: None)
    said, _ = answer(scripted({"HiYes<": "{yes}"}), TURNS, begins="Yes", grammar=GRAMMAR, may_begin_anew=True)
    assert said == "{yes}", "an answer of its own after the one that does not fit"


def test_given_reasoning_stands_before_the_answer_or_is_continued() -> None:
    said, started = answer(
        scripted({"Hi<think>2+2\n</think>\n\nIt is": " 4"}), OPENS, begins="It is", begins_reasoning="2+2"
    )
    assert (said, started.thinking) == (" 4", False)
    said, started = answer(scripted({"Hi<think>\n2+": "2</think>4"}), KNOWS + "{# <think> #}", begins_reasoning="2+")
    assert (said, started.thinking) == ("2</think>4", True)
    said, started = answer(scripted({"Hi<think>\n2+": "2</think>4"}), KNOWS, begins="<think>\n2+")
    assert (said, started.thinking) == ("2</think>4", True), "tags in the text are reasoning too"
    assert answer(scripted({"HiIt is": " 4"}), PLAIN, begins="It is", begins_reasoning="2+2")[0] == " 4", "knows none"


def test_a_given_beginning_is_no_part_of_the_answer() -> None:
    prepared = preparer(KNOWS).prepare(chat("Hi", begins="a <thi"), lambda event: None)
    assert prepared.splitter is not None
    assert prepared.splitter.feed("nk> b") == (AnswerPart("text", "nk> b"),)
    calls = preparer().prepare(chat("Hi", begins="Let me see. <tool", tools=(Tool("look"),)), lambda event: None)
    assert calls.splitter is not None
    parts = (*calls.splitter.feed(" box> it is"), *calls.splitter.flush())
    assert "".join(part.text for part in parts) == " box> it is"


def test_a_given_beginning_needs_a_chat_and_room() -> None:
    with pytest.raises(UsageError, match="plain prompt"):
        preparer().prepare(Generate(1, AnswerRequest(prompt="Hi", begins="Yes")), lambda event: None)
    long = preparer().prepare(chat("Hi", begins="far too long " * 500), lambda event: None)
    with pytest.raises(ContextOverflowError, match="6,502 tokens long"):
        Engine(FakeContext(scripted({}), n_ctx=100)).add(long)


@pytest.mark.parametrize("reasons", [True, False])
def test_what_loading_says_of_reasoning_is_what_requests_find(reasons: bool) -> None:
    tags = "<|think|>", "<|content|>"
    source = (
        "{% for m in messages %}{% if m.reasoning %}<|think|>{{ m.reasoning }}<|content|>{% endif %}"
        "{{ m.content }}\n{% endfor %}"
    )
    prepares = preparer(source if reasons else source.replace("{{ m.reasoning }}", ""))
    assert prepares.prompts.thinking_tags == (tags if reasons else ())
    found = prepares.prompts.reasoning(chat("Hi").asked)
    assert (found[:2] if found else ()) == prepares.prompts.thinking_tags


def test_a_call_that_must_come_is_not_thought_about_without_end() -> None:
    for choice in ("required", "=look"):
        forced = preparer(OPENS).prepare(
            chat("Hi", tools=(Tool("look"),), tool_choice=choice, limits=Limits(40)), lambda event: None
        )
        assert forced.thinking is not None
        forced.thinking.push("a")
        assert not forced.thinking.is_used_up
        for _ in range(19):
            forced.thinking.push("a")
        assert forced.thinking.is_used_up, "half of the answer"
    free = preparer(OPENS).prepare(chat("Hi", tools=(Tool("look"),), limits=Limits(40)), lambda event: None)
    assert free.thinking is None


@pytest.mark.parametrize("template", [OPENS, KNOWS, PLAIN])
def test_a_stop_string_in_the_reasoning_does_not_end_the_answer(template: str) -> None:
    thought = "" if template is OPENS else "<think>"
    model = scripted({"Hi<think>" if template is OPENS else "Hi": f"{thought}a.\n\nEND.</think>\n\nb END c"})
    text, started = answer(model, template, limits=Limits(60, ("\n\n", "END")))
    received = split(started, text)
    assert (received.reasoning, received.text) == ("a.\n\nEND.", "b ")


@pytest.fixture
def tags_are_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fake_context.CONTROL, BEGIN, "<think>")
    monkeypatch.setitem(fake_context.CONTROL, TURN, "</think>")


THINKS = [BEGIN, *tokens_of("hm"), TURN, *tokens_of("\n{yes}"), END]


@pytest.mark.usefixtures("tags_are_tokens")
def test_the_model_may_begin_to_think_by_itself() -> None:
    assert answer(scripted({"Hi": THINKS}), KNOWS, grammar=GRAMMAR)[0] == "<think>hm</think>\n{yes}"


@pytest.mark.usefixtures("tags_are_tokens")
def test_it_may_not_where_the_user_wants_none() -> None:
    text, _ = answer(scripted({"Hi": THINKS}), KNOWS, grammar=GRAMMAR, thinking=False)
    assert text.startswith("{")


def test_which_control_tokens_are_shown_is_the_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fake_context.CONTROL, BEGIN, "<t1>")
    monkeypatch.setitem(fake_context.CONTROL, TURN, "</t1>")
    shows = "{% for m in messages %}<t1>{{ m.reasoning_content }}</t1>{{ m.content }}{% endfor %}"
    model = preparer(PLAIN)
    assert model.prepare(chat("Hi"), lambda event: None).shown_controls == frozenset()
    assert model.prepare(chat("Hi", template=shows), lambda event: None).shown_controls == {BEGIN, TURN}
    assert model.prepare(chat("Hi"), lambda event: None).shown_controls == frozenset()


@pytest.mark.usefixtures("tags_are_tokens")
@pytest.mark.parametrize("own", [KNOWS, PLAIN])
def test_the_models_own_tags_are_shown_with_every_template(own: str) -> None:
    assert preparer(own).prepare(chat("Hi", template=PLAIN), lambda event: None).shown_controls == {BEGIN, TURN}


@pytest.mark.usefixtures("tags_are_tokens")
def test_a_model_may_reason_though_its_template_does_not_say_so() -> None:
    text, started = answer(scripted({"Hi": THINKS}), PLAIN)
    received = split(started, text)
    assert (received.reasoning, received.text) == ("hm", "{yes}")


def test_a_control_token_is_shown_that_only_begins_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Gemma 4's."""
    monkeypatch.setitem(fake_context.CONTROL, BEGIN, "<|channel>")
    monkeypatch.setitem(fake_context.CONTROL, TURN, "<channel|>")
    thinks = [BEGIN, *tokens_of("thought\nhm"), TURN, *tokens_of("Hello"), END]
    text, started = answer(scripted({"Hi": thinks}), PLAIN + "{# <channel|> #}")
    received = split(started, text)
    assert (received.reasoning.strip(), received.text) == ("hm", "Hello")


HARMONY = PLAIN + "{# <|channel|>final<|message|> #}"  # as in gpt-oss's
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"


def test_a_grammar_binds_gpt_oss_after_its_channels() -> None:
    model = scripted({f"Hi{ANALYSIS}": f"hm {{{FINAL}{{yes}}", "Hi<|channel|>final<|message|>": "{yes}"})
    text, started = answer(model, HARMONY, grammar=GRAMMAR, limits=Limits(100))
    received = split(started, text)
    assert (received.reasoning, received.text) == ("hm {", "{yes}")
    assert answer(model, HARMONY, grammar=GRAMMAR, thinking=False)[0] == "{yes}"


CALLING = (
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}{% if tools %}{{ tools[0].function.description }}"
    "{% endif %}{# <|channel|>final<|message|> #}"
)
NOON = Tool("noon", "?", '{"type": "object", "properties": {"town": {"enum": ["Rome"]}}, "required": ["town"]}')


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_gpt_oss_thinks_and_calls(choice: str) -> None:
    """It wants to ask about Paris, which the tool does not know."""
    call = '<|channel|>commentary to=functions.noon <|constrain|>json<|message|>{"town":'
    said = f"{ANALYSIS}hm<|end|><|start|>assistant{call}"
    model = scripted({"Hi?": f'{said} "Paris"}}' if choice == "auto" else f'{call} "Paris"}}'})
    text, started = answer(model, CALLING, tools=(NOON,), tool_choice=choice, limits=Limits(200))
    received = split(started, text, (NOON,), syntax=toolcalls.HARMONY)
    assert received.reasoning == ("hm" if choice == "auto" else "")
    (called,) = received.calls
    assert (received.text, called.name, json.loads(called.arguments)) == ("", "noon", {"town": "Rome"})


def test_a_call_may_follow_reasoning_that_is_closed_by_force() -> None:
    closed = "<|end|><|start|>assistant\n\n"
    call = '<|channel|>commentary to=functions.noon <|constrain|>json<|message|>{"town": "Rome"}'
    model = scripted({"Hi?": f"{ANALYSIS}hm, what then", f"Hi?{ANALYSIS}hm,\n{closed}": call})
    text, started = answer(model, CALLING, tools=(NOON,), thinking_tokens=3, limits=Limits(200))
    received = split(started, text, (NOON,), syntax=toolcalls.HARMONY)
    assert [(called.name, json.loads(called.arguments)) for called in received.calls] == [("noon", {"town": "Rome"})]


def test_gpt_oss_answers_without_a_call() -> None:
    model = scripted({"Hi?": f"{ANALYSIS}hm{FINAL}Noon."})
    text, started = answer(model, CALLING, tools=(NOON,), limits=Limits(200))
    received = split(started, text, syntax=toolcalls.HARMONY)
    assert (received.reasoning, received.text, received.calls) == ("hm", "Noon.", ())


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [chat("Hi", template="{# nothing #}"), chat(""), Generate(1, AnswerRequest(prompt=""))],
    ids=["template", "message", "prompt"],
)
def test_an_empty_prompt_is_the_users_mistake(request_: Generate) -> None:
    with pytest.raises(UsageError, match="the prompt is empty") as caught:
        preparer().prepare(request_, lambda event: None)
    assert caught.value.hint


class Lacking(FakeVocabulary):
    """A vocabulary that gives the same token ids for every text."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self._given = tokens

    def tokenize(self, text: str, *, special: bool, begins: bool = True) -> list[int]:
        return list(self._given)


@pytest.mark.parametrize("tokens", [(), (-1,), (5, 260), (5, -1)])
def test_a_vocabulary_that_lacks_the_prompts_tokens_is_a_bad_model(tokens: tuple[int, ...]) -> None:
    for asked in (chat("Hi"), Generate(1, AnswerRequest(prompt="Hi"))):
        with pytest.raises(BadModelError, match="can't encode this prompt"):
            preparer(vocabulary=Lacking(*tokens)).prepare(asked, lambda event: None)


LONG = 1_500_000
"""Tokens, more than are kept of a prompt that does not fit."""


@pytest.mark.parametrize(
    ("request_", "size"),
    [
        (chat("x" * LONG), LONG),
        (Generate(1, AnswerRequest(prompt="x" * LONG)), LONG),
        (Generate(1, AnswerRequest((Message("user", "x" * 1000),) * 2000, template=TURNS)), 2_000_001),
        (chat("x" * 9_000), 9_000),
    ],
    ids=["message", "prompt", "many messages", "not much too long"],
)
def test_an_overflow_names_the_number_of_tokens(request_: Generate, size: int) -> None:
    model = preparer()
    with pytest.raises(ContextOverflowError, match=f"{size:,} tokens long, the context window 100") as caught:
        Engine(FakeContext(scripted({}), n_ctx=100)).add(model.prepare(request_, lambda event: None))
    assert "--ctx" in caught.value.hint
    assert caught.value.size == (size, 100)


@pytest.mark.parametrize("lengths", [(9_000, 9_000, 9_000, 2), (2, LONG), (LONG, 2)])
def test_a_conversation_of_any_length_is_counted(lengths: tuple[int, ...]) -> None:
    asked, model = AnswerRequest(tuple(Message("user", "x" * length) for length in lengths), template=TURNS), preparer()
    counted = model.prompts.count(asked, 1, lambda event: None)
    assert (counted.each, counted.total) == (lengths, sum(lengths) + 1)
    assert len(model.prompts.rendered(asked, 1, lambda event: None)) == counted.total
    prompt = model.prompts.prompt(Generate(1, asked), lambda event: None, is_counted=True)
    assert len(prompt.tokens) <= 1 << 20, "memory is bounded"


def test_where_its_end_is_ignored_an_answer_goes_on_to_its_limit() -> None:
    model = scripted({"Hi": "Ho"})
    assert answer(model, PLAIN)[0] == "Ho"
    text, _ = answer(model, PLAIN, limits=Limits(9, ignores_end=True))
    assert text.startswith("Ho")
    assert len(text) > len("Ho")
    with pytest.raises(UsageError, match="ignore_eos"):
        answer(model, PLAIN, limits=Limits(9, ignores_end=True), grammar=GRAMMAR)


@pytest.mark.parametrize("reasons", [False, True])
def test_a_first_answer_parses_the_template_once_and_renders_little(
    reasons: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start waits for each: parsing takes longer than all trial renderings of a plain answer."""
    counts = {"parsed": 0, "rendered": 0}
    parse, render = sandbox.make_environment, ChatTemplate._generate

    def count_parse() -> Any:
        counts["parsed"] += 1
        return parse()

    def count_render(*arguments: Any, **named: Any) -> str:
        counts["rendered"] += 1
        return render(*arguments, **named)

    monkeypatch.setattr(sandbox, "make_environment", count_parse)
    monkeypatch.setattr(ChatTemplate, "_generate", count_render)
    compile_template.cache_clear()
    template = TOOL_TEMPLATES["qwen-xml"] + (
        "{% if enable_thinking is false %}<think></think>{% elif clear_thinking %}{% endif %}" if reasons else ""
    )
    prepare = preparer(template, n_ctx=1000).prepare
    prepare(chat("Hi"), lambda event: None)
    assert counts["parsed"] == 1
    assert counts["rendered"] <= (24 if reasons else 12), "tools and earlier turns have to wait until one is asked for"
    first = counts["rendered"]
    prepare(chat("Hi again"), lambda event: None)
    assert counts == {"parsed": 1, "rendered": first + 1}


def test_a_text_is_tokenized_as_it_is() -> None:
    assert preparer().prompts.tokenize(TokenizeText("", "ab")).tokens == tuple(tokens_of("ab"))
    assert len(preparer().prompts.tokenize(TokenizeText("", "x" * 100_000)).tokens) == 100_000, "whatever the window"
    with pytest.raises(UsageError, match=f"has {LONG:,} tokens, and at most 1,048,576 can be returned"):
        preparer().prompts.tokenize(TokenizeText("", "x" * LONG))


class SentencePieces(FakeVocabulary):
    """Puts a space before a text, and after a control token."""

    def tokenize(self, text: str, *, special: bool, begins: bool = True) -> list[int]:
        pieces = text.split(CONTROL[TURN])
        tokens = (tokens_of(f" {piece}") if piece else [] for piece in pieces)
        return [token for found in tokens for token in (*found, TURN)][:-1]


@pytest.mark.parametrize("text", ["Hi", " Hi", "  a b ", f"Hi{CONTROL[TURN]}you", f"{CONTROL[TURN]} a"])
def test_detokenize_is_the_inverse_of_tokenize(text: str) -> None:
    made = preparer(vocabulary=SentencePieces()).prompts
    assert made.detokenize(made.tokenize(TokenizeText("", text)).tokens) == text


def test_token_ids_are_a_prompt() -> None:
    asked = Generate(1, AnswerRequest(prompt="", prompt_tokens=(65, 66)))
    assert preparer().prompts.prompt(asked).tokens == [65, 66]
    with pytest.raises(UsageError, match="there is no token"):
        preparer().prompts.prompt(Generate(1, AnswerRequest(prompt="", prompt_tokens=(10**9,))))


def test_a_gap_is_filled_in_by_a_vocabulary_that_can() -> None:
    asked = Generate(1, AnswerRequest(prompt="ab", suffix="c"))
    with pytest.raises(UsageError, match="fill in the middle"):
        preparer().prompts.prompt(asked)
    vocabulary = FakeVocabulary()
    vocabulary.fill_in = (1, 2, 3)
    assert preparer(vocabulary=vocabulary).prompts.prompt(asked).tokens == [1, *tokens_of("ab"), 2, *tokens_of("c"), 3]
    empty = AnswerRequest(prompt="", suffix="")
    assert preparer(vocabulary=vocabulary).prompts.prompt(Generate(1, empty)).tokens == [1, 2, 3]


def test_tokens_are_a_text_again() -> None:
    assert preparer().prompts.detokenize(tokens_of("aé")) == "aé"
    half = tuple(tokens_of("é"))[:1]
    assert preparer().prompts.detokenize(half) == "\ufffd"
    for token in (-1, 10**9):
        with pytest.raises(UsageError, match="there is no token"):
            preparer().prompts.detokenize((token,))


# ---- telling, and saving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_counted", [False, True])
def test_the_front_is_told_when_the_template_runs(is_counted: bool) -> None:
    """Tokens and grammar are not its work."""
    model = preparer()
    said: list[Event] = []
    asked = AnswerRequest((Message("user", "Hi"),))
    model.prompts.count(asked, 1, said.append) if is_counted else model.prepare(Generate(1, asked), said.append)
    assert said == [Rendering(1), Rendered(1)]


def states(folder: Path) -> LoadedModel:
    file = folder / "model.gguf"
    if not file.exists():
        file.write_bytes(b"GGUF")
    weights: Any = SimpleNamespace(
        vocabulary=FakeVocabulary(),
        chat_template=PLAIN,
        path=str(file),
        rope_depends_on_window=False,
        identities={str(file): file_identity(file)},
    )
    context = FakeContext(scripted({}), n_ctx=500, n_batch=500)
    return LoadedModel(weights, context, Load(str(file), 500, states=str(folder / "states"), states_bytes=10**6))


BASE = Load("", 500)
LORA = (Adapter("a", "adapter.gguf", 1.0),)


@pytest.mark.parametrize(
    ("load", "changes"),
    [
        (BASE, {"kv_type_k": "q8_0"}),
        (BASE, {"kv_type_v": "q8_0"}),
        (BASE, {"flash_attention": "off"}),
        (BASE, {"adapters": LORA}),
        (replace(BASE, adapters=LORA), {"adapters": (LORA[0]._replace(scale=0.5),)}),
        (BASE, {"n_ctx": 400, "rope_depends_on_window": True}),
        (BASE, {"build": "another"}),
        (BASE, {"model.gguf": b"another"}),
        (replace(BASE, adapters=LORA), {"adapter.gguf": b"another"}),
    ],
    ids=str,
)
def test_a_state_is_of_use_only_to_what_it_depends_on(
    load: Load, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def store(load: Load, others: dict[str, Any]) -> KVStore:
        monkeypatch.setattr("llmrun.engine.loaded.build", lambda: others.get("build", "one"))
        for name in ("model.gguf", "adapter.gguf"):
            Path(name).write_bytes(others.get(name, b"GGUF"))
        identities = {name: file_identity(Path(name)) for name in ("model.gguf", "adapter.gguf")}
        rope = bool(changes.get("rope_depends_on_window"))
        weights: Any = SimpleNamespace(path="model.gguf", rope_depends_on_window=rope, identities=identities)
        return KVStore(Path("states"), state_key(load, weights), 10**6)

    load = replace(load, states="states")
    fields = {name: value for name, value in changes.items() if hasattr(load, name)}
    store(load, {}).save([1, 2, 3], b"state")
    changed = store(replace(load, **fields), changes)
    changed.save([7], b"other")
    assert changed.find([1, 2, 3], longer_than=0) is None
    same = store(replace(load, threads=7, n_seq_max=3), {})
    same.save([8], b"other")
    assert same.find([1, 2, 3], longer_than=0) is not None


def test_a_window_matters_only_to_position_encoding_that_depends_on_it(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    keys = []
    for n_ctx in (400, 500):
        identities = {str(file): file_identity(file)}
        weights: Any = SimpleNamespace(path=str(file), rope_depends_on_window=False, identities=identities)
        keys.append(state_key(Load(str(file), n_ctx, states=str(tmp_path)), weights))
        keys[-1].compute()
    assert keys[0].known() == keys[1].known() is not None


def test_a_grammar_module_that_another_thread_imports_is_not_used_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = states(tmp_path)
    model._is_shared = True
    monkeypatch.setitem(sys.modules, "llmrun.engine.constraint.matcher", ModuleType("half"))
    assert not model.is_worn_out


def finish(model: LoadedModel, text: str) -> Sequence[Event]:
    model.engine.add(model.preparer.prepare(chat(text), lambda event: None))
    events: list[Event] = []
    while model.engine.busy:
        events += model.engine.step()
    assert not any(isinstance(event, Failed) for event in events)
    return events


@pytest.mark.parametrize("fault", ["a file", "a full disk"])
def test_a_folder_that_cannot_be_written_saves_nothing_and_breaks_nothing(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = states(tmp_path)
    if fault == "a file":
        (tmp_path / "states").write_text("in the way")
    else:
        monkeypatch.setattr("llmrun.engine.core.states.os.open", full_disk)
    finish(model, "x" * 100)
    assert model.save(SaveState(1)) == StateSaved(0, 0)
    finish(model, "y" * 100)


def full_disk(*_: Any, **__: Any) -> int:
    raise OSError(28, "No space left on device")


def test_what_was_saved_is_found(tmp_path: Path) -> None:
    model = states(tmp_path)
    finish(model, "x" * 100)
    assert model.save(SaveState(1)).tokens > 90
    again = states(tmp_path)
    started = finish(again, "x" * 100)[0]
    assert isinstance(started, Started)
    assert started.reused_tokens > 90


def test_a_broken_grammar_is_said_before_anything_is_rendered() -> None:
    with pytest.raises(LlmrunError, match="line 1"):
        preparer().prepare(chat("Hi", grammar=Grammar("gbnf", "root ::= nothing")), refuse)


def test_an_image_in_a_result_is_a_line_for_a_model_without_vision() -> None:
    result = Message("tool", "a.png", media=(Media("", "a.png", 5),))
    asked = AnswerRequest((Message("user", "Read a.png"), result))
    expected = "a.png\n[image omitted: this model has no vision]"
    assert expected in preparer().prompts.prompt(Generate(1, asked)).text
    assert preparer().prompts.count(asked, 1, lambda event: None).each[1] == len(expected)
