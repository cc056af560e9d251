"""Metadata: what the hub answers is checked before anybody makes a path of it; its errors become ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in_hub import COMMIT, StandInHub, sha256, stand_in_hub

from llmrun.config import Settings
from llmrun.errors import LlmrunError, LoginRequiredError, ModelNotFoundError, NetworkError
from llmrun.models import hub as module
from llmrun.models.hub import RemoteFile, choose_file, file_url, parts_of, repository_files

REPOSITORY = "maker/tiny-GGUF"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setenv("NO_PROXY", "*")
    with stand_in_hub(REPOSITORY) as server:
        server.files["tiny-Q4_0.gguf"] = b"GGUF and more"
        yield server


def settings(endpoint: str, *, offline: bool = False) -> Settings:
    return Settings(Path("unused"), endpoint, offline=offline, debug=False)


def ask(hub: StandInHub, repository: str = REPOSITORY, revision: str = "main") -> module.Repository:
    return repository_files(repository, revision, settings(hub.url))


def test_files_with_size_and_hash(hub: StandInHub) -> None:
    found = ask(hub)
    assert (found.id, found.commit, found.gated) == (REPOSITORY, COMMIT, False)
    assert found.files == (RemoteFile("tiny-Q4_0.gguf", 13, sha256(b"GGUF and more")),)
    assert hub.requests[0].path == f"/api/models/{REPOSITORY}/revision/main"
    assert len(hub.requests) == 1  # no telemetry


@pytest.mark.parametrize(
    "lie",
    [
        {"commit": "../../../etc"}, {"commit": COMMIT.upper()}, {"commit": None}, {"commit": COMMIT + "\n"},
        {"name": "../x.gguf"}, {"name": "/etc/x.gguf"}, {"name": "a//x.gguf"}, {"name": "a/../x.gguf"},
        {"name": "a\\..\\x.gguf"}, {"name": "c:x.gguf"}, {"name": "\x1b[2J.gguf"}, {"name": "x\u202e.gguf"},
        {"name": "a" * 600 + ".gguf"}, {"sha": "../../x"}, {"sha": "F" * 64}, {"sha": "f" * 63},
        {"size": -1}, {"size": 0}, {"size": "12"}, {"size": 10**18},
        {"body": b"<html>"}, {"body": b"[]"}, {"body": b'{"siblings": 7}'}, {"body": b"{}"},
    ],
    ids=str,
)  # fmt: skip
def test_lies_are_refused(hub: StandInHub, lie: dict[str, Any]) -> None:
    for name, value in lie.items():
        setattr(hub.faults, name, value)
    with pytest.raises(NetworkError, match="nonsense") as caught:
        ask(hub)
    assert caught.value.why.isprintable()


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ((401, "RepoNotFound"), ModelNotFoundError, "private"),
        ((404, "RepoNotFound"), ModelNotFoundError, "private"),
        ((403, "GatedRepo"), LoginRequiredError, "terms"),
        ((404, "RevisionNotFound"), ModelNotFoundError, "no revision 'main'"),
        ((429, ""), NetworkError, "17 seconds"),
        ((403, ""), LoginRequiredError, "403"),
        ((500, ""), NetworkError, "500"),
    ],
)
def test_errors(hub: StandInHub, answer: tuple[int, str], error: type[LlmrunError], words: str) -> None:
    hub.faults.metadata = answer
    hub.faults.metadata_headers = {"Retry-After": "17"}
    with pytest.raises(error) as caught:
        ask(hub)
    assert words in str(caught.value)


def test_gated_says_what_to_do(hub: StandInHub) -> None:
    hub.faults.metadata = (403, "GatedRepo")
    with pytest.raises(LoginRequiredError) as caught:
        ask(hub)
    assert f"{hub.url}/{REPOSITORY}" in caught.value.hint
    assert "hf auth login" in caught.value.hint


def test_unreachable() -> None:
    with pytest.raises(NetworkError, match="can't reach the hub"):
        repository_files(REPOSITORY, "main", settings("http://127.0.0.1:9"))


def test_impossible_name(hub: StandInHub) -> None:
    with pytest.raises(ModelNotFoundError):
        ask(hub, "a--b/c")


def test_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(module, "_ask", lambda *_: threading.Event().wait(5))
    with pytest.raises(NetworkError, match="no answer within"):
        repository_files(REPOSITORY, "main", settings("http://127.0.0.1:9"))


def test_offline_asks_nobody(hub: StandInHub) -> None:
    with pytest.raises(NetworkError, match="HF_HUB_OFFLINE"):
        repository_files(REPOSITORY, "main", settings(hub.url, offline=True))
    assert not hub.requests


def files(*names: str) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(name, 1, "0" * 64) for name in names)


def test_choice() -> None:
    some = files("m-Q4_K_M.gguf", "m-Q8_0-00002-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf", "mmproj.gguf")
    assert [file.name for file in choose_file(some, None)] == ["m-Q4_K_M.gguf"]
    parts = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    assert [file.name for file in choose_file(some, "q8_0")] == parts


def test_no_such_quant_lists_those_there_are() -> None:
    with pytest.raises(ModelNotFoundError, match="there are Q4_K_M, Q8_0"):
        choose_file(files("m-Q8_0.gguf", "m-Q4_K_M.gguf"), "Q3_K_S")


def test_no_model_file() -> None:
    with pytest.raises(ModelNotFoundError, match="no GGUF"):
        choose_file(files("mmproj.gguf"), None)


def test_missing_part_and_missing_file() -> None:
    with pytest.raises(ModelNotFoundError, match="00002-of-00002"):
        choose_file(files("m-Q8_0-00001-of-00002.gguf"), None)
    with pytest.raises(ModelNotFoundError, match=r"there are m-Q8_0\.gguf"):
        parts_of(files("m-Q8_0.gguf"), "other.gguf")


def test_links_are_quoted() -> None:
    link = file_url(settings("https://hub.invalid"), REPOSITORY, COMMIT, "a b/c#d.gguf")
    assert link == f"https://hub.invalid/{REPOSITORY}/resolve/{COMMIT}/a%20b/c%23d.gguf"
