"""The parameters of a bench: llama-bench's lists and ranges, and the cases they make.

Pure; must not know models or machines. "512,1024" is a list, "128-512+128" and "128-1024*2" are ranges, and an option
that comes several times adds to its list.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from llmrun.errors import UsageError
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.settings import DEFAULTS, SETTINGS, EngineSettings, check_setting

Value = TypeVar("Value")

SWITCH = {"1": True, "on": True, "0": False, "off": False}
_FLASH_ATTENTION = {"auto": "auto", "-1": "auto", "on": "on", "1": "on", "off": "off", "0": "off"}
DEFAULT_PROMPT, DEFAULT_ANSWER, DEFAULT_CHAT = 512, 128, (128, 64)

_RANGE = re.compile(r"(-?\d{1,18})(?:-(\d{1,18})(?:([+*])(\d{1,18}))?)?")
_PAIR = re.compile(r"(\d{1,18}),(\d{1,18})")
_MOST_VALUES = 1000
_MOST_CASES = 2000


def bench_settings(**changes: Any) -> EngineSettings:
    """Return llama-bench's defaults, but for the threads, with changes."""
    return EngineSettings(**{"n_batch": 2048, **changes})


@dataclass(frozen=True, slots=True)
class Case:
    """Settings and a test: one row of the result for each model."""

    settings: EngineSettings
    test: BenchTest


@dataclass(frozen=True, slots=True)
class BenchGrid:
    """Lists of parameters, whose combinations are the cases."""

    settings: Mapping[str, Sequence[Any]]  # field of EngineSettings -> values
    prompts: tuple[int, ...] = (DEFAULT_PROMPT,)  # tokens; 0 is none
    answers: tuple[int, ...] = (DEFAULT_ANSWER,)  # tokens; 0 is none
    pairs: tuple[tuple[int, int], ...] = ()  # a prompt and an answer in one test
    chats: tuple[tuple[int, int], ...] = ()  # the same, with our own sampling and text
    depths: tuple[int, ...] = (0,)  # tokens in the context before the test

    def tests(self, depth: int) -> tuple[BenchTest, ...]:
        """Return the tests at a depth."""
        return (
            *(BenchTest(n_prompt=tokens, n_depth=depth) for tokens in self.prompts if tokens),
            *(BenchTest(n_gen=tokens, n_depth=depth) for tokens in self.answers if tokens),
            *(BenchTest(prompt, answer, depth) for prompt, answer in self.pairs if prompt + answer),
            *(BenchTest(prompt, answer, depth, chat=True) for prompt, answer in self.chats),
        )

    def cases(self) -> tuple[Case, ...]:
        """Return the cases in llama-bench's order: weights change least often, threads most often.

        Raises:
            UsageError: there are too many cases.
        """
        names = [name for name in reversed(SETTINGS) if name in self.settings]
        lists = [*(self.settings[name] for name in names), self.depths]
        count = len(self.tests(0)) * math.prod(map(len, lists))
        if count > _MOST_CASES:
            raise UsageError(
                f"these lists make {count:,} tests", why=f"the limit is {_MOST_CASES:,}", hint="give shorter lists"
            )
        found: list[Case] = []
        for *values, depth in itertools.product(*lists):
            settings = bench_settings(**dict(zip(names, values, strict=True)))
            found += (Case(settings, test) for test in self.tests(depth))
        return tuple(dict.fromkeys(found))


def numbers(texts: Sequence[str], option: str, *, least: int = 0) -> tuple[int, ...]:
    """Parse lists and ranges of whole numbers, e.g. ("512,1024", "128-512+128").

    Args:
        option: its name, for errors.
        least: the smallest number allowed.

    Raises:
        UsageError: a text is invalid, or a range is endless or too long.
    """
    found: list[int] = []
    for part in (part for text in texts for part in text.split(",")):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"invalid {option} {part.strip() or texts[0]}",
                why="must be a whole number, a list or a range",
                hint=f"{option} 512, or 128,512, or 128-1024+128, or 128-1024*2",
            )
        found += _range(match, option)
    for value in found:
        if value < least:
            raise UsageError(f"invalid {option} {value}", why=f"must be at least {least}")
    return tuple(found)


def _range(match: re.Match[str], option: str) -> list[int]:
    first, last = int(match[1]), int(match[2] or match[1])
    step = int(match[4] or 1)
    if last < first or (match[3] == "*" and (step < 2 or first < 1)) or step < 1:
        raise UsageError(f"invalid {option} {match[0]}", why="the range has no end, or ends before it begins")
    found = [first]
    while (following := found[-1] * step if match[3] == "*" else found[-1] + step) <= last:
        if len(found) == _MOST_VALUES:
            raise UsageError(
                f"{option} {match[0]} is too long",
                why=f"the limit is {_MOST_VALUES:,} values",
                hint=f"a larger step: {option} {first}-{last}+{max(1, (last - first) // 8)}",
            )
        found.append(following)
    return found


def setting_values(name: str, texts: Sequence[str]) -> tuple[Any, ...]:
    """Parse the list of an engine setting.

    Raises:
        UsageError: a text is invalid.
    """
    setting = SETTINGS[name]
    if setting.parse is not None:
        values = [part.strip() for text in texts for part in text.split(",")]
        for value in values:
            setting.parse(value)
        return tuple(dict.fromkeys(values))
    if isinstance(getattr(DEFAULTS, name), bool):
        return words(texts, setting.short, SWITCH)
    if setting.bounds is None:
        known = _FLASH_ATTENTION if name == "flash_attention" else {word: word for word in setting.choices}
        return words(texts, setting.short, known)
    found = numbers(texts, setting.short, least=setting.bounds[0])
    if name != "cpu_experts":
        return found
    for layers in found:
        check_setting(name, layers, setting.short)
    return tuple(tuple(range(layers)) for layers in found)


def pairs(texts: Sequence[str], option: str) -> tuple[tuple[int, int], ...]:
    """Parse pairs of prompt and answer tokens, e.g. ("512,128",).

    Raises:
        UsageError: a text is not a pair.
    """
    found = []
    for text in texts:
        match = _PAIR.fullmatch(text.replace(" ", ""))
        if match is None:
            raise UsageError(
                f"invalid {option} {text}",
                why="must be two numbers, the tokens of the prompt and of the answer",
                hint=f"{option} 512,128",
            )
        found.append((int(match[1]), int(match[2])))
    return tuple(found)


def words(texts: Sequence[str], option: str, known: Mapping[str, Value]) -> tuple[Value, ...]:
    """Parse lists of words, e.g. ("f16,q8_0",).

    Args:
        known: word -> value.

    Raises:
        UsageError: a word is unknown.
    """
    found = []
    for word in (part.strip() for text in texts for part in text.lower().split(",")):
        if word not in known:
            raise UsageError(f"invalid {option} {word}", why=f"must be one of {', '.join(known)}")
        found.append(known[word])
    return tuple(dict.fromkeys(found))
