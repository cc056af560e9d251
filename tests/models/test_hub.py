"""Metadata: what the hub answers is checked before anybody makes a path of it; its errors become ours."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.stand_in_hub import COMMIT, StandInHub, sha256, stand_in_hub

from llmrun.config import Settings
from llmrun.errors import LlmrunError, LoginRequiredError, ModelNotFoundError, NetworkError, OutOfMemoryError
from llmrun.models import hub as module
from llmrun.models.hub import (
    Match,
    RemoteFile,
    choose,
    choose_file,
    file_url,
    parts_of,
    repository_files,
    search,
)
from llmrun.models.registry import ModelSpec

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
        {"name": "a" * 251 + ".gguf"}, {"sha": "../../x"}, {"sha": "F" * 64}, {"sha": "f" * 63},
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


GB = 10**9


def files(*names: str, size: int = GB) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(name, size, "0" * 64) for name in names)


def sized(**gigabytes: float) -> tuple[RemoteFile, ...]:
    """A repository with these quants."""
    return tuple(RemoteFile(f"m-{quant}.gguf", int(size * GB), "0" * 64) for quant, size in gigabytes.items())


def names(parts: tuple[RemoteFile, ...]) -> list[str]:
    return [file.name for file in parts]


def test_choice() -> None:
    some = files("m-Q4_K_M.gguf", "m-Q8_0-00002-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf", "mmproj.gguf")
    assert names(choose_file(some, None)) == ["m-Q4_K_M.gguf"]
    assert names(choose_file(some, "q8_0")) == ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]


def test_the_choice_is_said_where_there_is_one() -> None:
    notes: list[str] = []
    choose_file(sized(Q4_K_M=4.7, Q8_0=8.1), None, on_note=notes.append)
    assert notes == ["Q4_K_M of Q4_K_M (4.7 GB), Q8_0 (8.1 GB): the usual choice, good answers for its size"]
    choose_file(sized(Q4_K_M=4.7), None, on_note=notes.append)
    choose_file(sized(Q4_K_M=4.7, Q8_0=8.1), "Q8_0", on_note=notes.append)
    assert len(notes) == 1


def test_the_largest_that_fits() -> None:
    some = sized(Q2_K=3.0, IQ3_XXS=3.3, Q3_K_M=3.8, Q4_K_M=4.7, Q8_0=8.1)
    notes: list[str] = []
    assert names(choose_file(some, None, 16 * GB, notes.append)) == ["m-Q4_K_M.gguf"]
    assert names(choose_file(some, None, int(5.5 * GB), notes.append)) == ["m-Q3_K_M.gguf"]
    assert notes[-1] == "Q3_K_M (3.8 GB): Q4_K_M with 4.7 GB and a KV cache does not fit into 5.5 GB of free memory"
    assert names(choose_file(some, None, int(4.5 * GB), notes.append)) == ["m-IQ3_XXS.gguf"]
    assert names(choose_file(some, "Q8_0", int(4.5 * GB))) == ["m-Q8_0.gguf"]  # who asks gets it


def test_a_split_model_counts_with_all_parts() -> None:
    some = (*sized(Q2_K=3.0), *files("m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf", size=5 * GB))
    assert names(choose_file(some, None, 8 * GB)) == ["m-Q2_K.gguf"]


def test_nothing_fits() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        choose_file(sized(Q2_K=30, Q4_K_M=47), None, 8 * GB, name="a/b")
    assert "Q2_K, takes 30.0 GB" in caught.value.why
    assert "a/b:Q2_K" in caught.value.hint


def test_the_catalogues_proposal_is_taken_when_it_fits() -> None:
    some = sized(Q4_1=5.0, Q4_K_M=4.7, Q2_K=3.0)
    spec = ModelSpec("tiny", repository="a/b", quant="Q4_1", filename="m-Q4_1.gguf", alias="tiny", any_quant=True)
    assert names(choose(spec, some)) == ["m-Q4_1.gguf"]
    assert names(choose(spec, some, 16 * GB)) == ["m-Q4_1.gguf"]
    assert names(choose(spec, some, int(4.5 * GB))) == ["m-Q2_K.gguf"]
    assert names(choose(replace(spec, any_quant=False), some, int(4.5 * GB))) == ["m-Q4_1.gguf"]


def test_no_such_quant_lists_those_there_are_and_the_near_ones() -> None:
    spec = ModelSpec("typed", repository="a/b", quant="Q4")
    with pytest.raises(ModelNotFoundError, match="there is no quant Q4 of a/b") as caught:
        choose(spec, sized(Q8_0=8.1, Q4_K_M=4.7, Q4_K_S=0.45))
    assert caught.value.why == "there are Q4_K_M (4.7 GB), Q4_K_S (450.0 MB), Q8_0 (8.1 GB)"
    assert caught.value.hint == "did you mean a/b:Q4_K_M or a/b:Q4_K_S?"
    with pytest.raises(ModelNotFoundError) as caught:
        choose(replace(spec, quant="LATEST"), sized(Q8_0=8.1, Q4_K_M=4.7))
    assert caught.value.hint == "did you mean a/b:Q4_K_M?"


def found(**changes: Any) -> dict[str, Any]:
    """What the hub says of a repository that a search found."""
    return {
        "id": "maker/tiny-GGUF", "downloads": 12345, "likes": 6, "gated": False,
        "lastModified": "2026-10-01T10:11:12.000Z", **changes,
    }  # fmt: skip


def test_search(hub: StandInHub) -> None:
    hub.pages["/api/models"] = ("application/json", json.dumps([found(), found(id="b/c", gated="auto")]).encode())
    first, second = search(["tiny", "gguf"], settings(hub.url), 5)
    assert first == Match("maker/tiny-GGUF", 12345, 6, "2026-10-01", gated=False)
    assert (second.repository, second.gated) == ("b/c", True)
    assert len(hub.requests) == 1


@pytest.mark.parametrize(
    "lie",
    [{"id": "../../x"}, {"id": "a/b\x1b[2J"}, {"id": None}, {"id": "plain"}, {"id": "a/" + "b" * 300}],
    ids=str,
)
def test_a_search_shows_only_what_can_be_typed(hub: StandInHub, lie: dict[str, Any]) -> None:
    answer = [found(**lie), found(downloads="many", likes=None, lastModified="\x1b[31m"), 7]
    hub.pages["/api/models"] = ("application/json", json.dumps(answer).encode())
    assert search(["x"], settings(hub.url)) == [Match("maker/tiny-GGUF", 0, 0, "", gated=False)]


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"7", b"\xff"])
def test_a_search_answered_with_nonsense(hub: StandInHub, body: bytes) -> None:
    hub.pages["/api/models"] = ("application/json", body)
    with pytest.raises(NetworkError, match="nonsense"):
        search(["x"], settings(hub.url))


def test_a_search_without_a_hub_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits and tries again"))
    with pytest.raises(NetworkError, match="can't reach the hub"):
        search(["x"], settings("http://127.0.0.1:9"))
    with pytest.raises(NetworkError, match="HF_HUB_OFFLINE"):
        search(["x"], settings("http://127.0.0.1:9", offline=True))


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
