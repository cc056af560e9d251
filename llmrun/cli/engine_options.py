"""Options made from the engine's settings, and the group that chooses GPUs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from llmrun.cli.completion import complete_words
from llmrun.protocol.devices import SPLIT_MODES
from llmrun.protocol.settings import DEFAULTS, FLASH_ATTENTION, SETTINGS

METAVARS = {
    "n_batch": "TOKENS", "n_ubatch": "TOKENS", "repack": "on|off", "flash_attention": "|".join(FLASH_ATTENTION),
    "kv_type_k": "TYPE", "kv_type_v": "TYPE", "cpu_experts": "LAYERS", "split_mode": "|".join(SPLIT_MODES),
    "tensor_split": "SHARE/...", "device": "NAME/...", "override_tensor": "PATTERN=DEVICE;...",
}  # fmt: skip
"""Engine setting -> the placeholder of its value in the help, unless it is a number."""


def engine_option(name: str, default: str = "", *, metavar: str | None = None, panel: str = "Engine") -> Any:
    """Return the option of an engine setting.

    Args:
        default: its value without the option, for the help.
        metavar: placeholder in the help, if not that of METAVARS.
    """
    setting, metavar = SETTINGS[name], metavar or METAVARS.get(name)
    words = metavar.split("|") if metavar and "|" in metavar else setting.choices
    return typer.Option(
        setting.option,
        setting.short,
        metavar=metavar,
        help=f"{setting.help} Default: {default}." if default else setting.help,
        autocompletion=complete_words(*words) if words else None,
        rich_help_panel=panel,
    )


SplitModeOption = Annotated[str, engine_option("split_mode")]
MainGpuOption = Annotated[int, engine_option("main_gpu", metavar="NUMBER")]
TensorSplitOption = Annotated[str, engine_option("tensor_split", "by free memory")]
DeviceOption = Annotated[str, engine_option("device", "all")]
OverrideTensorOption = Annotated[str, engine_option("override_tensor")]


def device_options(
    split_mode: SplitModeOption = DEFAULTS.split_mode,
    main_gpu: MainGpuOption = DEFAULTS.main_gpu,
    tensor_split: TensorSplitOption = DEFAULTS.tensor_split,
    device: DeviceOption = DEFAULTS.device,
    override_tensor: OverrideTensorOption = DEFAULTS.override_tensor,
) -> dict[str, Any]:
    """The options that choose GPUs, as fields of LoadPreferences."""
    return {
        "split_mode": split_mode,
        "main_gpu": main_gpu,
        "tensor_split": tensor_split,
        "device": device,
        "override_tensor": override_tensor,
    }
