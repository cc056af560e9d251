"""The parameters of a bench: llama-bench's lists and ranges, and the cases they make.

Pure; must not know models or machines. "512,1024" is a list, "128-512+128" and "128-1024*2" are ranges, and an option
that comes several times adds to its list.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmrun.errors import UsageError
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.loading import Load

Value = TypeVar("Value")

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Types of the KV cache."""
SWITCH = {"1": True, "on": True, "0": False, "off": False}
FLASH_ATTENTION = {"auto": "auto", "-1": "auto", "on": "on", "1": "on", "off": "off", "0": "off"}
DEFAULT_PROMPT, DEFAULT_ANSWER, DEFAULT_CHAT = 512, 128, (128, 64)

_RANGE = re.compile(r"(-?\d{1,18})(?:-(\d{1,18})(?:([+*])(\d{1,18}))?)?")
_PAIR = re.compile(r"(\d{1,18}),(\d{1,18})")
_MOST_VALUES = 1000
_MOST_CASES = 2000


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Load settings of a test, with llama-bench's defaults but for the threads."""

    threads: int
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attention: str = "auto"
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    repack: bool = True
    gpu_layers: int = -1
    n_cpu_moe: int = 0

    def load(self, path: str) -> Load:
        """Return the load settings for the engine; the test decides the context size."""
        return Load(
            path,
            n_ctx=0,
            n_ctx_start=0,
            n_batch=self.n_batch,
            n_ubatch=self.n_ubatch,
            threads=self.threads,
            gpu_layers=self.gpu_layers,
            cpu_experts=tuple(range(self.n_cpu_moe)),
            flash_attention=self.flash_attention,
            kv_type_k=self.kv_type_k,
            kv_type_v=self.kv_type_v,
            repack=self.repack,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """Settings and a test: one row of the result for each model."""

    settings: BenchSettings
    test: BenchTest


@dataclass(frozen=True, slots=True)
class BenchGrid:
    """Lists of parameters, whose combinations are the cases.

    Attributes:
        prompts: tokens of prompts; 0 is none.
        answers: tokens of answers; 0 is none.
        pairs: a prompt and an answer in one test.
        chats: the same, with our own sampling and text.
        depths: tokens in the context before the test.
        threads, batches, ubatches, flash_attention, types_k, types_v, repack, gpu_layers, n_cpu_moe: of BenchSettings.
    """

    threads: tuple[int, ...]
    prompts: tuple[int, ...] = (DEFAULT_PROMPT,)
    answers: tuple[int, ...] = (DEFAULT_ANSWER,)
    pairs: tuple[tuple[int, int], ...] = ()
    chats: tuple[tuple[int, int], ...] = ()
    depths: tuple[int, ...] = (0,)
    batches: tuple[int, ...] = (2048,)
    ubatches: tuple[int, ...] = (512,)
    flash_attention: tuple[str, ...] = ("auto",)
    types_k: tuple[str, ...] = ("f16",)
    types_v: tuple[str, ...] = ("f16",)
    repack: tuple[bool, ...] = (True,)
    gpu_layers: tuple[int, ...] = (-1,)
    n_cpu_moe: tuple[int, ...] = (0,)

    def tests(self, depth: int) -> tuple[BenchTest, ...]:
        """Return the tests at a depth."""
        return (
            *(BenchTest(n_prompt=tokens, n_depth=depth) for tokens in self.prompts if tokens),
            *(BenchTest(n_gen=tokens, n_depth=depth) for tokens in self.answers if tokens),
            *(BenchTest(prompt, answer, depth) for prompt, answer in self.pairs if prompt + answer),
            *(BenchTest(prompt, answer, depth, chat=True) for prompt, answer in self.chats),
        )

    def cases(self) -> tuple[Case, ...]:
        """Return the cases in llama-bench's order: weights change least often.

        Raises:
            UsageError: there are too many cases.
        """
        lists = (
            self.gpu_layers, self.n_cpu_moe, self.repack, self.batches, self.ubatches, self.types_k, self.types_v,
            self.flash_attention, self.threads, self.depths,
        )  # fmt: skip
        count = len(self.tests(0))
        for values in lists:
            count *= len(values)
        if count > _MOST_CASES:
            raise UsageError(
                f"these lists make {count:,} tests", why=f"the limit is {_MOST_CASES:,}", hint="give shorter lists"
            )
        found: list[Case] = []
        for *where, repack, batch, ubatch, type_k, type_v, flash, threads, depth in itertools.product(*lists):
            settings = BenchSettings(threads, batch, ubatch, flash, type_k, type_v, repack, *where)
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
