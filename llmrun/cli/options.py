"""Options that several commands share, each declared once.

`@with_options(answer=answer_options, ...)` adds groups of options to a command: Typer sees one flat signature, the
command gets one object for each group.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from llmrun.cli.completion import complete_model, complete_preset, complete_servers, complete_words
from llmrun.errors import CancelledError, UsageError, require_within
from llmrun.grammar import read_grammar, read_json_schema
from llmrun.planning.memory import KV_BYTES
from llmrun.planning.preferences import ATTENTION, LOAD_OPTIONS, LoadPreferences
from llmrun.planning.speculation import AUTO, read_draft_source, read_speculate
from llmrun.protocol.llama_folder import GGML, choose_kernels
from llmrun.protocol.media import Modality
from llmrun.protocol.messages import REQUEST_FIELDS, AnswerRequest, fields_with
from llmrun.protocol.params import Limits, check_limits
from llmrun.protocol.settings import SETTINGS
from llmrun.storage import check_target
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.chat.attachments import Attachments
    from llmrun.grammar import Grammar
    from llmrun.protocol.adapters import Adapter
    from llmrun.remote.server import Server

Result = TypeVar("Result")
PRESET_ORIGINS = "llmrun.preset_origins"
"""Key of the context's `meta`: parameters that presets and the environment have set -> origin of the value."""

ShowThoughtsOption = Annotated[
    Literal["on", "fold", "hide"],
    typer.Option(
        "--show-thoughts",
        metavar="on|fold|hide",
        help="Show the reasoning in full, only its beginning, or not at all.",
        rich_help_panel="Answer",
    ),
]


RpcOption = Annotated[
    str | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT,...",
        help="RPC workers that hold a part of the layers; start each with `llmrun worker`.",
        rich_help_panel="Engine",
    ),
]


def workers_of(rpc: str | None) -> tuple[str, ...]:
    """Return the endpoints of --rpc. Raises as read_endpoints()."""
    if rpc is None:
        return ()
    from llmrun.runner.workers import read_endpoints  # few starts have any

    return read_endpoints(rpc)


def read_constraint(grammar: str | None, json_schema: str | None) -> Grammar | None:
    """Parse --grammar or --json-schema, as far as possible without a model.

    Raises:
        UsageError: the file can't be read.
        BadGrammarError: it is invalid; names line and column.
    """
    if grammar is not None:
        return read_grammar(_file_text("--grammar", grammar, "a file with a GBNF or Lark grammar"))
    if json_schema is None:
        return None
    if not json_schema.lstrip().startswith(("{", "[", "true", "false")):
        json_schema = _file_text("--json-schema", json_schema, "a JSON schema, or a file with one")
    return read_json_schema(json_schema)


def _file_text(flag: str, path: str, expected: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{flag} {path} can't be read", why=why, hint=f"{flag} takes {expected}") from None


def template_text(template: str | None) -> str | None:
    """Return --template as Jinja text; a template in Ollama's store is no file.

    Raises:
        UsageError: the file can't be read.
    """
    if template is None or template == "chatml" or "{%" in template:
        return template
    return _file_text("--template", template, "chatml, or a file with Jinja text")


def check_output_file(output: Output, target: Path, *, yes: bool, hint: str = "-y replaces it") -> None:
    """Raise unless a file may be written. Call this before any work is done.

    Pipes and devices are always allowed.

    Args:
        yes: replace a file without asking.
        hint: what to type if there is no terminal to ask on.

    Raises:
        UsageError: the folder does not exist, or the file exists and there is no terminal to ask on.
        ResourceError: the folder is not writable.
        CancelledError: the answer was no.
    """
    check_target(target)
    if yes or not target.is_file():
        return
    if not output.can_ask:
        raise UsageError(f"{str(target)!r} exists already", why="there is no terminal to ask on", hint=hint)
    if not output.confirm(f"{target} exists already. Replace it?"):
        raise CancelledError("nothing was written")


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name from `llmrun list --all`, owner/repo[:quant], URL or path.",
        autocompletion=complete_model,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OutputFileYesOption = Annotated[bool, typer.Option("--yes", "-y", help="Replace existing files without asking.")]
RemovalYesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Required without a terminal.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Download and replace files without asking.")]

PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="Use a preset of the settings: model, system prompt, sampling, tools and more.",
        autocompletion=complete_preset,
        rich_help_panel="Prompt",
    ),
]
SystemOption = Annotated[str | None, typer.Option("--system", "-s", help="System prompt.", rich_help_panel="Prompt")]
CtxOption = Annotated[
    int | None,
    typer.Option(
        "--ctx",
        "-c",
        metavar="TOKENS",
        help="Size of the context window. Default: the model's training context, reduced to what fits in memory.",
        rich_help_panel="Engine",
    ),
]


