"""A model with a smaller draft model: the check that they fit, and the plan for both.

They fit if token ids mean the same in both, by the rules of llama.cpp's common_speculative_are_compatible().
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.errors import UsageError
from llmrun.gguf.header import DRAFT_KINDS, Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.models.registry import ModelSpec
from llmrun.planning.hardware import Hardware
from llmrun.planning.plan import UNMEASURED, Measurements, Plan, make_plan
from llmrun.planning.preferences import CONTEXT_BOUNDS, LoadPreferences

if TYPE_CHECKING:
    from llmrun.protocol.adapters import Adapter

_TOKENS = "tokenizer.ggml.tokens"
_MOST_DIFFERENCE = 128  # in the sizes of both vocabularies: some are padded
_FIRST_COMPARED = 5  # token id; names of earlier ones vary


@dataclass(frozen=True, slots=True)
class DraftFile:
    """A draft model's file."""

    name: str  # finds the model from any folder
    path: Path

    @classmethod
    def of(cls, spec: ModelSpec, path: Path) -> DraftFile:
        """Return the draft file of a resolved name."""
        return cls(str(path.absolute()) if spec.path is not None else spec.name, path)


def plan_pair(
    header: Header,
    draft: DraftFile | None,
    hardware: Hardware,
    preferences: LoadPreferences,
    *,
    measured: Measurements = UNMEASURED,
    name: str,
    repository: str,
    adapters: tuple[Adapter, ...] = (),
) -> Plan:
    """Return the plan of a model and of its draft model, if any, which has the same window and takes memory first.

    Args:
        measured, name, repository: as in make_plan().
        adapters: LoRA adapters, which add to the weights.

    Raises:
        OutOfMemoryError: the models don't fit, or not with the preferred context.
        BadModelError: a file is damaged, or of a kind that llama.cpp can't use.
        UsageError: the draft model does not fit the model.
    """
    drafts = read_draft(header, draft) if draft is not None else None
    own_bytes = header.weight_bytes + (_adapter_bytes(header, adapters) if adapters else 0)
    both = ResizedHeader.of(header, own_bytes, drafts)
    plan = make_plan(both, hardware, preferences, measured=measured, name=name, repository=repository)
    if draft is None or drafts is None:
        return plan
    load, path = plan.load, str(draft.path.absolute())
    n_ctx = max(load.n_ctx, CONTEXT_BOUNDS[0])
    if drafts.is_heads_only:
        n_bytes = drafts.weight_bytes + drafts.head_cache_bytes(load.n_cells or n_ctx)
        beside = replace(load, path=path, draft_heads=True)
        return replace(plan, load=replace(load, draft=beside), draft=drafts, draft_bytes=n_bytes)
    gpu_layers = 0 if hardware.workers else load.gpu_layers  # the network is too slow for drafts
    # Overrides, and the memory that was measured, are of the model.
    draft_preferences = replace(
        preferences, override_tensor="", n_ctx=n_ctx, threads=load.threads, gpu_layers=gpu_layers
    )
    alone = replace(hardware, memory_total=0, workers=())
    own = make_plan(drafts, alone, draft_preferences, measured=measured._replace(gpu_excess=()))
    beside = replace(own.load, path=path, n_parked=0)
    n_bytes = own.memory.weights + own.memory.kv
    return replace(plan, load=replace(load, draft=beside), draft=drafts, draft_bytes=n_bytes)


def _adapter_bytes(header: Header, adapters: tuple[Adapter, ...]) -> int:
    from llmrun.models.adapters import adapter_bytes  # few models have any

    return adapter_bytes(adapters, header)


