"""Watermark schemes, their parameters and keys. Must not know the marking or detecting. Defaults are transformers'."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from hashlib import sha256, shake_256
from typing import TYPE_CHECKING, Literal

from llmrun.errors import UsageError

if TYPE_CHECKING:
    from llmrun import _native

SCHEMES = ("green", "synthid")
_PUBLIC_KEYS = frozenset({"15485863", "654,400,836,123,340,443,597,160,57"})  # of transformers' documentation
_FINGERPRINT = "key-fingerprint:"
_LARGEST_KEY = 2**63 - 1
_SPELLED = "green,gamma=0.25,bias=2,selfhash=4 or synthid,ngram=5,rounds=30"


@dataclass(frozen=True, slots=True)
class Watermark:
    """A scheme and its parameters."""

    # "green" biases a share of the vocabulary chosen by the token before; "synthid" lets the candidates compete in
    # rounds, and changes no probability on average.
    scheme: Literal["green", "synthid"] = "green"
    # Green share of the vocabulary, between 0 and 1.
    gamma: float = field(default=0.25, metadata={"of": "green", "bounds": (0.01, 0.99)})
    # Added to the logits of green tokens.
    bias: float = field(default=2.0, metadata={"of": "green", "bounds": (0.01, 100.0)})
    # Number of tokens that choose, the candidate being the last; 0: the token before chooses (lefthash).
    selfhash: int = field(default=0, metadata={"of": "green", "bounds": (0, 64)})
    # Of synthid, number of tokens that decide, the candidate being the last.
    ngram: int = field(default=5, metadata={"of": "synthid", "bounds": (2, 64)})
    rounds: int = field(default=30, metadata={"of": "synthid", "bounds": (1, 64)})  # of synthid, if the key is a text

    def native(self, key: str) -> _native.Watermark:
        """Return the native watermark for a sampler or a detector; raises as native_keys()."""
        from llmrun import _native

        n_gram = self.selfhash if self.scheme == "green" else self.ngram
        return _native.Watermark(self.scheme, self.native_keys(key), n_gram=n_gram, share=self.gamma, bias=self.bias)

    def native_keys(self, key: str) -> tuple[int, ...]:
        """Return the numbers for a key: a number itself, synthid's numbers with commas between, or the hash of any
        other text.

        Raises:
            UsageError: the key is only a fingerprint, or a number is out of its bounds.
        """
        if key.startswith(_FINGERPRINT):
            raise UsageError("the watermark's key is needed", why="only its fingerprint is recorded")
        numbers = key.split(",") if self.scheme == "synthid" and "," in key else [key]
        if all(number.strip().isdecimal() for number in numbers) and (self.scheme == "green" or len(numbers) > 1):
            found = tuple(map(int, numbers))
            if len(found) > 64 or not all(0 < number <= _LARGEST_KEY for number in found):
                raise UsageError("invalid watermark key", why="a number must be 1 to 2**63 - 1, with 64 at most")
            return found
        digest = shake_256(key.encode()).digest(4 * 64)
        if self.scheme == "green":
            return (int.from_bytes(digest[:8], "little") % _LARGEST_KEY + 1,)
        # Rounds look at 16 bits of a key: two keys that have these in common would judge alike.
        words = (int.from_bytes(digest[at : at + 2], "little") for at in range(0, len(digest), 2))
        return tuple(word + 2**16 for word in list(dict.fromkeys(words))[: self.rounds])


def read_watermark(text: str, label: str = "watermark") -> Watermark:
    """Parse a watermark: a scheme, and parameters with commas between.

    Args:
        label: the user's name for it, e.g. the flag.

    Raises:
        UsageError: it is something else, or a value is out of its bounds.
    """
    scheme, *settings = (part.strip() for part in text.split(","))
    if scheme not in SCHEMES:
        raise UsageError(f"invalid {label} {text}", why="must be green or synthid", hint=f"{label} {_SPELLED}")
    known = {each.name: each for each in fields(Watermark) if each.metadata.get("of") == scheme}
    values: dict[str, float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in known or name in values:
            why = f"{scheme} has {', '.join(known)}, each once at most"
            raise UsageError(f"invalid {label} {text}", why=why, hint=f"{label} {_SPELLED}")
        low, high = known[name].metadata["bounds"]
        whole = isinstance(high, int)
        try:
            values[name] = int(value) if whole else float(value)
        except ValueError:
            raise UsageError(f"invalid {label} {text}", why=f"{name} must be a number") from None
        if not low <= values[name] <= high:
            raise UsageError(f"invalid {label} {text}", why=f"{name} must be {low} to {high}")
    return Watermark(scheme, **values)  # type: ignore[arg-type]


def is_public(key: str) -> bool:
    """Return whether a key stands in documentation, so that its mark proves nothing."""
    return key.replace(" ", "") in _PUBLIC_KEYS


def fingerprint(key: str) -> str:
    """Return the text to record instead of a key: enough to recognize another key, too little to find this one.

    16 bits, because more would give the short keys of these schemes away.
    """
    if not key or key.startswith(_FINGERPRINT):
        return key
    return f"{_FINGERPRINT}{sha256(key.encode()).hexdigest()[:4]}"
