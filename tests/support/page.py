"""The page of a server in a real browser, used by keys and mouse."""

from __future__ import annotations

import time
from typing import Any

from support.chromium import Chromium
from support.served import SECONDS, LiveServer

KEYS = {"Enter": ("Enter", 13, "\r"), "Tab": ("Tab", 9, ""), "Escape": ("Escape", 27, ""), "Space": (" ", 32, " ")}
KEYS["ArrowUp"] = ("ArrowUp", 38, "")
LAST = "[...document.querySelectorAll('.answer .text.markdown')].at(-1)"
IDLE = "document.body?.dataset.ready && document.querySelector('#stop').hidden"
ACTIVE = "document.activeElement"


class Page:
    """The page of a server, in a window of a width."""

    def __init__(
        self, browser: Chromium, server: LiveServer, width: int = 1200, path: str = "/", until: str = IDLE
    ) -> None:
        self.browser, self.server = browser, server
        browser.resize(width, 800)
        browser.open("about:blank")
        browser.errors.clear()
        browser.requests.clear()
        browser.open(f"http://127.0.0.1:{server.port}{path}")
        self.until(until)

    def see(self, script: str) -> Any:
        return self.browser.evaluate(script)

    def until(self, script: str) -> None:
        ends_at = time.monotonic() + SECONDS
        while not self.see(f"Boolean({script})"):
            assert time.monotonic() < ends_at, (script, self.browser.errors, self.see("document.body.innerText"))
            time.sleep(0.05)

    def key(self, name: str, *, alt: bool = False) -> None:
        """Press a key; the Alt key is held by modifier 1."""
        key, code, text = KEYS.get(name, (name, 0, ""))
        pressed = {"key": key, "windowsVirtualKeyCode": code, "text": text}
        if alt:
            pressed = {"key": name, "code": f"Key{name.upper()}", "modifiers": 1}
        self.browser.ask("Input.dispatchKeyEvent", type="keyDown", **pressed)
        self.browser.ask("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def write(self, text: str) -> None:
        self.browser.ask("Input.insertText", text=text)

    def set(self, label: str, value: str) -> None:
        """Give a setting a value."""
        labels = "[...document.querySelectorAll('#settings label')]"
        self.see(
            f"{labels}.find(each => each.textContent.startsWith('{label}')).querySelector('input').value = '{value}'"
        )

    def tab_to(self, words: str) -> None:
        """Go to a control by the Tab key alone."""
        for _ in range(60):
            if self.see(f"{ACTIVE}.getAttribute('aria-label') === {words!r} || {ACTIVE}.textContent === {words!r}"):
                return
            self.key("Tab")
        raise AssertionError(f"the Tab key never comes to {words}, but to {self.see(f'{ACTIVE}.outerHTML')}")

    def write_question(self, text: str) -> None:
        """Ask by keys."""
        self.see("document.querySelector('#question').focus()")
        self.write(text)
        self.key("Enter")

    def ask(self, text: str) -> None:
        """Ask by keys, and wait for the end of the answer."""
        n_answers = self.see("document.querySelectorAll('.answer').length")
        self.write_question(text)
        self.until(f"document.querySelectorAll('.answer').length > {n_answers} && {IDLE}")

    def check(self) -> None:
        """Nothing was complained of, and nothing foreign asked for."""
        assert not self.browser.errors
        home = f"http://127.0.0.1:{self.server.port}/"
        own = (home, f"blob:{home}", "about:blank")
        assert not [address for address in self.browser.requests if not address.startswith(own)]