@dataclass(frozen=True)
class ResizedHeader(Header):
    """The header of a model with the memory of another quant, of a draft model, or of both."""

    own_bytes: int = 0  # of its weights
    draft: Header | None = None

    @classmethod
    def of(cls, header: Header, own_bytes: int, draft: Header | None = None) -> ResizedHeader:
        values = {field.name: getattr(header, field.name) for field in fields(Header)}
        return cls(**values, own_bytes=own_bytes, draft=draft)

    @property
    def weight_bytes(self) -> int:
        return self.own_bytes + (self.draft.weight_bytes if self.draft else 0)

    def kv_bytes_per_token(self, bytes_per_element: float = 2.0) -> float:
        n_bytes = super().kv_bytes_per_token(bytes_per_element)
        if self.draft is not None and self.draft.is_heads_only:
            return n_bytes + self.draft.head_cache_bytes(1, bytes_per_element)
        return n_bytes + (self.draft.kv_bytes_per_token(bytes_per_element) if self.draft else 0)

    def cache_bytes(self, n_tokens: int, bytes_per_element: float = 2.0, *, ubatch: int, sequences: int = 1) -> float:
        sizes = {"ubatch": ubatch, "sequences": sequences}
        n_bytes = super().cache_bytes(n_tokens, bytes_per_element, **sizes)
        if self.draft is not None and self.draft.is_heads_only:
            return n_bytes + self.draft.head_cache_bytes(n_tokens, bytes_per_element)
        return n_bytes + (self.draft.cache_bytes(n_tokens, bytes_per_element, **sizes) if self.draft else 0)

    @property
    def expert_bytes(self) -> dict[int, int]:
        share = self.own_bytes / max(super().weight_bytes, 1)
        return {layer: int(size * share) for layer, size in super().expert_bytes.items()}


def read_draft(header: Header, draft: DraftFile) -> Header:
    """Read the header of a draft model for a model.

    Raises:
        BadModelError: the file is damaged, or no model that llama.cpp can run.
        UsageError: the draft model does not fit the model.
    """
    draft_header = read_header(draft.path, arrays=(_TOKENS,))
    if draft_header.draft_kind in DRAFT_KINDS.keys() - {"mtp"}:
        why = f"it is {DRAFT_KINDS[draft_header.draft_kind]}, with which llmrun can't draft yet"
        hint = "leave out --draft: drafts are from the text, and by the model's own heads if it has some"
    elif draft_header.is_heads_only:
        check(draft_header, is_of_heads=True)
        why, hint = _heads_misfit(header, draft_header), "give the heads (mtp-*.gguf) that were made with the model"
    else:
        check(draft_header)
        why = _misfit(read_header(header.path, arrays=(_TOKENS,)), draft_header)
        hint = "give a smaller model of the same family"
    if why:
        raise UsageError(f"{draft.name} can't draft for {header.path.name}", why=why, hint=hint)
    return draft_header


def _heads_misfit(header: Header, heads: Header) -> str:
    """Return the reason why a file of prediction heads does not go with a model; "" if it does."""
    if heads.architecture != header.architecture:
        return f"its architecture is {heads.architecture!r}, and the model's {header.architecture!r}"
    if not heads.can_use_heads:
        return f"the heads of {heads.architecture!r} can't draft here"
    for what, of in (("width", "n_embd"), ("vocabulary", "n_vocab")):
        numbers = [getattr(facts, of) for facts in (heads, header)]
        if numbers[0] != numbers[1]:
            return f"its {what} is {numbers[0]:,}, and the model's {numbers[1]:,}"
    return ""


def _misfit(header: Header, draft: Header) -> str:
    """Return the reason why a model can't draft for another one; "" if it can. Both headers include the tokens."""
    if draft.recurrent_bytes:
        return "it is recurrent: tokens can't be removed from its state"
    if header.tokenizer_model != draft.tokenizer_model:
        return f"their tokenizers are of different kinds: {draft.tokenizer_model} and {header.tokenizer_model}"
    if abs(header.n_vocab - draft.n_vocab) > _MOST_DIFFERENCE:
        return f"their vocabularies differ: {draft.n_vocab:,} tokens and {header.n_vocab:,}"
    for token in ("bos", "eos"):
        adds, numbers = (
            [facts.metadata.get(f"tokenizer.ggml.{key}") for facts in (draft, header)]
            for key in (f"add_{token}_token", f"{token}_token_id")
        )
        if _differ(adds) or (any(adds) and _differ(numbers)):
            return f"their prompts have different {token.upper()} tokens"
    return _different_token(header, draft)


def _differ(values: list[Any]) -> bool:
    """Return whether both files state a value, and the values differ."""
    first, second = values
    return None not in values and first != second


def _different_token(header: Header, draft: Header) -> str:
    tokens = [facts.metadata[_TOKENS] for facts in (draft, header)]
    pairs = zip(*tokens, strict=False)
    for number, (ours, theirs) in enumerate(pairs):
        if number >= _FIRST_COMPARED and ours != theirs:
            texts = " and ".join(repr(text.decode("utf-8", "replace")) for text in (ours, theirs))
            return f"their vocabularies differ: token {number:,} is {texts}"
    return ""
