"""The page on a phone: a second address, whose key makes its sender the user, and its code."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest
import segno
from support.chromium import Chromium
from support.installed import eventually
from support.page import IDLE, Page
from support.served import SECONDS, LiveServer, RawResponse, parse, read_all

from llmrun.errors import UsageError
from llmrun.server import phone
from llmrun.server.page import requests
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.serve import show_phone

pytestmark = pytest.mark.usefixtures("package_on_path")
Serve = Callable[..., LiveServer]
ADDRESS = "http://192.168.178.23:41234/#key=0123456789abcdefghijkl"
BORDER = 4


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network in which this machine is 127.0.0.1."""
    monkeypatch.setattr(phone, "network_address", lambda: "127.0.0.1")


def ask(server: LiveServer, address: str, path: str, key: str = "", **headers: str) -> RawResponse:
    """The answer of the address for phones."""
    host = urlsplit(address).netloc
    sent = server.request("GET", path, **{"host": host, "authorization": f"Bearer {key}" if key else "", **headers})
    with closing(socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])), SECONDS)) as connection:
        connection.sendall(sent)
        return parse(read_all(connection))


def listens(address: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", urlsplit(address).port or 0), SECONDS).close()
    except ConnectionError:
        return False
    return True


def test_only_the_key_of_the_code_opens_the_chats_from_elsewhere(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    assert server.get("/ui/phone").json == {"address": "", "code": []}, "nothing listens by default"
    server.post("/ui/ask", {"text": "a secret"})
    opened = server.post("/ui/phone", {"on": True}).json
    assert server.post("/ui/phone", {"on": True}).json == opened == server.get("/ui/phone").json, "opened once"
    address, key = opened["address"], opened["address"].partition("#key=")[2]
    assert len(key) >= 22, "128 bits"
    monkeypatch.setattr(requests, "is_same_user", lambda client, server: False)  # as from another machine
    assert b"a secret" in ask(server, address, "/ui/chats", key).body
    for wrong in ("", key[:-1], key.swapcase()):
        assert ask(server, address, "/ui/chats", wrong).status == 401
        assert ask(server, address, "/v1/models", wrong).status == 401
    assert ask(server, address, "/ui/files/page.js").status == 200
    assert ask(server, address, "/ui/chats", key, origin="http://evil.example").status == 403
    assert ask(server, address, "/ui/chats", key, sec_fetch_site="cross-site").status == 403
    assert ask(server, address, "/ui/chats", key, host="evil.example").status == 403
    refused = server.get("/ui/chats", authorization=f"Bearer {key}")
    assert (refused.status, "code of the page's settings" in refused.json["error"]["message"]) == (403, True)
    assert not [record for record in server.served if key in record.path]
    monkeypatch.undo()
    server.post("/ui/phone", {"on": False})
    assert eventually(lambda: not listens(address), SECONDS)


def test_another_code_has_another_key(serve: Serve) -> None:
    server, keys = serve(), set()
    for _ in range(2):
        address = server.post("/ui/phone", {"on": True}).json["address"]
        keys.add(address.partition("#key=")[2])
        assert server.post("/ui/phone", {"on": False}).json == {"address": "", "code": []}
    assert len(keys) == 2


def test_a_machine_without_a_network_says_so(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise UsageError("a phone can't reach this machine", why="it is in no network", hint="connect it")

    monkeypatch.setattr(phone, "network_address", none)
    refused = serve().post("/ui/phone", {"on": True})
    assert (refused.status, "it is in no network" in refused.json["error"]["message"]) == (400, True)


def modules() -> list[str]:
    """The code of ADDRESS as segno has it, without a border."""
    return ["".join(str(each) for each in row) for row in segno.make(ADDRESS, error="m", micro=False).matrix]


def test_the_code_has_the_address_and_the_border_that_readers_need() -> None:
    code = phone.code_of(ADDRESS)
    empty = ["0" * len(code)] * BORDER
    assert code[:BORDER] == code[-BORDER:] == empty
    assert [row[BORDER:-BORDER] for row in code[BORDER:-BORDER]] == modules()


def test_the_terminal_shows_the_code_and_a_log_does_not() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown, log = Terminal(), io.StringIO()
    for stderr in (shown, log):
        output = Output(stderr=stderr, environment={"TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"})
        show_phone(output, ADDRESS, phone.code_of(ADDRESS))
    assert "key=" not in log.getvalue()
    assert "Use on your phone" in log.getvalue()
    lines = shown.getvalue().splitlines()
    assert ADDRESS in lines
    halves = {"█": "00", "▀": "01", "▄": "10", " ": "11"}
    drawn = [line for line in lines if re.fullmatch("[█▀▄ ]{20,}", line)]
    rows = ["".join(halves[each][half] for each in line) for line in drawn for half in (0, 1)]
    assert len(drawn) < 24, "one screen"
    assert [row[2:-2] for row in rows[2 : 2 + len(modules())]] == modules()


@pytest.fixture
def narrow(browser: Chromium) -> Iterator[Chromium]:
    yield browser
    browser.evaluate("sessionStorage.clear()")


def test_the_page_shows_the_code_and_a_phone_takes_its_key_out_of_the_address(
    narrow: Chromium, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    page = Page(narrow, server, 400)
    page.see("document.querySelector('#toggle-settings').click()")
    page.see(
        "[...document.querySelectorAll('#settings button')].find(e => e.textContent === 'Use on your phone').click()"
    )
    page.until("document.querySelector('#phone').open")
    page.see("document.querySelector('#phone .main').click()")
    page.until("document.querySelector('#phone svg path')")
    address = page.see("document.querySelector('#phone code').textContent")
    squares = page.see("document.querySelector('#phone svg path').getAttribute('d')")
    dark = {(int(x), int(y)) for x, y in re.findall(r"M(\d+) (\d+)h1v1h-1z", squares)}
    code = phone.code_of(address)
    assert dark == {(x, y) for y, row in enumerate(code) for x, each in enumerate(row) if each == "1"}
    assert page.see("(each => each.scrollWidth - each.clientWidth)(document.querySelector('#phone'))") == 0
    assert page.see("document.documentElement.scrollWidth") <= 400
    page.check()

    monkeypatch.setattr(requests, "is_same_user", lambda client, server: False)  # as from another machine
    place, _, key = address.partition("#key=")
    narrow.open("about:blank")
    narrow.open(f"{place}#key={key}")
    page.until(IDLE)
    assert page.see("location.href") == place
    page.ask("Hello")
    assert key not in page.see("JSON.stringify([document.body.outerHTML, {...localStorage}, history.state])")
    assert not [asked for asked in narrow.requests if key in asked.partition("#")[0]]
    page.browser.ask("Page.reload")
    page.until(f"{IDLE} && document.querySelectorAll('article').length === 2")
    page.see("sessionStorage.clear()")
    narrow.open("about:blank")
    narrow.open(f"{place}#key=wrong&chat=1")
    page.until("document.querySelector('#key')?.open")
    assert page.see("location.hash") == "#chat=1"
    assert "photographs its code again" in page.see("document.querySelector('#key').textContent")
