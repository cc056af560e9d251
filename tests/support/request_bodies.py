"""Good bodies of every route of the server, which name most of its fields, for its models "fuzzed" and "plain"."""

from __future__ import annotations

import base64
from typing import Any

from support.served import CHAT
from support.tiny_projector import png

IMAGE = base64.b64encode(png(28, 28)).decode()
URL = f"data:image/png;base64,{IMAGE}"
SOUND = b"RIFF\x24\x20\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x80\x3e\0\0\0\x7d\0\0\2\0\x10\0data\0\x20\0\0" + bytes(8192)
WAVE = base64.b64encode(SOUND).decode()
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
}
FUNCTION = {"name": "weather", "description": "Tell it.", "parameters": SCHEMA, "strict": True}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "rom"}'}}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9, "repeat_penalty": 1.1, "seed": 3,
    "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"5": -1.5}, "dry_multiplier": 0.5,
    "mirostat": 0, "xtc_probability": 0.1, "stop": ["zz"], "ban": ["q!"], "speculate": 3, "cache_salt": "mine",
}  # fmt: skip
TALK: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "12°"},
    {"role": "user", "content": "And?", "name": "Ann"},
]
SHOWN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "?"}]}]
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "parallel_tool_calls": False}
FORCED = {"type": "function", "function": {"name": "weather"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": WAVE, "format": "wav"}}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
CHATS: list[dict[str, Any]] = [
    {"messages": TALK, "max_tokens": 3, **SAMPLING, "logprobs": True, "top_logprobs": 2, "n": 2, "user": "me"},
    {"messages": TALK[:2], "max_tokens": 3, **TOOLS, "stream": True, "stream_options": {"include_usage": True}},
    {"messages": TALK, "max_completion_tokens": 3, **TOOLS, "tool_choice": FORCED},
    {"messages": SHOWN, "max_tokens": 2, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
    {"messages": [{"role": "user", "content": [AUDIO]}], "max_tokens": 2},
    {"messages": TALK[:1], "max_tokens": 6, "response_format": AS_SCHEMA},
    {"messages": TALK[-1:], "max_tokens": 4, "grammar": 'root ::= "a" [b-d]{1,3}', "ignore_eos": False,
     "keep_reasoning": True},
    {"messages": [TALK[-1], {"role": "assistant", "content": "It"}], "max_tokens": 2, "continue_final_message": True,
     "add_generation_prompt": False, "stops_repeats": True},
]  # fmt: skip
TEXTS: list[dict[str, Any]] = [
    {"prompt": ["Once", "Twice"], "max_tokens": 2, **SAMPLING, "logprobs": 2, "n": 1, "best_of": 1},
    {"prompt": "Once", "suffix": "end", "max_tokens": 2, "stream": True},
    {"prompt": [5, 6, 7], "max_tokens": 1, "echo": True, "logprobs": 1},
]
BLOCKS: list[dict[str, Any]] = [
    {
        "max_tokens": 3, "system": [{"type": "text", "text": "Be brief."}], "temperature": 0.5, "top_k": 3,
        "stop_sequences": ["zz"], "metadata": {"user_id": "me"},
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "Look", "cache_control": {"type": "ephemeral"}},
                {"type": "document", "title": "t", "source": {
                    "type": "base64", "media_type": "text/plain", "data": "aGk="}},
            ]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "rom"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "is_error": False, "content": [
                    {"type": "text", "text": "12"}]},
            ]},
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    {
        "max_tokens": 2, "stream": True, "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}]}],
    },
    {"max_tokens": 6, "messages": TALK[-1:],
     "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}},
]  # fmt: skip
RESPONSES: list[dict[str, Any]] = [
    {
        "instructions": "Be brief.", "max_output_tokens": 3, "store": True, "temperature": 0.5, "top_logprobs": 1,
        "include": ["message.output_text.logprobs"], "reasoning": {"effort": "low", "summary": "auto"}, "stream": True,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "rom"}'},
            {"type": "function_call_output", "call_id": "c", "output": "12"},
            {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        ],
        "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "patch"}], "tool_choice": "auto",
    },
    {"input": "Hi", "max_output_tokens": 2, "previous_response_id": None, "text": {"format": {"type": "json_object"}}},
    {"max_output_tokens": 1, "input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": URL},
        {"type": "input_file", "filename": "a", "file_data": "data:text/plain;base64,aGk="}]}]},
]  # fmt: skip
OPTIONS = {
    "num_predict": 3,
    "temperature": 0.5,
    "top_k": 4,
    "seed": 1,
    "num_ctx": 512,
    "stop": ["zz"],
    "repeat_penalty": 1.1,
}
OLLAMA: list[dict[str, Any]] = [
    {"messages": [*TALK[:1], {"role": "user", "content": "Hi", "images": [IMAGE]}], "options": OPTIONS,
     "stream": False},
    {"messages": [TALK[0], {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [
        {"function": {"name": "weather", "arguments": {"city": "rom"}}}]},
        {"role": "tool", "tool_name": "weather", "content": "1"}],
     "tools": TOOLS["tools"], "think": "low", "options": OPTIONS},
    {"messages": TALK[-1:], "format": SCHEMA, "options": {**OPTIONS, "num_predict": 6}, "logprobs": True,
     "top_logprobs": 1},
]  # fmt: skip
EMBEDDINGS: list[dict[str, Any]] = [
    {"model": "plain", "input": ["a b", "the model"], "encoding_format": "base64", "dimensions": 8, "user": "me"},
    {"model": "plain", "input": [[5, 6], [7]], "input_type": "query"},
]
RERANK = [{
    "model": "plain", "query": "the model", "documents": ["a b", {"text": "runs"}], "top_n": 1, "return_documents": True
}]  # fmt: skip
COUNTED = [{key: value for key, value in body.items() if key not in ("stream", "n")} for body in CHATS]
COMPACTED = [{"model": "fuzzed", **body} for body in RESPONSES]
ROUTES: dict[str, list[dict[str, Any]]] = {
    CHAT: CHATS,
    "/chat/completions": CHATS,
    "/v1/completions": TEXTS,
    "/v1/responses": RESPONSES,
    "/responses": RESPONSES,
    "/v1/responses/compact": COMPACTED,
    "/responses/compact": COMPACTED,
    "/v1/responses/{name}/cancel": [{}],
    "/v1/chat/completions/{name}": [{"metadata": {"a": "b"}}],
    "/completion": [{"prompt": "Once", "n_predict": 2, "n_probs": 2, "stream": True, "json_schema": SCHEMA}],
    "/completions": [{"prompt": [5, 6], "n_predict": 2, **SAMPLING}],
    "/infill": [{"input_prefix": "def f(", "prompt": "x", "input_suffix": "):", "n_predict": 2, "stream": True}],
    "/v1/messages": BLOCKS,
    "/api/chat": OLLAMA,
    "/api/generate": [
        {"prompt": "Hi", "system": "Be brief.", "images": [IMAGE], "options": OPTIONS, "stream": False, "think": False},
        {"prompt": "Once", "suffix": "end", "options": OPTIONS, "context": [1, 2], "raw": True, "template": ""},
    ],
    "/v1/messages/count_tokens": BLOCKS,
    "/v1/chat/completions/input_tokens": COUNTED,
    "/chat/completions/input_tokens": COUNTED,
    "/v1/responses/input_tokens": RESPONSES,
    "/responses/input_tokens": RESPONSES,
    "/tokenize": [{"content": "a b", "parse_special": True, "add_special": True, "with_pieces": True}],
    "/detokenize": [{"tokens": [5, 6, 260]}],
    "/apply-template": COUNTED,
    "/v1/embeddings": EMBEDDINGS,
    "/api/embed": [{"model": "plain", "input": ["a b", "the model"], "truncate": True, "dimensions": 8, "options": {}}],
    "/api/embeddings": [{"model": "plain", "prompt": "the model", "options": OPTIONS}],
    "/embedding": [{"model": "plain", "content": "a b"}],
    "/embeddings": [{"model": "plain", "content": ["a b", "the model"]}],
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/rerank": RERANK,
    "/v1/reranking": RERANK,
    "/reranking": RERANK,
    "/api/show": [{"model": "fuzzed", "name": "plain", "verbose": True}],
    "/api/copy": [{"source": "fuzzed", "destination": "b"}],
    "/api/delete": [{"model": "no such"}],
    "/ui/ask": [{
        "text": "Hi", "model": "fuzzed", "system": "Be brief.", "files": [{"name": "a.txt", "text": "b"}],
        "media": [{"name": "a.png", "data": IMAGE}],
    }],
    "/ui/answer": [{
        "chat": 1, "question": 1, "model": "fuzzed", "max_tokens": 2, "temperature": 0.5, "thinking": False,
        "candidates": 2, "begins": "x", "overflow": "roll",
    }],
    "/ui/search": [{"text": "Hi"}],
    "/ui/rename": [{"chat": 1, "name": "n"}],
    "/ui/delete": [{"chat": 10_000}],
    "/ui/go": [{"chat": 1, "entry": 1, "branch": None}],
    "/ui/system": [{"chat": 1, "system": "x"}],
    "/ui/documents": [{"name": "a.pdf", "data": "aGk="}],
    "/ui/decide": [{"call": "c", "decision": "once"}],
    "/ui/explain": [{"chat": 1, "answer": 2, "model": "fuzzed", "tokens": 1, "candidates": 2, "thinking": False}],
    **{
        f"/ui/{name}": [{"chat": 1, "answer": 2, "question": 1, "token": 0, "model": "fuzzed", "begins": "x"}]
        for name in ("undo", "stop", "tokens", "why", "context")
    },
}  # fmt: skip
"""Path -> good bodies, which name most of its fields. /api/pull asks the hub, and /ui/speed measures for seconds."""
DAMAGED, BAD_TOOL = f"{IMAGE}\ud800", {"name": "weather", "parameters": {**SCHEMA, "description": "\ud800"}}
BAD_PART = {"type": "image_url", "image_url": {"url": f"{URL}\ud800"}}
KILLERS: list[tuple[str, dict[str, Any]]] = [
    *((path, {"messages": [{"role": "user", "content": [BAD_PART]}]}) for path in (CHAT, "/apply-template")),
    (f"{CHAT}/input_tokens", {"messages": [{"role": "user", "content": [BAD_PART]}]}),
    ("/api/chat", {"messages": [{"role": "user", "content": "?", "images": [DAMAGED]}]}),
    ("/api/generate", {"prompt": "?", "images": [DAMAGED]}),
    *(
        (path, {"max_tokens": 1, "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DAMAGED}}]}]})
        for path in ("/v1/messages", "/v1/messages/count_tokens")
    ),
    (CHAT, {"messages": TALK[:2], "max_tokens": 2, "tools": [{"type": "function", "function": BAD_TOOL}]}),
]  # fmt: skip
"""Requests that each ended an engine once."""
