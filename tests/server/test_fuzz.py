"""Hostile bodies to every route, beside streams of well-behaved clients, over real engines of tiny random models."""

from __future__ import annotations

import base64
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.embedding_models import gguf_of
from support.fuzz import Fuzzer
from support.random_model import write_random_model
from support.served import CHAT, LiveServer, RawResponse, parse
from support.tiny_projector import png, projector

pytestmark = pytest.mark.usefixtures("package_on_path")
WIDTH, N_CTX = 128, 2048
TEMPLATE = (
    "{% if tools %}Tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<start_of_image>' }}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chats whose calls are written parameter by parameter."""

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
CHATS: list[dict[str, Any]] = [
    {"messages": TALK, "max_tokens": 3, **SAMPLING, "logprobs": True, "top_logprobs": 2, "n": 2, "user": "me"},
    {"messages": TALK[:2], "max_tokens": 3, **TOOLS, "stream": True, "stream_options": {"include_usage": True}},
    {"messages": TALK, "max_completion_tokens": 3, **TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"messages": SHOWN, "max_tokens": 2, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
    {
        "messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": WAVE, "format": "wav"}}]}],
        "max_tokens": 2,
    },
    {"messages": TALK[:1], "max_tokens": 6, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"messages": TALK[-1:], "max_tokens": 4, "grammar": 'root ::= "a" [b-d]{1,3}', "ignore_eos": False, "keep_reasoning": True},
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
                {"type": "document", "title": "t", "source": {"type": "base64", "media_type": "text/plain", "data": "aGk="}},
            ]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "rom"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "is_error": False, "content": [{"type": "text", "text": "12"}]},
            ]},
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    {
        "max_tokens": 2, "stream": True, "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}]}],
    },
    {"max_tokens": 6, "messages": TALK[-1:], "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}},
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
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}, {"type": "input_file", "filename": "a",
      "file_data": "data:text/plain;base64,aGk="}]}], "max_output_tokens": 1},
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
    {"messages": [*TALK[:1], {"role": "user", "content": "Hi", "images": [IMAGE]}], "options": OPTIONS, "stream": False},
    {"messages": [TALK[0], {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [
        {"function": {"name": "weather", "arguments": {"city": "rom"}}}]}, {"role": "tool", "tool_name": "weather", "content": "1"}],
     "tools": TOOLS["tools"], "think": "low", "options": OPTIONS},
    {"messages": TALK[-1:], "format": SCHEMA, "options": {**OPTIONS, "num_predict": 6}, "logprobs": True, "top_logprobs": 1},
]  # fmt: skip
EMBEDDINGS: list[dict[str, Any]] = [
    {"model": "plain", "input": ["a b", "the model"], "encoding_format": "base64", "dimensions": 8, "user": "me"},
    {"model": "plain", "input": [[5, 6], [7]], "input_type": "query"},
]
RERANK = [{
    "model": "plain", "query": "the model", "documents": ["a b", {"text": "runs"}], "top_n": 1, "return_documents": True
}]  # fmt: skip
COUNTED = [{key: value for key, value in body.items() if key not in ("stream", "n")} for body in CHATS]
ROUTES: dict[str, list[dict[str, Any]]] = {
    CHAT: CHATS,
    "/chat/completions": CHATS,
    "/v1/completions": TEXTS,
    "/v1/responses": RESPONSES,
    "/responses": RESPONSES,
    "/completion": [{**TEXTS[1], "n_predict": 2, "n_probs": 2, "prompt": "Once", "suffix": None, "json_schema": SCHEMA}],
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
    **{path: RERANK for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")},
    "/api/show": [{"model": "fuzzed", "name": "plain", "verbose": True}],
    "/api/copy": [{"source": "fuzzed", "destination": "b"}],
    "/api/delete": [{"model": "no such"}],
    "/ui/ask": [{"chat": None, "text": "Hi", "model": "fuzzed", "files": [{"name": "a.txt", "data": "aGk="}]}],
    "/ui/answer": [{"chat": 1, "settings": {"max_tokens": 2, "temperature": 0.5}}],
    "/ui/search": [{"words": "Hi"}],
    "/ui/delete": [{"chat": 10_000}],
    **{
        f"/ui/{name}": [{"chat": 1, "name": "n", "text": "x", "entry": 1, "call": "c", "answer": 1, "data": "aGk="}]
        for name in ("rename", "go", "undo", "system", "documents", "stop", "decide", "explain", "tokens", "why", "context")
    },
}  # fmt: skip
"""Path -> good bodies, which name most of its fields. /api/pull asks the hub, and /ui/speed measures for seconds."""
UNTOUCHED = ("keep_alive",)  # unloads the model, as it should
STORIES = ("Tell a long story.", "Name the planets, one a line.")
_MOST_SHOWN = 12


@contextmanager
def fuzzed_server(folder: Path) -> Iterator[LiveServer]:
    """A server of a model that writes calls and sees images, and of an embedding model."""
    model = write_random_model(folder / "fuzzed.gguf", layers=2, width=WIDTH, n_ctx=N_CTX, template=TEMPLATE)
    embeds = gguf_of("bert, mean", folder / "bert")
    images = str(projector(folder / "eyes.gguf", WIDTH, "gemma3"))
    names = (str(model), str(embeds))
    with LiveServer(
        folder, ("real",), model=model, names=names, n_ctx=N_CTX, parallel=8, queue=400, projector=images
    ) as server:
        yield server


def engines() -> set[int]:
    """The process ids of this process's engines."""
    children = psutil.Process(os.getpid()).children()
    return {child.pid for child in children if any("llmrun.engine" in word for word in child.cmdline())}


def story(server: LiveServer, said: str) -> str:
    """A greedy stream's text."""
    body = {"messages": [{"role": "user", "content": said}], "temperature": 0, "max_tokens": 60, "stream": True}
    answer = server.post(CHAT, {**body, "speculate": "off"})
    assert answer.status == 200, answer.body
    return "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events)


def complaint(path: str, data: bytes, answer: RawResponse) -> str:
    """Return what is wrong with an answer; "" if nothing is."""
    shown = f"{path} {answer.status} {answer.body[:300]!r} for {data[:1500]!r}"
    if any(word in answer.body for word in (b"internal-error", b"engine-crashed", b"internal error", b"deadly-prompt")):
        return shown
    if 200 <= answer.status < 300:
        return ""
    try:
        error = answer.json.get("error")
        reason = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        reason = None
    return "" if 400 <= answer.status < 500 and isinstance(reason, str) and reason.strip() else shown


class Attack:
    """Requests of several clients to all routes in turns, beside well-behaved ones.

    Attributes:
        counts: (path, status) -> answers.
        complaints: about answers.
    """

    def __init__(self, server: LiveServer, n_requests: int, seed: int) -> None:
        self._server, self._n_requests = server, n_requests
        bodies = [body for bodies in ROUTES.values() for body in bodies]
        self._fuzzer, self._paths = Fuzzer(bodies, seed, UNTOUCHED), [*ROUTES]
        self._lock, self._number, self._is_over = threading.Lock(), 0, threading.Event()
        self.counts: Counter[tuple[str, int]] = Counter()
        self.complaints: list[str] = []

    def run(self, stories: dict[str, str]) -> int:
        """Send all requests; return how many stories came out well meanwhile."""
        with ThreadPoolExecutor(6) as pool:
            neighbours = [pool.submit(self._tell, said, told) for said, told in stories.items()]
            attackers = [pool.submit(self._attack) for _ in range(3)]
            try:
                for attacker in attackers:
                    attacker.result()
            finally:
                self._is_over.set()
            return sum(neighbour.result() for neighbour in neighbours)

    def _tell(self, said: str, told: str) -> int:
        n_told = 0
        while not (self._is_over.is_set() and n_told):
            assert story(self._server, said) == told
            n_told += 1
        return n_told

    def _attack(self) -> None:
        while (made := self._next()) is not None:
            path, data = made
            headers = {"sec_fetch_site": "same-origin"} if path.startswith("/ui/") else {}
            answer = parse(self._server.raw(self._server.request("POST", path, data, **headers)))
            with self._lock:
                self.counts[path, answer.status] += 1
                self.complaints += filter(None, [complaint(path, data, answer)])

    def _next(self) -> tuple[str, bytes] | None:
        """Return the next request: what it is depends on its number only."""
        with self._lock:
            self._number += 1
            path = self._paths[self._number % len(self._paths)]
            bodies = ROUTES[path]
            good = bodies[self._number // len(self._paths) % len(bodies)]
            return (path, self._fuzzer.body(good)) if self._number <= self._n_requests else None


def table(counts: Counter[tuple[str, int]]) -> str:
    """The answers by route and status."""
    paths = sorted({path for path, _ in counts})
    rows = [
        f"{path:36}" + " ".join(f"{s}: {n:4}" for (p, s), n in sorted(counts.items()) if p == path) for path in paths
    ]
    totals = Counter[int]()
    for (_, status), count in counts.items():
        totals[status] += count
    return "\n".join([*rows, f"{sum(totals.values())} requests: {dict(sorted(totals.items()))}"])


@pytest.mark.parametrize(
    "n_requests", [400, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "ten thousand"]
)
def test_nothing_that_a_request_holds_ends_an_engine(tmp_path: Path, n_requests: int) -> None:
    with fuzzed_server(tmp_path) as server:
        for path, bodies in ROUTES.items():
            assert complaint(path, b"", server.post(path, bodies[0])) == ""
        stories = {said: story(server, said) for said in STORIES}
        running = engines()
        attack = Attack(server, n_requests, seed=49)
        n_told = attack.run(stories)
        print(table(attack.counts))
        print(f"{n_told} neighbours' streams equal the ones alone")
        assert attack.complaints == [], "\n".join(attack.complaints[:_MOST_SHOWN])
        assert engines() == running, "the same processes"
        assert server.engines == len(running)
        assert sum(attack.counts.values()) == n_requests
