"""`llmrun doctor`: checks of this machine and the installation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.options import JsonOption
from llmrun.config import Settings, load_settings
from llmrun.doctor.doctor import examine, try_model
from llmrun.doctor.gpu_build import cuda_package, install, install_package, require_build
from llmrun.errors import CancelledError, LlmrunError, UsageError
from llmrun.models.store.store import Store
from llmrun.planning.hardware import probe_details, this_machine
from llmrun.protocol.llama_folder import INSTALLED, is_bundled
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, show_table

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Install without asking.")]

if TYPE_CHECKING:
    from llmrun.doctor.doctor import Finding, TrialResult


def doctor(
    answer: Annotated[
        bool, typer.Option("--answer/--no-answer", help="Test an answer of a model on this disk.")
    ] = True,
    install_gpu: Annotated[
        bool, typer.Option("--install-gpu", help="Install llama.cpp for this machine's GPU, and try it.")
    ] = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Check this machine and the installation, and suggest fixes.

    The exit code is 0 if nothing is broken, else that of the first problem. --install-gpu asks, installs llmrun-cuda
    or compiles for minutes, tries an answer with it, and puts the old build back if that fails.
    """
    if install_gpu:
        _install_gpu(Output(json=json), yes=yes)
        return
    output = Output(json=json)
    settings = load_settings()
    if output.stderr_is_terminal and not json:
        output.note("Testing an answer and asking the hub takes some seconds." if answer else "Asking the hub.")
    trial = _try(settings) if answer else None
    findings = examine(settings, installed=len(Store(settings).installed()), trial=trial)
    if json:
        output.result_json([asdict(finding) for finding in findings])
    else:
        show_findings(output, findings)
    status = next((finding.exit_status for finding in findings if finding.exit_status), 0)
    if status:
        raise typer.Exit(status)


def show_findings(output: Output, findings: Sequence[Finding]) -> None:
    """Print the findings of doctor, each with its fix below; what is ok needs none."""
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        rows.append((finding.status, finding.topic, finding.text))
        if finding.fix and finding.status != "ok":
            rows.append(("", "", f"try: {finding.fix}"))
    show_table(output, (Column(""), Column("", style="bold"), Column("")), rows)


def _install_gpu(output: Output, *, yes: bool) -> None:
    def ask(question: str) -> None:
        if not yes and not output.can_ask:
            raise UsageError("--install-gpu asks before it installs", hint="llmrun doctor --install-gpu --yes")
        if not yes and not output.confirm(question):
            raise CancelledError("nothing was changed")

    def tries() -> None:
        if not (gpus := this_machine().gpus):
            raise LlmrunError("the new build finds no GPU", hint="install or load the card's driver")
        output.note(f"found {', '.join(gpu.description for gpu in gpus)}; trying an answer")
        if (trial := try_model(load_settings())) is not None:
            output.note(f"{trial.name}: {trial.tokens} tokens at {trial.decode_rate:,.1f} tokens/s")

    graphics = probe_details().graphics
    if package := cuda_package(graphics):
        output.note(f"This installs llama.cpp's CUDA backend and NVIDIA's libraries: pip install {package}")
        ask("Download and install it?")
        if install_package(package, tries):
            output.note("llama.cpp with CUDA is installed; llmrun plan MODEL shows what fits on the GPU")
            return
        output.note(f"{package} can't be had for this machine, so it has to be compiled")
    build = require_build(graphics)
    output.note(f"This compiles llama.cpp with {build.backend} for some minutes, in this environment: {build.command}")
    ask("Build and install it?")
    is_beside = is_bundled()
    install(build, tries)
    output.note(f"llama.cpp with {build.backend} is installed; llmrun plan MODEL shows what fits on the GPU")
    if is_beside:
        output.note(f"To use it instead of llmrun's own: export LLMRUN_LLAMA={INSTALLED}")


def _try(settings: Settings) -> TrialResult | LlmrunError | None:
    try:
        return try_model(settings)
    except LlmrunError as error:
        return error
