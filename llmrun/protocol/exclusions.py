"""Options that exclude each other: one table, and the functions that ask it. Pure.

Two that are typed are refused with one sentence. One of a preset, the environment or a server gives way to what is
typed or requested.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from llmrun.errors import UsageError
from llmrun.protocol.arguments import EFFORTS
from llmrun.protocol.layers import Layer
from llmrun.protocol.messages import REQUEST_FIELDS
from llmrun.protocol.params import PARAMETERS
from llmrun.protocol.settings import KV_TYPES, SETTINGS


class Exclusion(NamedTuple):
    """Options of which only one can be used.

    "--speculate off" is an option with this value only; "--answers N" is one whose value stands in the sentence. A
    variable of the environment that does an option's work stands for it.
    """

    options: tuple[str, ...]
    why: str = ""
    hint: str = "give one of them"
    command: str = ""  # the only one in which they exclude each other; "": all


def _request() -> list[Exclusion]:
    efforts = [f"--think-effort {effort}" for effort in EFFORTS if effort != "none"]
    return [
        *(Exclusion(("--no-think", other)) for other in ("--think-tokens", *efforts)),
        Exclusion(("--think", "--think-effort none")),
        *(Exclusion(("--grammar", other)) for other in ("--json-schema", "--format")),
        Exclusion(("--watermark", "--mirostat")),
        Exclusion(("--prefill", "--raw"), hint="put the text at the end of the prompt"),
        Exclusion(("--record", "--answers N"), "a recording is of one answer", ""),
        Exclusion(("--continue", "--session", "--private")),
        Exclusion(("--json", "--output"), command="embed"),
        *(
            Exclusion(("--tools", other), hint=f"leave out {other.partition(' ')[0]}")
            for other in ("--raw", "--beams", "--record", "--answers N", "--logprobs")
        ),
    ]


def _beams() -> list[Exclusion]:
    drawn = [row.flag for row in PARAMETERS.values() if not row.for_beams]
    others = (
        "--think", "--think-tokens", "--think-effort", "--speculate", "--draft", "--record", "--prompt-cache",
        "--explain-sampling", "--answers", "--logprobs",
    )  # fmt: skip
    return [
        *(Exclusion(("--beams", flag), "beam search does not sample") for flag in drawn),
        *(Exclusion(("--beams", flag)) for flag in others),
        Exclusion(("--prefill", "--beams"), hint="put the text at the end of the prompt"),
    ]


def _engine() -> list[Exclusion]:
    without_flash = [f"--cache-type-v {name}" for name in KV_TYPES if name != "f16"]
    return [
        Exclusion(("--draft", "--speculate off")),
        *(Exclusion((other, "--flash-attention off"), "it needs flash attention") for other in without_flash),
        Exclusion(("--ray", "--rpc"), "a worker serves one engine at a time", ""),
        Exclusion(("--at", "--ray")),
    ]


def _remote() -> list[Exclusion]:
    settings = [row.option for row in SETTINGS.values() if row.option]
    others = "--speculate", "--draft", "--mmproj", "--lora", "--rpc", "--kernels", "--verbose"
    loads = dict.fromkeys(("--ctx", *settings, *others), "the server has loaded its model already")
    keeps = dict.fromkeys(
        ("--beams", "--record", "--prompt-cache"), "a server does not give access to its logits and KV cache"
    )
    ways = {"--at": "leave out --at", "LLMRUN_SERVER": "unset LLMRUN_SERVER"}
    return [
        Exclusion((server, flag), why, f"leave out {flag}; for a model of this machine, {away}")
        for server, away in ways.items()
        for flag, why in {**loads, **keeps}.items()
    ]


def _by_flag() -> dict[str, list[Exclusion]]:
    found = defaultdict[str, list[Exclusion]](list)
    for each in EXCLUSIONS:
        for option in each.options:
            found[option.partition(" ")[0]].append(each)
    return found


EXCLUSIONS = (*_remote(), *_engine(), *_request(), *_beams())
_BY_FLAG = _by_flag()


def _as_given(option: str, given: Mapping[str, Any]) -> str:
    """Return an option of the table as it is given; "" if it is not."""
    flag, _, value = option.partition(" ")
    if (there := given.get(flag)) is False or there in (None, "") or (flag, there) == ("--draft", "off"):
        return ""
    if value == "N":
        return f"{flag} {there}"
    return option if value in ("", str(there)) else ""


def _excludes(row: Exclusion, given: Mapping[str, Any]) -> bool:
    return sum(bool(_as_given(option, given)) for option in row.options) > 1


def conflict(given: Mapping[str, Any], command: str = "") -> Exclusion | None:
    """Return the first row of the table with two options that are given.

    Args:
        given: by flag; None, False and "" are not given.
    """
    rows = (row for row in EXCLUSIONS if row.command in ("", command))
    return next((row for row in rows if _excludes(row, given)), None)


def refuse_together(given: Mapping[str, Any], command: str = "") -> None:
    """Raise UsageError if two of the options exclude each other; the arguments are those of conflict()."""
    if (row := conflict(given, command)) is not None:
        *first, last = (_as_given(option, given) or option for option in row.options)
        raise UsageError(f"{', '.join(first)} and {last} can't be used together", why=row.why, hint=row.hint)


def spelled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of requests, of the sampler and of a load by their flags, as conflict() takes them."""
    found = {}
    for name, value in values.items():
        row = REQUEST_FIELDS.get(name) or PARAMETERS.get(name)
        flag = row.flag if row is not None else SETTINGS[name].option if name in SETTINGS else ""
        flag = flag or f"--{name}"
        switched_on, _, switched_off = flag.partition("/")
        is_off = bool(switched_off) and value is False
        found[switched_off if is_off else switched_on] = is_off or value
    return found


def yielding(weaker: Layer, given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the values of a layer that exclude nothing of a stronger one.

    Args:
        given: the stronger ones, by flag.
    """

    def excludes(name: str, value: Any) -> bool:
        ((flag, spelled_value),) = spelled({name: value}).items()
        return any(_excludes(row, {**given, flag: spelled_value}) for row in _BY_FLAG.get(flag, ()))

    return {name: each for name, each in weaker.items() if not excludes(name, each[0])}
