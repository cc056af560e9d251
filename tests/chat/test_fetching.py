"""What is fetched from the web: only from checked addresses, within limits."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.certificates import server_context
from support.stand_in_web import Names, Web, stand_in_web

from llmrun.chat import fetching
from llmrun.chat.attachments import MAX_FILE_BYTES, attach, read_media
from llmrun.chat.fetching import fetch, host_of, is_public
from llmrun.errors import LlmrunError, NetworkError, UsageError

HTML = {"Content-Type": "text/html"}
PUBLIC = "93.184.216.34"
MOST = 1 << 20


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with stand_in_web() as found:
        yield found


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


def refusal(url: str, **options: Any) -> str:
    with pytest.raises(LlmrunError) as caught:
        fetch(url, options.pop("max_bytes", MOST), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:127.0.0.1", "::127.0.0.1",
        "64:ff9b::127.0.0.1", "64:ff9b:1::1", "2002:7f00:1::", "fec0::1",
    ],
)  # fmt: skip
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "0x7f000001", "2130706433", "[::ffff:127.0.0.1]"])
def test_a_private_address_is_refused_however_it_is_written(web: Web, host: str) -> None:
    assert "private address" in refusal(web.url("/", host))
    assert web.asked == []


def test_a_named_host_may_be_private(web: Web) -> None:
    web.pages["/"] = (200, {"Content-Type": "text/plain; charset=latin-1"}, "Grün".encode("latin-1"))
    for named in (web.host, "127.0.0.1"):
        assert fetch(web.url("/"), MOST, (named,))[1:] == ("Grün".encode(), "text/plain")
    assert "private address" in refusal(web.url("/"), named=(f"127.0.0.1:{web.port + 1}", "localhost"))


@pytest.mark.parametrize("charset", ["undefined", "idna", "utf-7", "unicode_escape", "no-such"])
def test_a_charset_that_can_not_be_read_leaves_the_bytes(web: Web, charset: str) -> None:
    content = rb"+2D0- \ud83d \xff" + bytes([0xFF])
    web.pages["/"] = (200, {"Content-Type": f"text/plain; charset={charset}"}, content)
    assert fetch(web.url("/"), MOST, (web.host,)).data == content


def test_a_redirect_is_checked_like_the_first_url(web: Web, names: Names) -> None:
    names.addresses = {"public.example": [[PUBLIC]], "inside.example": [["10.0.0.1"]]}
    public = web.url("/", "public.example")
    for target in (web.url("/secret"), web.url("/secret", "inside.example"), "file:///etc/passwd"):
        web.pages["/"] = (302, {"Location": target}, b"")
        assert "can't be fetched" in refusal(public)
        assert not any("secret" in each for each in web.asked)
    web.pages["/"] = (302, {"Location": "/page"}, b"")
    web.pages["/page"] = (200, HTML, b"there")
    assert fetch(public, MOST)[:2] == (web.url("/page", "public.example"), b"there")
    web.pages["/"] = (302, {"Location": "/"}, b"")
    assert "more than 5 other URLs" in refusal(public)
    assert {*names.connected} == {PUBLIC}


def test_a_name_that_leads_elsewhere_a_moment_later_gains_nothing(web: Web, names: Names) -> None:
    """DNS rebinding: the check sees a public address, a second look-up would see the private one."""
    names.addresses = {"evil.example": [[PUBLIC], ["127.0.0.1"]]}
    web.pages["/"] = (200, HTML, b"fine")
    assert fetch(web.url("/", "evil.example"), MOST).data == b"fine"
    assert names.connected == [PUBLIC]
    assert web.asked == [f"evil.example:{web.port} /"]
    assert "127.0.0.1, a private address" in refusal(web.url("/", "evil.example"))


def test_one_private_address_of_several_is_enough(web: Web, names: Names) -> None:
    names.addresses = {"both.example": [[PUBLIC, "192.168.1.1"]]}
    assert "192.168.1.1, a private address" in refusal(web.url("/", "both.example"))
    assert names.connected == []


def test_offline_only_loopback_is_reached(web: Web, names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names.addresses = {"public.example": [[PUBLIC]]}
    web.pages["/"] = (200, HTML, b"fine")
    assert "HF_HUB_OFFLINE" in refusal(web.url("/", "public.example"))
    assert fetch(web.url("/"), MOST, (web.host,)).data == b"fine"


def test_the_certificate_is_that_of_the_name(tmp_path: Path, names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    context, authority = server_context(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    names.addresses = {"localhost": [[PUBLIC]], "other.example": [[PUBLIC]]}
    with stand_in_web(context) as web:
        web.pages["/"] = (200, HTML, b"fine")
        assert fetch(f"https://localhost:{web.port}/", MOST).data == b"fine"
        assert "certificate" in refusal(f"https://other.example:{web.port}/").lower()
        assert names.connected == [PUBLIC, PUBLIC]


def test_sizes_are_limited(web: Web) -> None:
    web.pages["/"] = (200, HTML, b"x" * 101)
    assert "larger than 100 bytes" in refusal(web.url("/"), max_bytes=100, named=(web.host,))
    packed = gzip.compress(b"x" * 1_000_000)
    web.pages["/"] = (200, {**HTML, "Content-Encoding": "gzip"}, packed)
    assert "larger than 5,000 bytes" in refusal(web.url("/"), max_bytes=5_000, named=(web.host,))
    assert len(fetch(web.url("/"), MOST, (web.host,)).data) == 1_000_000


@pytest.mark.parametrize("begins", [b"", b"HTTP/1.0 200 OK\r\nA: b\r\n", b"HTTP/1.0 200 OK\r\n\r\nsome"])
def test_a_server_that_never_ends_is_left(web: Web, begins: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, all of them do not."""

    def drip(file: Any) -> None:
        file.write(begins)
        for _ in range(36_000):
            file.write(b"x")
            file.flush()
            time.sleep(0.1)

    web.pages["/"] = drip
    monkeypatch.setattr(fetching, "MAX_SECONDS", 1)
    assert "it took longer than 1 seconds" in refusal(web.url("/"), named=(web.host,))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://example.org/", "only addresses with http:// or https://"),
        ("http://", "only addresses with http://"),
        ("http://user:secret@example.org/", "a user name or a password"),
        ("http://[::1/", "invalid URL"),
        ("http://example.org:99999/", "invalid URL"),
    ],
)
def test_what_is_not_fetched(url: str, words: str) -> None:
    found = refusal(url)
    assert words in found
    assert "secret" not in found


