"""Options that several commands share, named and explained once.

`@with_options(wanted=wanted, ...)` gives a command whole groups of them: Typer sees one flat signature, the command
gets what was typed as one object a group.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmrun.cli.completion import complete_model, complete_words
from llmrun.cli.rpc import RpcOption, workers_of
from llmrun.errors import UsageError, require_within
from llmrun.planning.plan import FLASH_ATTENTION, LoadPreferences
from llmrun.planning.speculation import AUTO, OFF, read_speculate
from llmrun.protocol.params import MOST_TOKENS, Limits, check_limits

if TYPE_CHECKING:
    from llmrun.chat.attachments import Attachments
    from llmrun.grammar import Grammar
    from llmrun.protocol.adapters import Adapter
    from llmrun.protocol.messages import AnswerRequest
    from llmrun.remote.server import Server

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name of `llmrun list --all`, owner/repo[:quant], URL or path.",
        autocompletion=complete_model,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ExactOption = Annotated[bool, typer.Option("--exact", help="Give bit for bit what run --speculate off gives.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Download and replace files without asking.")]

SystemOption = Annotated[str | None, typer.Option("--system", "-s", help="System prompt.", rich_help_panel="Prompt")]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="FILE|chatml",
        help="Chat template instead of the model's own.",
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
    typer.Option("--gpu-layers", "-ngl", help="GPU layers; -1 is all. Default: what fits.", rich_help_panel="Engine"),
]
CpuExpertsOption = Annotated[
    int | None,
    typer.Option(
        "--n-cpu-moe",
        metavar="LAYERS",
        help="Layers whose experts the processor computes beside a GPU. Default: as many as do not fit there.",
        rich_help_panel="Engine",
    ),
]
_complete_cache_type = complete_words("f16", "q8_0")
CacheTypeKOption = Annotated[
    str,
    typer.Option(
        "--cache-type-k",
        "-ctk",
        metavar="f16|q8_0",
        help="Type of keys in the KV cache.",
        autocompletion=_complete_cache_type,
        rich_help_panel="Engine",
    ),
]
CacheTypeVOption = Annotated[
    str,
    typer.Option(
        "--cache-type-v",
        "-ctv",
        metavar="f16|q8_0",
        help="Type of values in the KV cache.",
        autocompletion=_complete_cache_type,
        rich_help_panel="Engine",
    ),
]
FlashAttentionOption = Annotated[
    str,
    typer.Option(
        "--flash-attention",
        "-fa",
        metavar="auto|on|off",
        autocompletion=complete_words(*FLASH_ATTENTION),
        help="Use flash attention. Default: where it is faster.",
        rich_help_panel="Engine",
    ),
]
SpeculateOption = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="auto|off|TOKENS",
        autocompletion=complete_words("auto", "off"),
        help="Draft up to TOKENS per decode step; answers stay the same. Default: auto, if measured to be faster.",
        rich_help_panel="Engine",
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL",
        autocompletion=complete_model,
        help="Draft model: smaller, with the same vocabulary; see llmrun help speculation.",
        rich_help_panel="Engine",
    ),
]
MmprojOption = Annotated[
    str | None,
    typer.Option(
        "--mmproj",
        metavar="FILE",
        help="Projector for images. Default: the mmproj file beside the model.",
        rich_help_panel="Engine",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="FILE[:SCALE]",
        help="LoRA adapter and its scale (default: 1); may be repeated. See llmrun help lora.",
        rich_help_panel="Engine",
    ),
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
        help="Maximum length of the answer. Default: up to the context window.",
        rich_help_panel="Answer",
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Stop at this text; may be repeated.", rich_help_panel="Answer"),
]
BanOption = Annotated[
    list[str] | None,
    typer.Option("--ban", metavar="PHRASE", help="Never write this text; may be repeated.", rich_help_panel="Answer"),
]
GrammarOption = Annotated[
    str | None,
    typer.Option(
        "--grammar", metavar="FILE", help="Constrain the answer to a GBNF or Lark grammar.", rich_help_panel="Answer"
    ),
]
JsonSchemaOption = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE|JSON",
        help="Constrain the answer to JSON of this schema; {} allows any JSON.",
        rich_help_panel="Answer",
    ),
]
StatsOption = Annotated[
    bool | None,
    typer.Option(
        "--stats/--no-stats",
        help="Print all figures on stderr after the answer. Default: a few, on a terminal.",
        rich_help_panel="Answer",
    ),
]


def with_options(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command groups of options.

    Args:
        groups: parameter of the command -> the function whose options are added to it and whose result it gets.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name not in groups]
        added = {name: _parameters(group) for name, group in groups.items()}
        parameters = [*own, *(parameter for group in added.values() for parameter in group)]

        @functools.wraps(command)
        def wrapper(**options: Any) -> None:
            for name, group in groups.items():
                options[name] = group(**{parameter.name: options.pop(parameter.name) for parameter in added[name]})
            command(**options)

        # What Typer reads.
        vars(wrapper)["__signature__"] = signature.replace(parameters=parameters)
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def _parameters(group: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(group, eval_str=True).parameters.values()
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]


def load_preferences(
    threads: ThreadsOption = None,
    gpu_layers: GpuLayersOption = None,
    cache_type_k: CacheTypeKOption = "f16",
    cache_type_v: CacheTypeVOption = "f16",
    flash_attention: FlashAttentionOption = "auto",
) -> LoadPreferences:
    """The options of a command that loads models with a context of its own choice."""
    return LoadPreferences(None, threads, gpu_layers, cache_type_k, cache_type_v, flash_attention)


@dataclass(frozen=True, slots=True)
class LoadingOptions:
    """How a model is to be loaded.

    Attributes:
        wishes: what the user said of it.
        speculate: see planning.speculation.DraftPolicy.most; None where the user did not say.
        draft: name of a model that drafts.
        adapters: that count in answers.
        verbose: show llama.cpp's log and the plan.
        yes: download without asking.
        projector: file that turns pictures into what the model takes; None is the one beside the model, if any.
        server: that answers in place of an engine here; then none of the above counts.
    """

    wishes: LoadPreferences
    speculate: int | None
    verbose: bool
    yes: bool
    draft: str | None = None
    adapters: tuple[Adapter, ...] = ()
    projector: str | None = None
    server: Server | None = None

    @property
    def most_drafted(self) -> int:
        """What the user said of drafts, or what holds without a word."""
        return AUTO if self.speculate is None else self.speculate


def loading(
    ctx: CtxOption = None,
    threads: ThreadsOption = None,
    gpu_layers: GpuLayersOption = None,
    cpu_experts: CpuExpertsOption = None,
    cache_type_k: CacheTypeKOption = "f16",
    cache_type_v: CacheTypeVOption = "f16",
    flash_attention: FlashAttentionOption = "auto",
    speculate: SpeculateOption = None,
    draft: DraftOption = None,
    mmproj: MmprojOption = None,
    lora: LoraOption = None,
    rpc: RpcOption = None,
    verbose: VerboseOption = False,
    yes: YesOption = False,
) -> LoadingOptions:
    """The options of a command that loads a model."""
    wishes = load_preferences(threads, gpu_layers, cache_type_k, cache_type_v, flash_attention)
    most = None if speculate is None else read_speculate(speculate)
    if most == OFF and draft is not None:
        raise UsageError("--draft and --speculate off exclude each other", hint="give one of them")
    wishes = replace(wishes, n_ctx=ctx, cpu_experts=cpu_experts, workers=workers_of(rpc))
    return LoadingOptions(wishes, most, verbose, yes, draft, adapters_of(lora), mmproj)


def adapters_of(lora: list[str] | None) -> tuple[Adapter, ...]:
    """--lora. Raises as read_adapters()."""
    if not lora:
        return ()
    from llmrun.models.adapters import read_adapters  # few starts have any

    return read_adapters(lora)


ThinkOption = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think",
        help="Turn reasoning on or off. Default: as the chat template says.",
        rich_help_panel="Answer",
    ),
]
ThinkTokensOption = Annotated[
    int | None,
    typer.Option("--think-tokens", metavar="TOKENS", help="Maximum length of the reasoning.", rich_help_panel="Answer"),
]
ShowThoughtsOption = Annotated[
    Literal["on", "fold", "hide"],
    typer.Option(
        "--show-thoughts",
        metavar="on|fold|hide",
        help="Show the whole reasoning, only its beginning, or none of it.",
        rich_help_panel="Answer",
    ),
]
PlainOption = Annotated[
    bool,
    typer.Option("--plain", help="Print the answer as plain text, not as rendered Markdown.", rich_help_panel="Answer"),
]
LoopGuardOption = Annotated[
    bool,
    typer.Option("--loop-guard/--no-loop-guard", help="End an answer that repeats itself.", rich_help_panel="Answer"),
]
FilesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Put a text file, or files like 'src/*.py', before the prompt; may be repeated.",
        rich_help_panel="Prompt",
    ),
]


ImagesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="Put an image before the prompt, for vision models; may be repeated.",
        rich_help_panel="Prompt",
    ),
]


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """What becomes of a reasoning model's thoughts.

    Attributes:
        thinking: whether it makes any; None leaves it to its chat template.
        tokens: how many at most.
        shown: "on", "hide" or "fold".
    """

    thinking: bool | None = None
    tokens: int | None = None
    shown: Literal["on", "hide", "fold"] = "fold"


def read_think(text: str, label: str) -> ReasoningOptions:
    """What /think says.

    Raises:
        UsageError: it says nothing sensible.
    """
    if text == "off":
        return ReasoningOptions(thinking=False)
    if text == "on":
        return ReasoningOptions(thinking=True, shown="on")
    if text in ("hide", "fold"):
        return ReasoningOptions(shown="hide" if text == "hide" else "fold")
    if text.isdecimal():
        require_within(label, int(text), (0, MOST_TOKENS))
        return ReasoningOptions(tokens=int(text))
    raise UsageError(f"invalid {label} {text}", why="must be on, off, hide, fold, or a number of tokens")


@dataclass(frozen=True)
class AnswerOptions:
    """What an answer is to be like, besides its sampling.

    Attributes:
        system: the system prompt.
        asked: how it is asked for; messages and sampling come later.
        attached: files that go before the prompt.
        thoughts: what is shown of them, see Think.shown.
        plain: the answer's text as it is.
    """

    system: str | None
    asked: AnswerRequest
    attached: Attachments | None
    thoughts: Literal["on", "hide", "fold"]
    plain: bool

    @property
    def sees(self) -> bool:
        """Whether there are pictures to look at."""
        return self.attached is not None and bool(self.attached.pictures)


def wanted(
    system: SystemOption = None,
    template: TemplateOption = None,
    max_tokens: MaxTokensOption = None,
    stop: StopOption = None,
    ban: BanOption = None,
    grammar: GrammarOption = None,
    json_schema: JsonSchemaOption = None,
    think: ThinkOption = None,
    think_tokens: ThinkTokensOption = None,
    show_thoughts: ShowThoughtsOption = "fold",
    plain: PlainOption = False,
    loop_guard: LoopGuardOption = True,
    files: FilesOption = None,
    images: ImagesOption = None,
) -> AnswerOptions:
    """The options of a command that answers; what is wrong with them is said before anything is loaded.

    Raises:
        UsageError: a value is invalid, or a file can't be read.
        BadGrammarError: the grammar is broken; says at which line and column.
    """
    from llmrun.protocol.messages import AnswerRequest

    check_limits(max_tokens, stop or (), ban or (), ("--max-tokens", "--stop", "--ban"))
    require_within("--think-tokens", think_tokens, (0, MOST_TOKENS))
    if think is False and think_tokens is not None:
        raise UsageError("--no-think and --think-tokens exclude each other", hint="give one of them")
    asked = AnswerRequest(
        limits=Limits(max_tokens, tuple(stop or ()), tuple(ban or ())),
        template=template_text(template),
        grammar=read_constraint(grammar, json_schema),
        thinking=think,
        thinking_tokens=think_tokens,
        stops_repeats=loop_guard,
    )
    return AnswerOptions(system, asked, _attached(files or (), images or ()), show_thoughts, plain)


def _attached(files: Sequence[str], images: Sequence[str]) -> Attachments | None:
    if not files and not images:
        return None
    from llmrun.chat.attachments import attach, attach_image_files

    return replace(attach(files), pictures=attach_image_files(images))


def read_constraint(grammar: str | None, json_schema: str | None) -> Grammar | None:
    """--grammar or --json-schema, checked as far as that goes without a model.

    Raises:
        UsageError: both are given, or the file can't be read.
        BadGrammarError: it is broken; says at which line and column.
    """
    if grammar is None and json_schema is None:
        return None
    if grammar is not None and json_schema is not None:
        raise UsageError("--grammar and --json-schema exclude each other", hint="give one of them")
    from llmrun.grammar import read_grammar, read_json_schema

    if grammar is not None:
        return read_grammar(_file_text("--grammar", grammar, "a file with a GBNF or Lark grammar"))
    assert json_schema is not None
    if not json_schema.lstrip().startswith(("{", "[", "true", "false")):
        json_schema = _file_text("--json-schema", json_schema, "a JSON schema, or a file with one")
    return read_json_schema(json_schema)


def _file_text(flag: str, path: str, wanted: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # Windows' editors put a mark in front
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{flag} {path} can't be read", why=why, hint=f"{flag} takes {wanted}") from None


def template_text(template: str | None) -> str | None:
    """--template as Jinja text.

    Raises:
        UsageError: the file can't be read.
    """
    if template is None or template == "chatml":
        return template
    return _file_text("--template", template, "chatml, or a file with Jinja text")
