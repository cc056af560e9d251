"""load() of the Python API: find the model, download it, start its engine.

Must not know terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Literal

from llmrun import errors
from llmrun.config import load_settings
from llmrun.model import Model
from llmrun.model.load_plan import prepare
from llmrun.models.location import locate, not_on_disk
from llmrun.models.registry import ModelSpec
from llmrun.planning.pairs import DraftFile
from llmrun.planning.plan import LoadPreferences
from llmrun.planning.speculation import read_draft_source, read_speculate
from llmrun.protocol.arguments import checked
from llmrun.runner import client


@checked
def load(
    name: str | PathLike[str],
    *,
    n_ctx: int | None = None,
    threads: int | None = None,
    gpu_layers: int | None = None,
    parallel: int = 1,
    speculate: int | Literal["auto", "off"] = "auto",
    draft: str | PathLike[str] | None = None,
    lora: Sequence[str] = (),
    pull: bool = True,
    on_pull: Callable[[int, int], None] = lambda done, total: None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> Model:
    """Load a model by name or path; downloads a missing one first.

        model = llmrun.load("smollm2", n_ctx=4096)

    Args:
        name: an alias such as "smollm2", owner/repo[:quant], a URL, or a path.
        n_ctx: context window in tokens; None is the trained one, cut to the memory.
        threads: None is one for each physical core.
        gpu_layers: layers on the GPU; -1 is all, None as many as fit.
        parallel: number of answers decoded together, each in its own context window; a shared prompt is prefilled once:
            `await asyncio.gather(*(model.chat("Hi", seed=seed) for seed in range(4)))`.
        speculate: maximum drafted tokens per step, which never changes answers; "auto" is as many as pay by the step
            times measured here, see measure_steps().
        draft: name or path of a smaller draft model with the same vocabulary, downloaded if missing; "mtp" drafts with
            the model's own heads, as is the default where it has some, "off" only from the text.
        lora: LoRA adapters, each a file or "FILE:SCALE"; AnswerRequest.adapters chooses among them.
        pull: False never downloads.
        on_pull: called with (bytes done, bytes in all) during the download.
        on_progress: called with the loaded share of the weights, 0 to 1.

    Raises:
        LlmrunError: see llmrun.errors for the kinds.
    """
    from llmrun.models.adapters import read_adapters  # the command's start, too, imports this module

    draft, heads = read_draft_source(fspath(draft) if draft is not None else None)
    preferences = LoadPreferences(n_ctx=n_ctx, threads=threads, gpu_layers=gpu_layers, parallel=parallel, as_alone=True)
    preferences = replace(preferences, draft_heads=heads)
    max_drafted = read_speculate(speculate, "speculate")
    settings, adapters = load_settings(), read_adapters(lora, "lora")

    def find(name: str | PathLike[str]) -> tuple[ModelSpec, Path]:
        located = locate(fspath(name), settings)
        if located.path is not None:
            return located.spec, located.path
        if not pull:
            raise not_on_disk(fspath(name))
        from llmrun.models.pull import pull as fetch
        from llmrun.planning.estimate import chooser

        return located.spec, fetch(located.spec, settings, on_pull, choose=chooser(settings))

    spec, path = find(name)
    drafts = DraftFile.of(*find(draft)) if draft is not None else None
    model = prepare(spec, path, preferences, speculate=max_drafted, draft=drafts, adapters=adapters)
    model.plan = replace(model.plan, notes=tuple(map(errors.rephrase, model.plan.notes)))
    model.start(client.EngineClient(), on_progress)
    return model
