"""The modules that sentence-transformers runs after a model: what llama.cpp computes of them, and what it would drop.

A dropped module changes every vector, so it is refused.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from llmrun.errors import BadModelError, UsageError
from llmrun.lab.convert.folder import Config, Folder
from llmrun.protocol.codec import load_json

_MAX_MODULES = 100
_POOLINGS = {"mean_tokens": 1, "cls_token": 2, "lasttoken": 3, "mean": 1, "cls": 2}  # llama_pooling_type
_SUBFOLDER = re.compile(r"[\w-]{0,80}")
_FLAG = "pooling_mode_"
_WITHOUT_EFFECT = frozenset({"Transformer", "Normalize", "Dropout"})  # vectors are normalized when they are computed
_PROMPTS = "config_sentence_transformers.json"


class Module(NamedTuple):
    """A module of modules.json."""

    kind: str  # the name of its class
    path: str  # its folder


def read_modules(folder: Folder) -> list[Module]:
    """Return the modules of a folder of sentence-transformers; none for another one.

    Raises:
        BadModelError: modules.json is damaged.
    """
    if not folder.has("modules.json"):
        return []
    try:
        rows = load_json(folder.text("modules.json"))
    except ValueError as error:
        raise _damaged(str(error)) from None
    if not isinstance(rows, list) or len(rows) > _MAX_MODULES or not all(isinstance(row, dict) for row in rows):
        raise _damaged("it is no list of modules")
    return [_module(row) for row in rows]


def _module(row: dict[str, Any]) -> Module:
    kind, path = row.get("type"), row.get("path", "")
    if not isinstance(kind, str) or not isinstance(path, str):
        raise _damaged("a module has no type")
    path = path.removeprefix("./").rstrip("/")
    if not _SUBFOLDER.fullmatch(path):
        raise _damaged(f"{path[:80]!r} is not the name of a folder in it")
    return Module(kind.rpartition(".")[2][:80], path)


def _damaged(why: str) -> BadModelError:
    return BadModelError("modules.json is damaged", why=why, hint="download it again")


def pooling_type(folder: Folder, modules: list[Module]) -> tuple[int | None, list[str]]:
    """Return llama.cpp's number of the pooling, None without one, and notes.

    Raises:
        UsageError: llama.cpp has no such pooling, or there are several.
        BadModelError: its settings are damaged.
    """
    poolings = [module for module in modules if module.kind == "Pooling"]
    if not poolings:
        return None, []
    if len(poolings) > 1:
        raise UsageError(
            "the model's modules can't be converted", why=f"it has {len(poolings)} Pooling modules, not one"
        )
    path = poolings[0].path
    settings = folder.json(f"{path}/config.json")
    stated = [name.removeprefix(_FLAG) for name, value in settings.items() if name.startswith(_FLAG) and value is True]
    mode = settings.get("pooling_mode")
    stated = stated or [str(each)[:80] for each in (mode if isinstance(mode, list) else [mode]) if each is not None]
    if len(stated) != 1 or stated[0] not in _POOLINGS:
        what = f"it is {' and '.join(stated)}" if stated else f"{path}/config.json states none"
        raise UsageError("the model's pooling can't be converted", why=f"only mean, first and last token can; {what}")
    notes = ["tokens of a prompt are pooled too, which include_prompt of the model's pooling forbids"]
    return _POOLINGS[stated[0]], notes if settings.get("include_prompt") is False else []


def refuse_others(modules: list[Module], *, has_dense: bool = False) -> None:
    """Raise UsageError for a module that llama.cpp would not compute.

    Args:
        has_dense: Dense modules are computed.
    """
    others = [module for module in modules if module.kind not in {*_WITHOUT_EFFECT, "Pooling"}]
    others = [module for module in others if module.kind != "Dense" or not has_dense]
    if others:
        names = ", ".join(f"{module.kind} ({module.path})" if module.path else module.kind for module in others)
        raise UsageError(
            f"modules of this sentence-transformers model can't be converted: {names}",
            why="llama.cpp computes nothing but the pooling after the model, so that all vectors would be others",
        )


def dense_modules(folder: Folder, modules: list[Module]) -> list[Module]:
    """Return the Dense modules, if llama.cpp can compute them: a matrix each, with nothing added to the product.

    Raises:
        UsageError: one has a bias or an activation function.
    """
    found = [module for module in modules if module.kind == "Dense"]
    for module in found:
        settings = Config(folder.json(f"{module.path}/config.json")) if module.path else Config({})
        activation = settings.text("activation_function").rpartition(".")[2] or "Tanh"  # its default
        if activation != "Identity" or settings.get("bias") is not False:
            bias = "no bias" if settings.get("bias") is False else "a bias"
            raise UsageError(
                f"the module Dense ({module.path}) can't be converted",
                why=f"it has {bias} and the activation {activation[:40]}; llama.cpp only multiplies with its matrix",
            )
    return found


def prompt_notes(folder: Folder) -> list[str]:
    """Return a note if sentence-transformers puts a prompt before each text unless told otherwise."""
    settings = folder.json(_PROMPTS)
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str) or not prompt:
        return []
    return [f"sentence-transformers puts {prompt[:200]!r} before each text: llmrun embed --prompt does"]
