"""The tree of all errors that llmrun raises on purpose, each with a stable code and an exit status.

`cli.main` is the only place that turns one into text and an exit status, `server` the only
place that turns one into HTTP.

    LlmrunError                 1  internal
    ├── InternalError           1  internal-error
    ├── UsageError              2  usage
    │   ├── ContextOverflowError 2 context-overflow
    │   └── NoModelError        2  no-model
    ├── ModelNotFoundError      3  model-not-found
    ├── LoginRequiredError      4  login-required
    ├── NetworkError            5  network
    │   ├── IntegrityError      5  integrity
    │   └── UnavailableError    5  unavailable
    ├── ResourceError           6  not-enough-resources
    │   ├── OutOfMemoryError    6  not-enough-memory
    │   └── DiskFullError       6  not-enough-disk
    ├── BadModelError           7  bad-model
    │   ├── BadTemplateError    7  bad-template
    │   ├── BadGrammarError     7  bad-grammar
    │   └── BadLogitsError      7  bad-logits
    ├── EngineCrashedError      8  engine-crashed
    ├── CutOffError             9  cut-off
    ├── RowsFailedError        10  rows-failed
    ├── CancelledError        130  cancelled
    └── TerminatedError       143  terminated
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

_MUCH_LESS_SIMILAR = 0.09  # than the most similar name; such names are not worth a question


def near_names(typed: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that were probably meant: names that contain the typed text, else similar ones.

    Case does not count.
    """
    from difflib import SequenceMatcher, get_close_matches

    lower = {name.lower(): name for name in names}
    if inside := [low for low in lower if typed.lower() in low] if len(typed) > 1 else []:
        return [lower[low] for low in inside[:3]]
    near = get_close_matches(typed.lower(), lower)
    ratios = [SequenceMatcher(None, low, typed.lower()).ratio() for low in near]
    return [lower[low] for low, ratio in zip(near, ratios, strict=True) if ratio > ratios[0] - _MUCH_LESS_SIMILAR]


def did_you_mean(typed: str, names: Iterable[str], otherwise: str = "") -> str:
    """Return a hint that guesses the name that was meant.

    Args:
        otherwise: follows the guess, or stands alone if no name is near.
    """
    near = near_names(typed, names)
    guess = f"did you mean {' or '.join(near)}?" if near else ""
    return " ".join(filter(None, (guess, otherwise)))


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names as text, e.g. "a, b and 3 more"."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def first_bytes(data: bytes) -> str:
    """Return bytes of a file for a message: as text if all are printable, else in hexadecimal."""
    text = data.decode("latin-1")
    return f'"{text}"' if text.isascii() and text.isprintable() else data.hex(" ")


def _as_flags(text: str) -> str:
    return text


rephrase: Callable[[str], str] = _as_flags
"""Translates the names of arguments in messages, which are the command line's; a program that imports a name from the
package `llmrun` sets protocol.arguments.in_python()."""


class LlmrunError(Exception):
    """An error with an explanation.

    Args:
        what: the event, one line, no full stop at the end.
        why: the cause, if known.
        hint: the user's next step.
    """

    code: ClassVar[str] = "internal"
    exit_status: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        self.what, self.why, self.hint = (rephrase(text) for text in (what, why, hint))
        super().__init__(self.what)

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.why else self.what


class InternalError(LlmrunError):
    """A bug of llmrun, which one request has met: its cause is the exception, and its number is in the log."""

    code = "internal-error"


