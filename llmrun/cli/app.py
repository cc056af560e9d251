"""The Typer application: the root command, which imports a command when it is called."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llmrun.cli import habits
from llmrun.cli.command import Command, ModelCommand
from llmrun.cli.commands import ALIASES, BENCH_COMMANDS, COMMANDS, CommandEntry
from llmrun.cli.completion import complete_bench, complete_model, completes, fix_words
from llmrun.cli.pages import OPTIONS, root_help
from llmrun.errors import NoModelError, UsageError, did_you_mean
from llmrun.ui.terminal.output import Output

_MODEL_FIRST = frozenset(
    {"run", "chat", "pull", "show", "plan", "quantize", "report", "evaluate", "bench", "tune", "tokenize", "explain"}
)


class RootCommand(TyperGroup):
    """The commands of commands.COMMANDS and BENCH_COMMANDS."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command, or None if no command has the name. The Tab key mostly gets a stand-in."""
        name = ALIASES.get(cmd_name, cmd_name)
        entry = COMMANDS.get(name) or BENCH_COMMANDS.get(name)
        if entry is None:
            return None
        completed = completes(os.environ)
        if completed == "command" or (completed == "model" and name in _MODEL_FIRST):
            return _command(name, entry, _name_bench if name == "bench" else _name_model)
        return _command(name, entry, entry.load())

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of the arguments.

        Raises:
            UsageError: no command has the name; suggests similar ones.
        """
        if " ".join(args[:2]) in BENCH_COMMANDS:
            args = [" ".join(args[:2]), *args[2:]]
        if args[0] == "server" and " ".join(args[1:2]) in habits.SERVER_WORDS:
            raise UsageError(f"there is no command {' '.join(args[:2])!r}", hint=habits.SERVER_WORDS[args[1]])
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            if habit := habits.COMMANDS.get(args[0]):
                raise UsageError(f"there is no command {args[0]!r}", why=habit.why, hint=habit.hint)
            hint = did_you_mean(args[0], [*COMMANDS, *ALIASES], "llmrun --help shows all")
            raise UsageError(f"there is no command {args[0]!r}", hint=hint)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(root_help())


def _command(name: str, entry: CommandEntry, function: Any) -> Any:
    """Return a function or a Typer app as a command."""
    single = function
    if not isinstance(function, typer.Typer):
        single = typer.Typer(add_completion=False, context_settings=_SETTINGS)
        cls = ModelCommand if name in habits.TAKES_MODEL else Command
        text = entry.help if function in (_name_model, _name_bench) else None
        single.command(name, cls=cls, help=text)(function)
    command = typer.main.get_command(single)
    command.name = name
    return command


def _name_model(model: Annotated[str, typer.Argument(autocompletion=complete_model)]) -> None:
    """Stand in for a command while its name or its model is being completed."""


def _name_bench(models: Annotated[list[str], typer.Argument(autocompletion=complete_bench)]) -> None:
    """Stand in for `bench`, which takes more than models."""


_SETTINGS = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="llmrun",
    cls=RootCommand,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help=OPTIONS["--version"])] = False,
    debug: Annotated[bool, typer.Option("--debug", help=OPTIONS["--debug"])] = False,
) -> None:
    """Run large language models on this machine."""


def call(arguments: Sequence[str]) -> int:
    """Run the command of these arguments and return its exit status.

    Raises:
        LlmrunError: the command failed; wrong options and arguments are a UsageError.
    """
    fix_words(os.environ)
    arguments = [*(["run"] if habits.begins_answer(arguments) else []), *arguments]
    try:
        return app(arguments, prog_name="llmrun", standalone_mode=False, obj=arguments) or 0
    except NoModelError as error:
        from llmrun.cli.defaults import choose_model  # slow, and most commands have a model

        chosen = choose_model(Output(json="--json" in arguments), error)
        return call([arguments[0], "--model", chosen, "--yes", *arguments[1:]])
    except typer.TyperException as error:
        command = " ".join(["llmrun", *arguments[:1]]) if arguments and arguments[0] in COMMANDS else "llmrun"
        raise _usage_error(error, command) from None


def _usage_error(error: typer.TyperException, command: str) -> UsageError:
    """Return an error of Typer as one of ours."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", "")
    path = context.command_path if context else command
    message, hint = error.format_message().rstrip("."), f"{path} --help"
    if isinstance(error, typer.BadParameter) and error.param is not None:
        return _parameter_error(error, error.param, hint)
    if context is not None and message.startswith("No such option"):
        names = [
            name
            for parameter in context.command.params
            if not getattr(parameter, "hidden", False)
            for name in (*parameter.opts, *parameter.secondary_opts)
        ]
        if line := _at_home(option, context):
            what = f"{path} has no option {option}"
            return UsageError(what, why=f"{' '.join(line.split()[:2])} has it", hint=line)
        ours = habits.OPTIONS.get(option, "")
        if ours.startswith("llmrun") or ours.partition(" ")[0] in names:
            return UsageError(f"there is no option {option}", why="that is another program's name of it", hint=ours)
        return UsageError(f"there is no option {option}", hint=did_you_mean(option, names, hint))
    if name := re.match("No such command '(.*?)'", message):
        return UsageError(f"there is no command {f'{path} {name[1]}'.removeprefix('llmrun ')!r}", hint=hint)
    if words := re.fullmatch(r"Got unexpected extra argument\(s\) \((.*)\)", message):
        return UsageError(f"unexpected arguments: {words[1]}", why=f"{path} takes fewer", hint=hint)
    if number := re.fullmatch("Option .* requires (an|[0-9]+) arguments?", message):
        return UsageError(f"{option} needs {'a value' if number[1] == 'an' else f'{number[1]} values'}", hint=hint)
    if message.endswith("does not take a value"):
        return UsageError(f"{option} takes no value", hint=hint)
    return UsageError(message[:1].lower() + message[1:], hint=hint)


