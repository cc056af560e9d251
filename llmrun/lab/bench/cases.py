"""The cases of a bench: lists and ranges as in llama-bench, the cases that they make, and their check before a run.

"512,1024" is a list, "128-512+128" and "128-1024*2" are ranges, and an option that comes several times adds to its
list. Impossible cases are refused by name, odd ones are noted. Sizes are in bytes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from llmrun.errors import OutOfMemoryError, UsageError, require_within
from llmrun.gguf.header import Header
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import UBATCH, memory
from llmrun.planning.preferences import CONTEXT_BOUNDS
from llmrun.protocol.devices import check_overrides, selected
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.settings import DEFAULTS, KV_TYPES, MAX_THREADS, SETTINGS, EngineSettings, check_setting
from llmrun.protocol.sizes import readable_size

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
        cases: list[Case] = []
        for *values, depth in itertools.product(*lists):
            settings = bench_settings(**dict(zip(names, values, strict=True)))
            cases += (Case(settings, test) for test in self.tests(depth))
        return tuple(dict.fromkeys(cases))


def numbers(texts: Sequence[str], option: str, *, least: int = 0) -> tuple[int, ...]:
    """Parse lists and ranges of whole numbers, e.g. ("512,1024", "128-512+128").

    Args:
        option: its name, for errors.
        least: the smallest number allowed.

    Raises:
        UsageError: a text is invalid, or a range is endless or too long.
    """
    values: list[int] = []
    for part in (part for text in texts for part in text.split(",")):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"invalid {option} {part.strip() or texts[0]}",
                why="must be a whole number, a list or a range",
                hint=f"{option} 512, or 128,512, or 128-1024+128, or 128-1024*2",
            )
        values += _range(match, option)
    for value in values:
        if value < least:
            raise UsageError(f"invalid {option} {value}", why=f"must be at least {least}")
    return tuple(values)


def _range(match: re.Match[str], option: str) -> list[int]:
    first, last = int(match[1]), int(match[2] or match[1])
    step = int(match[4] or 1)
    if last < first or (match[3] == "*" and (step < 2 or first < 1)) or step < 1:
        raise UsageError(f"invalid {option} {match[0]}", why="the range has no end, or ends before it begins")
    values = [first]
    while (following := values[-1] * step if match[3] == "*" else values[-1] + step) <= last:
        if len(values) == _MOST_VALUES:
            raise UsageError(
                f"{option} {match[0]} is too long",
                why=f"the limit is {_MOST_VALUES:,} values",
                hint=f"a larger step: {option} {first}-{last}+{max(1, (last - first) // 8)}",
            )
        values.append(following)
    return values


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
    parsed = numbers(texts, setting.short, least=setting.bounds[0])
    if name != "cpu_experts":
        return parsed
    for layers in parsed:
        check_setting(name, layers, setting.short)
    return tuple(tuple(range(layers)) for layers in parsed)


def pairs(texts: Sequence[str], option: str) -> tuple[tuple[int, int], ...]:
    """Parse pairs of prompt and answer tokens, e.g. ("512,128",).

    Raises:
        UsageError: a text is not a pair.
    """
    parsed = []
    for text in texts:
        match = _PAIR.fullmatch(text.replace(" ", ""))
        if match is None:
            raise UsageError(
                f"invalid {option} {text}",
                why="must be two numbers, the tokens of the prompt and of the answer",
                hint=f"{option} 512,128",
            )
        parsed.append((int(match[1]), int(match[2])))
    return tuple(parsed)


def words(texts: Sequence[str], option: str, values_by_word: Mapping[str, Value]) -> tuple[Value, ...]:
    """Parse lists of words, e.g. ("f16,q8_0",).

    Args:
        values_by_word: word -> value.

    Raises:
        UsageError: a word is unknown.
    """
    values = []
    for word in (part.strip() for text in texts for part in text.lower().split(",")):
        if word not in values_by_word:
            raise UsageError(f"invalid {option} {word}", why=f"must be one of {', '.join(values_by_word)}")
        values.append(values_by_word[word])
    return tuple(dict.fromkeys(values))


# ---- the check before a run

MOST_REPETITIONS = 1000

_PLAIN = frozenset({"f32", "f16", "bf16"})


class NamedModel(NamedTuple):
    """A model's name and header."""

    name: str
    header: Header


def check_cases(cases: Sequence[Case], hardware: Hardware, repetitions: int) -> list[str]:
    """Check the cases before models are located.

    Returns:
        Notes about odd cases.

    Raises:
        UsageError: a case is impossible.
    """
    require_within("--repetitions", repetitions, (1, MOST_REPETITIONS))
    if not cases:
        raise UsageError(
            "there is nothing to measure",
            why="prompts and answers have 0 tokens in all",
            hint="llmrun bench MODEL -p 512 -n 128",
        )
    for case in cases:
        _check_tokens(case.test)
        _check_settings(case, hardware)
    for threads in sorted({case.settings.threads for case in cases}):
        _check_threads(threads, hardware)
    return _odd_threads(cases, hardware)