def engine_option(name: str, unset: str, *, metavar: str = "", panel: str = "Engine") -> Any:
    """Return the option of an engine setting.

    Args:
        unset: its value without the option, in words, for the help.
        metavar: placeholder in the help, if not the setting's.
    """
    setting = SETTINGS[name]
    metavar = metavar or setting.metavar
    words = metavar.split("|") if "|" in metavar else setting.choices
    return typer.Option(
        setting.option,
        setting.short,
        metavar=metavar,
        help=f"{setting.help} Default: {unset}." if unset else setting.help,
        autocompletion=complete_words(*words) if words else None,
        rich_help_panel=panel,
    )


def option_table(
    options: Mapping[str, Any], read: Callable[..., Any], defaults: Mapping[str, Any] = {}
) -> Callable[..., Any]:
    """Return a group of options made from a table.

    Args:
        options: parameter -> its annotated type.
        read: gets their values.
        defaults: values without the option; None if missing.
    """
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=defaults.get(name), annotation=type_)
        for name, type_ in options.items()
    ]
    group = functools.partial(read)
    vars(group)["__signature__"] = inspect.Signature(parameters)
    return group


def some_of(group: Callable[..., Result], *names: str) -> Callable[..., Result]:
    """Return a group with only these options of another one."""
    signature = inspect.signature(group, eval_str=True)
    some = functools.partial(group)
    vars(some)["__signature__"] = signature.replace(parameters=[signature.parameters[name] for name in names])
    return some


def _planned(name: str) -> Any:
    """Return the annotated type of the option of an engine setting that a plan chooses if the user does not."""
    types = "|".join(KV_BYTES) if name in ("kv_type_k", "kv_type_v") else ""
    value: Any = int if SETTINGS[name].bounds else str
    return Annotated[value | None, engine_option(name, SETTINGS[name].unset, metavar=types)]


def engine_options(*names: str, read: Callable[..., Any] = dict) -> Callable[..., Any]:
    """Return the options of engine settings, whose values `read` gets, by name, if the user gives them."""

    def given(**values: Any) -> Any:
        return read(**{name: value for name, value in values.items() if value is not None})

    return option_table({name: _planned(name) for name in names}, given)


SpeculateOption = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="auto|off|TOKENS",
        autocompletion=complete_words("auto", "off"),
        help="Draft up to this many tokens per decode step (speculative decoding); the answer stays the same. "
        "Default: auto, only where it is measured to be faster.",
        rich_help_panel="Engine",
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL|mtp|off",
        autocompletion=complete_model,
        help="Smaller model with the same vocabulary that drafts tokens, or the model's own heads; see llmrun help "
        "speculation.",
        rich_help_panel="Engine",
    ),
]
MmprojOption = Annotated[
    str | None,
    typer.Option(
        "--mmproj",
        metavar="FILE",
        help="Projector for images or audio. Default: the mmproj file beside the model.",
        rich_help_panel="Engine",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="FILE[:SCALE]",
        help="LoRA adapter to apply, with a scale of 1 or SCALE; may be repeated. See llmrun help lora.",
        rich_help_panel="Engine",
    ),
]
KernelsOption = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        metavar="NAME",
        autocompletion=complete_words(GGML),
        help="Matrix kernels of the processor: ggml, or an instruction set of llmrun's own, e.g. AVX2. Default: the "
        "best of llmrun's own, or $LLMRUN_KERNELS.",
        rich_help_panel="Engine",
    ),
]


def kernels(kernels: KernelsOption = None) -> str | None:
    """The option of the matrix kernels, which the engines of this command use. Raises as choose_kernels()."""
    if kernels is not None:
        choose_kernels(kernels)
    return kernels


VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show llama.cpp's log and the plan.", rich_help_panel="Engine")
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        metavar="TOKENS",
        help="Stop the answer after this many tokens. Default: at the end of the context window.",
        rich_help_panel="Answer",
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", help="End the answer at this text, not its reasoning; may be repeated.", rich_help_panel="Answer"
    ),
]
BanOption = Annotated[
    list[str] | None,
    typer.Option("--ban", metavar="PHRASE", help="Never write this text; may be repeated.", rich_help_panel="Answer"),
]
GrammarOption = Annotated[
    str | None,
    typer.Option(
        "--grammar",
        metavar="FILE",
        help="Constrain the answer to this GBNF or Lark grammar.",
        rich_help_panel="Answer",
    ),
]
JsonSchemaOption = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE|JSON",
        help="Constrain the answer to JSON that matches this schema; {} allows any JSON.",
        rich_help_panel="Answer",
    ),
]
FormatOption = Annotated[str | None, typer.Option("--format", hidden=True)]  # Ollama's
StatsOption = Annotated[
    bool | None,
    typer.Option(
        "--stats/--no-stats",
        help="Print all figures after the answer, on stderr. Default: a few, on a terminal only.",
        rich_help_panel="Answer",
    ),
]


def with_options(**groups: Callable[..., Any]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Give a command, or a group of options, further groups of options.

    Args:
        groups: parameter of the command -> the function whose parameters are options, and whose result it gets.
    """

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(command, eval_str=True)
        added = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}
        # A group's options stand where the signature has the group; several may take the context.
        stated = [added.get(name, {name: parameter}) for name, parameter in signature.parameters.items()]
        keyword = inspect.Parameter.KEYWORD_ONLY
        named = {name: parameter for options in stated for name, parameter in options.items()}
        parameters = [parameter.replace(kind=keyword) for parameter in named.values()]

        @functools.wraps(command)
        def wrapper(**options: Any) -> Any:
            for name, group in groups.items():
                options[name] = group(**{option: options[option] for option in added[name] if option in options})
            return command(**{name: options[name] for name in signature.parameters if name in options})

        # What Typer reads.
        vars(wrapper)["__signature__"] = signature.replace(parameters=parameters)
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


PREFERENCES = engine_options("threads", "gpu_layers", *ATTENTION, read=LoadPreferences)
"""The options of a command that loads models with a context of its own choice."""


@dataclass(frozen=True, slots=True)
class LoadingOptions:
    """Options of loading a model, or the remote server to use instead."""

    preferences: LoadPreferences
    speculate: int | None  # see planning.speculation.DraftPolicy.most; None if not specified
    verbose: bool
    yes: bool  # download without asking
    draft: str | None = None
    adapters: tuple[Adapter, ...] = ()
    projector: str | None = None  # None: the mmproj file beside the model, if any
    kernels: str | None = None  # chosen matrix kernels, which the environment of the engine has
    server: Server | None = None  # the fields above are then ignored
    origins: Mapping[str, str] = field(default_factory=dict)  # of all values of the command that presets have set

    @property
    def most_drafted(self) -> int:
        return AUTO if self.speculate is None else self.speculate


AtOption = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="URL",
        help="Use this OpenAI-compatible server instead of an engine on this machine; ollama is that of "
        "$OLLAMA_HOST. Default: $LLMRUN_SERVER.",
        autocompletion=complete_servers,
        rich_help_panel="Remote server",
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="File with the server's API key. Default: $LLMRUN_SERVER_KEY or $LLMRUN_SERVER_KEY_FILE.",
        rich_help_panel="Remote server",
    ),
]


def remote_server(at: str | None, key_file: Path | None) -> Server | None:
    """Return the server of --at or LLMRUN_SERVER; None if the engine is here.

    Raises:
        UsageError: the address or the key is invalid, or there is a key without a server.
    """
    address = at if at is not None else os.environ.get("LLMRUN_SERVER", "")
    if address.strip():
        from llmrun.remote.server import ollama_address, read_server  # most starts name none

        if address.strip().lower() == "ollama":
            address = ollama_address(os.environ)
        return read_server(address, os.environ, key_file)
    if at is not None:
        raise UsageError("invalid --at: it is empty", hint="e.g. --at http://127.0.0.1:8080")
    if key_file is not None:
        raise UsageError("--key-file needs --at", hint="e.g. --at https://example.org --key-file key.txt")
    return None


@with_options(engine=engine_options(*LOAD_OPTIONS), kernels=kernels)
def loading(
    context: typer.Context,
    n_ctx: CtxOption = None,
    *,
    engine: dict[str, Any],
    kernels: str | None,
    speculate: SpeculateOption = None,
    draft: DraftOption = None,
    mmproj: MmprojOption = None,
    lora: LoraOption = None,
    rpc: RpcOption = None,
    verbose: VerboseOption = False,
    yes: YesOption = False,
) -> LoadingOptions:
    """The options of a command that loads a model."""
    most = None if speculate is None else read_speculate(speculate)
    draft, heads = read_draft_source(draft)
    preferences = LoadPreferences(n_ctx, workers=workers_of(rpc), draft_heads=heads, **engine)
    origins = context.meta.get(PRESET_ORIGINS, {})
    return LoadingOptions(preferences, most, verbose, yes, draft, adapters_of(lora), mmproj, kernels, origins=origins)


def adapters_of(lora: list[str] | None) -> tuple[Adapter, ...]:
    """Read the adapters of --lora. Raises as read_adapters()."""
    if not lora:
        return ()
    from llmrun.models.adapters import read_adapters  # rarely used

    return read_adapters(lora)


PlainOption = Annotated[
    bool, typer.Option("--plain", help="Print the answer as it is, not as Markdown.", rich_help_panel="Answer")
]
FilesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Put a text, document (PDF, Word, HTML, a URL), image or audio before the prompt, or all of 'src/*.py'.",
        rich_help_panel="Prompt",
    ),
]


AudioOption = Annotated[
    list[str] | None,
    typer.Option(
        "--audio",
        metavar="FILE",
        help="Put a WAV, MP3 or FLAC file before the prompt; may be repeated.",
        rich_help_panel="Prompt",
    ),
]
ImagesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="Put an image before the prompt; may be repeated.",
        rich_help_panel="Prompt",
    ),
]


@dataclass(frozen=True)
class AnswerOptions:
    """Options of an answer, except sampling."""

    system: str | None
    request: AnswerRequest  # without messages and sampling
    attached: Attachments | None  # files to put before the prompt
    thoughts: Literal["on", "hide", "fold"]  # the part of the reasoning to show
    plain: bool

    @property
    def modalities(self) -> frozenset[Modality]:
        """The kinds of files that the model has to read besides text."""
        return self.attached.modalities if self.attached is not None else frozenset()


def _request_option(name: str) -> Any:
    """Return the annotated type of the option of a field of AnswerRequest."""
    row = REQUEST_FIELDS[name]
    kind: Any = {"bool": bool, "int": int, "str": str}[row.plain_type]
    if row.choices:
        kind = Literal[row.choices]
    option = typer.Option(row.flag, metavar=row.metavar or None, help=row.help, rich_help_panel=row.panel)
    return Annotated[kind if row.is_on else kind | None, option]


def read_request_options(**values: Any) -> dict[str, Any]:
    """Return the fields of AnswerRequest that are given by options.

    Raises:
        UsageError: a value is invalid, or a file can't be read.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        row = REQUEST_FIELDS[name]
        if row.bounds is not None:
            require_within(row.flag, value, row.bounds)
    if "template" in given:
        given["template"] = template_text(given["template"])
    return given


REQUEST_OPTIONS = option_table(
    {name: _request_option(name) for name, row in REQUEST_FIELDS.items() if row.flag},
    read_request_options,
    dict.fromkeys(fields_with(is_on=True), True),
)
"""The options of fields of a request, read by read_request_options()."""


@with_options(given=REQUEST_OPTIONS)
def answer_options(
    system: SystemOption = None,
    max_tokens: MaxTokensOption = None,
    stop: StopOption = None,
    ban: BanOption = None,
    grammar: GrammarOption = None,
    json_schema: JsonSchemaOption = None,
    *,
    given: dict[str, Any],
    show_thoughts: ShowThoughtsOption = "fold",
    plain: PlainOption = False,
    files: FilesOption = None,
    images: ImagesOption = None,
    audio: AudioOption = None,
    json_format: FormatOption = None,
) -> AnswerOptions:
    """Collect the options of a command that answers; raise before a model is loaded.

    Raises:
        UsageError: a value is invalid, or a file can't be read.
        BadGrammarError: the grammar is invalid; names line and column.
    """
    check_limits(max_tokens, stop or (), ban or (), ("--max-tokens", "--stop", "--ban"))
    if json_format is not None:
        if json_format != "json":
            raise UsageError(f"invalid --format {json_format}", why="must be json", hint="--json-schema FILE|JSON")
        json_schema = json_schema or "{}"
    request = AnswerRequest(
        limits=Limits(max_tokens, tuple(stop or ()), tuple(ban or ())),
        grammar=read_constraint(grammar, json_schema),
        **given,
    )
    return AnswerOptions(system, request, _attached(files or (), images or (), audio or ()), show_thoughts, plain)


def _attached(files: Sequence[str], images: Sequence[str], audio: Sequence[str]) -> Attachments | None:
    if not (files or images or audio):
        return None
    from llmrun.chat.attachments import attach, attach_media

    return attach_media(audio, "audio", attach_media(images, "image", attach(files)))
