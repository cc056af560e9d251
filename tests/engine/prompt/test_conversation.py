"""Conversations that a template refuses or shortens are rewritten for that template alone, each text in its place."""

from __future__ import annotations

import pytest
from support.agent_conversations import CONVERSATIONS, TOOLS, has_tools

from llmrun.engine.prompt.template import ChatTemplate, ControlTexts, Part
from llmrun.protocol.media import Media
from llmrun.protocol.messages import Message, ToolCall

_TURNS = (
    "{% for m in messages %}[{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}]'
    "{% endfor %}{% for t in tools or [] %}({{ t.function.name }} {{ t.function.description }}){% endfor %}"
)
_ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)
_ALTERNATE = (
    "{% set ns = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% elif m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
    "{% endif %}{% endfor %}"
)
_NO_EMPTY = (
    "{% for m in messages %}{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
    "{{ raise_exception('must have content or calls') }}{% endif %}{% endfor %}"
)
_NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
_CALLS_FIRST = (
    "{% set ns = namespace(c=false) %}{% for m in messages %}{% if m.tool_calls %}{% set ns.c = true %}"
    "{% elif m.role == 'tool' and not ns.c %}{{ raise_exception('no call before') }}{% endif %}{% endfor %}"
)
_ASKS = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no query') }}{% endif %}"
)
_HOISTS = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    + _TURNS.replace("in messages %}", "in messages if m.role != 'system' %}")
)  # fmt: skip
_DROPS = "{{ messages[0].content if messages[0].role == 'system' }}" + _HOISTS[_HOISTS.index("endfor %}") + 9 :]
TEMPLATES = {
    "takes all": _TURNS,
    "one system prompt (Qwen3.5)": _ASKS + _ONE_SYSTEM + _TURNS,
    "alternating (Mistral)": _ALTERNATE + _TURNS,
    "no empty answers (Ministral)": _NO_EMPTY + _ALTERNATE + _TURNS,
    "alternating without system (Gemma 2)": _NO_SYSTEM + _ALTERNATE + _TURNS,
    "no result without a call (gpt-oss)": _CALLS_FIRST + _TURNS,
    "hoists system text (DeepSeek)": _HOISTS,
    "drops later system text (MiniMax)": _DROPS,
    "without tools": _ALTERNATE + "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}",
}


