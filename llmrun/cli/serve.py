"""`llmrun serve`: models over HTTP."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from llmrun.cli import settings_file
from llmrun.cli.background import LOG_VARIABLE, install_service, rotate, serve_in_background, uninstall_service
from llmrun.cli.commands import EXPLAIN_ON_PAGE
from llmrun.cli.completion import complete_model
from llmrun.cli.defaults import preset_layer
from llmrun.cli.docs import DocsOptions, documents, open_documents
from llmrun.cli.loading import find_draft, find_model
from llmrun.cli.main import ENDING
from llmrun.cli.options import (
    REQUEST_OPTIONS,
    LoadingOptions,
    loading,
    some_of,
    with_options,
)
from llmrun.cli.sampling import WATERMARK_OPTIONS, sampling_flags
from llmrun.cli.servers import at_most
from llmrun.cli.tools import ToolOptions, page_tools, tooling
from llmrun.config import load_settings, model_aliases
from llmrun.errors import CancelledError, LlmrunError, TerminatedError, UsageError, require_within
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.models.adapters import adapter_bytes
from llmrun.models.location import find_projector, locate, not_on_disk
from llmrun.planning.measurements import compare_allocated
from llmrun.protocol.exclusions import spelled, yielding
from llmrun.protocol.layers import FLAG, Layer, layer, resolved
from llmrun.protocol.messages import fields_with
from llmrun.protocol.params import PARAMETERS
from llmrun.server.guard import LOOPBACK, Policy, read_keys
from llmrun.server.pool import Defaults
from llmrun.server.protocols.fields import read_time
from llmrun.server.registry import END_NOW, RunningServer, allow_many_connections, bind, registered
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.serve import ServeView, TimedLines, show_phone

if TYPE_CHECKING:
    from llmrun.chat.passages import FolderIndex
    from llmrun.model import Model
    from llmrun.planning.pairs import DraftFile
    from llmrun.protocol.params import SamplingParams
    from llmrun.server.page.insights import EngineJobs
    from llmrun.server.page.tools import PageTools
    from llmrun.server.pool import PooledModel
    from llmrun.server.registry import ServerFile
    from llmrun.server.serving import ServeOptions, Serving

_WATCH_SECONDS = 0.5
_LOOPBACK = "127.0.0.1"
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - addresses that mean all, and what this machine calls

ModelsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL...",
        help="Models to load at start; the first is the default. Other models are loaded on first use.",
        autocompletion=complete_model,
    ),
]
HostOption = Annotated[str, typer.Option("--host", help="Address to listen on.", rich_help_panel="Network")]
PortOption = Annotated[int, typer.Option("--port", help="Port to listen on.", rich_help_panel="Network")]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="File with API keys, one per line; required beyond loopback. Two or more share no cached text.",
        rich_help_panel="Network",
    ),
]
AllowOriginOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin",
        metavar="ORIGIN",
        help="Accept requests from web pages of this origin, e.g. https://example.org or app://; may be repeated.",
        rich_help_panel="Network",
    ),
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="Accept this host name in requests too; may be repeated.",
        rich_help_panel="Network",
    ),
]
AliasOption = Annotated[
    list[str] | None,
    typer.Option("--alias", metavar="NAME=MODEL", help="Another name of a model in requests; may be repeated."),
]
AnyModelOption = Annotated[
    bool, typer.Option("--any-model", help="Answer requests for all other models with the first one.")
]
AllowManageOption = Annotated[
    bool,
    typer.Option("--allow-manage", help="Let all clients pull, copy and delete models.", rich_help_panel="Network"),
]
KeepOption = Annotated[str, typer.Option("--keep", metavar="TIME", help="Unload a model after this idle time.")]
ParallelOption = Annotated[int, typer.Option("--parallel", "-np", help="Requests answered at the same time.")]
QueueOption = Annotated[int, typer.Option("--queue", help="Requests that may wait; further ones get 503.")]
GraceOption = Annotated[
    str, typer.Option("--grace", metavar="TIME", help="Time to finish running answers after Ctrl-C.")
]
TimeoutOption = Annotated[str, typer.Option("--timeout", metavar="TIME", help="Time limit of an answer.")]
ParentOption = Annotated[int | None, typer.Option("--parent", metavar="PID", hidden=True)]  # of `llmrun launch`
BackgroundOption = Annotated[
    bool, typer.Option("--background", help="Return when the models are loaded; it runs on. See llmrun logs.")
]
InstallOption = Annotated[
    bool | None,
    typer.Option(
        "--install/--uninstall", help="Install a service with these options that starts with the session, or remove it."
    ),
]
LogJsonOption = Annotated[bool, typer.Option("--log-json", help="Log each request as a JSON object on stderr.")]
_REQUESTS = some_of(REQUEST_OPTIONS, *fields_with(in_server=True))
"""The options of the fields that requests may leave out."""


@with_options(requests=_REQUESTS, loading=loading, marking=WATERMARK_OPTIONS, docs=documents, tooling=tooling)
def serve(
    context: typer.Context,
    models: ModelsArgument = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8080,
    key_file: KeyFileOption = None,
    allow_origin: AllowOriginOption = None,
    allow_host: AllowHostOption = None,
    alias: AliasOption = None,
    any_model: AnyModelOption = False,
    allow_manage: AllowManageOption = False,
    keep: KeepOption = "5m",
    parallel: ParallelOption = 8,
    queue: QueueOption = 64,
    timeout: TimeoutOption = "1h",
    grace: GraceOption = "30s",
    log_json: LogJsonOption = False,
    background: BackgroundOption = False,
    install: InstallOption = None,
    parent: ParentOption = None,
    *,
    requests: dict[str, Any],
    loading: LoadingOptions,
    marking: Mapping[str, Any],
    docs: DocsOptions,
    tooling: ToolOptions,
) -> None:
    """Serve models over HTTP to OpenAI, Anthropic and Ollama clients."""
    if install is False:
        uninstall_service(Output())
        return
    require_within("--port", port, settings_file.SERVE["port"].bounds)
    require_within("--queue", queue, settings_file.SERVE["queue"].bounds)
    keep_seconds, grace_seconds, answer_seconds = (
        read_time(flag, text) for flag, text in (("--keep", keep), ("--grace", grace), ("--timeout", timeout))
    )
    allow_many_connections()
    listening = bind(host, 0 if install else port)  # an installed server may use the port now
    from llmrun.server.serving import run_in_event_loop

    output, names = Output(json=log_json), tuple(dict.fromkeys(models or []))
    policy = _policy(host, listening, key_file, allow_origin or [], allow_host or [])
    _require_model(names, {"--any-model": any_model, "--template FILE": "template" in requests})
    loading = replace(loading, preferences=replace(loading.preferences, parallel=parallel))
    options = _serve_options(
        output, names, policy, loading, keep_seconds=keep_seconds, queue=queue, answer_seconds=answer_seconds,
        grace_seconds=grace_seconds, sampling=marking, any_model=any_model, aliases=_aliases(alias or []),
        allow_manage=allow_manage, defaults=served_defaults(requests),
    )  # fmt: skip
    if background or install:
        listening.close()
        _run_on(output, context.obj, port, options, installs=bool(install))
        return
    if not output.stderr_is_terminal and not log_json:
        _write_times(output)
    with page_tools(output, tooling) as tools, open_documents(output, docs, loading) as index:
        run_in_event_loop(_run(output, options, listening, parent, tools, index, log_json=log_json))


def _write_times(output: Output) -> None:
    """Write the time before each line of the log, for the rest of the process."""
    sys.stderr = output.stderr = cast("TextIO", TimedLines(output.stderr))


def _run_on(output: Output, typed: Sequence[str], port: int, options: ServeOptions, *, installs: bool) -> None:
    """Start a server with these arguments that outlives this command."""
    end = typed.index("--") if "--" in typed else len(typed)
    arguments = [word for word in typed[:end] if word not in ("--background", "--install")] + [*typed[end:]]
    if installs:
        grace = None if options.grace_seconds == math.inf else options.grace_seconds
        install_service(output, arguments, port, grace)
    else:
        for path in filter(None, (locate(name, load_settings()).path for name in options.names)):
            check(read_header(path))  # the user would not see the server's error
        serve_in_background(output, arguments, port)


def serve_page(
    name: str, loading: LoadingOptions, docs: DocsOptions, tooling: ToolOptions, page: str, *, phone: bool = False
) -> None:
    """Serve a model on a free port of loopback, for the page alone, until Ctrl-C.

    Args:
        docs: documents of the page.
        tooling: tools of the page.
        page: path of the page that the browser opens.
        phone: the page is open to a phone, too.
    """
    allow_many_connections()
    listening = bind(_LOOPBACK, 0, "llmrun chat --web")
    from llmrun.server.serving import run_in_event_loop

    output = Output()
    policy = _policy(_LOOPBACK, listening, None, [], [])
    options = _serve_options(output, (name,), policy, loading, keep_seconds=math.inf, defaults=served_defaults())
    address = f"http://{_LOOPBACK}:{listening.getsockname()[1]}{page}"
    with page_tools(output, tooling) as tools, open_documents(output, docs, loading) as index:
        output.note(f"{'The browser opens' if _open_browser(address) else 'Open in a browser:'} {address}")
        run_in_event_loop(_run(output, options, listening, None, tools, index, log_json=False, phone=phone))


def _serve_options(
    output: Output, names: tuple[str, ...], policy: Policy, loading: LoadingOptions, **others: Any
) -> ServeOptions:
    """Return the options of a server, once its first models are on this disk; raise as _fetch_missing().

    Args:
        others: further fields of ServeOptions.
    """
    from llmrun.server.serving import ServeOptions

    return ServeOptions(
        names,
        policy,
        loading.preferences,
        verbose=loading.verbose,
        speculate=loading.most_drafted,
        draft=_fetch_missing(output, names, loading),
        projector=loading.projector,
        adapters=loading.adapters,
        presets=page_presets,
        **others,
    )


def _open_browser(address: str) -> bool:
    """Open a page in the user's browser; return False where there is no window to show one."""
    has_windows = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    if not (has_windows or os.environ.get("BROWSER")):  # a browser in this terminal would take it from the server
        return False
    import webbrowser

    # A browser that was not running may hold up who starts it.
    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    return True