def test_errors_of_servers_are_of_the_network(web: Web) -> None:
    with pytest.raises(NetworkError, match="404"):
        fetch(web.url("/none"), MOST, (web.host,))
    with pytest.raises(NetworkError, match="can't be fetched"):
        fetch("http://127.0.0.1:1/", MOST, ("127.0.0.1",))


def test_hosts_of_urls() -> None:
    assert [host_of(url) for url in ("http://A.example/x", "https://a.example", "http://[::1]:8080/")] == [
        "a.example:80", "a.example:443", "::1:8080",
    ]  # fmt: skip


# ---- -f URL


def test_a_page_is_attached_as_its_text(web: Web) -> None:
    web.pages["/p"] = (200, HTML, b"<html><nav>Home</nav><script>no()</script><p>A lamp &amp; a door.</p></html>")
    web.pages["/fragment"] = (200, HTML, b"<p>Only a part.</p>")
    web.pages["/t"] = (200, {"Content-Type": "text/plain"}, b"<p>as it is\r\n")
    attached = attach([web.url(path) for path in ("/p?a=[1]*", "/fragment", "/t")])
    assert [file.text for file in attached.files] == ["A lamp & a door.", "Only a part.", "<p>as it is\n"]
    assert attached.files[0].name == web.url("/p?a=[1]*")
    assert attached.notes[0].endswith("its text without markup")


def test_what_a_url_of_the_user_leads_to_is_checked(web: Web) -> None:
    web.pages["/"] = (302, {"Location": "http://127.0.0.1:1/"}, b"")
    with pytest.raises(UsageError, match="private address"):
        attach([web.url("/")])


def test_what_is_no_text_is_not_attached(web: Web) -> None:
    web.pages["/b"] = (200, {}, b"a\0b")
    web.pages["/i.png"] = (200, {}, b"\x89PNG\r\n\x1a\n" + b"\0" * 20)
    web.pages["/long"] = (200, {}, b"x" * (MAX_FILE_BYTES + 1))
    for path, words in (("/b", "it is binary"), ("/i.png", "it is an image"), ("/long", "it is larger than")):
        with pytest.raises(UsageError, match=words):
            attach([web.url(path)])
    with pytest.raises(UsageError, match="only texts and documents are fetched"):
        read_media(web.url("/i.png"))


def test_a_file_of_that_name_is_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("http").write_text("a file")
    assert attach(["http"]).files[0].text == "a file"
