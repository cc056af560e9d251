"""The header of a file on a server: the same as from the file itself, from few bytes, or a clear error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from support.certificates import server_context
from support.gguf_writer import TENSORS, Typed, tiny_model, write
from support.stand_in_hub import StandInHub, retrying, stand_in_hub

from llmrun.errors import BadModelError, LlmrunError, LoginRequiredError, ModelNotFoundError, NetworkError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.models.download import remote
from llmrun.models.download.remote import read_remote_header
from llmrun.models.download.transfer import RetryableError, RetryPolicy, total_bytes, trusted_certificates

QUICK = RetryPolicy(connect_seconds=30, stall_seconds=30, backoff_seconds=0.01)
IMPATIENT = replace(QUICK, stall_seconds=0.4)  # for faults without an end
NAME = "tiny-Q4_1.gguf"
WEIGHTS = 40 << 20


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with stand_in_hub() as running:
        running.files[NAME] = tiny_model() + bytes(WEIGHTS)
        yield running


def link(hub: StandInHub, name: str = NAME) -> str:
    return f"{hub.url}/{hub.repository}/resolve/main/{quote(name)}"


def read(hub: StandInHub, name: str = NAME, policy: RetryPolicy = QUICK, **options: Any) -> Header:
    with retrying(policy):
        return read_remote_header(link(hub, name), **options)


def test_says_the_same_as_the_file(hub: StandInHub, tmp_path: Path) -> None:
    there, here = read(hub), read_header(write(tmp_path / NAME, hub.files[NAME]))
    assert (there.metadata, there.tensors, there.file_size) == (here.metadata, here.tensors, here.file_size)
    assert there.path == Path(NAME)
    assert hub.sent <= remote.FIRST_BYTES + (1 << 20)


def test_asks_for_more_when_the_header_is_longer(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_BYTES", 64)
    header = read(hub)
    assert len(header.tensors) == len(TENSORS)
    asked = [request.headers["range"] for request in hub.transfers()]
    assert asked[:3] == ["bytes=0-63", "bytes=64-255", "bytes=256-1023"]
    assert len(asked) <= 5


@pytest.mark.parametrize("first", [64, 1 << 20])
def test_ranges_ignored_reads_no_further_than_it_has_to(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(remote, "FIRST_BYTES", first)
    hub.faults.ignore_range = True
    hub.faults.bytes_per_second = 64 << 20  # so that hanging up is noticed before all is sent
    assert read(hub).file_size == len(hub.files[NAME])
    assert hub.sent < WEIGHTS / 2


def test_the_token_stays_with_its_host(hub: StandInHub) -> None:
    read(hub, token="canary")
    for request in hub.requests:
        assert ("authorization" in request.headers) == (request.host == "127.0.0.1")
    assert {request.host for request in hub.requests} == {"127.0.0.1", "localhost"}


def test_split_model(hub: StandInHub) -> None:
    first, second = (f"big-{number:05}-of-00002.gguf" for number in (1, 2))
    counts = {"split.count": Typed(2, 2), "split.tensors.count": Typed(5, 3)}
    hub.files[first] = tiny_model({**counts, "split.no": Typed(2, 0)}, TENSORS[:2])
    hub.files[second] = tiny_model({**counts, "split.no": Typed(2, 1)}, TENSORS[2:])
    header = read(hub, first)
    assert [tensor.name for tensor in header.tensors] == [tensor.name for tensor in TENSORS]
    assert header.file_size == len(hub.files[first]) + len(hub.files[second])
    with pytest.raises(BadModelError, match="part 2"):
        read(hub, second)
    del hub.files[second]
    with pytest.raises(ModelNotFoundError, match="big-00002-of-00002"):
        read(hub, first)


def test_a_hiccup_is_survived(hub: StandInHub) -> None:
    hub.faults.statuses = [503, 429]
    assert read(hub).architecture == "llama"


def test_a_broken_connection_goes_on_where_it_was(hub: StandInHub) -> None:
    hub.faults.cut_after = [5000]
    assert read(hub).architecture == "llama"
    assert hub.transfers()[1].headers["range"].startswith("bytes=5000-")


@pytest.mark.parametrize(
    ("faults", "kind", "words"),
    [
        ({"content_range": "bytes 7-20/100"}, NetworkError, "does not understand ranges"),
        ({"content_range": f"bytes 0-{2**21 - 1}/*"}, NetworkError, "how large"),
        ({"chunked": True, "ignore_range": True}, NetworkError, "how large"),
        ({"content": b""}, NetworkError, "the server's file is shorter"),
        ({"content": b"tiny"}, BadModelError, "4 bytes"),
        ({"content": b"<!doctype html>" * 100}, BadModelError, "not a GGUF"),
        ({"content": tiny_model()[:-1]}, BadModelError, "cut off"),
        ({"statuses": [404]}, ModelNotFoundError, "404"),
        ({"resolve_statuses": [401]}, LoginRequiredError, "login"),
        ({"stall_after": 1000}, NetworkError, "stopped arriving"),
        ({"cut_after": [10] * 9}, NetworkError, ""),
    ],
)  # fmt: skip
def test_faults(hub: StandInHub, faults: dict[str, Any], kind: type[LlmrunError], words: str) -> None:
    for name, value in faults.items():
        setattr(hub.faults, name, value)
    with pytest.raises(kind) as caught:
        read(hub, policy=IMPATIENT if {"stall_after", "silent"} & faults.keys() else QUICK)
    assert words in f"{caught.value} {caught.value.why}"


def test_bytes_that_trickle_in_are_given_up(hub: StandInHub) -> None:
    hub.faults.stall_after, hub.faults.drip = 10, True
    with pytest.raises(NetworkError, match="stopped arriving"):
        read(hub, policy=IMPATIENT)


def test_a_file_that_changes_between_two_requests(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_BYTES", 64)
    content = hub.files[NAME]
    parse = remote.parse_header

    def then_change(*arguments: Any, **options: Any) -> Header:
        hub.files[NAME] = content + b"more"
        return parse(*arguments, **options)

    monkeypatch.setattr(remote, "parse_header", then_change)
    with pytest.raises(NetworkError, match="changed while it was read"):
        read(hub)


def ranged(content_range: str, **headers: str) -> httpx2.Response:
    return httpx2.Response(206, headers={"content-range": content_range, **headers})


def test_another_range_of_the_same_length_is_refused() -> None:
    assert total_bytes(ranged("bytes 10-19/100"), 10, 20) == 100
    assert total_bytes(ranged("bytes 10-19/*"), 10, None) is None
    for other in ("bytes 9-18/100", "bytes 11-20/100", "bytes 0-9/100", "bytes 10-20/100"):
        with pytest.raises(RetryableError):
            total_bytes(ranged(other), 10, 20)
    with pytest.raises(RetryableError):
        total_bytes(ranged("bytes 10-19/100", **{"content-length": "9"}), 10, 20)


def test_certificates_are_read_once_until_their_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, authority = server_context(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    first = trusted_certificates()
    assert trusted_certificates() is first
    authority.write_bytes(authority.read_bytes() + b"\n")
    assert trusted_certificates() is not first
