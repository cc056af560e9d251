"""Prompts equal those of llama-server, for llama.cpp's own chat templates and nine conversations.

LLAMA_CPP is the folder of llama.cpp's sources, LLAMA_SERVER the program. Prints a line for each template.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.family_model import write_family_model

from llmrun.engine.prompt.template import ChatTemplate, ControlTexts, Part
from llmrun.protocol.messages import Message, Tool, ToolCall

LLAMA_CPP, LLAMA_SERVER = os.environ.get("LLAMA_CPP", ""), os.environ.get("LLAMA_SERVER", "")
PATIENCE = 30.0  # seconds

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (LLAMA_CPP and LLAMA_SERVER), reason="needs LLAMA_CPP, the folder of llama.cpp's sources, and LLAMA_SERVER"
    ),
]

TOOLS = (
    Tool(
        "get_weather",
        "Weather of a city.",
        '{"type": "object", "properties": {"city": {"type": "string", "description": "its name"}, '
        '"days": {"type": "integer"}}, "required": ["city"]}',
    ),
    Tool(
        "list_files",
        "Files of a folder.",
        '{"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}',
    ),
)


def _call(number: int, name: str, **arguments: Any) -> ToolCall:
    return ToolCall(f"call0000{number}", name, json.dumps(arguments))


def _result(number: int, name: str, content: str) -> Message:
    return Message("tool", content, tool_call_id=f"call0000{number}", name=name)


SYSTEM, QUESTION, NEXT = (
    Message("system", "You are brief."),
    Message("user", "How is the weather in Rome?"),
    Message("user", "And Oslo?"),
)
BEGIN = (SYSTEM, QUESTION)
ROUND = (
    Message("assistant", "", (_call(1, "get_weather", city="Rome", days=2),), reasoning="I should look."),
    _result(1, "get_weather", "sunny"),
)
TEXT_AND_CALL = (
    Message("assistant", "Let me see.", (_call(2, "list_files", path="/tmp"),), reasoning="Now the files."),
    _result(2, "list_files", "a.txt"),
)
BOTH = (_call(1, "get_weather", city="Rome"), _call(2, "get_weather", city="Oslo"))
ANSWER = Message("assistant", "Sunny.", reasoning="I can answer.")
CONVERSATIONS: dict[str, tuple[tuple[Message, ...], tuple[Tool, ...]]] = {
    "chat": (BEGIN, ()),
    "turns": ((*BEGIN, ANSWER, NEXT), ()),
    "tools": (BEGIN, TOOLS),
    "call": ((*BEGIN, *ROUND), TOOLS),
    "text": ((*BEGIN, *ROUND, *TEXT_AND_CALL), TOOLS),
    "after": ((*BEGIN, *ROUND, ANSWER, NEXT), TOOLS),
    "parallel": (
        (*BEGIN, Message("assistant", "", BOTH), _result(1, "get_weather", "sun"), _result(2, "get_weather", "rain")),
        TOOLS,
    ),
    "nosystem": ((QUESTION,), TOOLS),
    "notools": ((*BEGIN, *ROUND), ()),
}

LOST = "the template leaves the call out; ours says it in text"
APART = "the template leaves a call out where there is text before it; ours are two messages"
SEVERAL = "the template leaves out all calls of a message but the first; ours are one after the other"
FORGETS = "the template has a switch that keeps earlier reasoning, which llama-server does not know"
ORDER = "the template puts the text behind the result, as if the answer ended there; ours leaves it out"
LISTED = "llama-server gives it texts as lists of parts, of which it then writes none of the assistant's"
REFUSED = "the template refuses reasoning and text before a call, so llama-server drops the text; ours adds it"
_CALLS = ("call", "text", "after", "parallel", "notools")
DIFFERENCES = {
    **dict.fromkeys(((name, case) for name in ("LFM2-8B-A1B", "LFM2.5-Instruct") for case in _CALLS), LOST),
    **dict.fromkeys((("ibm-granite-granite-3.3-2B-Instruct", case) for case in _CALLS), LOST),
    ("HuggingFaceTB-SmolLM3-3B", "notools"): LOST,
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "notools"): LOST,
    ("llama-cpp-rwkv-world", "notools"): LOST,
    ("microsoft-Phi-3.5-mini-instruct", "notools"): LOST,
    ("GigaChat3-10B-A1.8B", "parallel"): SEVERAL,
    ("GigaChat3.1-10B-A1.8B", "parallel"): SEVERAL,
    ("openai-gpt-oss-120b", "parallel"): SEVERAL,
    ("tencent-Hy3", "turns"): FORGETS,
    **dict.fromkeys((("upstage-Solar-Open-100B", c) for c in ("turns", "call", "text", "after", "notools")), FORGETS),
    ("google-gemma-4-31B-it", "text"): ORDER,
    ("llama-cpp-deepseek-r1", "text"): APART,
    **dict.fromkeys((("unsloth-mistral-Devstral-Small-2507", case) for case in ("turns", "text", "after")), LISTED),
    ("openai-gpt-oss-120b", "text"): REFUSED,
}
"""The prompts that differ, and why."""


def _body(messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> dict[str, Any]:
    def data(message: Message) -> dict[str, Any]:
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
        fields = {
            "tool_calls": calls, "reasoning_content": message.reasoning, "tool_call_id": message.tool_call_id,
            "name": message.name,
        }  # fmt: skip
        return {"role": message.role, "content": message.content} | {name: v for name, v in fields.items() if v}

    functions = [
        {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
        for tool in tools
    ]
    body = {"messages": [*map(data, messages)], "chat_template_kwargs": {"enable_thinking": True}}
    return body | ({"tools": [{"type": "function", "function": each} for each in functions]} if tools else {})


@contextmanager
def _llama_server(template: Path, model: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--jinja", "-c", "512", "-np", "1", "-t", "1", "--no-warmup", "--host", "127.0.0.1")
    command = [LLAMA_SERVER, "-m", model, "--chat-template-file", template, "--port", str(port), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + PATIENCE
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                    break
                except OSError:
                    assert process.poll() is None, "llama-server ended"
                    assert time.monotonic() < end, "llama-server does not start"
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/apply-template"
        finally:
            process.terminate()


def _theirs(url: str, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> str | None:
    """Return llama-server's prompt; None if it refuses, or leaves the tools out."""
    data = json.dumps(_body(messages, tools)).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"})) as answer:
            prompt: str = json.load(answer)["prompt"]
    except urllib.error.HTTPError:
        return None
    return prompt if not tools or tools[0].description in prompt else None


