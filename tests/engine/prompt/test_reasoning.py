"""Reasoning in a conversation: the template keeps it or leaves it out, and knows some levels of effort."""

from __future__ import annotations

import json

import pytest

from llmrun.engine.prompt.template import ChatTemplate, ControlTexts, Part
from llmrun.errors import UsageError
from llmrun.protocol.messages import Message, Tool, ToolCall

_ASKED = Message("user", "u1")
_SAID = Message("assistant", "a1", reasoning="r1")
_CALLED = Message("assistant", "t1", (ToolCall("abcdefghi", "tell_time", "{}"),), reasoning="r2")
_RESULT = Message("tool", "noon", tool_call_id="abcdefghi", name="tell_time")
_TOOLS = (Tool("tell_time", "Tells the time."),)
_CALLS = (
    "{% for t in tools or [] %}({{ t.function.name }} {{ t.function.description }}){% endfor %}"
    "{% for m in messages %}[{{ m.role }} KEPT{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}]'
    "{% endfor %}"
)
_NAMED = "{%% for m in messages %%}[{%% if m.%s %%}<think>{{ m.%s }}</think>{%% endif %%}{{ m.content }}]{%% endfor %%}"
_PARTS = (
    "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}]{% endfor %}"
)
_EITHER = (
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
    "{{ raise_exception('content and thinking') }}{% endif %}{% endfor %}"
    + _CALLS.replace("KEPT", "{% if m.thinking %}<{{ m.thinking }}>{% endif %}")
)


def prompt(source: str, *messages: Message, **options: object) -> str:
    template = ChatTemplate(source, bos="<s>", eos="</s>")
    parts = template.render(messages, ControlTexts(("<s>", "</s>")), **options)  # type: ignore[arg-type]
    return "".join(part.text for part in parts if isinstance(part, Part))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_template_gets_it_by_its_own_name(name: str) -> None:
    assert prompt(_NAMED % (name, name), _ASKED, _SAID) == "[u1][<think>r1</think>a1]"


def test_or_as_a_part_of_the_content() -> None:
    assert prompt(_PARTS, _ASKED, _SAID, _ASKED) == "[u1][[THINK]r1[/THINK]a1][u1]"


def test_or_leaves_it_out() -> None:
    assert prompt("{% for m in messages %}[{{ m.content }}]{% endfor %}", _ASKED, _SAID) == "[u1][a1]"


def test_a_template_that_prints_the_content_gets_no_parts() -> None:
    assert prompt("{% for m in messages %}{# type thinking #}{{ m.content }}{% endfor %}", _ASKED, _SAID) == "u1a1"


def test_text_before_a_call_joins_the_reasoning_where_both_are_refused() -> None:
    text = prompt(_EITHER, _ASKED, _CALLED, _RESULT, tools=_TOOLS)
    assert "[assistant <r2\n\nt1><tool_call>" in text
    assert "[assistant <r2>t1<tool_call>" in prompt(_EITHER.replace("raise_exception", ""), _ASKED, _CALLED, _RESULT)


def test_control_texts_in_it_stay_text() -> None:
    template = ChatTemplate(_NAMED % ("reasoning", "reasoning"), bos="<s>", eos="</s>")
    said = Message("assistant", "a1", reasoning="</s>")
    parts = template.render((_ASKED, said), ControlTexts(("<s>", "</s>")))
    assert [part.special for part in parts if isinstance(part, Part) and "</s>" in part.text] == [False]


@pytest.mark.parametrize(
    ("known", "effort", "written"),
    [
        ("", "minimal", "low"),
        ("", "medium", "medium"),
        ("", "max", "high"),
        ("", "none", "?"),
        ("{# 'minimal' #}", "minimal", "minimal"),
        ('{# "none" #}', "none", "none"),
        ("{% if reasoning_effort == 'medium' %}{{ raise_exception('no') }}{% endif %}", "medium", "low"),
    ],
)
def test_the_nearest_effort_that_a_template_knows(known: str, effort: str, written: str) -> None:
    source = known + "{{ messages[0].content }} {{ reasoning_effort or '?' }}"
    assert prompt(source, _ASKED, effort=effort) == f"u1 {written}"


@pytest.mark.parametrize("name", ["reasoning_effort", "reasoning_strength", "thinking_effort"])
def test_other_names_of_the_effort(name: str) -> None:
    """Those of Muse Glimmer and Kimi K3."""
    source = f"{{% if {name} == 'medium' and thinking %}}{{{{ raise_exception('no') }}}}{{% endif %}}{{{{ {name} }}}}"
    assert prompt(source, _ASKED, effort="medium", thinking=True) == "low"


def test_variables_of_the_template() -> None:
    source = "{{ messages[0].content }} {{ level }} {{ deep.a[0] }} {{ bos_token }}"
    given = json.dumps({"level": 3, "deep": {"a": ["x"]}, "bos_token": "mine", "messages": []})
    assert prompt(source, _ASKED, variables=given) == "u1 3 x <s>"
    template = ChatTemplate("{{ messages[0].content }}{{ level }}", bos="<s>", eos="</s>")
    parts = template.render((_ASKED,), ControlTexts(("</s>",)), variables='{"level": "</s>"}')
    assert not any(part.special for part in parts if isinstance(part, Part) and "</s>" in part.text)
    with pytest.raises(UsageError, match="not JSON"):
        prompt(source, _ASKED, variables="{")


def test_thinking_has_both_of_its_names() -> None:
    source = "{{ messages[0].content }} {{ enable_thinking }} {{ thinking }}"
    assert prompt(source, _ASKED, thinking=False) == "u1 False False"
