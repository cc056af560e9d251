"""Errors of the server itself; all others are in llmrun.errors."""

from __future__ import annotations

from llmrun.errors import LlmrunError, ModelNotFoundError, UsageError


def model_not_found(name: str, listing: str = "/v1/models", hint: str = "") -> ModelNotFoundError:
    """Return the error for an unknown name; `listing` is the path that lists all names."""
    return ModelNotFoundError(f"there is no model {name[:200]!r}", hint=f"GET {listing} lists all models{hint}")


def response_not_found(name: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(
        f"no response or item is called {name[:200]!r}",
        why="only the last ones are kept, until the server ends",
        hint="send the whole conversation",
    )


class HostRejectedError(LlmrunError):
    """The Host header names another machine: a page may have rebound its name to this one (DNS rebinding)."""

    code = "host-refused"
    http_status = 403


class OriginRejectedError(LlmrunError):
    """The request is from a page of another origin."""

    code = "origin-refused"
    http_status = 403


class InvalidKeyError(LlmrunError):
    """No API key, or a wrong one."""

    code = "wrong-key"
    http_status = 401


class RouteNotFoundError(LlmrunError):
    """The path has no route."""

    code = "no-route"
    http_status = 404


class ResponseNotFoundError(LlmrunError):
    """No response with this id is kept."""

    code = "response-not-found"
    http_status = 404


class MethodNotAllowedError(LlmrunError):
    """The route has other methods."""

    code = "method-not-allowed"
    http_status = 405


class BodyTooLargeError(LlmrunError):
    """The body exceeds the limit."""

    code = "body-too-large"
    http_status = 413


class HeadersTooLargeError(LlmrunError):
    """The headers exceed the limit."""

    code = "headers-too-large"
    http_status = 431


class NotJsonError(LlmrunError):
    """The body is not declared as JSON; pages can send other types to any address without permission."""

    code = "not-json"
    http_status = 415


class UnknownEncodingError(LlmrunError):
    """The body is compressed in a way that is not read."""

    code = "unknown-encoding"
    http_status = 415


class MalformedRequestError(UsageError):
    """The request is not valid HTTP, or its body not valid JSON."""

    code = "malformed"


class CrashingPromptError(LlmrunError):
    """Two engines died while this prompt was in them."""

    code = "deadly-prompt"
    http_status = 422


class BusyError(LlmrunError):
    """The queue is full."""

    code = "busy"
    http_status = 503


class DrainingError(LlmrunError):
    """The server is shutting down."""

    code = "shutting-down"
    http_status = 503


class AnswerTimeoutError(LlmrunError):
    """The answer exceeds the time limit."""

    code = "timeout"
    http_status = 504
