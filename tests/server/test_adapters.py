"""Adapters in one server: every request gets its own, and nothing that another one computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.hf_writer import files_of
from support.peft_writer import AdaptedModel, adapted_model, lora, weights_of, write_peft
from support.served import CHAT, HI, LiveServer

from llmrun.lab.convert.peft import convert_adapter
from llmrun.protocol.adapters import Adapter

pytestmark = pytest.mark.usefixtures("package_on_path")
CLOSE = 0.02  # in log probabilities: KV caches of float16; an adapter changes them by much more


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    return adapted_model(tmp_path_factory.mktemp("adapted"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def adapters(files: AdaptedModel) -> tuple[Adapter, ...]:
    """Two; the second counts nothing where a request does not say."""
    other = lora(weights_of(files_of("LlamaForCausalLM")), seed=2)
    path = files.adapter.with_name("other.gguf")
    convert_adapter(write_peft(files.adapter.with_name("other"), other), files.base, path)
    return Adapter("style", str(files.adapter)), Adapter("other", str(path), 0.0)


@pytest.fixture
def server(files: AdaptedModel, adapters: tuple[Adapter, ...], tmp_path: Path) -> Iterator[LiveServer]:
    with started(files, adapters, tmp_path) as live:
        yield live


def started(files: AdaptedModel, adapters: tuple[Adapter, ...], folder: Path) -> LiveServer:
    return LiveServer(
        folder, ("real",), model=files.base, adapters=adapters, parallel=4, n_ctx=1024, queue=128, speculate=0
    )


def body(server: LiveServer, prompt: str, choice: int) -> dict[str, Any]:
    """A request; choices are: as started, the second adapter by name, both by number, none."""
    asked = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    ways: list[dict[str, Any]] = [
        {},
        {"model": f"{server.model}:other"},
        {"lora": [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 1.0}]},
        {"lora": []},
    ]
    return {**asked, **ways[choice], **({"speculate": 7} if len(prompt) % 2 else {})}


def answer(server: LiveServer, prompt: str, choice: int) -> dict[str, Any]:
    found = server.post("/v1/completions", body(server, prompt, choice))
    assert found.status == 200, found.json
    logprobs: dict[str, Any] = found.json["choices"][0]["logprobs"]
    return logprobs


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same tokens, as likely; up to one that could as well have been another."""
    for place, (first, second) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        assert abs(one["token_logprobs"][place] - other["token_logprobs"][place]) < CLOSE
        if first != second:
            return


def prompts(seed: int, count: int) -> list[str]:
    """Some begin alike, for long enough to be stowed and saved."""
    rng = random.Random(seed)
    common = "".join(rng.choices("abcdefgh ", k=300))
    return [common[: rng.choice([0, 100, 300])] + "".join(rng.choices("xyz ", k=20)) for _ in range(count)]


@pytest.mark.slow
def test_a_hundred_requests_at_once_are_answered_as_each_alone(server: LiveServer) -> None:
    asked = [(prompt, number % 4) for number, prompt in enumerate(prompts(3, 100))]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda each: answer(server, *each), asked))
    fresh = [{**body(server, *each), "cache_salt": str(number)} for number, each in enumerate(asked)]
    alone = [server.post("/v1/completions", each).json["choices"][0]["logprobs"] for each in fresh]
    for one, other in zip(together, alone, strict=True):
        assert_same(one, other)
    firsts = [alone[number]["token_logprobs"][0] for number in range(4)]
    assert len({round(first, 1) for first in firsts}) > 1


def test_adapters_make_a_difference(server: LiveServer) -> None:
    found = [answer(server, "the quick brown fox", choice)["top_logprobs"][0] for choice in range(4)]
    for number, one in enumerate(found):
        for other in found[number + 1 :]:
            assert one.keys() != other.keys() or max(abs(one[token] - other[token]) for token in one) > 2 * CLOSE


@pytest.mark.slow
def test_saved_states_are_for_the_adapters_they_were_computed_with(
    files: AdaptedModel, adapters: tuple[Adapter, ...], tmp_path: Path
) -> None:
    long = prompts(5, 30)
    with started(files, adapters, tmp_path) as server:
        before = [[answer(server, prompt, choice) for choice in (0, 1)] for prompt in long]
    turned = (adapters[0]._replace(scale=0.0), adapters[1]._replace(scale=1.0))
    with started(files, turned, tmp_path) as server:
        for prompt, (_, other) in zip(long, before, strict=True):
            assert_same(answer(server, prompt, 0), other)


def test_adapters_are_listed(server: LiveServer) -> None:
    names = [each["id"] for each in server.get("/v1/models").json["data"]]
    assert names[:3] == [server.model, f"{server.model}:style", f"{server.model}:other"]
    assert server.get("/lora-adapters").json == [
        {"id": 0, "path": "style", "scale": 1.0},
        {"id": 1, "path": "other", "scale": 0.0},
    ]


def test_scales_are_set_for_requests_that_name_none(server: LiveServer) -> None:
    started, other = (answer(server, "the quick brown fox", choice) for choice in (0, 1))
    assert server.post("/lora-adapters", [{"id": 1, "scale": 1.0}]).json == {"success": True}
    assert [each["scale"] for each in server.get("/lora-adapters").json] == [0.0, 1.0]
    assert_same(answer(server, "the quick brown fox", 0), other)
    named = {"prompt": "the quick brown fox", "lora": [{"id": 0, "scale": 1.0}]}
    found = server.post("/v1/completions", {**body(server, "", 0), **named}).json["choices"][0]["logprobs"]
    assert_same(found, started)
    for wrong in ([{"id": 2, "scale": 1}], [{"scale": 1}], [5], {"id": 0}, "a"):
        assert server.post("/lora-adapters", wrong).status == 400
    assert [each["scale"] for each in server.get("/lora-adapters").json] == [0.0, 1.0], "nothing has changed"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lora": 5}, "lora must be a list"),
        ({"lora": [5]}, "lora[0] must be an object"),
        ({"lora": [{}]}, "lora[0].id is missing"),
        ({"lora": [{"id": 0}, {"id": 0}]}, "lora[1].id is given twice"),
        ({"lora": [{"id": 0, "scale": "much"}]}, "lora[0].scale must be a number"),
        ({"lora": [{"id": 2}]}, "there is no adapter 2"),
        ({"model": "MODEL:other", "lora": []}, "can't be used together"),
        ({"model": "MODEL:nobody"}, "there is no model"),
    ],
)
def test_a_wrong_choice_is_named(changes: dict[str, Any], named: str, server: LiveServer) -> None:
    changes = {name: _with_model(value, server) for name, value in changes.items()}
    found = server.post("/v1/completions", {"prompt": "a", **changes})
    assert found.status in (400, 404, 422), found.status
    assert named in found.json["error"]["message"]


def test_vectors_of_an_adapter_that_is_chosen_are_refused(server: LiveServer) -> None:
    found = server.post("/v1/embeddings", {"input": "a", "model": f"{server.model}:other"})
    assert (found.status, "can't compute vectors" in found.json["error"]["message"]) == (400, True)


def _with_model(value: Any, server: LiveServer) -> Any:
    return value.replace("MODEL", server.model) if isinstance(value, str) else value


def test_a_server_without_adapters_has_none(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as server:
        assert server.get("/lora-adapters").json == []
        assert server.post(CHAT, {**HI, "lora": []}).status == 200
