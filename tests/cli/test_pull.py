"""`llmrun pull` as it is typed, from a hub that is busy, broken, behind a proxy or has a certificate of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.certificates import server_context
from support.gguf_writer import tiny_model
from support.stand_in_hub import COMMIT, StandInHub, stand_in_hub

from llmrun.protocol.sizes import readable_size

MODEL, NEWER = tiny_model(), tiny_model({"general.name": "Newer"})
REPOSITORY = "maker/tiny-GGUF"
FILE = "tiny-Q4_K_M.gguf"
SNAPSHOTS = f"models--maker--tiny-GGUF/snapshots/{{}}/{FILE}"

pytestmark = pytest.mark.usefixtures("package_on_path")
Pull = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with stand_in_hub(REPOSITORY) as server:
        server.files[FILE] = MODEL
        yield server


@pytest.fixture
def pull(hub: StandInHub, tmp_path: Path) -> Pull:
    """pull(*options, quant="", status=0, **variables): the command, run to the end."""

    def run(*options: str, quant: str = "", status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        others = ("HF_", "HUGGINGFACE_", "XDG_", "SSL_CERT_", "REQUESTS_CA_", "CURL_CA_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(others)}
        usual = {
            "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url, "HF_TOKEN": "canary",
            "NO_PROXY": "*", "LLMRUN_HOME": str(tmp_path / "state"), "COLUMNS": "200",
        }  # fmt: skip
        environment = {key: value for key, value in {**kept, **usual, **variables}.items() if value}
        command = [sys.executable, "-m", "llmrun", "pull", REPOSITORY + quant, *options]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


def fetched(tmp_path: Path, commit: str = COMMIT, cache: str = "cache") -> bytes:
    return (tmp_path / cache / SNAPSHOTS.format(commit)).read_bytes()


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"metadata_statuses": [429], "metadata_headers": {"Retry-After": "1"}}, "too many requests to the hub"),
        ({"cut_after": [100]}, "broke off"),
    ],
    ids=str,
)
def test_metadata_and_header_are_asked_for_again(
    hub: StandInHub, pull: Pull, tmp_path: Path, faults: dict[str, Any], said: str
) -> None:
    vars(hub.faults).update(faults)
    told = pull().stderr
    assert said in told
    assert "trying again in" in told
    assert fetched(tmp_path) == MODEL


@pytest.mark.parametrize(
    ("faults", "status", "said"),
    [
        (
            {"metadata": (429, ""), "metadata_headers": {"Retry-After": "3600"}},
            5,
            "try again in 3600 seconds, as the server asks",
        ),
        ({"content": MODEL[:-1] + b"x"}, 5, "wrong"),
        ({"without_hash": [FILE]}, 3, "no sha256 to verify"),
    ],
    ids=["429", "wrong bytes", "no hash"],
)
def test_the_right_exit_code(
    hub: StandInHub, pull: Pull, tmp_path: Path, faults: dict[str, Any], status: int, said: str
) -> None:
    vars(hub.faults).update(faults)
    assert said in pull(status=status).stderr
    assert not (tmp_path / "cache" / "models--maker--tiny-GGUF/snapshots").exists()


def test_a_file_without_a_hash_does_not_hide_the_others(hub: StandInHub, pull: Pull, tmp_path: Path) -> None:
    hub.files["tiny-Q8_0.gguf"], hub.faults.without_hash = MODEL, ["tiny-Q8_0.gguf"]
    assert "ignored, because the hub has no sha256 to verify them: tiny-Q8_0.gguf" in pull().stderr
    assert fetched(tmp_path) == MODEL


def test_a_newer_file(hub: StandInHub, pull: Pull, tmp_path: Path) -> None:
    assert json.loads(pull("--json").stdout)["state"] == "downloaded"
    assert json.loads(pull("--json").stdout)["state"] == "unchanged"
    assert "the hub has no newer file" in pull().stderr
    hub.files[FILE], hub.faults.commit = NEWER, "e" * 40
    coming = json.loads(pull("--dry-run", "--json").stdout)
    assert (coming["quant"], coming["missing_bytes"]) == ("Q4_K_M", len(NEWER))
    told = pull().stderr
    assert f"the hub has a newer {FILE}" in told
    assert "llmrun gc" in told
    assert (fetched(tmp_path), fetched(tmp_path, "e" * 40)) == (MODEL, NEWER)
    assert json.loads(pull("--json", HF_HUB_OFFLINE="1").stdout)["state"] == "unchecked"


def test_a_dry_run_brings_nothing(hub: StandInHub, pull: Pull, tmp_path: Path) -> None:
    size = readable_size(len(MODEL))
    assert pull("--dry-run").stdout == f"{FILE}, {size}: {size} to download\n"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({"HUGGINGFACE_HUB_CACHE": "{}/legacy"}, "legacy"),
        ({"HF_HOME": "$PLACE/home", "PLACE": "{}"}, "home/hub"),
        ({"HF_HOME": "~/models", "HOME": "{}"}, "models/hub"),
    ],
    ids=str,
)
def test_where_the_cache_is(pull: Pull, tmp_path: Path, variables: dict[str, str], cache: str) -> None:
    pull(HF_HUB_CACHE="", **{name: value.format(tmp_path) for name, value in variables.items()})
    assert fetched(tmp_path, cache=cache) == MODEL


def test_a_token_is_sent_only_where_it_may_be(hub: StandInHub, pull: Pull, tmp_path: Path) -> None:
    def sent() -> set[str | None]:
        found = {request.headers.get("authorization") for request in hub.requests if request.host == "127.0.0.1"}
        hub.requests.clear()
        return found

    pull("--dry-run")
    assert sent() == {"Bearer canary"}
    pull("--dry-run", HF_HUB_DISABLE_IMPLICIT_TOKEN="1")
    assert sent() == {None}
    (tmp_path / "secret").write_text("from a file\n")
    pull("--dry-run", HF_TOKEN="", HF_TOKEN_PATH=str(tmp_path / "secret"))
    assert sent() == {"Bearer from a file"}


def test_through_a_proxy(hub: StandInHub, pull: Pull, tmp_path: Path) -> None:
    """The stand-in is the proxy: the hub's name exists nowhere else."""
    pull(HF_ENDPOINT="http://hub.invalid", HTTP_PROXY=hub.url, NO_PROXY="localhost")
    assert {request.host for request in hub.requests} == {"hub.invalid", "localhost"}
    assert fetched(tmp_path) == MODEL


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_a_certificate_authority_of_ones_own(pull: Pull, tmp_path: Path, variable: str) -> None:
    context, ca_file = server_context(tmp_path)
    with stand_in_hub(REPOSITORY, tls=context) as server:
        server.files[FILE] = MODEL
        endpoint = f"https://127.0.0.1:{server.port}"
        refused = pull(status=5, HF_ENDPOINT=endpoint).stderr
        assert "CERTIFICATE_VERIFY_FAILED" in refused
        assert "SSL_CERT_FILE=FILE" in refused
        server.faults.location = f"https://localhost:{server.port}/cdn/{FILE}"
        pull(HF_ENDPOINT=endpoint, **{variable: str(ca_file)})
    assert fetched(tmp_path) == MODEL


def test_certificates_that_are_not_there(pull: Pull, tmp_path: Path) -> None:
    assert "can't read the certificates" in pull(status=5, SSL_CERT_FILE=str(tmp_path / "none.pem")).stderr
