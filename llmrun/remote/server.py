"""The address of a remote server, by --at URL or LLMRUN_SERVER, its key, and the choice of its model.

A key comes from the environment or a file, never from the command line, and is in no message, log or repr.

    LLMRUN_SERVER           the address, without --at
    LLMRUN_SERVER_KEY       the key for it
    LLMRUN_SERVER_KEY_FILE  a file with the key, without --key-file
    OPENAI_API_KEY          for https://api.openai.com alone
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from llmrun.errors import ModelNotFoundError, UsageError, did_you_mean, listed
from llmrun.system import user_path

OPENAI_HOST = "api.openai.com"
_VERSION = re.compile(r"v\d+\w*")  # of an API, as a part of its path
_ENDPOINTS = ("/chat/completions", "/completions", "/models")
_OLLAMA_PORT = 11434
_LONGEST_KEY_FILE = 64 * 1024
_EXAMPLE = "e.g. --at http://127.0.0.1:8080"


@dataclass(frozen=True, slots=True)
class Server:
    """An OpenAI-compatible server."""

    url: str  # with the API's version, without a slash at the end, e.g. "http://127.0.0.1:8080/v1"
    key: str = field(default="", repr=False)  # sent as a bearer token to this server alone; "" is none

    @property
    def host(self) -> str:
        """Host and port, for messages."""
        return urlsplit(self.url).netloc

    @property
    def is_loopback(self) -> bool:
        """Whether the server runs on this machine."""
        return is_loopback(urlsplit(self.url).hostname or "")

    @property
    def warning(self) -> str:
        """Warning for the user before anything is sent; "" is none."""
        if self.url.startswith("https:") or self.is_loopback:
            return ""
        what = "the key and everything that is asked and answered" if self.key else "what is asked and answered"
        return f"{self.host} is reached without TLS: whoever is on the way can read {what}"

    def without_key(self, text: str) -> str:
        """Return a text of the server's without the key, which it may repeat."""
        return text.replace(self.key, "[key]") if self.key else text


class ServedModel(NamedTuple):
    """A model of a server."""

    name: str
    owner: str = ""  # the server's name for itself: "llamacpp", "vllm", "sglang", "llmrun" ...
    n_ctx: int | None = None  # context window in tokens; None if not reported
    alias_of: str = ""  # the name of the same model, if this is another name of it


def read_server(text: str, environment: Mapping[str, str], key_file: Path | None = None) -> Server:
    """Return the server at an address, with its key.

    Args:
        text: "http://host:8080", with or without /v1 or an endpoint; http:// may be left out on this machine.
        key_file: its first line that is not a comment is the key.

    Raises:
        UsageError: the text is not an address, or holds a secret; or the key can't be read.
    """
    url = _address(text.strip())
    return Server(url, _key(url, environment, key_file))


def ollama_host(text: str) -> tuple[str, str, int]:
    """Return scheme, host and port of OLLAMA_HOST: "", "127.0.0.1", ":11434", "http://localhost:1234".

    Raises:
        UsageError: the value is invalid.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname or "127.0.0.1", parts.port or _OLLAMA_PORT
    except ValueError:
        raise UsageError(f"invalid OLLAMA_HOST={text}", hint="e.g. OLLAMA_HOST=127.0.0.1:11434") from None
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - what a server listens on; a client finds it here
        host = "127.0.0.1"
    return parts.scheme, host, port


def ollama_address(environment: Mapping[str, str]) -> str:
    """Return the address of `--at ollama`. Raises as ollama_host()."""
    scheme, host, port = ollama_host(environment.get("OLLAMA_HOST", ""))
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _address(text: str) -> str:
    """Return the normalized address. Messages do not repeat one that may hold a secret."""
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise UsageError("the server's address can't be read", hint=_EXAMPLE) from None
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(
            "the server's address holds more than a host and a path",
            why="what is on a command line can be read by every program on this machine",
            hint="give the key as LLMRUN_SERVER_KEY or with --key-file FILE",
        )
    scheme = parts.scheme or ("http" if is_loopback(host) else "")
    if scheme not in ("http", "https") or not re.fullmatch(r"[\w.:%-]+", host):
        hint = f"https://{text} or http://{text}" if not parts.scheme and host else _EXAMPLE
        raise UsageError(f"invalid --at {text}", why="must be an address with http:// or https://", hint=hint)
    path = parts.path.rstrip("/")
    for endpoint in _ENDPOINTS:
        path = path.removesuffix(endpoint)
    if not any(map(_VERSION.fullmatch, path.split("/"))):
        path += "/v1"
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}{'' if port is None else f':{port}'}{path}"


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's own."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _key(url: str, environment: Mapping[str, str], key_file: Path | None) -> str:
    """Return the key for a server; a file named by the user precedes the environment."""
    named = environment.get("LLMRUN_SERVER_KEY_FILE", "")
    if key_file is not None:
        where, key = f"--key-file {key_file}", _first_line(key_file, f"--key-file {key_file}")
    elif key := environment.get("LLMRUN_SERVER_KEY", "").strip():
        where = "LLMRUN_SERVER_KEY"
    elif named:
        where, key = f"LLMRUN_SERVER_KEY_FILE={named}", _first_line(user_path(named), "LLMRUN_SERVER_KEY_FILE")
    elif urlsplit(url).hostname == OPENAI_HOST and url.startswith("https:"):
        where, key = "OPENAI_API_KEY", environment.get("OPENAI_API_KEY", "").strip()
    else:
        return ""
    if not re.fullmatch(r"[!-~]*", key):
        raise UsageError(f"the key in {where} can't be sent", why="must be of ASCII characters, without blanks")
    return key


def _first_line(path: Path, where: str) -> str:
    """Return the first line of a file of keys that is not blank or a comment."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = file.read(_LONGEST_KEY_FILE).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "it is not text"
        raise UsageError(f"{where} can't be read", why=why) from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise UsageError(f"{where} has no key", why="it needs one line with the key")
    return keys[0]


def choose_model(server: Server, found: Sequence[ServedModel], name: str | None) -> ServedModel:
    """Return the model that the user means.

    Args:
        found: the server's models.
        name: None is the only one.

    Raises:
        UsageError: there are several, and none was named.
        ModelNotFoundError: there is no model of that name, or none at all.
    """
    names = [model.name for model in found]
    if name is None:  # other names of one model do not make it several
        found = [model for model in found if model.alias_of not in names]
        names = [model.name for model in found]
    if not names:
        raise ModelNotFoundError(f"{server.host} has no model", hint="load one there, and try again")
    if name is None and len(names) > 1:
        raise UsageError(
            f"{server.host} has {len(names)} models", why=listed(names, 10), hint="name the one that is meant"
        )
    chosen = found[0] if name is None else next((model for model in found if model.name == name), None)
    if chosen is None:
        hint = did_you_mean(name or "", names) or "name one of these"
        raise ModelNotFoundError(f"{server.host} has no model {name!r}", why=f"it has {listed(names, 10)}", hint=hint)
    return chosen