def prompt(template: str, *messages: Message, tools: bool = False) -> str:
    compiled = ChatTemplate(TEMPLATES[template], bos="<s>", eos="</s>")
    parts = compiled.render(messages, ControlTexts(()), tools=TOOLS if tools else ())
    return "".join(part.text for part in parts if isinstance(part, Part))


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_no_conversation_is_refused_and_no_text_is_lost(template: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    text = prompt(template, *messages, tools=has_tools(conversation))
    places = [text.find(message.content) for message in messages if message.content]
    assert -1 not in places
    if conversation != "system text between call and result":
        assert places == sorted(places)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_a_template_that_takes_all_gets_all_as_it_is(conversation: str) -> None:
    text = prompt("takes all", *CONVERSATIONS[conversation], tools=has_tools(conversation))
    assert text.count("[") == len(CONVERSATIONS[conversation])
    assert [piece.split()[0].rstrip("]") for piece in text.split("[")[1:]] == [
        message.role for message in CONVERSATIONS[conversation]
    ]


@pytest.mark.parametrize(
    ("template", "conversation", "expected"),
    [
        ("one system prompt (Qwen3.5)", "system text later", "[system s1][user u1][assistant a1][user s2][user u2]"),
        ("one system prompt (Qwen3.5)", "two system prompts", "[system s1\ns2][user u1]"),
        ("one system prompt (Qwen3.5)", "only a system prompt", "[system s1][user ...]"),
        ("alternating (Mistral)", "system text later", "[system s1][user u1][assistant a1][user s2\nu2]"),
        ("alternating (Mistral)", "two answers", "[user u1][assistant a1\na2][user u2]"),
        ("no empty answers (Ministral)", "an empty answer", "[user u1\nu2]"),
        ("alternating (Mistral)", "an answer first", "[user ...][assistant a1][user u1]"),
        ("alternating without system (Gemma 2)", "two system prompts", "[user s1\ns2\nu1]"),
        ("hoists system text (DeepSeek)", "system text later", "s1[user u1][assistant a1][user s2][user u2]"),
    ],
)
def test_the_rewritten_conversation(template: str, conversation: str, expected: str) -> None:
    assert prompt(template, *CONVERSATIONS[conversation]) == expected


@pytest.mark.parametrize(
    ("template", "conversation", "rewritten"),
    [
        ("takes all", "system text later", ()),
        ("one system prompt (Qwen3.5)", "system text later", ("system",)),
        ("alternating (Mistral)", "system text last", ("neighbours", "system")),
        ("alternating (Mistral)", "an answer first", ("opening",)),
        ("no result without a call (gpt-oss)", "a result without a call", ("calls",)),
        ("without tools", "a call first", ("opening", "tools")),
    ],
)
def test_what_was_rewritten_is_told_once(template: str, conversation: str, rewritten: tuple[str, ...]) -> None:
    compiled = ChatTemplate(TEMPLATES[template], bos="<s>", eos="</s>")
    for expected in (rewritten, ()):
        compiled.render(CONVERSATIONS[conversation], ControlTexts(()), tools=TOOLS if has_tools(conversation) else ())
        assert compiled.new_rewritings() == expected


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_growing_conversation_keeps_its_prefix(template: str) -> None:
    reminder = Message("system", "tokens left: 1000")
    turns = [Message("system", "s1"), Message("user", "u1"), Message("assistant", "a1"), reminder]
    grown = [*turns, Message("user", "u2"), Message("assistant", "a2"), Message("system", "tokens left: 900")]
    before = prompt(template, *turns)
    assert prompt(template, *grown).startswith(before[: before.index("1000")])


def test_a_trial_that_exceeds_a_limit_says_nothing_about_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmrun.engine.prompt import template as module
    from llmrun.errors import BadTemplateError

    monkeypatch.setattr(module, "MAX_PROMPT_CHARACTERS", 1000)
    endless = ChatTemplate("{% for i in range(5000) %}{{ messages[0].content }}{% endfor %}", bos="", eos="")
    with pytest.raises(BadTemplateError, match="endless"):
        endless.render(CONVERSATIONS["system text later"], ControlTexts(()))


def test_an_image_in_a_result_stands_where_the_result_stands() -> None:
    image = Media("data", "a.png", 2)
    compiled = ChatTemplate(TEMPLATES["without tools"], bos="", eos="")
    messages = (Message("user", "u1"), Message("tool", "It is", media=(image,)))
    before, seen, after = compiled.render(messages, ControlTexts(()))
    assert seen == image
    assert isinstance(before, Part)
    assert isinstance(after, Part)
    assert before.text.endswith("<tool_response>\nIt")
    assert after.text.startswith(" is")


def test_several_calls_are_made_one_by_one_where_a_template_takes_one_only() -> None:
    """Llama 3's refuses several, GigaChat's and gpt-oss's write the first alone."""
    calls = (ToolCall("a", "tell_time", '{"town": "Rome"}'), ToolCall("b", "tell_time", '{"town": "Oslo"}'))
    messages = (
        Message("user", "u1"),
        Message("assistant", "", calls),
        Message("tool", "late", tool_call_id="b", name="tell_time"),
        Message("tool", "noon", tool_call_id="a", name="tell_time"),
        Message("user", "u2"),
    )
    single = "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}REFUSE{% endif %}{% endfor %}"
    written = []
    for before, turns in (
        ("", _TURNS),
        (single.replace("REFUSE", "{{ raise_exception('single') }}"), _TURNS),
        ("", _TURNS.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")),
    ):
        compiled = ChatTemplate(before + turns, bos="<s>", eos="</s>")
        parts = compiled.render(messages, ControlTexts(()), tools=TOOLS)
        written.append("".join(part.text for part in parts if isinstance(part, Part)))
    together, refused, shortened = written
    assert together.count("[assistant") == 1
    assert refused == shortened
    places = [refused.index(text) for text in ("u1", "Rome", "noon", "Oslo", "late", "u2")]
    assert places == sorted(places)
