"""Local lookup of named models and their projectors, without the network."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from llmrun.config import Settings
from llmrun.errors import LlmrunError, ModelNotFoundError, UsageError
from llmrun.gguf.filenames import name_of_projector, projector_for, projectors_for
from llmrun.gguf.reader import read_header, read_part
from llmrun.models.modelfile import Modelfile
from llmrun.models.registry import ModelSpec, resolve
from llmrun.models.store.store import Store
from llmrun.protocol.media import PLURALS, Modality
from llmrun.system import user_path

_WITH_PROJECTOR: dict[Modality, str] = {
    "image": "smolvlm-500m and gemma3-4b come with one",
    "audio": "ggml-org/ultravox-v0_5-llama-3_2-1b-GGUF comes with one",
}


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """Spec and file of a named model; path is None for a model that is not on this disk."""

    spec: ModelSpec
    path: Path | None

    @property
    def identity(self) -> tuple[Path | None, str]:
        """Equal for names that load and answer alike: Ollama has the same weights under several names."""
        return self.path, repr(self.spec.modelfile)


def locate(name: str, settings: Settings) -> ModelLocation:
    """Find a model without the network.

    Raises ModelNotFoundError if there is no such model, and UsageError if the name is invalid.
    """
    spec = resolve(name)
    if spec.path is not None:
        return ModelLocation(spec, spec.path)
    installed = Store(settings).find(spec)
    if installed is not None and installed.projector is not None:  # Ollama fetched both from the repository
        spec = replace(spec, modelfile=Modelfile(projector=installed.projector))
    return ModelLocation(spec, installed.path if installed else None)


def find_projector(model: Path, named: str | None = None, stored: Path | None = None) -> Path | None:
    """Return the projector of images or audio: the one named by the user, or one beside the model that fits it.

    Args:
        stored: the one that Ollama's store has for the model.

    Raises:
        UsageError: the named file does not exist, or several may be meant.
    """
    if named is not None:
        path = user_path(named)
        if not path.is_file():
            raise UsageError(f"--mmproj {named} can't be read", why="there is no such file")
        return path
    if stored is not None:
        return stored
    with suppress(OSError):
        if not model.is_file():
            return None
        projectors = projectors_for(model.name, (path.name for path in model.parent.iterdir()))
        if len(projectors) > 1:
            projectors = _fitting(model, projectors)
        best = projector_for(model.name, projectors)
        return model.parent / best if best else None
    return None


def _fitting(model: Path, projectors: list[str]) -> list[str]:
    """Return those of several projectors whose vectors are as wide as the model's.

    Raises:
        UsageError: they are of several models.
    """
    width = read_header(model).n_embd
    fitting = [name for name in projectors if _projected_width(model.with_name(name)) in (0, width)]
    names = {name_of_projector(name) for name in fitting}
    if len(names) > 1:
        raise UsageError(
            f"which projector belongs to {model.name} is not clear",
            why=f"{', '.join(sorted(fitting))} stand beside it",
            hint="--mmproj FILE names one",
        )
    return fitting


def _projected_width(projector: Path) -> int:
    """Return the width of a projector's vectors; 0 if the file does not state it."""
    with suppress(LlmrunError):
        header = read_part(projector)
        widths = (header.integer(f"clip.{encoder}.projection_dim") for encoder in ("vision", "audio"))
        return next(filter(None, widths), 0)
    return 0


def require_modalities(
    name: str,
    needed: frozenset[Modality],
    readable: frozenset[Modality],
    *,
    projector: Path | None = None,
    server: str = "",
) -> None:
    """Raise UsageError unless a model can read these kinds of files.

    Args:
        readable: by the model.
        projector: of a local model, if it has one.
        server: the remote one; "" for a local model.
    """
    for modality in sorted(needed - readable):
        kind = PLURALS[modality]
        why, hint = "there is no projector (mmproj*.gguf) beside it", "--mmproj FILE names one"
        if projector is not None:
            why, hint = f"its projector {projector.name} has no encoder for {kind}", "--mmproj FILE names another"
        hint = f"{hint}; {_WITH_PROJECTOR[modality]}"
        if server:
            why, hint = f"according to {server}", ""
        raise UsageError(f"{name} can't read {kind}", why=why, hint=hint)


def not_on_disk(name: str) -> ModelNotFoundError:
    return ModelNotFoundError(f"{name} is not on this disk", hint=f"llmrun pull {shlex.quote(name)}")