def _without_bos(prompt: str) -> str:
    """Return a prompt without the text of the token that begins it, which llama-server's tokenizer adds."""
    return re.sub(r"^(<s>|</s>)(?=<|\[)", "", prompt)


def test_prompts_equal_llama_servers(tmp_path: Path) -> None:
    model = write_family_model(tmp_path / "tiny.gguf", ("<|im_start|>",), ("</s>",))
    files = sorted(Path(LLAMA_CPP, "models", "templates").glob("*.jinja"))
    assert len(files) >= 50
    different, n_equal, n_compared = set[tuple[str, str]](), 0, 0
    for file in files:
        template = ChatTemplate(file.read_text(), bos="<s>", eos="</s>")
        row = []
        with _llama_server(file, model) as url:
            for name, (messages, tools) in CONVERSATIONS.items():
                parts = template.render(messages, ControlTexts(()), tools=tools, thinking=True)
                ours = "".join(part.text for part in parts if isinstance(part, Part))
                theirs = _theirs(url, messages, tools)
                is_equal = theirs is not None and _without_bos(ours) == _without_bos(theirs)
                n_compared, n_equal = n_compared + (theirs is not None), n_equal + is_equal
                if theirs is not None and not is_equal:
                    different.add((file.stem, name))
                row.append(f"{name} {'-' if theirs is None else '=' if is_equal else 'x'}")
        print(f"{file.stem:46} {'  '.join(row)}")
    print(f"{n_equal} of {n_compared} prompts are equal")
    assert different == {*DIFFERENCES}