def as_llmrun_error(error: Exception) -> LlmrunError:
    """Return the error that a request ends with: one of ours as it is; any other exception is a bug."""
    if isinstance(error, LlmrunError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemoryError("there is not enough memory for this request", hint="shorten it, or close programs")
    hint = "the server's log, or --debug, shows where; please report it"
    internal = InternalError(f"internal error {os.urandom(4).hex()}", why=type(error).__name__, hint=hint)
    internal.__cause__ = error
    return internal


class UsageError(LlmrunError):
    """An argument or option with an invalid value."""

    code = "usage"
    exit_status = 2
    http_status = 400


class NoModelError(UsageError):
    """No model is named, and there is no default one.

    Args:
        proposals: name, size and purpose of models for this machine.
    """

    code = "no-model"

    def __init__(
        self,
        what: str = "there is no model",
        *,
        why: str = "",
        hint: str = "",
        proposals: Sequence[tuple[str, str, str]] = (),
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.proposals = proposals


class ValueKind(NamedTuple):
    """A kind of value."""

    words: str  # follow "must be" in a message
    fits: Callable[[Any], bool]  # returns whether a value is of this kind


TEXT = ValueKind("a text", lambda value: isinstance(value, str))


def require(name: str, value: Any, kind: ValueKind) -> None:
    """Raise UsageError if a value is not of its kind."""
    if not kind.fits(value):
        raise UsageError(f"invalid {name} {brief(value)}", why=f"must be {kind.words}")


def brief(value: Any) -> str:
    """Return the beginning of a value's repr()."""
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python writes no integers of over 4,300 digits
        return f"of {type(value).__name__}"


def require_within(name: str, value: float | None, bounds: tuple[float, float]) -> None:
    """Raise UsageError if the value of an option, if there is one, is not within its bounds, both included."""
    low, high = bounds
    if value is not None and not low <= value <= high:  # a comparison with NaN is false
        text = brief(value) if isinstance(value, int) else f"{value:.12g}"  # no float holds 400 digits
        raise UsageError(f"invalid {name} {text}", why=f"must be between {low:,.12g} and {high:,.12g}")


class ContextOverflowError(UsageError):
    """The prompt alone is longer than the context window.

    Args:
        size: tokens of the prompt and of the context window, if known.
    """

    code = "context-overflow"

    def __init__(self, what: str, *, why: str = "", hint: str = "", size: tuple[int, int] | None = None) -> None:
        super().__init__(what, why=why, hint=hint)
        self.size = size

    @classmethod
    def of_prompt(cls, n_tokens: int, n_ctx: int) -> ContextOverflowError:
        """Return the error of a prompt of n_tokens."""
        what = f"the prompt is {n_tokens:,} tokens long, the context window {n_ctx:,}"
        return cls(what, hint="shorten it, or ask for a larger context window with --ctx", size=(n_tokens, n_ctx))


class ModelNotFoundError(LlmrunError):
    """No model of that name, or no file at that path."""

    code = "model-not-found"
    exit_status = 3
    http_status = 404


class LoginRequiredError(LlmrunError):
    """The hub requires a token, or its terms accepted."""

    code = "login-required"
    exit_status = 4
    http_status = 403


class NetworkError(LlmrunError):
    """The hub or a server can't be reached, or its answer is unusable."""

    code = "network"
    exit_status = 5
    http_status = 502


class IntegrityError(NetworkError):
    """The received bytes do not have the promised hash."""

    code = "integrity"


class UnavailableError(NetworkError):
    """A server can't be reached or can't answer just now: the same request may succeed later."""

    code = "unavailable"
    http_status = 503


class ResourceError(LlmrunError):
    """This machine has too little of something."""

    code = "not-enough-resources"
    exit_status = 6
    http_status = 507


class OutOfMemoryError(ResourceError):
    """The model or its KV cache does not fit into memory."""

    code = "not-enough-memory"
    http_status = 503


class DiskFullError(ResourceError):
    """The file does not fit on the disk."""

    code = "not-enough-disk"


class BadModelError(LlmrunError):
    """The model file is damaged, or not a model that can be run."""

    code = "bad-model"
    exit_status = 7
    http_status = 422


class BadTemplateError(BadModelError):
    """The chat template is missing, broken, or takes too long or too much memory."""

    code = "bad-template"


class BadGrammarError(BadModelError):
    """A grammar or JSON schema is broken, or too large.

    Attributes:
        path: the keys and indices that lead to the mistake in a JSON schema, if it has a place there.
    """

    path: tuple[str | int, ...] = ()
    code = "bad-grammar"
    http_status = 400


class BadLogitsError(BadModelError):
    """The model computed logits that are not numbers."""

    code = "bad-logits"


class EngineCrashedError(LlmrunError):
    """The engine process died; the front and the conversation go on."""

    code = "engine-crashed"
    exit_status = 8
    http_status = 500


class CutOffError(LlmrunError):
    """A structured answer was cut off by a limit, and is incomplete."""

    code = "cut-off"
    exit_status = 9


class RowsFailedError(LlmrunError):
    """Some rows of a batch have an error instead of an answer."""

    code = "rows-failed"
    exit_status = 10


class CancelledError(LlmrunError):
    """The user pressed Ctrl-C."""

    code = "cancelled"
    exit_status = 130
    http_status = 499


class TerminatedError(LlmrunError):
    """The process was asked to end (SIGTERM)."""

    code = "terminated"
    exit_status = 143
    http_status = 503


def _tree(root: type[LlmrunError]) -> dict[str, type[LlmrunError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE = _tree(LlmrunError)
"""Stable code -> class, for errors from the engine."""