def check_models(cases: Sequence[Case], subjects: Sequence[NamedModel], hardware: Hardware) -> list[str]:
    """Check the models for the cases before the first test.

    Returns:
        Notes about odd models.

    Raises:
        UsageError: a model can't be loaded with these settings.
        OutOfMemoryError: a model does not fit with the context that a test needs.
    """
    notes: list[str] = []
    for subject in subjects:
        for case in cases:
            _check_heads(case, subject)
            _check_memory(case, subject, hardware)
        notes += _odd_depths(cases, subject)
    return notes


def _check_tokens(test: BenchTest) -> None:
    if test.chat and not (test.n_prompt and test.n_gen):
        raise UsageError(
            f"invalid test {test.name}",
            why="a chat has a prompt of at least one token, and an answer of at least one",
            hint="--chat 128,64",
        )
    most = CONTEXT_BOUNDS[1]
    if test.n_tokens + test.n_depth > most:
        raise UsageError(
            f"invalid test {test.name}",
            why=f"it needs a context of {test.n_tokens + test.n_depth:,} tokens; the limit is {most:,}",
        )


def _check_settings(case: Case, hardware: Hardware) -> None:
    settings = case.settings
    for name in ("n_batch", "n_ubatch", "gpu_layers", "main_gpu"):
        check_setting(name, getattr(settings, name), SETTINGS[name].short)
    gpus = selected(hardware.gpus, settings.device, settings.split_mode, settings.main_gpu, settings.tensor_split)
    check_overrides(settings.override_tensor, gpus)
    if settings.flash_attention == "off" and settings.split_mode == "tensor":
        raise UsageError("-sm tensor needs flash attention", hint="leave out -fa off")
    if settings.flash_attention == "off" and settings.kv_type_v not in _PLAIN:
        raise UsageError(
            f"-ctv {settings.kv_type_v} needs flash attention",
            why="llama.cpp supports quantized values only with it",
            hint="leave out -fa off",
        )


def _check_threads(threads: int, hardware: Hardware) -> None:
    most = min(max(hardware.logical_cores, 1), MAX_THREADS)
    if not 1 <= threads <= most:
        raise UsageError(
            f"invalid -t {threads}",
            why=f"this machine has {most} usable hardware thread{'s' if most > 1 else ''}",
            hint=f"-t {hardware.usable_cores}, which is the default",
        )


def _odd_threads(cases: Sequence[Case], hardware: Hardware) -> list[str]:
    most = max(case.settings.threads for case in cases)
    if most <= hardware.usable_cores:
        return []
    why = "the container's quota" if hardware.cpu_quota is not None else "physical cores"
    return [f"{most} threads are more than {why} can compute at once ({hardware.usable_cores}): expect noise"]


def _check_heads(case: Case, subject: NamedModel) -> None:
    settings = case.settings
    for option, kv_type, length in (
        ("-ctk", settings.kv_type_k, subject.header.key_length),
        ("-ctv", settings.kv_type_v, subject.header.value_length),
    ):
        together = KV_TYPES[kv_type][1]
        if length and length % together:
            raise UsageError(
                f"{subject.name} can't have {option} {kv_type}",
                why=f"its heads have {length} elements, which is not a multiple of {together}",
                hint=f"{option} f16",
            )


def needed_memory(case: Case, header: Header) -> int:
    """Return the memory for a test: weights, KV cache (twice at a depth, whose state is saved), scratch."""
    n_ctx = case.test.n_tokens + case.test.n_depth
    ubatch = max(UBATCH, min(case.settings.n_ubatch, case.settings.n_batch))
    parts = memory(header, n_ctx, ubatch=ubatch)
    kv = parts.kv * case.settings.kv_element_bytes / 2.0
    if case.test.n_depth and not case.test.chat:
        kv *= 1 + case.test.n_depth / n_ctx
    return int(parts.needed - parts.kv + kv)


def _check_memory(case: Case, subject: NamedModel, hardware: Hardware) -> None:
    needed = needed_memory(case, subject.header)
    free = hardware.memory_available
    if not hardware.memory_total or needed <= free or _has_gpu_memory(case, hardware):
        return
    raise OutOfMemoryError(
        f"{subject.name} does not fit into memory for {case.test.name}",
        why=f"that takes {readable_size(needed)}, and {readable_size(free)} are free",
        hint="a shorter test or depth, a smaller quant, or close other programs",
    )


def _has_gpu_memory(case: Case, hardware: Hardware) -> bool:
    """Return whether a part of the model, not yet known, lies on GPUs or workers."""
    return case.settings.gpu_layers != 0 and (bool(hardware.workers) or any(not gpu.shared for gpu in hardware.gpus))


def fit_together(cases: Sequence[Case], headers: Sequence[Header], hardware: Hardware) -> bool:
    """Return whether all models fit into memory together."""
    needed = sum(max(needed_memory(case, header) for case in cases) for header in headers)
    return not hardware.memory_total or needed <= hardware.memory_available


def _odd_depths(cases: Sequence[Case], subject: NamedModel) -> list[str]:
    trained = subject.header.n_ctx_train
    beyond = [case.test for case in cases if trained and case.test.n_depth + case.test.n_tokens > trained]
    if not beyond:
        return []
    names = ", ".join(dict.fromkeys(test.name for test in beyond))
    return [
        f"{names}: beyond the {trained:,} tokens that {subject.name} was trained on; its speed is real all the same"
    ]
