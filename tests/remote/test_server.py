"""Which server is meant, with which key, and which of its models."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.remote_server import KEY

from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.remote.server import ServedModel, Server, choose_model, read_server


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("http://host:8080", "http://host:8080/v1"),
        ("http://host:8080/", "http://host:8080/v1"),
        ("http://host:8080/v1", "http://host:8080/v1"),
        (" HTTP://Host:8080/v1/ ", "http://host:8080/v1"),
        ("https://host/v1/chat/completions", "https://host/v1"),
        ("https://host/api/v1/models", "https://host/api/v1"),
        ("https://host/llm", "https://host/llm/v1"),
        ("https://host/v1beta/openai/", "https://host/v1beta/openai"),
        ("localhost:8080", "http://localhost:8080/v1"),
        ("127.0.0.1:1", "http://127.0.0.1:1/v1"),
        ("http://[::1]:8080", "http://[::1]:8080/v1"),
    ],
)
def test_an_address_may_be_written_in_many_ways(typed: str, url: str) -> None:
    assert read_server(typed, {}).url == url


@pytest.mark.parametrize(
    "typed",
    ["", "x", "host:8080", "ftp://host", "http://", "http://host:x", "http://host:99999", "https://ho st", "file:///x"],
)
def test_an_address_may_be_wrong(typed: str) -> None:
    with pytest.raises(UsageError):
        read_server(typed, {})


@pytest.mark.parametrize(
    "typed", [f"https://user:{KEY}@host", f"https://{KEY}@host", f"https://host?key={KEY}", f"https://host/v1#{KEY}"]
)
def test_a_secret_has_no_place_in_an_address(typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_server(typed, {})
    assert KEY not in f"{caught.value} {caught.value.hint}"
    assert "LLMRUN_SERVER_KEY" in caught.value.hint


def test_a_key_is_in_no_repr() -> None:
    assert KEY not in repr(read_server("https://host", {"LLMRUN_SERVER_KEY": KEY}))


def test_where_the_key_comes_from(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("# mine\n\n from-one \nsecond\n")
    other.write_text("from-other")
    everything = {"LLMRUN_SERVER_KEY": KEY, "LLMRUN_SERVER_KEY_FILE": str(other), "OPENAI_API_KEY": "openai's"}
    assert read_server("https://host", everything, one).key == "from-one"
    assert read_server("https://host", everything).key == KEY
    assert read_server("https://host", {**everything, "LLMRUN_SERVER_KEY": ""}).key == "from-other"
    assert read_server("https://host", {}).key == ""


def test_openais_key_is_openais() -> None:
    environment = {"OPENAI_API_KEY": "openai's"}
    assert read_server("https://api.openai.com", environment).key == "openai's"
    for other in ("http://api.openai.com", "https://api.openai.com.example", "https://host", "http://localhost:1"):
        assert read_server(other, environment).key == ""


@pytest.mark.parametrize("key", ["two words", "line\nline", "schlüssel", "a\x00b"])
def test_a_key_may_be_wrong(key: str) -> None:
    with pytest.raises(UsageError, match="LLMRUN_SERVER_KEY") as caught:
        read_server("https://host", {"LLMRUN_SERVER_KEY": key})
    assert key not in f"{caught.value} {caught.value.hint}"


def test_a_key_file_may_be_wrong(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("empty", "binary", "missing", "."):
        with pytest.raises(UsageError, match="--key-file"):
            read_server("https://host", {}, tmp_path / name)
        with pytest.raises(UsageError, match="LLMRUN_SERVER_KEY_FILE"):
            read_server("https://host", {"LLMRUN_SERVER_KEY_FILE": str(tmp_path / name)})


def test_who_can_read_it_is_said() -> None:
    assert not Server("https://host/v1", KEY).warning
    assert not Server("http://127.0.0.1:8080/v1", KEY).warning
    assert not Server("http://[::1]:8080/v1", KEY).warning
    assert "the key" in Server("http://10.0.0.1/v1", KEY).warning
    assert "the key" not in Server("http://10.0.0.1/v1").warning
    assert KEY not in Server("http://10.0.0.1/v1", KEY).warning


def test_which_model_is_meant() -> None:
    server = Server("http://host/v1")
    one, other = ServedModel("llama-3"), ServedModel("qwen-3")
    assert choose_model(server, (one,), None) == one
    assert choose_model(server, (one, other), "qwen-3") == other
    with pytest.raises(UsageError, match="2 models: llama-3, qwen-3"):
        choose_model(server, (one, other), None)
    with pytest.raises(ModelNotFoundError, match="it has llama-3, qwen-3") as caught:
        choose_model(server, (one, other), "lama-3")
    assert caught.value.hint == "did you mean llama-3?"
    with pytest.raises(ModelNotFoundError) as caught:
        choose_model(server, (one, other), "x")
    assert caught.value.hint == "name one of these"
    with pytest.raises(ModelNotFoundError, match="has no model"):
        choose_model(server, (), None)
    with pytest.raises(UsageError, match="and 15 more"):
        choose_model(server, [one] * 25, None)


def test_another_name_of_a_model_is_not_a_second_model() -> None:
    server = read_server("http://127.0.0.1:8080", {})
    model, alias = ServedModel("qwen-3"), ServedModel("fast", alias_of="qwen-3")
    assert choose_model(server, (model, alias), None) == model
    assert choose_model(server, (model, alias), "fast") == alias
    with pytest.raises(UsageError, match="has 2 models"):
        choose_model(server, (model, alias, ServedModel("lama")), None)
    assert choose_model(server, (alias,), None) == alias, "its model is not listed"
