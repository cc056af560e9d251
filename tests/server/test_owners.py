"""Two keys, two owners: what a server remembers of a request serves requests with the same key only."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.family_model import control_texts, write_family_model
from support.installed import eventually
from support.served import CHAT, HI, SECONDS, LiveServer, RawResponse, parse

from llmrun.protocol.messages import AnswerRequest
from llmrun.server.app import COMPLETION_APIS
from llmrun.server.guard import Policy, with_saved_secret
from llmrun.server.pool import Pool

pytestmark = pytest.mark.usefixtures("package_on_path")
KEYS = (b"the key of Alice", b"the key of Mallory")
ALICE, MALLORY = (f"Bearer {key.decode()}" for key in KEYS)
TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' }}"""
QUESTION = "The code of the vault is quokka-7319. " * 60
PLACE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"at": {"enum": ["here", "there"]}},
    "required": ["at"],
}
FEW, MANY = 20, 200
"""Tokens: what all prompts of a template begin with, and most of QUESTION."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_family_model(file, control_texts(TEMPLATE), ("<|im_end|>",), template=TEMPLATE)


def real(folder: Path, model: Path, *keys: bytes) -> LiveServer:
    return LiveServer(folder, ("real",), model=model, n_ctx=4096, keep_seconds=-1, policy=Policy(keys=keys))


def asked(server: LiveServer, messages: list[Any], key: str = "") -> tuple[str, int]:
    """The answer, and the number of tokens of the prompt that were cached."""
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    body = {"messages": messages, "temperature": 0, "response_format": schema}
    found = server.post(CHAT, body, authorization=key)
    assert found.status == 200, found.body
    cached = found.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found.json["choices"][0]["message"]["content"], cached


def said(text: str, *turns: str) -> list[Any]:
    """A conversation: a question, and turns by turns answers and questions."""
    roles = ("assistant", "user") * len(turns)
    return [{"role": "user", "content": text}, *({"role": r, "content": t} for r, t in zip(roles, turns, strict=False))]


def test_prefixes_and_answers_as_generated_are_of_one_owner(tmp_path: Path, model: Path) -> None:
    with real(tmp_path, model, *KEYS) as server:
        answer, cached = asked(server, said(QUESTION), ALICE)
        assert cached == 0
        longer = said(QUESTION, answer, "And then?")
        for key, expected in ((MALLORY, 0), (ALICE, 1)):
            n_served = len(server.served)
            cached = asked(server, longer, key)[1]
            assert (cached > MANY) == (key == ALICE), cached
            assert (cached < FEW) == (key == MALLORY), cached
            assert eventually(lambda n=n_served: len(server.served) > n, SECONDS)
            told = server.served[-1].facts.get("history")
            assert (told["answers"] if told else 0) == expected
        assert asked(server, longer, MALLORY)[1] > MANY, "and each reuses its own"


def is_saved(folder: Path) -> bool:
    """Whether there is a state; the model's hash is written first."""
    return any(file.parent.name != "hashes" for file in folder.rglob("*.kv"))


def saved_conversation(server: LiveServer, folder: Path, key: str = "") -> list[Any]:
    """Have a conversation of two turns, wait until it is on the disk, and return it with a third question."""
    answer, _ = asked(server, said(QUESTION), key)
    second, _ = asked(server, said(QUESTION, answer, "And then?"), key)
    assert eventually(lambda: is_saved(folder), SECONDS)
    return said(QUESTION, answer, "And then?", second, "And at last?")


def test_saved_states_are_of_one_owner_also_after_a_restart(tmp_path: Path, model: Path) -> None:
    with real(tmp_path, model, *KEYS) as server:
        longer = saved_conversation(server, tmp_path, ALICE)
    with real(tmp_path, model, *reversed(KEYS)) as server:
        assert asked(server, longer, MALLORY)[1] < FEW
        assert asked(server, longer, ALICE)[1] > MANY
    with real(tmp_path, model) as server:
        assert asked(server, longer)[1] < FEW, "and the machine's user is another one"


def test_one_key_is_the_machine_s_user(tmp_path: Path, model: Path) -> None:
    with real(tmp_path, model) as server:
        longer = saved_conversation(server, tmp_path)
    with real(tmp_path, model, KEYS[0]) as server:
        assert asked(server, longer, ALICE)[1] > MANY
    assert not list(tmp_path.rglob("owners.secret"))


# ---- the front, over fake engines ----


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(tmp_path, ("echo",), n_ctx=4096, policy=Policy(keys=KEYS)) as live:
        yield live


