"""200 JSON schemas through `llmrun serve`, in every protocol, several clients at once, judged by jsonschema."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jsonschema
import pytest
from support.grammar_cases import SCHEMAS
from support.installed import SECONDS
from support.real_server import RealServer
from support.record_schemas import record_schema

N_SCHEMAS, N_CLIENTS, MOST_TOKENS = 200, 8, 96
WELL_KNOWN = list(SCHEMAS.values())
ALL = [*WELL_KNOWN, *map(record_schema, range(N_SCHEMAS - len(WELL_KNOWN)))]
QUESTION = [{"role": "user", "content": "Give me an example as JSON."}]


class Outcome(NamedTuple):
    """What came of a schema: "valid", "length" where the answer was cut off, else what is wrong."""

    path: str
    schema: Any
    result: str


def post(server: RealServer, path: str, body: dict[str, Any]) -> Any:
    data = json.dumps({"model": "smollm2", **body}).encode()
    request = urllib.request.Request(f"{server.address}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


def chat(server: RealServer, schema: Any) -> tuple[str, bool]:
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    body = {"messages": QUESTION, "response_format": wanted, "max_tokens": MOST_TOKENS, "seed": 1}
    (choice,) = post(server, "/v1/chat/completions", body)["choices"]
    return choice["message"]["content"], choice["finish_reason"] == "length"


def responses(server: RealServer, schema: Any) -> tuple[str, bool]:
    wanted = {"format": {"type": "json_schema", "name": "it", "schema": schema}}
    body = {"input": QUESTION, "text": wanted, "max_output_tokens": MOST_TOKENS, "seed": 1}
    answer = post(server, "/v1/responses", body)
    text = "".join(part["text"] for item in answer["output"] for part in item["content"])
    return text, answer["status"] == "incomplete"


def messages(server: RealServer, schema: Any) -> tuple[str, bool]:
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    body = {"messages": QUESTION, "output_config": wanted, "max_tokens": MOST_TOKENS, "seed": 1}
    answer = post(server, "/v1/messages", body)
    return "".join(block["text"] for block in answer["content"]), answer["stop_reason"] == "max_tokens"


def ollama(server: RealServer, schema: Any) -> tuple[str, bool]:
    body = {"messages": QUESTION, "format": schema, "options": {"num_predict": MOST_TOKENS, "seed": 1}, "stream": False}
    answer = post(server, "/api/chat", body)
    return answer["message"]["content"], answer["done_reason"] == "length"


PROTOCOLS = (chat, responses, messages, ollama)


def outcome(server: RealServer, number: int) -> Outcome:
    """Ask for an answer to one schema, in one protocol."""
    schema, ask = ALL[number], PROTOCOLS[number % len(PROTOCOLS)]
    try:
        text, is_cut = ask(server, schema)
    except urllib.error.HTTPError as error:
        return Outcome(ask.__name__, schema, error.read().decode())
    return Outcome(ask.__name__, schema, "length" if is_cut else "valid" if is_valid(schema, text) else text)


def is_valid(schema: Any, text: str) -> bool:
    """In the draft that the schema was written for."""
    old = isinstance(schema.get("exclusiveMinimum"), bool)
    validator: Any = jsonschema.Draft4Validator if old else jsonschema.Draft202012Validator
    try:
        value = json.loads(text.replace("-02-29", "-02-28"))  # llguidance's pattern of dates knows no leap years
        return bool(validator(schema, format_checker=validator.FORMAT_CHECKER).is_valid(value))
    except ValueError:
        return False


@pytest.mark.slow
def test_two_hundred_schemas_are_kept(server: RealServer) -> None:
    assert len(ALL) == N_SCHEMAS
    with ThreadPoolExecutor(N_CLIENTS) as clients:
        found = list(clients.map(lambda number: outcome(server, number), range(N_SCHEMAS)))
    assert [each for each in found if each.result not in ("valid", "length")] == []
    counts = Counter(each.result for each in found)
    print(f"{counts['valid']} of {N_SCHEMAS} valid, {counts['length']} cut off at {MOST_TOKENS} tokens")
    assert counts["valid"] > N_SCHEMAS / 2
