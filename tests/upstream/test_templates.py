"""Every chat template in llama.cpp's sources takes the conversations that agents send.

LLAMA_CPP is the folder of llama.cpp's sources.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.agent_conversations import CONVERSATIONS, TOOLS, has_tools

from llmrun.engine.prompt.template import ChatTemplate, ControlTexts, Part
from llmrun.errors import BadTemplateError

LLAMA_CPP = os.environ.get("LLAMA_CPP", "")

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(not LLAMA_CPP, reason="needs LLAMA_CPP, the folder of llama.cpp's sources"),
]


def _refusal(template: ChatTemplate, name: str) -> str | None:
    messages = CONVERSATIONS[name]
    try:
        parts = template.render(messages, ControlTexts(()), tools=TOOLS if has_tools(name) else ())
    except BadTemplateError as error:
        return str(error)
    prompt = "".join(part.text for part in parts if isinstance(part, Part))
    late = [each.content for each in messages[1:] if each.role == "system"]
    return next((f"{text} is missing" for text in late if text not in prompt), None)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_no_template_refuses_it(name: str) -> None:
    files = sorted(Path(LLAMA_CPP, "models", "templates").glob("*.jinja"))
    assert len(files) >= 50
    compiled = {file.stem: ChatTemplate(file.read_text(), bos="<s>", eos="</s>") for file in files}
    refused = {stem: why for stem, template in compiled.items() if (why := _refusal(template, name))}
    assert refused == {}