def served_defaults(flags: Mapping[str, Any] = {}) -> Defaults:
    """Return the defaults of a server's models: options, the environment, presets. Raises UsageError as fill().

    Args:
        flags: fields of requests that options set.
    """
    given = settings_file.read_file()
    preset_layer(given, "")  # an invalid variable is an error at the start

    @cache
    def defaults(model: str) -> Layer:
        found = preset_layer(given, model)
        read = sampling_flags(**{name: value for name, (value, _) in found.items() if name in PARAMETERS})
        preset = {name: (read.get(name, value), origin) for name, (value, origin) in found.items()}
        return resolved(layer(FLAG, flags), yielding(preset, spelled(flags)))

    return defaults


def page_presets() -> list[dict[str, Any]]:
    """Return the presets of --preset as the page uses them: it has fields for some of their values.

    Raises:
        UsageError: the settings file is invalid.
    """
    given, found = settings_file.read_file(), []
    for name in settings_file.preset_names(given):
        preset = settings_file.read_preset(name, given)
        values = {settings_file.NAMED[key].parameter: value for key, value in preset.items()}
        shown = {key: values.get(key) for key in ("model", "system")}
        found.append({"name": name, **shown, "thinking": values.get("thinking"), "values": values})
    return found


def _aliases(given: list[str]) -> dict[str, str]:
    """Return the model of each --alias, and of each alias in the settings file whose model is on this disk.

    Raises:
        UsageError: one is not NAME=MODEL.
        ModelNotFoundError: a model is not on this disk.
    """
    settings, found = load_settings(), dict[str, str]()
    for name, model in model_aliases().items():
        with suppress(LlmrunError):
            if locate(model, settings).path is not None:
                found[name] = model
    for each in given:
        name, _, model = each.partition("=")
        if not name or not model:
            raise UsageError(f"invalid --alias {each!r:.80}", why="must be NAME=MODEL", hint="--alias gpt-5=qwen3-4b")
        if locate(model, settings).path is None:
            raise not_on_disk(model)
        found[name] = model
    return found


