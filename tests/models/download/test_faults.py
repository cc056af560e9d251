"""Everything a server can do wrong, in one table: the right file, or an error that names the cause. Never a wrong file.

The hub answers as 127.0.0.1 and its CDN as localhost, so that they are two hosts to the client; a token must never
reach the second.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import tiny_model
from support.stand_in_hub import COMMIT, StandInHub, retrying, sha256, stand_in_hub

from llmrun.config import Settings
from llmrun.errors import LlmrunError
from llmrun.models.download import download as module
from llmrun.models.download.download import part_path
from llmrun.models.download.transfer import RetryPolicy
from llmrun.models.pull import pull
from llmrun.models.registry import ModelSpec

MODEL = tiny_model() + random.Random(1).randbytes(1_500_000)
SIZE = len(MODEL)
NAME = "tiny-Q4_K_M.gguf"
FLIPPED = MODEL[:700_000] + bytes([MODEL[700_000] ^ 1]) + MODEL[700_001:]
PAGE = b"<!doctype html><html><body>Please log in to the hotel's network</body></html>"
TOKEN = "canary-token"
SILENCES = {"stall_after", "silent"}
"""Policy for faults that end only by running out of retries; generous enough for a busy machine."""
DEFAULT_RETRY_POLICY = RetryPolicy(connect_seconds=30, stall_seconds=20, retries=2, backoff_seconds=0.0)


@dataclass(frozen=True)
class Mode:
    """A fault, and what is to come of it.

    Attributes:
        name: of the test.
        faults: attributes of Faults.
        says: in the error's text; empty when the file has to arrive all the same.
        status: the exit status that goes with the error.
        files: in place of the one model.
        before: bytes of an earlier run that lie there.
        quant: to ask for.
        in_ranges: in place of `says` for a file that comes in ranges: they tell sooner what is wrong.
    """

    name: str
    faults: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    status: int = 5
    files: dict[str, bytes] | None = None
    before: bytes = b""
    quant: str | None = None
    in_ranges: str | None = None

    @property
    def policy(self) -> RetryPolicy:
        """Little where it is what ends the transfer, and as many retries as a busy machine needs for one to succeed."""
        if not SILENCES & self.faults.keys():
            return DEFAULT_RETRY_POLICY
        if self.faults.get("drip"):  # a byte has to come within it
            return replace(DEFAULT_RETRY_POLICY, stall_seconds=2, retries=0)
        if self.says:
            return replace(DEFAULT_RETRY_POLICY, stall_seconds=0.1, retries=1)
        return replace(DEFAULT_RETRY_POLICY, stall_seconds=0.4, retries=20)


def split(number: int) -> str:
    return f"tiny-Q4_K_M-0000{number}-of-00003.gguf"


MODES = [
    Mode("nothing is wrong"),
    # -- the connection
    Mode("silence at the start", {"stall_after": 0}, "stopped arriving"),
    Mode("silence at 50 %", {"stall_after": SIZE // 2}),
    Mode("silence at 99 %", {"stall_after": SIZE * 99 // 100}),
    Mode("one byte now and then", {"stall_after": 1000, "drip": True}, "almost nothing"),
    Mode("no answer at all", {"silent": 10}, "stopped arriving"),
    Mode("no answer at first", {"silent": 1}),
    Mode("cut once", {"cut_after": [SIZE // 2]}),
    Mode("reset once", {"cut_after": [SIZE // 2], "reset": True}),
    Mode("cut at the last byte", {"cut_after": [SIZE - 1]}),
    Mode("cut every time", {"cut_after": [10] * 99}, "broke off"),
    Mode("reset every time", {"cut_after": [10] * 99, "reset": True}, "broke off"),
    # -- other bytes
    Mode("truncated file", {"content": MODEL[:-5]}, f"instead of {SIZE:,}"),
    Mode("truncated body", {"content": MODEL[:-5], "length": SIZE}, "the server's file is shorter"),
    Mode(
        "truncated, no length",
        {"content": MODEL[:-5], "chunked": True},
        "the server's file is shorter",
        in_ranges="instead of",
    ),
    Mode("extra bytes", {"content": MODEL + b"more"}, f"instead of {SIZE:,}"),
    Mode("extra bytes, no length", {"content": MODEL + b"more", "chunked": True}, in_ranges="instead of"),
    Mode("one flipped byte", {"content": FLIPPED}, "sha256"),
    Mode("all zeros", {"content": bytes(SIZE)}, "sha256"),
    Mode("web page", {"content": PAGE, "content_type": "text/html; charset=utf-8"}, "a web page came"),
    Mode("web page, unlabelled", {"content": PAGE}, f"instead of {SIZE:,}"),
    Mode("web page of the right size", {"content": PAGE.ljust(SIZE)}, "sha256"),
    Mode("compressed", {"encoding": "gzip"}, "compressed"),
    Mode("chunked", {"chunked": True}),
    Mode("length of 10^14", {"length": 10**14}, "it has 100,000,000,000,000 bytes"),
    Mode("empty file", {"content": b"", "length": 0}, "the server's file is shorter|instead of"),
    # -- ranges
    Mode("range ignored", {"ignore_range": True}, before=MODEL[:500_000]),
    Mode("range of other bytes", {"content_range": f"bytes 5-9/{SIZE}"}, before=MODEL[:500_000]),
    Mode("range that makes no sense", {"content_range": "bytes nonsense"}, before=MODEL[:500_000]),
    Mode("range without numbers", {"content_range": f"bytes */{SIZE}"}, before=MODEL[:500_000]),
    Mode("416 once", {"statuses": [416]}, before=MODEL[:500_000]),
    Mode("416 for ever", {"statuses": [416] * 99}, "the server's file is shorter"),
    Mode("changed in the middle", {"cut_after": [SIZE // 2], "etag": '"other"'}),
    Mode("part of another file", before=FLIPPED[:800_000], says="sha256"),
    Mode("part that is too long", before=MODEL + b"more"),
    Mode("part that is whole", before=MODEL),
    # -- statuses of the bytes' host
    Mode("link has expired", {"statuses": [403]}),
    Mode("link expires in the middle", {"cut_after": [SIZE // 2], "statuses": [0, 403]}),
    Mode("link expires in the middle, 400", {"cut_after": [SIZE // 2], "statuses": [0, 400]}),
    Mode("link has expired, always", {"statuses": [403] * 99}, "answered 403.*has expired"),
    Mode("404", {"statuses": [404]}, "answered 404.*missing"),
    Mode("429", {"statuses": [429], "headers": {"Retry-After": "0"}}),
    Mode("429 for an hour", {"statuses": [429], "headers": {"Retry-After": "3600"}}, "429.*3600 seconds"),
    Mode(
        "429 until the year 2100",
        {"statuses": [429], "headers": {"Retry-After": formatdate(4.1e9, usegmt=True)}},
        "429.*as the server asks",
    ),
    Mode("429 and nonsense", {"statuses": [429], "headers": {"Retry-After": "soon " * 99}}),
    Mode("500 twice", {"statuses": [500, 500]}),
    Mode("500 for ever", {"statuses": [500] * 99}, "answered 500"),
    Mode("503 once", {"statuses": [503]}),
    Mode("503 for ever", {"statuses": [503] * 99}, "answered 503"),
    Mode("418", {"statuses": [418]}, "answered 418"),
    # -- the hub and its redirects
    Mode("login", {"resolve_statuses": [401]}, "requires a login.*accept the terms", status=4),
    Mode("gated", {"resolve_statuses": [403]}, "requires a login.*accept the terms", status=4),
    Mode("503 of the hub", {"resolve_statuses": [503]}),
    Mode("redirects in a circle", {"circle": True}, "too many redirects"),
    Mode("redirect to nowhere", {"location": ""}, "invalid"),
    Mode("redirect to no link", {"location": "http://127.0.0.1:port/"}, "invalid"),
    Mode("redirect to no host's name", {"location": "http://a..b/x"}, "invalid link"),
    Mode("redirect to a file", {"location": "file:///etc/passwd"}, "unsafe redirect|invalid"),
    Mode("redirect to a dead host", {"location": "http://127.0.0.1:9/x"}, r"can't reach 127\.0\.0\.1"),
    # -- metadata
    Mode("metadata: login", {"metadata": (401, "GatedRepo")}, "gated.*accept the terms", status=4),
    Mode("metadata: unknown", {"metadata": (404, "RepoNotFound")}, "no repository", status=3),
    Mode("metadata: 429", {"metadata": (429, "")}, "too many requests"),
    Mode("metadata: 500", {"metadata": (500, "")}, "answered 500"),
    Mode("metadata: web page", {"body": PAGE}, "invalid response"),
    Mode("metadata: commit that is a path", {"commit": "../../../../evil"}, "invalid response.*commit"),
    Mode("metadata: name that is a path", {"name": "../../evil-Q4_K_M.gguf"}, "invalid response.*file name"),
    Mode("metadata: absolute name", {"name": "/tmp/evil-Q4_K_M.gguf"}, "invalid response.*file name"),
    Mode("metadata: name with a drive", {"name": "C:evil-Q4_K_M.gguf"}, "invalid response.*file name"),
    Mode("metadata: hash that is a path", {"sha": "../../../evil"}, "invalid response.*hash"),
    Mode("metadata: hash of something else", {"sha": "0" * 64}, "sha256"),
    Mode("metadata: size of 10^14", {"size": 10**14}, "100,000,000,000,000 bytes are needed", status=6),
    Mode("metadata: size of 10^17", {"size": 10**17}, "invalid response.*size"),
    Mode("metadata: negative size", {"size": -1}, "invalid response.*size"),
    Mode("metadata: size that is too small", {"size": SIZE - 1}, "instead of"),
    Mode("version that is a path", {"etag": '"../../../../evil"'}),
    Mode("missing shard", says=r"00002-of-00003.*missing", files={split(1): MODEL, split(3): MODEL}, quant="Q4_K_M"),
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with stand_in_hub() as server:
        server.files[NAME] = MODEL
        yield server


@pytest.mark.parametrize("ranges", [False, True], ids=["one", "ranges"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_fault(mode: Mode, ranges: bool, hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if ranges:
        monkeypatch.setattr(module, "LARGE_FILE_BYTES", 1_000_000)
        monkeypatch.setattr(module, "RANGE_BYTES", 1 << 18)
    for name, value in mode.faults.items():
        setattr(hub.faults, name, list(value) if isinstance(value, list) else value)
    if mode.files is not None:
        hub.files = mode.files
    cache = tmp_path / "hub"
    blob = cache / "models--maker--tiny-GGUF" / "blobs" / sha256(MODEL)
    if mode.before:
        blob.parent.mkdir(parents=True)
        part_path(blob).write_bytes(mode.before)

    error = run(hub, cache, mode.quant, mode.policy)

    assert {request.headers.get("authorization") for request in hub.requests if request.host == "127.0.0.1"} <= {
        f"Bearer {TOKEN}"
    }
    assert not any("authorization" in request.headers for request in hub.requests if request.host == "localhost")
    assert not (tmp_path / "evil").exists()
    installed = blob.parent.parent / "snapshots" / COMMIT / NAME
    says = mode.in_ranges if ranges and mode.in_ranges is not None else mode.says
    if says:
        assert error is not None, "a wrong file was taken"
        assert error.exit_status == mode.status
        text = f"{error} / {error.hint}"
        assert matches(says, text), text
        assert TOKEN not in text
        assert not installed.exists()
        assert left_over(cache) <= {part_path(blob)}
    else:
        assert error is None, f"{error}"
        assert installed.read_bytes() == MODEL
        assert left_over(cache) == {blob, installed, blob.parent.parent / "refs" / "main"}


def run(
    hub: StandInHub, cache: Path, quant: str | None, policy: RetryPolicy = DEFAULT_RETRY_POLICY
) -> LlmrunError | None:
    """The error of a pull, None when it came to a good end."""
    settings = Settings(cache, hub.url, offline=False, debug=False)
    try:
        with retrying(policy):
            pull(ModelSpec("tiny", repository=hub.repository, quant=quant), settings)
    except LlmrunError as error:
        return error
    return None


def matches(pattern: str, text: str) -> bool:
    import re

    return re.search(pattern, text, re.DOTALL) is not None


def left_over(cache: Path) -> set[Path]:
    """Every file of the cache but the locks."""
    return {path for path in cache.rglob("*") if not path.is_dir() and ".locks" not in path.parts}


@pytest.mark.parametrize("pause", [0.0, 5.0])
def test_a_long_pause_in_a_transfer_is_said(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    notes = list[str]()
    monkeypatch.setattr(module, "_NOTED_WAIT_SECONDS", pause)
    hub.faults.statuses, hub.faults.headers = [429], {"Retry-After": "0"}
    settings = Settings(tmp_path / "hub", hub.url, offline=False, debug=False)
    with retrying(DEFAULT_RETRY_POLICY):
        pull(ModelSpec("tiny", repository=hub.repository), settings, on_note=notes.append)
    assert any("answered 429" in note for note in notes) == (pause == 0.0)


def test_there_are_enough_of_them() -> None:
    assert len(MODES) >= 60
    assert len({mode.name for mode in MODES}) == len(MODES)


def test_what_a_failed_run_left_is_of_use(hub: StandInHub, tmp_path: Path) -> None:
    """Whatever stopped it in the middle, the next run asks for the rest only."""
    hub.faults.cut_after = [SIZE // 2]
    hub.faults.statuses = [0, *[500] * 9]
    assert run(hub, tmp_path / "hub", None) is not None
    hub.faults.statuses = []
    hub.sent = 0
    assert run(hub, tmp_path / "hub", None) is None
    assert hub.sent <= SIZE // 2 + 1
