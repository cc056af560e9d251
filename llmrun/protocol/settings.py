"""The settings of an engine: values, and how each is named, typed and shown.

Options, tables, comparisons and job commands take them from here. Must not know which values are fast or fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from llmrun.errors import UsageError, require_within
from llmrun.protocol.devices import SPLIT_MODES, device_names, proportions, tensor_overrides

KV_TYPES = {
    "f32": (4.0, 1), "f16": (2.0, 1), "bf16": (2.0, 1), "q8_0": (34 / 32, 32), "q5_1": (24 / 32, 32),
    "q5_0": (22 / 32, 32), "q4_1": (20 / 32, 32), "q4_0": (18 / 32, 32), "iq4_nl": (18 / 32, 32),
}  # fmt: skip
"""Type of the KV cache -> bytes of an element, and elements of a block."""
FLASH_ATTENTION = ("auto", "on", "off")
MAX_TOKENS = 1 << 24
"""The largest context window and batch."""
MAX_THREADS = 512
PARALLEL_BOUNDS = (1, 128)
"""Bounds of the answers at the same time."""


class Setting(NamedTuple):
    """The description of a setting."""

    label: str  # in notes and comparisons, e.g. "flash attention off"
    option: str = ""  # e.g. "--flash-attention"; "" for settings that only `llmrun tune` changes
    short: str = ""  # e.g. "-fa"
    help: str = ""
    metavar: str = "NUMBER"  # placeholder of its value in the help; A|B are its words
    unset: str = ""  # its value without the option, in words, where a plan chooses it
    heading: str = ""  # of its column in the table of `llmrun bench`
    column: str = ""  # its field in a bench row, which is llama-bench's
    bounds: tuple[int, int] | None = None  # inclusive; of cpu_experts, for the number of layers
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None  # raises UsageError for a text that is invalid
    in_preset: bool = False  # the settings file and the environment may set it, for each model


def setting(default: Any, label: str, **description: Any) -> Any:
    """Return a field of a dataclass of settings, described as Setting()."""
    return field(default=default, metadata={"setting": Setting(label, **description)})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of an engine that change its speed.

    Other kernels round otherwise, and where two tokens are nearly as likely as each other that changes a greedy answer:
    flash attention, repack, and with flash attention the threads of decode. A quantized KV cache loses precision, too.
    """

    threads: int = setting(
        1, "threads", option="--threads", short="-t", help="Threads that compute.",
        unset="one per physical core, fewer while others need them", heading="THREADS",
        column="n_threads", bounds=(1, MAX_THREADS), in_preset=True,
    )  # of decode  # fmt: skip
    threads_batch: int = setting(0, "batch threads", column="n_threads_batch")  # of prefill; 0: as many as for decode
    n_batch: int = setting(
        512, "batch", option="--batch-size", short="-b", help="Tokens of one decode call.",
        metavar="TOKENS", heading="BATCH", unset="512, and 2048 where a GPU computes",
        column="n_batch", bounds=(1, MAX_TOKENS),
    )  # fmt: skip
    n_ubatch: int = setting(
        512, "ubatch", option="--ubatch-size", short="-ub", help="Tokens computed at once.",
        metavar="TOKENS", heading="UBATCH", unset="512, or more on a GPU with memory for it",
        column="n_ubatch", bounds=(1, MAX_TOKENS),
    )  # fmt: skip
    flash_attention: str = setting(
        "auto", "flash attention", option="--flash-attention", short="-fa", help="Use flash attention.",
        metavar="|".join(FLASH_ATTENTION), unset="where it is faster", heading="FA",
        column="flash_attn", choices=FLASH_ATTENTION,
    )  # fmt: skip
    kv_type_k: str = setting(
        "f16", "KV keys", option="--cache-type-k", short="-ctk", help="Type of keys in the KV cache.",
        metavar="TYPE", unset="f16", heading="K",
        column="type_k", choices=tuple(KV_TYPES), in_preset=True,
    )  # fmt: skip
    kv_type_v: str = setting(
        "f16", "KV values", option="--cache-type-v", short="-ctv", help="Type of values in the KV cache.",
        metavar="TYPE", unset="f16", heading="V",
        column="type_v", choices=tuple(KV_TYPES), in_preset=True,
    )  # fmt: skip
    repack: bool = setting(
        True, "repack", option="--repack", short="-rpk", help="Repack weights for this processor's kernels.",
        metavar="on|off",
        heading="REPACK", column="repack",
    )  # fmt: skip
    mmap: bool = setting(True, "mmap")  # the file is mapped into memory, not read
    gpu_layers: int = setting(
        -1, "GPU layers", option="--gpu-layers", short="-ngl", help="GPU layers; -1 is all.",
        unset="all that fit", heading="NGL",
        column="n_gpu_layers", bounds=(-1, 1000), in_preset=True,
    )  # fmt: skip
    cpu_experts: tuple[int, ...] = setting(
        (), "layers' experts on the processor", option="--n-cpu-moe", short="-ncmoe", heading="NCMOE",
        help="Layers whose experts the processor computes beside a GPU.", metavar="LAYERS",
        unset="as many as do not fit there", column="n_cpu_moe", bounds=(0, 1000),
    )  # fmt: skip
    split_mode: str = setting(
        "layer", "split mode", option="--split-mode", short="-sm", help="Division of a model between several GPUs.",
        metavar="|".join(SPLIT_MODES), unset="layer",
        heading="SPLIT", column="split_mode", choices=SPLIT_MODES,
    )  # fmt: skip
    main_gpu: int = setting(
        0, "main GPU", option="--main-gpu", short="-mg", help="Number of the GPU for --split-mode none, from 0.",
        unset="0",
        heading="MAIN", column="main_gpu", bounds=(0, 63),
    )  # fmt: skip
    tensor_split: str = setting(
        "", "tensor split", option="--tensor-split", short="-ts", help="Proportion of the model on each GPU, e.g. 3/1.",
        metavar="SHARE/...", unset="by free memory",
        heading="SHARES", column="tensor_split", parse=proportions,
    )  # fmt: skip
    device: str = setting(
        "", "devices", option="--device", short="-dev", help="GPUs to use, e.g. CUDA0/CUDA1, or none.",
        metavar="NAME/...", unset="all",
        heading="DEVICES", column="devices", parse=device_names,
    )  # fmt: skip
    override_tensor: str = setting(
        "", "tensor overrides", option="--override-tensor", short="-ot", parse=tensor_overrides,
        help="Put tensors whose names match on a device, e.g. ffn_up=CPU.", metavar="PATTERN=DEVICE;...",
        heading="OVERRIDES",
        column="tensor_buft_overrides",
    )  # fmt: skip

    @property
    def kv_element_bytes(self) -> float:
        """Bytes of an element of the KV cache, the mean of keys and values."""
        return (KV_TYPES[self.kv_type_k][0] + KV_TYPES[self.kv_type_v][0]) / 2