def _give_way() -> None:
    """Let no event interrupt a thread that computes: this thread has its share of the processor, but begins at the end
    of a time slice, or when a core is idle. Sending must not delay decode steps.

    Only Linux has scheduling policies of threads.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may forbid it
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _on_signal(number: int, act: Callable[[], None]) -> None:
    """Call a function in the running event loop when a signal comes."""
    loop = asyncio.get_running_loop()
    if sys.platform == "win32":  # whose event loops have no signal handlers
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(act))
    else:
        loop.add_signal_handler(number, act)


def _policy(host: str, listening: socket.socket, key_file: Path | None, origins: list[str], hosts: list[str]) -> Policy:
    """Return the access policy.

    Raises:
        UsageError: the server would be open to other machines without a key, or the key file can't be read.
    """
    keys = read_keys(key_file) if key_file else ()
    address = listening.getsockname()[0]
    is_loopback = address == "::1" or address.startswith("127.")
    if not is_loopback and not keys:
        raise UsageError(
            f"--host {host} opens the server to other machines",
            why="without a key, anyone who can reach this machine could use the server",
            hint=f"openssl rand -hex 16 > keys.txt; llmrun serve --host {host} --key-file keys.txt",
        )
    own = () if is_loopback else (socket.gethostname(), f"{socket.gethostname()}.local")
    named = {name.lower() for name in (host, address, *own, *hosts)}
    bracketed = {f"[{name}]" for name in named if ":" in name}
    return Policy(LOOPBACK | named | bracketed, frozenset(origins), keys, any_address=not is_loopback)


def _fetch_missing(output: Output, names: tuple[str, ...], loading: LoadingOptions) -> DraftFile | None:
    """Download missing models before the first request; return the file of the draft model.

    Raises:
        UsageError: the draft's model is ambiguous, or an adapter or projector does not fit the first model.
    """
    if loading.draft is not None and len(names) != 1:
        raise UsageError("--draft drafts for one model", hint="llmrun serve MODEL --draft SMALLER")
    _require_model(names, {"--lora FILE": bool(loading.adapters), "--mmproj FILE": loading.projector is not None})
    paths = [find_model(output, name, yes=loading.yes)[1] for name in names]
    if loading.adapters:
        adapter_bytes(loading.adapters, read_header(paths[0]))  # raises for one that does not fit
    if loading.projector is not None:
        find_projector(Path(), loading.projector)
    return find_draft(output, loading.draft, yes=loading.yes)


def _require_model(names: tuple[str, ...], given: Mapping[str, bool]) -> None:
    """Raise UsageError if an option of the first model is given without a model."""
    for option, is_given in given.items():
        if is_given and not names:
            flag = option.partition(" ")[0]
            raise UsageError(f"{flag} needs a model", hint=f"llmrun serve MODEL {option}")


def _show_loaded(view: ServeView, options: ServeOptions, pooled: PooledModel) -> None:
    """Print how a model was loaded."""
    model = pooled.loaded_model
    different = compare_allocated(model.header, model.plan, model.loaded.buffers, load_settings().state_dir)
    for note in (*model.plan.notes, *different):
        view.note(note)
    if options.verbose:
        view.note(model.plan.summary)
    view.loaded(pooled.name, model.n_ctx, options.preferences.parallel, model.loaded.load_seconds)


def _explain(model: Model, measuring: tuple[EngineJobs, int]) -> Callable[[SamplingParams], str]:
    write: Callable[[SamplingParams], str] = EXPLAIN_ON_PAGE.load()(model, measuring)
    return write


async def _run(
    output: Output,
    options: ServeOptions,
    listening: socket.socket,
    parent: int | None,
    tools: PageTools,
    index: FolderIndex | None,
    *,
    log_json: bool,
    phone: bool = False,
) -> None:
    """Serve until a signal comes. Running answers are finished then, unless Ctrl-C or `stop --now` ends them."""
    from llmrun.server.serving import Serving

    view = ServeView(output, log_json=log_json)
    settings = load_settings()

    serving = Serving(
        options,
        settings,
        explain=_explain,
        tools=tools,
        index=index,
        on_served=view.served,
        on_loaded=partial(_show_loaded, view, options),
        on_failed=view.failed,
    )
    _give_way()
    gc.freeze()  # collections during streams skip the imported modules, which take milliseconds
    grace = None if options.grace_seconds == math.inf else options.grace_seconds
    ended_by: list[LlmrunError] = []  # what cut running answers off

    def end(error: LlmrunError, *, now: bool = False) -> None:
        if serving.is_busy and now:
            ended_by.append(error)
        elif serving.is_busy and not serving.is_ending:
            view.note(f"Stopping when running answers are finished{at_most(grace)}; Ctrl-C again stops now.")
        serving.end(now=now)

    _on_signal(signal.SIGINT, lambda: end(CancelledError("stopped by Ctrl-C"), now=serving.is_ending))
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            _on_signal(number, partial(end, TerminatedError(f"stopped by {number.name}")))
    _on_signal(END_NOW, lambda: end(TerminatedError("stopped by llmrun stop --now"), now=True))
    if phone:
        await _open_to_phone(output, serving)
    address, port = _address_of(listening)
    view.begin(address, serving.names, has_keys=bool(options.policy.keys))
    log = os.environ.get(LOG_VARIABLE, "")
    with registered(settings.state_dir, address) as entry:
        server = RunningServer(os.getpid(), address, port, time.time(), grace_seconds=grace, log=log)
        watching = asyncio.ensure_future(_watch(serving, view, entry, server, parent))
        try:
            await serving.run(listening)
        finally:
            watching.cancel()
            view.end()
    if ended_by:
        raise ended_by[0]


async def _open_to_phone(output: Output, serving: Serving) -> None:
    """Open the page to a phone, and print the code for it. Raises UsageError as PhoneAccess.open()."""
    from llmrun.server.phone import code_of

    await serving.phone.open()
    show_phone(output, serving.phone.address, code_of(serving.phone.address))


def _address_of(listening: socket.socket) -> tuple[str, int]:
    """Return the address at which this machine finds a server, and its port."""
    host, port = listening.getsockname()[:2]
    host = _EVERYWHERE.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}", port


async def _watch(
    serving: Serving, view: ServeView, entry: ServerFile | None, server: RunningServer, parent: int | None
) -> None:
    """Keep the live line and this server's entry in `llmrun ps` up to date; end the server after its parent."""
    written: RunningServer | None = None
    now = server
    while True:
        if parent is not None and os.getppid() != parent:
            serving.end(now=True)
        if server.log:
            rotate(Path(server.log))
        now = now._replace(models=tuple(serving.loaded), files=tuple(serving.files))
        now = now._replace(is_ending=serving.is_ending, drafts=serving.drafts)
        if view.is_live or now.requests != tuple(view.requests):
            conditions = (await serving.statuses()).values()
            n_bytes = sum(condition.checkpoint_bytes for condition in conditions)
            threads = min((condition.threads for condition in conditions), default=(0, 0))
            now = now._replace(requests=tuple(view.requests), checkpoint_bytes=n_bytes, threads=threads)
        if entry is not None and now != written:
            entry.write(now)
            written = now
        if view.is_live:
            used, cells = (
                sum(condition.cells_used for condition in conditions),
                sum(condition.cells for condition in conditions),
            )
            view.show(serving.metrics.figures._replace(cells_used=used, cells=cells))
        await asyncio.sleep(_WATCH_SECONDS)
