"""Requests to the hub's API: retries, refusals as our errors, JSON.

Owns login and retries; must not know the meaning of the responses. A refusal explains itself in X-Error-Code.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from llmrun.config import Settings
from llmrun.errors import LlmrunError, LoginRequiredError, ModelNotFoundError, NetworkError
from llmrun.models.download.transfer import (
    BUSY,
    DEFAULT_RETRY_POLICY,
    Link,
    OnNote,
    RetryableError,
    RetryPolicy,
    TransferSource,
    ignore_note,
    new_client,
    read_body,
    wait_seconds,
    with_retries,
)
from llmrun.protocol.codec import load_json

if TYPE_CHECKING:
    import httpx2

CONNECT_SECONDS = 4.0
# In total: ten addresses blocked by a firewall would take ten times the connect timeout.
ANSWER_SECONDS = 10.0
_MAX_BYTES = 64 << 20  # of a response
_WRONG_LOGIN = "Invalid credentials in Authorization header"


def request_json(
    path: str,
    query: dict[str, Any],
    settings: Settings,
    on_note: OnNote = ignore_note,
    *,
    about: tuple[str, str] = ("", ""),
    policy: RetryPolicy = DEFAULT_RETRY_POLICY,
) -> Any:
    """Return the JSON of the hub's response.

    Args:
        path: below the endpoint, with a slash.
        query: a list stands for one pair per item.
        on_note: called before each retry, with the reason.
        about: repository and revision, for messages.

    Raises:
        ModelNotFoundError: there is no such repository or revision.
        LoginRequiredError: it is gated, or the token is refused.
        NetworkError: the hub can't be reached, or its response is invalid, after retries.
    """
    url = f"{settings.endpoint}{path}?{urlencode(query, doseq=True)}"
    source = TransferSource(url, "the answer", token=token())
    one_try = replace(policy, connect_seconds=CONNECT_SECONDS, stall_seconds=min(ANSWER_SECONDS, policy.stall_seconds))
    body = with_retries(
        lambda: _within(ANSWER_SECONDS + CONNECT_SECONDS, settings, lambda: _get(source, settings, about, one_try)),
        policy,
        on_note,
    )
    try:
        return load_json(body)
    except ValueError as error:
        raise invalid_response(settings, "something that can't be read") from error


def token() -> str | None:
    """Return the user's token for the hub, from HF_TOKEN or `hf auth login`; None when implicit tokens are disabled."""
    # Read when huggingface_hub is imported; otherwise requests report the installed packages to the hub.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from huggingface_hub import constants, get_token

    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


def login_hint(settings: Settings, repository: str) -> str:
    return f"open {settings.endpoint}/{repository}, accept the terms, then run `hf auth login` or set HF_TOKEN"


def invalid_response(settings: Settings, what: str) -> NetworkError:
    return NetworkError(
        f"the hub at {settings.endpoint} sent an invalid response",
        why=f"it sent {what}",
        hint="check HF_ENDPOINT and the proxy",
    )


def _get(source: TransferSource, settings: Settings, about: tuple[str, str], policy: RetryPolicy) -> bytes:
    import httpx2

    try:
        with (
            new_client(policy) as client,
            Link(source).answer(client, {"Accept": "application/json"}) as response,
        ):
            if response.status_code != 200:
                _refuse(response, settings, about, policy)
            return read_body(response, source, _MAX_BYTES, policy)
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError, httpx2.InvalidURL) as error:
        raise _unreachable(settings, str(error) or type(error).__name__) from error
    except httpx2.HTTPError as error:
        what = f"the hub at {settings.endpoint} sent an incomplete response"
        raise RetryableError(NetworkError(what, why=str(error) or type(error).__name__)) from error


def _refuse(response: httpx2.Response, settings: Settings, about: tuple[str, str], policy: RetryPolicy) -> None:
    """Raise the error that a refusal means."""
    repository, revision = about
    status, headers = response.status_code, response.headers
    code = headers.get("x-error-code", "")
    if code == "GatedRepo":
        raise LoginRequiredError(
            f"{repository} is gated",
            why="its terms have to be accepted first",
            hint=login_hint(settings, repository),
        )
    if code == "RevisionNotFound":
        raise ModelNotFoundError(f"{repository} has no revision {revision!r}")
    if code == "RepoNotFound" or (status == 401 and headers.get("x-error-message") != _WRONG_LOGIN):
        raise ModelNotFoundError(
            f"the hub has no repository {repository}",
            why="it does not exist, or it is private",
            hint="check the spelling; for a private one run `hf auth login` or set HF_TOKEN",
        )
    if status in (401, 403):
        raise LoginRequiredError(
            "the hub refuses the login",
            why=f"it answered {status}",
            hint="run `hf auth login` again, or check HF_TOKEN",
        )
    error: LlmrunError = NetworkError(f"the hub at {settings.endpoint} answered {status}", hint="try again later")
    if status == 429:
        error = NetworkError(
            "too many requests to the hub",
            hint="wait, or log in with `hf auth login` for a higher limit",
        )
    if status in BUSY:
        raise RetryableError(error, wait_seconds(response, error, policy))
    raise error


def _unreachable(settings: Settings, why: str) -> NetworkError:
    hint = "check the network; models of `llmrun list` work without it"
    if "CERTIFICATE" in why:
        hint = "name the certificates to trust: SSL_CERT_FILE=FILE"
    why = re.sub(r"^\[Errno -?\d+\] ", "", why)
    return NetworkError(f"can't reach the hub at {settings.endpoint}", why=why, hint=hint)


def _within(seconds: float, settings: Settings, call: Callable[[], bytes]) -> bytes:
    """Run a call in a thread, because a resolver or a list of dead addresses has no overall timeout."""
    results: list[bytes] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again by the waiting thread
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise _unreachable(settings, f"no answer within {seconds:.0f} seconds")
    return results[0]
