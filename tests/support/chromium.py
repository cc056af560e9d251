"""A headless Chromium without network but for 127.0.0.1, asked over its DevTools protocol (https://chromedevtools.github.io).

Messages are JSON with a zero byte behind them, on two pipes that Chromium finds as its descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None where there is no such browser."""
_NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", _NO_NETWORK, "--remote-debugging-pipe")


class Chromium:
    """One page of a browser.

    Args:
        options: further ones of its command line.

    Attributes:
        errors: what its console, its log and its scripts complained of.
        requests: every address that was asked for.
    """

    def __init__(self, profile: Path, *options: str) -> None:
        assert PROGRAM
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", PROGRAM, *_OPTIONS, *options, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read, self._number, self._session = b"", 0, ""
        self._events: dict[str, Any] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    @property
    def pid(self) -> int:
        """Of its first process."""
        return self._process.pid

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, page: Path | str) -> None:
        """Open a file or an address, and wait until it is loaded."""
        self._events.pop("Page.loadEventFired", None)
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self.until_event("Page.loadEventFired")

    def resize(self, width: int, height: int) -> None:
        """Give the window a size in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def picture(self) -> bytes:
        """What the window shows, as PNG."""
        self.ask("Page.bringToFront")  # the page may have opened another tab
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])

    def accessibility_faults(self, axe: str) -> list[str]:
        """What axe-core, whose script is given, finds in the page."""
        self.evaluate(f"typeof axe === 'undefined' && (() => {{ {axe} }})()")
        found: list[str] = self.evaluate(
            "axe.run().then(found => found.violations.map(each => `${each.id}: ${each.nodes.map(one => one.target)}`))"
        )
        return found

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, or of its promise."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def ask(self, method: str, **parameters: Any) -> Any:
        """The answer to a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (found := self._next()).get("id") != self._number:
            pass
        assert "error" not in found, found
        return found["result"]

    def until_event(self, method: str) -> Any:
        """The parameters of an event of a kind, which may have come before the answer to the last command."""
        while method not in self._events:
            self._next()
        return self._events.pop(method)

    def _next(self) -> dict[str, Any]:
        """The next message; events are noted."""
        while b"\0" not in self._read:
            data = os.read(self._in, 1 << 16)
            assert data, "the browser died"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        method, told = found.get("method"), found.get("params", {})
        if method:
            self._events[method] = told
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"]))
        if (method == "Log.entryAdded" and told["entry"]["level"] == "error") or (
            method == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert")
        ):
            self.errors.append(str(told))
        return found