def _at_home(option: str, context: Any) -> str:
    """Return the command line of an option that this command lacks and a sibling of it has; "" if none has."""
    siblings = ("chat", "run", "serve") if context.command.name in ("chat", "run", "serve") else ()
    for name in siblings:
        for parameter in context.find_root().command.get_command(context, name).params:
            if option.startswith("--") and option in (*parameter.opts, *parameter.secondary_opts):
                value = "" if parameter.is_flag else f" {parameter.metavar or parameter.type.name.upper()}"
                return f"llmrun {name} MODEL {option}{value}"
    return ""


_EXPECTED = {"int": "a whole number", "float": "a number", "boolean": "true or false"}


def _parameter_error(error: typer.BadParameter, parameter: Any, hint: str) -> UsageError:
    """Return Typer's error of an option or argument: what is wrong, and what is expected."""
    is_argument = parameter.param_type_name == "argument"
    name = (
        parameter.human_readable_name
        if is_argument
        else next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])
    )
    if hasattr(error, "param_type"):  # only Typer's MissingParameter has it, which it does not export
        return UsageError(f"{name} is missing", hint=hint)
    message = error.message.rstrip(".")
    if match := re.fullmatch(r"'?(.*?)'? is not a valid (\w+)(?:\. .*)?", message):
        return UsageError(f"invalid {name} {match[1]}", why=f"must be {_EXPECTED.get(match[2], match[2])}", hint=hint)
    if match := re.fullmatch("'?(.*?)'? is not one of (.*)", message):
        return UsageError(
            f"invalid {name} {match[1]}", why=f"must be one of {match[2].replace(chr(39), '')}", hint=hint
        )
    if match := re.fullmatch(r"(.*) is not in the range (?:(\S+)<=)?x(?:(<=|>=)(\S+))?", message):
        bounds = (
            f"between {match[2]} and {match[4]}"
            if match[2]
            else f"at {'most' if match[3] == '<=' else 'least'} {match[4]}"
        )
        return UsageError(f"invalid {name} {match[1]}", why=f"must be {bounds}", hint=hint)
    return UsageError(f"invalid {name}", why=message, hint=hint)
