"""The page in bad times: a server that comes again, a slow network, two windows, a long chat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.chromium import Chromium
from support.page import ACTIVE, IDLE, LAST, Page
from support.served import LiveServer

from llmrun.chat.store.store import Sessions, folder_in
from llmrun.chat.store.turns import Answer, Question, Tree, TurnEntry
from llmrun.config import load_settings
from llmrun.models.fingerprint import ModelFingerprint

pytestmark = pytest.mark.usefixtures("package_on_path")
TURNS = 1000


ROOM = "(({ scrollTop, scrollHeight, clientHeight }) => scrollHeight - scrollTop - clientHeight)"
BELOW = f"{ROOM}(document.querySelector('#scroller'))"


def add_chat(n_turns: int, text: str) -> None:
    """Save a chat whose answers all have a text."""
    entries = []
    for number in range(1, 2 * n_turns, 2):
        entries.append(TurnEntry(number, number - 1 or None, 0.0, Question(f"question {number}")))
        entries.append(TurnEntry(number + 1, number, 0.0, Answer(text, model=ModelFingerprint("tiny"))))
    with Sessions(folder_in(load_settings().state_dir)) as store:
        store.add(Tree("long", "", 0.0, 0.0, "main", {"main": 2 * n_turns}, tuple(entries))).release()


def test_the_end_of_a_long_answer_stays_in_view(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    page.ask("word " * 3000)
    assert page.see("document.querySelector('#scroller').scrollTop") > 0
    page.until(f"{BELOW} < 2")
    page.ask("short")
    page.until(f"{BELOW} < 2")
    page.check()


def test_who_reads_further_up_is_left_there_when_the_answer_ends(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    server = serve("obedient")
    add_chat(3, "word " * 1000)
    page = Page(browser, server, path="/#chat=1")
    page.until(f"document.querySelectorAll('article').length === 6 && {BELOW} < 2")
    page.write_question("Go on for ever")
    page.until(f"{LAST}.textContent.includes('Hel') && {BELOW} < 2")
    drawn = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    up = f"document.querySelector('#scroller').scrollTop = 0, {drawn}"
    browser.ask("Runtime.evaluate", expression=up, awaitPromise=True)
    page.key("Escape")
    page.until(IDLE)
    assert page.see("document.querySelector('#scroller').scrollTop") == 0
    page.see("document.querySelector('#to-end').focus()")
    page.key("Enter")
    page.until(f"{BELOW} < 2 && document.querySelector('#to-end').hidden")
    assert page.see(f"{ACTIVE}.id") == "question"
    page.check()


def test_a_server_that_comes_again_goes_on_with_the_chat(browser: Chromium, tmp_path: Path) -> None:
    with LiveServer(tmp_path, ("echo",)) as server:
        page = Page(browser, server)
        page.ask("first")
        port = server.port
    page.write_question("second")
    page.until("document.querySelector('#problem').textContent.includes('can\\'t be reached')")
    assert page.see("document.querySelector('#question').value") == "second", "nothing that was typed is lost"
    with LiveServer(tmp_path, ("echo",), port=port):
        page.key("Enter")
        page.until(f"{IDLE} && document.querySelectorAll('.answer').length === 2")
        assert page.see(f"{LAST}.textContent").strip() == "second"
        assert page.see("document.querySelector('#problem').textContent") == ""


def test_a_server_that_ends_in_the_middle_of_an_answer_is_said(browser: Chromium, tmp_path: Path) -> None:
    with LiveServer(tmp_path, ("obedient",)) as server:
        page = Page(browser, server)
        page.write_question("Go on for ever")
        page.until(f"{LAST}?.textContent.includes('Hel')")
    page.until("document.querySelector('#problem').textContent && document.querySelector('#stop').hidden")
    with LiveServer(tmp_path, ("echo",), port=server.port):
        page.ask("Again")
        assert page.see(f"{LAST}.textContent").strip() == "Again"


def test_a_slow_network(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    slow = {"offline": False, "latency": 300, "downloadThroughput": 200_000, "uploadThroughput": 50_000}
    browser.ask("Network.emulateNetworkConditions", **slow)
    try:
        page = Page(browser, serve())
        page.ask("Some *words* over a slow line")
        assert page.see(f"{LAST}.querySelector('em').textContent") == "words"
        page.check()
    finally:
        fast = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        browser.ask("Network.emulateNetworkConditions", **fast)


def test_a_model_that_the_server_still_loads_is_waited_for(
    browser: Chromium, serve: Callable[..., LiveServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = tmp_path / "may load"
    monkeypatch.setenv("FAKE_ENGINE_MAY_END", str(may_load))
    page = Page(browser, serve("starved_in_load"))
    assert page.see("document.querySelector('.empty').textContent").startswith("Ask tiny")
    assert "being loaded" in page.see("document.querySelector('.empty').textContent")
    page.until("document.querySelector('#loading').textContent.startsWith('loading')")
    may_load.touch()
    page.until("document.querySelector('.empty').textContent.includes('in memory')")
    assert page.see("document.querySelector('#loading').textContent") == ""
    page.check()


def test_the_second_of_two_windows_is_told(browser: Chromium, serve: Callable[..., LiveServer], tmp_path: Path) -> None:
    server = serve()
    page = Page(browser, server)
    page.ask("first")
    other = Chromium(tmp_path / "other")
    try:
        second = Page(other, server, path="/#chat=1")
        page.ask("second")
        second.until("document.querySelector('#elsewhere').textContent.includes('gone on in another window')")
        second.write_question("third")
        second.until("document.querySelector('#problem').textContent.includes('gone on in another window')")
        second.tab_to("Show it as it is now")
        second.key("Enter")
        second.until("document.querySelectorAll('article').length === 4")
    finally:
        other.close()


def test_a_chat_of_1000_turns_goes_on_without_drawing_them_again(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    server = serve()
    add_chat(TURNS, "**answer**\n\n- one\n- two")
    page = Page(browser, server, path="/#chat=1")
    page.until(f"document.querySelectorAll('article').length === {2 * TURNS}")
    page.see("document.querySelector('article').isTheFirst = true")
    page.see("document.querySelector('#scroller').scrollTop = 0")
    page.until("document.querySelector('article strong')?.checkVisibility({ contentVisibilityAuto: true })")
    far = LAST.replace("-1", "-2")
    assert not page.see(f"{far}.checkVisibility({{ contentVisibilityAuto: true }})"), "what is far away is not laid out"
    page.ask("And now?")
    assert page.see("document.querySelectorAll('article').length") == 2 * TURNS + 2
    assert page.see("document.querySelector('article').isTheFirst") is True
    page.check()
