"""Hub metadata: responses are validated before they become paths; HTTP errors become ours."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.stand_in_hub import COMMIT, StandInHub, retrying, sha256, stand_in_hub

from llmrun.config import Settings
from llmrun.errors import LlmrunError, LoginRequiredError, ModelNotFoundError, NetworkError
from llmrun.models import hub as module
from llmrun.models.download.transfer import RetryPolicy
from llmrun.models.hub import Match, RemoteFile, choose, file_url, offers, parts_of, repository_files, search
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
    with retrying(RetryPolicy(retries=0)):
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
    with pytest.raises(NetworkError, match="invalid response") as caught:
        ask(hub)
    assert caught.value.why.isprintable()


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ((401, "RepoNotFound"), ModelNotFoundError, "private"),
        ((404, "RepoNotFound"), ModelNotFoundError, "private"),
        ((403, "GatedRepo"), LoginRequiredError, "terms"),
        ((404, "RevisionNotFound"), ModelNotFoundError, "no revision 'main'"),
        ((429, ""), NetworkError, "too many requests"),
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


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_hub_is_asked_again_and_that_is_said(hub: StandInHub, status: int) -> None:
    hub.faults.metadata_statuses = [status, status]
    hub.faults.metadata_headers = {"Retry-After": "0"}
    notes: list[str] = []
    with retrying(RetryPolicy(backoff_seconds=0)):
        found = repository_files(REPOSITORY, "main", settings(hub.url), notes.append)
    assert [file.name for file in found.files] == ["tiny-Q4_0.gguf"]
    assert len(hub.requests) == 3
    assert len(notes) == 2
    assert all("trying again in 0 seconds" in note for note in notes)


def test_a_hub_that_hangs_up_is_asked_again(hub: StandInHub) -> None:
    hub.faults.metadata_statuses = [StandInHub.HANG_UP]
    notes: list[str] = []
    with retrying(RetryPolicy(backoff_seconds=0)):
        repository_files(REPOSITORY, "main", settings(hub.url), notes.append)
    assert "sent an incomplete response" in notes[0]


def test_a_hub_that_falls_silent_is_asked_again(hub: StandInHub) -> None:
    hub.faults.metadata_statuses = [StandInHub.SILENT]
    notes: list[str] = []
    with retrying(RetryPolicy(stall_seconds=0.2, backoff_seconds=0)):
        repository_files(REPOSITORY, "main", settings(hub.url), notes.append)
    assert len(notes) == 1


def test_retries_end(hub: StandInHub) -> None:
    hub.faults.metadata = (503, "")
    with retrying(RetryPolicy(retries=2, backoff_seconds=0)), pytest.raises(NetworkError, match="answered 503"):
        repository_files(REPOSITORY, "main", settings(hub.url))
    assert len(hub.requests) == 3


def test_who_asks_for_hours_is_not_waited_for(hub: StandInHub) -> None:
    hub.faults.metadata = (429, "")
    hub.faults.metadata_headers = {"Retry-After": "7200"}
    with pytest.raises(NetworkError, match="too many requests") as caught:
        repository_files(REPOSITORY, "main", settings(hub.url))
    assert "7200 seconds" in caught.value.hint
    assert len(hub.requests) == 1


def test_files_without_a_hash_are_left_out_and_named(hub: StandInHub) -> None:
    hub.files["small-Q8_0.gguf"] = b"GGUF in git itself"
    hub.faults.without_hash = ["small-Q8_0.gguf"]
    notes: list[str] = []
    found = repository_files(REPOSITORY, "main", settings(hub.url), notes.append)
    assert [file.name for file in found.files] == ["tiny-Q4_0.gguf"]
    assert notes == ["ignored, because the hub has no sha256 to verify them: small-Q8_0.gguf"]


def test_unreachable() -> None:
    with pytest.raises(NetworkError, match="can't reach the hub"):
        repository_files(REPOSITORY, "main", settings("http://127.0.0.1:9"))


def test_impossible_name(hub: StandInHub) -> None:
    with pytest.raises(ModelNotFoundError):
        ask(hub, "a--b/c")


@pytest.mark.parametrize("repository", ["local/tiny", "Local/tiny"])
def test_an_imported_model_that_is_gone_is_not_fetched_from_a_strangers_repository(
    hub: StandInHub, repository: str
) -> None:
    with pytest.raises(ModelNotFoundError, match="is not on this disk"):
        ask(hub, repository)
    assert not hub.requests


def test_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.0)
    monkeypatch.setattr(module, "_get", lambda *_: threading.Event().wait(5))
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
    spec = ModelSpec("a/b", repository="a/b")
    assert names(choose(spec, some)) == ["m-Q4_K_M.gguf"]
    both = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    assert names(choose(replace(spec, quant="q8_0"), some)) == both
    assert {quant: names(parts) for quant, parts in offers(spec, some).items()} == {
        "Q4_K_M": ["m-Q4_K_M.gguf"], "Q8_0": both,
    }  # fmt: skip


def test_the_catalogues_file_counts_beside_another_of_its_quant() -> None:
    some = files("m-Q4_K_M.gguf", "other-m-Q4_K_M.gguf", "m-Q8_0.gguf")
    spec = ModelSpec("tiny", repository="a/b", quant="Q4_K_M", filename="other-m-Q4_K_M.gguf", any_quant=True)
    assert {quant: names(parts) for quant, parts in offers(spec, some).items()} == {
        "Q4_K_M": ["other-m-Q4_K_M.gguf"], "Q8_0": ["m-Q8_0.gguf"],
    }  # fmt: skip


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
    """Return one search result of the hub."""
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


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"7", b"\xff", b"[" * 100_000])
def test_a_search_answered_with_nonsense(hub: StandInHub, body: bytes) -> None:
    hub.pages["/api/models"] = ("application/json", body)
    with pytest.raises(NetworkError, match="invalid response"):
        search(["x"], settings(hub.url))


def test_a_search_without_a_hub_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits and tries again"))
    with pytest.raises(NetworkError, match="can't reach the hub"):
        search(["x"], settings("http://127.0.0.1:9"))
    with pytest.raises(NetworkError, match="HF_HUB_OFFLINE"):
        search(["x"], settings("http://127.0.0.1:9", offline=True))


def test_no_model_file() -> None:
    with pytest.raises(ModelNotFoundError, match="no GGUF"):
        choose(ModelSpec("a/b", repository="a/b"), files("mmproj.gguf"))


def test_missing_part_and_missing_file() -> None:
    with pytest.raises(ModelNotFoundError, match="00002-of-00002"):
        choose(ModelSpec("a/b", repository="a/b"), files("m-Q8_0-00001-of-00002.gguf"))
    with pytest.raises(ModelNotFoundError, match=r"there are m-Q8_0\.gguf"):
        parts_of(files("m-Q8_0.gguf"), "other.gguf")


def test_links_are_quoted() -> None:
    link = file_url(settings("https://hub.invalid"), REPOSITORY, COMMIT, "a b/c#d.gguf")
    assert link == f"https://hub.invalid/{REPOSITORY}/resolve/{COMMIT}/a%20b/c%23d.gguf"


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (("m-Q4_0.gguf", "m-UD-Q4_K_XL.gguf", "m-Q8_0.gguf"), "m-UD-Q4_K_XL.gguf"),
        (("m-Q4_1.gguf", "m-Q8_0.gguf"), "m-Q4_1.gguf"),
        (("m-Q4_K_M.gguf", "m-Q4_K_S.gguf"), "m-Q4_K_M.gguf"),
    ],
)
def test_a_file_of_the_catalogue_that_is_gone_is_replaced_by_its_nearest_kin(
    there: tuple[str, ...], expected: str
) -> None:
    spec = ModelSpec("m", repository="o/m", quant="Q4_K_M", filename="m-Q4_K_M.gguf", alias="m")
    assert module.choose(spec, files(*there))[0].name == expected


def test_no_quant_of_other_bits_replaces_one_that_is_gone() -> None:
    spec = ModelSpec("m", repository="o/m", quant="Q4_K_M", filename="m-Q4_K_M.gguf", alias="m")
    for each in (spec, replace(spec, alias=None)):
        with pytest.raises(ModelNotFoundError):
            module.choose(each, files("m-Q8_0.gguf"))
