"""The green-list watermark: its parameters and its keys. Defaults are transformers'."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from hashlib import sha256, shake_256
from typing import TYPE_CHECKING

from llmrun.errors import UsageError

if TYPE_CHECKING:
    from llmrun import _native

_PUBLIC_KEY = "15485863"  # of transformers' documentation
_FINGERPRINT = "key-fingerprint:"
_LARGEST_KEY = 2**63 - 1
_SPELLED = "green,gamma=0.25,bias=2,selfhash=4"


@dataclass(frozen=True, slots=True)
class Watermark:
    """A bias for a share of the vocabulary that the key and the tokens before choose."""

    # Green share of the vocabulary, between 0 and 1.
    gamma: float = field(default=0.25, metadata={"bounds": (0.01, 0.99)})
    # Added to the logits of green tokens.
    bias: float = field(default=2.0, metadata={"bounds": (0.01, 100.0)})
    # Number of tokens that choose, the candidate being the last; 0: the token before chooses (lefthash).
    selfhash: int = field(default=0, metadata={"bounds": (0, 64)})

    def native(self, key: str) -> _native.Watermark:
        """Return the native watermark for a sampler or a detector; raises as native_key()."""
        from llmrun import _native

        return _native.Watermark(native_key(key), n_gram=self.selfhash, share=self.gamma, bias=self.bias)


def native_key(key: str) -> int:
    """Return the number for a key: a number itself, or the hash of any other text.

    Raises:
        UsageError: the key is only a fingerprint, or the number is out of its bounds.
    """
    if key.startswith(_FINGERPRINT):
        raise UsageError("the watermark's key is needed", why="only its fingerprint is recorded")
    if not key.strip().isdecimal():
        return int.from_bytes(shake_256(key.encode()).digest(8), "little") % _LARGEST_KEY + 1
    if not 0 < int(key) <= _LARGEST_KEY:
        raise UsageError("invalid watermark key", why="a number must be 1 to 2**63 - 1")
    return int(key)


def read_watermark(text: str, label: str = "watermark") -> Watermark:
    """Parse a watermark: "green", and parameters with commas between.

    Args:
        label: the user's name for it, e.g. the flag.

    Raises:
        UsageError: it is something else, or a value is out of its bounds.
    """
    scheme, *settings = (part.strip() for part in text.split(","))
    if scheme != "green":
        raise UsageError(f"invalid {label} {text}", why="must be green", hint=f"{label} {_SPELLED}")
    parameters = {field.name: field for field in fields(Watermark)}
    values: dict[str, float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in parameters or name in values:
            why = f"green has {', '.join(parameters)}, each once at most"
            raise UsageError(f"invalid {label} {text}", why=why, hint=f"{label} {_SPELLED}")
        low, high = parameters[name].metadata["bounds"]
        try:
            values[name] = int(value) if isinstance(high, int) else float(value)
        except ValueError:
            raise UsageError(f"invalid {label} {text}", why=f"{name} must be a number") from None
        if not low <= values[name] <= high:
            raise UsageError(f"invalid {label} {text}", why=f"{name} must be {low} to {high}")
    return Watermark(**values)  # type: ignore[arg-type]


def is_public(key: str) -> bool:
    """Return whether a key stands in documentation, so that its mark proves nothing."""
    return key.strip() == _PUBLIC_KEY


def fingerprint(key: str) -> str:
    """Return the text to record instead of a key: enough to recognize another key, too little to find this one.

    16 bits, because more would give short keys away.
    """
    if not key or key.startswith(_FINGERPRINT):
        return key
    return f"{_FINGERPRINT}{sha256(key.encode()).hexdigest()[:4]}"
