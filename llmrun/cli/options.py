"""Options that several commands share, named and explained once.

`@with_sampling` and `@with_model` give a command their options: Typer sees one flat signature, the command gets
what was typed as one mapping or dataclass. A sampling option that was not typed stays out of the mapping, so that
the model's own recommendation can count.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrun.errors import UsageError
from llmrun.params import DEFAULTS, Limits, SamplingParams, resolve_sampling

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A name of `llmrun list --all`, owner/repo[:quant], URL or path."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Download without asking.")]

SystemOption = Annotated[str | None, typer.Option("--system", "-s", help="System prompt.", rich_help_panel="Prompt")]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="FILE|chatml",
        help="Chat template in place of the model's own.",
        rich_help_panel="Prompt",
    ),
]
CtxOption = Annotated[
    int | None,
    typer.Option(
        "--ctx",
        "-c",
        metavar="TOKENS",
        help="Context window. (default: what the model was trained on, cut to what fits)",
        rich_help_panel="Engine",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", "-t", help="Default: one per physical core.", rich_help_panel="Engine"),
]
GpuLayersOption = Annotated[
    int | None,
    typer.Option("--gpu-layers", help="Layers on the GPU; -1 is all, the default.", rich_help_panel="Engine"),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show llama.cpp's log and the plan.", rich_help_panel="Engine")
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        metavar="TOKENS",
        help="Longest answer. Default: up to the context window.",
        rich_help_panel="Answer",
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Text that ends the answer; may be repeated.", rich_help_panel="Answer"),
]
StatsOption = Annotated[
    bool | None,
    typer.Option(
        "--stats/--no-stats",
        help="Speed and context after the answer, on stderr. Default: on a terminal.",
        rich_help_panel="Answer",
    ),
]

# SamplingParams field -> flag, help.
_SAMPLING: dict[str, tuple[str, str]] = {
    "temperature": ("--temp", "0 is greedy."),
    "seed": ("--seed", "Of the random generator; the same seed gives the same answer."),
    "top_k": ("--top-k", "Keep the k likeliest tokens; 0 is off."),
    "top_p": ("--top-p", "Keep the likeliest tokens that reach this probability together; 1 is off."),
    "min_p": ("--min-p", "Keep tokens at least this times as likely as the likeliest; 0 is off."),
    "typical_p": ("--typical-p", "Locally typical sampling; 1 is off."),
    "top_n_sigma": ("--top-n-sigma", "Keep logits within n standard deviations of the best; <= 0 is off."),
    "xtc_probability": ("--xtc-probability", "Chance to remove the likeliest tokens; 0 is off."),
    "xtc_threshold": ("--xtc-threshold", "Probability from which XTC counts a token."),
    "repeat_penalty": ("--repeat-penalty", "Divides the logits of tokens seen lately; 1 is off."),
    "repeat_last_n": ("--repeat-last-n", "How many last tokens the penalties look at; 0 is off."),
    "frequency_penalty": ("--frequency-penalty", "Subtracted per occurrence; 0 is off."),
    "presence_penalty": ("--presence-penalty", "Subtracted once for tokens seen lately; 0 is off."),
    "dry_multiplier": ("--dry-multiplier", "Strength of the DRY penalty on repeated sequences; 0 is off."),
    "dry_base": ("--dry-base", "How the DRY penalty grows with the length of the repeat."),
    "dry_allowed_length": ("--dry-allowed-length", "Repeats up to this length are free."),
    "dry_last_n": ("--dry-last-n", "How many last tokens DRY looks at; 0 is off."),
    "dry_breakers": ("--dry-breaker", "Text that DRY follows no repeat across; may be repeated."),
    "temperature_range": ("--dynatemp-range", "Dynamic temperature, +- this much by entropy; 0 is off."),
    "temperature_exponent": ("--dynatemp-exp", "How entropy maps to dynamic temperature."),
    "mirostat": ("--mirostat", "1 or 2 replaces the truncating samplers by mirostat; 0 is off."),
    "mirostat_tau": ("--mirostat-tau", "Mirostat's target surprise, in bits."),
    "mirostat_eta": ("--mirostat-eta", "Mirostat's learning rate."),
    "logit_bias": ("--logit-bias", "TOKEN=BIAS, added to a token's logit, -inf bans it; may be repeated."),
}
_REPEATED = {"dry_breakers", "logit_bias"}
_INTEGERS = {"seed", "top_k", "repeat_last_n", "dry_allowed_length", "dry_last_n", "mirostat"}


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every sampling flag; it receives what was typed as `flags: Mapping[str, Any]`."""
    signature = inspect.signature(command, eval_str=True)
    names = [field.name for field in fields(SamplingParams)]
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != "flags"]
    parameters = kept + [_sampling_parameter(name) for name in sorted(names, key=list(_SAMPLING).index)]

    @functools.wraps(command)
    def wrapper(**options: Any) -> None:
        flags = _given({name: options.pop(name) for name in names})
        resolve_sampling(("flag", flags))  # nonsense is refused before anything is loaded
        command(**options, flags=flags)

    # What Typer reads.
    vars(wrapper)["__signature__"] = signature.replace(parameters=parameters)
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _sampling_parameter(name: str) -> inspect.Parameter:
    flag, text = _SAMPLING[name]
    default = getattr(DEFAULTS, name)
    shown = "random" if name == "seed" else " ".join(repr(item) for item in default) if name in _REPEATED else default
    kind: Any = list[str] if name in _REPEATED else int if name in _INTEGERS else float
    names = [flag, "--temperature"] if name == "temperature" else [flag]
    note = f" Default: {shown}." if shown not in ("", None) else ""
    option = typer.Option(*names, help=f"{text}{note}", rich_help_panel="Sampling", show_default=False)
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was typed, in the types of SamplingParams."""
    given = {name: value for name, value in options.items() if value is not None and value != []}
    if "dry_breakers" in given:
        given["dry_breakers"] = tuple(given["dry_breakers"])
    if "logit_bias" in given:
        given["logit_bias"] = tuple(_bias(text) for text in given["logit_bias"])
    return given


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UsageError(f"--logit-bias {text!r} makes no sense", hint="--logit-bias 2=-inf") from None


def limits(max_tokens: int | None, stop: list[str] | None) -> Limits:
    """--max-tokens and --stop as Limits."""
    return Limits(max_tokens, tuple(stop or ()))


def template_text(template: str | None) -> str | None:
    """--template as Jinja text.

    Raises:
        UsageError: the file can't be read.
    """
    if template is None or template == "chatml":
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--template {template} can't be read",
            why=str(error),
            hint="--template chatml, or a file with Jinja text",
        ) from None
