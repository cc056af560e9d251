"""The page on the user's phone: a second address, which this machine's network reaches, and its code to photograph.

Owns its listener and its key, which is new each time and nowhere saved; must not know routes. The key makes its sender
the user of this machine, so nothing listens until the user asks for it. It stands in the fragment of the address, which
browsers do not send, so no log has it.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from contextlib import closing, suppress

from llmrun.errors import UsageError
from llmrun.server.guard import Policy
from llmrun.server.listener import Listener
from llmrun.server.registry import bind

_KEY_BYTES = 16
_ELSEWHERE = ("192.0.2.1", 9)  # an address of documentation, RFC 5737
_COMMAND = "the page on a phone"


class PhoneAccess:
    """The second address of the page, which is opened and ended in one event loop.

    Args:
        serve: makes a listener on a socket with an access policy.

    Attributes:
        address: of the page with its key; "" while nothing listens.
    """

    def __init__(self, serve: Callable[[Policy, socket.socket], Listener]) -> None:
        self._serve = serve
        self._listener: Listener | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self.address = ""

    async def open(self) -> None:
        """Listen in the network of this machine, if that is not so already.

        Raises:
            UsageError: no other machine could reach this one.
        """
        host, key = network_address(), secrets.token_urlsafe(_KEY_BYTES)
        if self.address.startswith(f"http://{host}:"):
            return
        self.end()
        listening = bind(host, 0, _COMMAND)
        policy = Policy(frozenset({host}), keys=(key.encode(),), is_own=True)
        self._listener = self._serve(policy, listening)
        self.address = f"http://{host}:{listening.getsockname()[1]}/#key={key}"
        await self._listener.start()

    def end(self) -> None:
        """Stop listening soon: the request that asks for it may come from there."""
        if self._listener is not None:
            task = asyncio.ensure_future(self._listener.stop())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._listener, self.address = None, ""

    async def close(self) -> None:
        """Stop listening."""
        self.end()
        await asyncio.gather(*self._ending, return_exceptions=True)


def code_of(address: str) -> list[str]:
    """Return the QR code of an address as rows of "1", dark, and "0", with the light border that readers need."""
    import segno  # takes 100 ms

    rows = segno.make_qr(address, error="m").matrix_iter(border=4)
    return ["".join("1" if dark else "0" for dark in row) for row in rows]


def network_address() -> str:
    """Return the address of this machine in its network. Raises UsageError without one."""
    with suppress(OSError), closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect(_ELSEWHERE)  # sends nothing: it chooses the network to send by
        found = str(probe.getsockname()[0])
        if not found.startswith("127."):
            return found
    why = "it is in no network, so only this machine itself can open the page"
    raise UsageError("a phone can't reach this machine", why=why, hint="connect it to the phone's Wi-Fi, and try again")
