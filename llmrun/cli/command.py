"""The classes of commands: plain help, --help-all, empty paths refused, and what a command that takes a model adds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from llmrun.cli import habits
from llmrun.cli.pages import HELP_ALL, command_help
from llmrun.errors import UsageError, did_you_mean

_USES_PRESETS = frozenset({"run", "chat", "serve", "batch", "explain", "embed", "rerank", "score"})
_LOADS_MODEL = _USES_PRESETS | {"replay"}
_MAY_BE_REMOTE = frozenset({"run", "chat", "batch"})


class Command(TyperCommand):
    """A command whose help is written without Rich, which takes tenths of a second to load."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(_help_all_option())

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(command_help(ctx))

    def make_parser(self, ctx: Any) -> Any:
        return _Parser(super().make_parser(ctx), partial(self.complete, ctx))

    def complete(self, context: Any, values: dict[str, Any], rest: list[str]) -> list[str]:
        """Complete and check the parsed values before Typer converts them; return the words beyond the arguments.

        Args:
            values: by parameter; changed.
            rest: words beyond the arguments.
        """
        _refuse_empty_paths(self.params, context, values)
        if self.name in _LOADS_MODEL and not (context.resilient_parsing or _wants_help(values)):
            from llmrun.protocol.exclusions import refuse_together  # most commands have no such options

            typed = self.typed(values)
            refuse_together(typed, self.name)
            if self.name in _USES_PRESETS:
                from llmrun.cli import defaults  # slow, and most commands have no presets

                defaults.fill(self.name, context, values, typed)
        return rest

    def typed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parsed values by their flags, without defaults, and LLMRUN_SERVER where it names the server."""
        found = {}
        for each in self.params:
            value = values.get(each.name or "")
            if value is None or str(value) == str(each.default):
                continue
            is_off = value is False and bool(each.secondary_opts)
            flags = each.secondary_opts if is_off else each.opts
            found[max(flags, key=lambda flag: flag.startswith("--"))] = is_off or value
        server = os.environ.get("LLMRUN_SERVER", "").strip()
        if server and self.name in _MAY_BE_REMOTE and not {"--at", "--ray", "--web"} & found.keys():
            found["LLMRUN_SERVER"] = server
        return found


class CommandGroup(TyperGroup):
    """A command with commands of its own, and a help like theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(_help_all_option())

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of the arguments, also by other programs' name of it.

        Raises:
            UsageError: no command has the name; suggests similar ones.
        """
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            meant = next((word for word in habits.WORDS.get(name, ()) if word in known), "")
            if not meant:
                typed = f"{ctx.command_path} {name}".removeprefix("llmrun ")
                hint = did_you_mean(name, known, f"{ctx.command_path} --help")
                raise UsageError(f"there is no command {typed!r}", hint=hint)
            args = [meant, *args[1:]]
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(command_help(ctx))


class ModelCommand(Command):
    """A command that takes a model: also named by options of other programs, as may be its prompt, or by a preset."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arguments = [param for param in self.params if param.param_type_name == "argument"]
        self.params.append(_hidden_option(habits.MODEL, *habits.MODEL_OPTIONS))
        if self.name in habits.TAKES_PROMPT:
            self.params.append(_hidden_option(habits.PROMPT, *habits.PROMPT_OPTIONS))

    def complete(self, context: Any, values: dict[str, Any], rest: list[str]) -> list[str]:
        return super().complete(context, values, habits.name_arguments(values, self._arguments, rest))


def _wants_help(values: Mapping[str, Any]) -> bool:
    return bool(values.get("help") or values.get(HELP_ALL.lstrip("-").replace("-", "_")))


class _Parser:
    """Typer's parser, with a function that changes what it has parsed."""

    def __init__(self, parser: Any, complete: Callable[[dict[str, Any], list[str]], list[str]]) -> None:
        self._parser, self._complete = parser, complete

    def parse_args(self, args: list[str]) -> tuple[dict[str, Any], list[str], Any]:
        values, rest, order = self._parser.parse_args(args=args)
        return values, self._complete(values, rest), order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


def _refuse_empty_paths(parameters: Sequence[Any], context: Any, values: dict[str, Any]) -> None:
    """Refuse an empty path, such as that of an unset shell variable, which would be this folder."""
    for parameter in parameters:
        if parameter.type.name == "path" and not context.resilient_parsing:
            value = values.get(parameter.name)
            if value == "" or (isinstance(value, (list, tuple)) and "" in value):
                raise typer.BadParameter("it is empty", ctx=context, param=parameter)


def _hidden_option(name: str, *flags: str) -> TyperOption:
    return TyperOption(param_decls=[name, *flags], hidden=True, expose_value=False)


def _help_all_option() -> TyperOption:
    def show(context: typer.Context, _: Any, value: bool) -> None:
        if value and not context.resilient_parsing:
            typer.echo(command_help(context, shows_all=True).rstrip("\n"))
            context.exit()

    text = "Show all options and exit."
    return TyperOption(
        param_decls=[HELP_ALL], is_flag=True, is_eager=True, expose_value=False, callback=show, help=text
    )
