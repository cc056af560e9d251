"""What the server itself refuses, before or in place of an engine; the rest of the tree is in llmrun.errors."""

from __future__ import annotations

from llmrun.errors import LlmrunError, UsageError


class HostRejectedError(LlmrunError):
    """The Host header names another machine: a foreign page may have rebound its name to this one."""

    code = "host-refused"
    http_status = 403


class OriginRejectedError(LlmrunError):
    """A page of another origin asks."""

    code = "origin-refused"
    http_status = 403


class InvalidKeyError(LlmrunError):
    """No API key, or a wrong one."""

    code = "wrong-key"
    http_status = 401


class RouteNotFoundError(LlmrunError):
    """There is nothing at that path."""

    code = "no-route"
    http_status = 404


class MethodNotAllowedError(LlmrunError):
    """That path takes another method."""

    code = "method-not-allowed"
    http_status = 405


class BodyTooLargeError(LlmrunError):
    """The body is larger than any request has to be."""

    code = "body-too-large"
    http_status = 413


class HeadersTooLargeError(LlmrunError):
    """There are more headers than any request has to have."""

    code = "headers-too-large"
    http_status = 431


class NotJsonError(LlmrunError):
    """The body is not declared as JSON: what a page may send anywhere without being asked is not."""

    code = "not-json"
    http_status = 415


class MalformedRequestError(UsageError):
    """The request is not HTTP, or its body not JSON, as they should be."""

    code = "malformed"


class CrashingPromptError(LlmrunError):
    """The engine died twice while this prompt was in it."""

    code = "deadly-prompt"
    http_status = 422


class BusyError(LlmrunError):
    """As many requests wait as may."""

    code = "busy"
    http_status = 503


class DrainingError(LlmrunError):
    """The server is about to end."""

    code = "shutting-down"
    http_status = 503


class AnswerTimeoutError(LlmrunError):
    """The answer took longer than an answer may."""

    code = "timeout"
    http_status = 504