def owners_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the requests that are sent to engines from now on."""
    found, original = list[str](), Pool.complete

    def complete(pool: Pool, pooled: Any, name: str, request: AnswerRequest) -> AnswerRequest:
        completed = original(pool, pooled, name, request)
        found.append(completed.owner)
        return completed

    monkeypatch.setattr(Pool, "complete", complete)
    return found


COUNTS = (
    "/apply-template", "/v1/messages/count_tokens", "/v1/chat/completions/input_tokens",
    "/chat/completions/input_tokens", "/v1/responses/input_tokens", "/responses/input_tokens",
)  # fmt: skip


@pytest.mark.parametrize("path", [*COMPLETION_APIS, *COUNTS])
def test_every_route_says_whose_request_it_is(server: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owners, is_text = owners_of(monkeypatch), path in ("/v1/completions", "/completion", "/completions")
    body = {"model": server.model, "input": "Hi", "input_prefix": "a", "input_suffix": "b", "max_tokens": 5}
    asked = {"prompt": ["Hi", "there"] if path == "/v1/completions" else "Hi"} if is_text else HI
    if path == "/api/generate":
        asked = {"prompt": "Hi"}
    for key in (ALICE, MALLORY):
        # An engine of this stand-in ends at /apply-template.
        assert server.post(path, {**body, **asked}, authorization=key).status == (
            500 if path == "/apply-template" else 200
        )
    half = len(owners) // 2
    assert half == (2 if path == "/v1/completions" else 1)
    assert len({*owners[:half]}) == len({*owners[half:]}) == 1
    assert len({*owners, ""}) == 3


def test_the_page_is_the_machine_s_user_whatever_its_key(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = owners_of(monkeypatch)
    for key in (ALICE, MALLORY):
        asked = server.post("/ui/ask", {"text": "Hi"}, authorization=key).json
        body = {"chat": asked["id"], "question": asked["entries"][0]["id"]}
        assert server.post("/ui/answer", body, authorization=key).status == 200
    assert len(owners) >= 2
    assert {*owners} == {""}


def test_a_kept_response_is_unknown_to_others(server: LiveServer) -> None:
    def fetched(method: str, path: str, key: str) -> RawResponse:
        return parse(server.raw(server.request(method, path, authorization=key)))

    kept = server.post("/v1/responses", {"input": "Hello"}, authorization=ALICE).json
    path, item = f"/v1/responses/{kept['id']}", kept["output"][0]["id"]
    going_on = {"input": "And?", "previous_response_id": kept["id"]}
    referring = {"input": [{"type": "item_reference", "id": item}, {"role": "user", "content": "And?"}]}
    for key, status in ((MALLORY, 404), (ALICE, 200)):
        for body in (going_on, referring):
            for where in ("/v1/responses", "/v1/responses/input_tokens"):
                assert server.post(where, body, authorization=key).status == status, (where, body)
        for method, where in (
            ("GET", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel"), ("DELETE", path),
        ):  # fmt: skip
            assert fetched(method, where, key).status == status, (method, where)


def test_a_kept_chat_is_unknown_to_others(server: LiveServer) -> None:
    kept = server.post(CHAT, {**HI, "store": True}, authorization=ALICE).json
    path = f"{CHAT}/{kept['id']}"
    for key, status in ((MALLORY, 404), (ALICE, 200)):
        listed = server.get(CHAT, authorization=key).json["data"]
        assert [each["id"] for each in listed] == ([kept["id"]] if key == ALICE else [])
        assert server.post(path, {"metadata": {}}, authorization=key).status == status
        for method, where in (("GET", path), ("GET", f"{path}/messages"), ("DELETE", path)):
            assert parse(server.raw(server.request(method, where, authorization=key))).status == status


# ---- owners ----


@pytest.mark.parametrize("keys", [(), KEYS[:1]])
def test_one_key_or_none_makes_no_owners(keys: tuple[bytes, ...], tmp_path: Path) -> None:
    policy = with_saved_secret(Policy(keys=keys), tmp_path)
    assert policy.owner(KEYS[0]) == ""
    assert policy.owner(KEYS[1]) == (None if keys else "")
    assert not list(tmp_path.iterdir())


def test_an_owner_follows_from_the_key_and_the_secret() -> None:
    policy = Policy(keys=KEYS, secret=b"s" * 32)
    alice, mallory = (policy.owner(key) for key in KEYS)
    assert alice
    assert mallory
    assert alice != mallory
    assert policy.owner(b"another key") is None
    assert policy.owner(b"") is None
    assert replace(policy, keys=KEYS[::-1]).owner(KEYS[0]) == alice
    assert replace(policy, secret=b"t" * 32).owner(KEYS[0]) != alice
    assert Policy(keys=KEYS).owner(KEYS[0]) != Policy(keys=KEYS).owner(KEYS[0])


def test_a_secret_is_not_shown_with_its_policy() -> None:
    assert "sssss" not in repr(Policy(keys=KEYS, secret=b"s" * 32))


def test_the_secret_is_kept_for_this_user_alone(tmp_path: Path) -> None:
    first = with_saved_secret(Policy(keys=KEYS), tmp_path / "state")
    (file,) = (tmp_path / "state").iterdir()
    assert file.read_bytes() == first.secret
    assert sys.platform == "win32" or stat.S_IMODE(file.stat().st_mode) == 0o600
    assert with_saved_secret(Policy(keys=KEYS), tmp_path / "state").secret == first.secret


def test_a_damaged_secret_is_replaced_by_one_that_others_can_t_read(tmp_path: Path) -> None:
    file = tmp_path / "owners.secret"
    file.write_bytes(b"short")
    file.chmod(0o644)
    policy = with_saved_secret(Policy(keys=KEYS), tmp_path)
    assert len(policy.secret) == 32
    assert file.read_bytes() == policy.secret
    assert sys.platform == "win32" or stat.S_IMODE(file.stat().st_mode) == 0o600


def test_where_nothing_can_be_kept_there_are_owners_still(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    policies = [with_saved_secret(Policy(keys=KEYS), tmp_path / "file" / "state") for _ in range(2)]
    first, second = (policy.owner(KEYS[0]) for policy in policies)
    assert first
    assert second
    assert first != second