SETTINGS: dict[str, Setting] = {each.name: each.metadata["setting"] for each in fields(EngineSettings)}
DEFAULTS = EngineSettings()
DEVICE_SETTINGS = ("split_mode", "main_gpu", "tensor_split", "device", "override_tensor")
"""The settings that choose GPUs and divide a model between them."""


def common_fields(value: EngineSettings, target: type[EngineSettings] = EngineSettings) -> dict[str, Any]:
    """Return the fields of a value that another class of settings has, too."""
    own = {each.name for each in fields(value)}
    return {each.name: getattr(value, each.name) for each in fields(target) if each.name in own}


def shown(value: object) -> str:
    """Return the text of a value: a switch is on or off, and layers are counted."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(len(value) if isinstance(value, tuple) else value) or "auto"


def check_setting(name: str, value: Any, label: str = "", *, choices: tuple[str, ...] = ()) -> None:
    """Check a value that a user gave; None is valid.

    Args:
        value: for cpu_experts, the number of layers.
        label: the option's name for the error, if not the long one.
        choices: if fewer than the setting has.

    Raises:
        UsageError: it is out of bounds, or none of the choices.
    """
    setting = SETTINGS[name]
    label, choices = label or setting.option, choices or setting.choices
    if setting.bounds:
        require_within(label, value, setting.bounds)
    if setting.parse:
        setting.parse(value)
    if choices and value not in (None, *choices):
        raise UsageError(f"invalid {label} {value}", why=f"must be one of {', '.join(choices)}")
