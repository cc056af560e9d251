"""With every chat template in llama.cpp's sources, each request of a loop of calls computes only what is new.

LLAMA_CPP is the folder of llama.cpp's sources. `pytest -s` shows a table: computed and new tokens of each request.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.answering import Answered, answering, with_other_json, without_reasoning
from support.family_model import ENDS, control_texts, write_family_model

from llmrun.engine.prompt.template import ChatTemplate, ControlTexts, Part
from llmrun.protocol.messages import Message, Tool, ToolCall
from llmrun.protocol.params import Limits

LLAMA_CPP = os.environ.get("LLAMA_CPP", "")

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(not LLAMA_CPP, reason="needs LLAMA_CPP, the folder of llama.cpp's sources"),
]

TOOLS = (
    Tool(
        "get_weather",
        "Weather of a city.",
        '{"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},'
        ' "required": ["city", "days"]}',
    ),
    Tool(
        "list_files", "Files.", '{"type": "object", "properties": {"path": {"enum": ["/tmp"]}}, "required": ["path"]}'
    ),
)
QUESTION = Message("user", "How is the weather in Rome? " * 20)
ANSWER, NEXT = "Thismodelanswer", "Thenextmessage"
HARMONY_FINAL = "<|channel|>final<|message|>"
CLIENTS: dict[str, Callable[[Message], Message]] = {
    "as it was": lambda message: message,
    "no reasoning": without_reasoning,
    "other JSON": lambda message: with_other_json(without_reasoning(message)),
}
NEW_TEXT = 200
"""Most tokens of a result or a question in a vocabulary of bytes, with the template's text around it."""
REPEATS = ("CohereForAI-c4ai-command-r-plus-tool_use",)
"""Templates that write the same instructions at the end of each prompt only; there, the template's own form holds."""
BLANK_LINES = ("llama-cpp-rwkv-world",)
MOVES = ("mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506")
"""Templates that write the tools before the last question, so that they are new with each question."""


def _ends(template: ChatTemplate) -> Sequence[str]:
    """Return the texts that end an answer and a call; they are not in the template, but in the model's file."""
    if HARMONY_FINAL in template.source:
        return "<|return|>", "<|call|>"
    if "'User: '" in template.source:  # RWKV's
        return ("\n\n",)
    call = Message("assistant", "", (ToolCall("call00001", "list_files", f'{{"path": "{ANSWER}"}}'),))
    answers = (
        (Message("assistant", ANSWER), Message("user", NEXT)),
        (call, Message("tool", NEXT, tool_call_id="call00001", name="list_files")),
    )
    found = dict[str, None]()
    for messages in answers:
        parts = template.render((QUESTION, *messages), ControlTexts(()), tools=TOOLS)
        prompt = "".join(part.text for part in parts if isinstance(part, Part))
        between = prompt.rpartition(ANSWER)[2].partition(NEXT)[0]
        found |= dict.fromkeys(min(((between.find(end), end) for end in ENDS if end in between), default=())[1:])
    return (*found,) or ("</s>",)


def _loop(file: Path, model: Path, change: Callable[[Message], Message]) -> list[Answered]:
    """Return the answers: a forced call, another one, text, and text to the next question."""
    source = file.read_text()
    answers, messages = list[Answered](), [Message("system", "Be brief."), QUESTION]
    says = (HARMONY_FINAL if HARMONY_FINAL in source else "") + "It is fine."
    with answering(model, source) as talk:

        def ask(**request: object) -> None:
            answers.append(talk.ask(messages, tools=TOOLS, limits=Limits(400), **request))
            messages.append(change(answers[-1].message))
            calls = answers[-1].message.tool_calls
            messages.extend(Message("tool", "sunny", tool_call_id=call.id, name=call.name) for call in calls)

        # RWKV ends an answer with a blank line, which closed reasoning has.
        budget = {"thinking": False} if file.stem in BLANK_LINES else {"thinking_tokens": 6}
        for _ in range(2):
            ask(tool_choice="required", parallel_calls=False, sampling=talk.without_blanks, **budget)
        ask(says=says, thinks="Hm, so.", thinking=budget.get("thinking"))
        messages.append(Message("user", "And in Oslo?"))
        ask(says=says, thinks="Hm.", thinking=budget.get("thinking"))
    return answers


def test_each_request_computes_only_what_is_new(tmp_path: Path) -> None:
    files = sorted(Path(LLAMA_CPP, "models", "templates").glob("*.jinja"))
    assert len(files) >= 50
    failed = []
    for file in files:
        template = ChatTemplate(file.read_text(), bos="<s>", eos="</s>")
        model = write_family_model(tmp_path / "tiny.gguf", control_texts(template.source), _ends(template))
        for client, change in CLIENTS.items():
            answers = _loop(file, model, change)
            row = [str(answers[0].computed)]
            if [len(each.message.tool_calls) for each in answers] != [1, 1, 0, 0]:
                failed.append(f"{file.stem}, {client}: a forced call is not there")
            for number, (before, answered) in enumerate(itertools.pairwise(answers)):
                stands = answered.prompt[: len(before.standing)] == before.standing
                n_new = len(answered.prompt) - len(before.standing)
                row.append(f"{answered.computed}/{n_new if stands else '-'}")
                is_text = n_new <= NEW_TEXT or (file.stem in MOVES and number == 2)
                if not (stands and answered.computed == n_new and is_text) and file.stem not in REPEATS:
                    failed.append(f"{file.stem}, {client}: {row[-1]}")
            print(f"{file.stem:46} {client:13} {'  '.join(each.rjust(9) for each in row)}")
    assert failed == []
