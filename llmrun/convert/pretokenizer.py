"""llama.cpp's name for the pre-tokenizer in tokenizer.json, which splits text into words before merges.

llama.cpp has a fixed list of pre-tokenizers with built-in regular expressions (llama-vocab.cpp). Its own converter
recognizes a vocabulary by a checksum of test ids. This module compares the description instead, so a model with another
vocabulary and the same rules converts too. An unknown pre-tokenizer is refused: text would be split wrongly.
"""

from __future__ import annotations

from typing import Any, NoReturn

from llmrun.convert.architectures import ANOTHER_WAY
from llmrun.errors import UsageError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    f"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)  # fmt: skip
_GPT4O = (
    f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
    "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[" + "\r\n" + r"]*|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+",
)
_GPT2, _DIGITS = "ByteLevel", "Digits"  # steps without a regular expression of their own

# Steps, and "ignore_merges" (a word that is a token needs no merges; None for either value) -> llama.cpp's name.
_NAMES: dict[tuple[tuple[str, ...], bool | None], str] = {
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "dbrx",
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
    ((_GPT2,), False): "gpt-2",
    ((_DIGITS, _GPT2), False): "smollm",
    ((_TEKKEN,), True): "tekken",
    ((_GPT4O,), None): "gpt-4o",
    (_DEEPSEEK3, False): "deepseek-v3",
}
_MAX_DEPTH = 8


def find_name(description: Any, *, ignores_merges: bool) -> str:
    """Return llama.cpp's name for a pre-tokenizer.

    Args:
        description: "pre_tokenizer" of tokenizer.json.
        ignores_merges: "ignore_merges" of the model in tokenizer.json.

    Raises:
        UsageError: llama.cpp has no equivalent one.
    """
    steps = tuple(_steps(description, _MAX_DEPTH))
    name = _NAMES.get((steps, ignores_merges)) or _NAMES.get((steps, None))
    if name is None:
        shown = " then ".join(step if len(step) < 200 else step[:200] + "…" for step in steps) or "nothing"
        _refuse(f"it splits by {shown}{', and ignores merges' if ignores_merges else ''}")
    return name


def _steps(description: Any, depth: int) -> list[str]:
    kind = description.get("type") if isinstance(description, dict) else None
    if kind == "Sequence" and depth and isinstance(description.get("pretokenizers"), list):
        return [step for part in description["pretokenizers"] for step in _steps(part, depth - 1)]
    if kind == "ByteLevel":
        if description.get("add_prefix_space"):
            _refuse("it prepends a space to the text")
        return [_GPT2] if description.get("use_regex", True) else []
    if kind == "Digits" and description.get("individual_digits"):
        return [_DIGITS]
    if kind != "Split":
        _refuse(f"it has a step {str(kind)[:80]!r}")
    return [_pattern(description)]


def _pattern(description: dict[str, Any]) -> str:
    pattern = description.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    mode = (description.get("behavior"), bool(description.get("invert")))
    # An expression that matches every character splits the same way in both modes.
    if not isinstance(regex, str) or mode not in (("Isolated", False), ("Removed", True)):
        _refuse(f"it splits at {str(pattern)[:120]} with {mode[0]!r}")
    return regex


def _refuse(reason: str) -> NoReturn:
    raise UsageError("llama.cpp does not have this pre-tokenizer", why=reason, hint=ANOTHER_WAY)
