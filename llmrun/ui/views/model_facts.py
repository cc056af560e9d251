"""The facts about a model as text: `llmrun show` without --json.

Any fact may be missing: a model that is neither on this disk nor reachable has only its entry in the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmrun.gguf.header import DRAFT_KINDS
from llmrun.protocol.media import PLURALS
from llmrun.protocol.sizes import readable_count, readable_size
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import show_facts

Facts = Mapping[str, Any]


def show_model(output: Output, facts: Facts, *, stderr: bool = False) -> None:
    """Print one fact on each line.

    Args:
        facts: as `llmrun show --json` prints them.
        stderr: print there, because the facts are not the command's result.
    """
    rows = [
        ("name", facts.get("name")),
        ("title", facts.get("title") if facts.get("title") != facts.get("name") else ""),
        ("repository", _repository(facts)),
        ("made by", facts.get("author")),
        ("made from", facts.get("base_model")),
        ("licence", facts.get("license")),
        ("architecture", facts.get("architecture")),
        ("LoRA adapter", _adapter(facts)),
        ("parameters", _parameters(facts)),
        ("quant", _quant(facts)),
        ("size", _size(facts)),
        ("tensors", _tensors(facts)),
        ("layers", facts.get("layers")),
        ("draft heads", _heads_to_draft(facts)),
        ("drafter", _drafter(facts)),
        ("width", facts.get("embedding_width")),
        ("heads", _heads(facts)),
        ("experts", _experts(facts)),
        ("context", _tokens(facts.get("context_window"))),
        ("positions", _positions(facts)),
        ("sliding window", _window(facts)),
        ("KV cache", _kv_cache(facts)),
        ("recurrent state", _bytes(facts.get("recurrent_bytes"))),
        ("tokenizer", _tokenizer(facts)),
        ("special tokens", _listed(facts.get("special_tokens"))),
        ("chat template", _template(facts)),
        ("made for", _purpose(facts)),
        ("coding agents", "" if facts.get("agents", True) else "weak: Ollama warns against it for them"),
        ("before queries", _quoted(facts, "query")),
        ("before documents", _quoted(facts, "document")),
        ("projector", _projector(facts)),
        *_modelfile(facts.get("modelfile", {})),
        ("sampling advice", _listed(facts.get("recommended_sampling"))),
        ("other quants", _others(facts)),
        ("path", facts.get("path")),
        ("link", facts.get("url")),
    ]
    show_facts(output, [(name, value) for name, value in rows if value not in (None, "", 0)], stderr=stderr)


def _repository(facts: Facts) -> str:
    repository = facts.get("repository") or ""
    return f"{repository} (accept its terms on the hub first)" if facts.get("gated") else repository


def _purpose(facts: Facts) -> str:
    """Return the purpose of an embedding or reranking model; "" for other models."""
    pooling, advice = facts.get("pooling"), facts.get("embedding_advice")
    if pooling == "rank":
        return "ranking documents (llmrun rerank)"
    if pooling is None and advice is None:
        return ""
    kinds = {"mean": "the mean of all tokens", "cls": "the first token's vector", "last": "the last token's vector"}
    words = f"embeddings: {kinds[pooling]}" if pooling in kinds else "embeddings"
    minimum = advice["least_dimensions"] if advice else 0
    return f"{words}, may be cut to {minimum} dimensions (llmrun embed)" if minimum else f"{words} (llmrun embed)"


def _quoted(facts: Facts, role: str) -> str:
    """Return the prompt that an embedding model's authors recommend for queries or documents."""
    text = (facts.get("embedding_advice") or {}).get(role)
    return repr(text) if text else ""


def _heads_to_draft(facts: Facts) -> str:
    """Return the layers for multi-token prediction in words; "" without any."""
    found = facts.get("draft_heads")
    if not found:
        return ""
    return f"{found['layers']} layer{'s' if found['layers'] > 1 else ''} (MTP), {_bytes(found['bytes'])}"


def _drafter(facts: Facts) -> str:
    """Return what kind of drafter a file is, and whether it can be used; "" for a model of its own."""
    found = facts.get("drafter")
    if not found:
        return ""
    layers = ", ".join(map(str, found["target_layers"]))
    target = f", made for a model of width {found['target_width']:,}" if found["target_width"] else ""
    reads = f", reads its layers {layers}" if layers else ""
    use = "llmrun run MODEL --draft FILE" if found["is_usable"] else "llmrun can't draft with it yet"
    return f"{DRAFT_KINDS[found['kind']]}{target}{reads}; {use}"


def _projector(facts: Facts) -> str:
    found = facts.get("projector")
    if not found:
        return ""
    kinds = " and ".join(PLURALS[modality] for modality in found.get("modalities", ()))
    return f"{found['name']}, {_bytes(found['bytes'])}{f', for {kinds}' if kinds else ''}"


def _modelfile(found: Facts) -> list[tuple[str, str]]:
    """Return what Ollama's store has for a model, as rows."""
    limits = {"ctx": found.get("n_ctx"), "max-tokens": found.get("max_tokens")}
    parameters = {**found.get("sampling", {}), **{name: value for name, value in limits.items() if value}}
    return [
        ("stored adapter", ", ".join(found.get("adapters", ()))),
        ("stored system prompt", found.get("system", "")),
        ("stored template", "used" if found.get("template") else ""),
        ("stored examples", " · ".join(f"{each['role']}: {each['content']}" for each in found.get("messages", ()))),
        ("stored parameters", _listed(parameters)),
        ("stored stop texts", " ".join(map(repr, found.get("stop", ())))),
        ("not used", "; ".join(found.get("notes", ()))),
    ]


def _adapter(facts: Facts) -> str:
    found = facts.get("adapter")
    if not found:
        return ""
    ranks = " or ".join(map(str, found["ranks"]))
    return f"rank {ranks}, alpha {found['alpha']:g}; changes {found['changes']} matrices: {', '.join(found['kinds'])}"


def _parameters(facts: Facts) -> object:
    total, active = facts.get("parameters"), facts.get("active_parameters")
    if isinstance(total, int) and isinstance(active, int) and active != total:
        return f"{readable_count(total)} ({total:,}), of which a token uses {readable_count(active)}"
    return f"{readable_count(total)} ({total:,})" if isinstance(total, int) else total


def _quant(facts: Facts) -> str:
    bits = facts.get("bits_per_weight")
    return f"{facts.get('quant', '')}, {bits:g} bits per weight" if bits else str(facts.get("quant") or "")


def _size(facts: Facts) -> str:
    n_bytes, files = facts.get("file_bytes"), facts.get("files", 1)
    if not n_bytes:
        return ""
    return readable_size(n_bytes) + (f" in {files} files" if files > 1 else "")


def _tensors(facts: Facts) -> str:
    counts = facts.get("tensors_per_type", {})
    return " · ".join(
        f"{counts.get(kind, 0)} {kind} ({readable_size(n_bytes)})"
        for kind, n_bytes in facts.get("bytes_per_type", {}).items()
    )


def _heads(facts: Facts) -> str:
    heads, kv_heads = _per_layer(facts.get("heads")), _per_layer(facts.get("kv_heads"))
    if not heads:
        return ""
    kinds = f"{heads}, {kv_heads} for keys and values" if kv_heads != heads else heads
    width = f" of {facts['key_length']}" if facts.get("key_length") else ""
    return kinds + width + (", stored in compressed form" if facts.get("latent_attention") else "")


def _per_layer(value: object) -> str:
    """Return a number, or the range of a number for each layer."""
    if isinstance(value, tuple | list):
        low, high = min(value, default=0), max(value, default=0)
        return f"{low} to {high} by layer" if low != high else str(high)
    return str(value) if value else ""


def _experts(facts: Facts) -> str:
    if not facts.get("experts"):
        return ""
    text = f"{facts['experts']}, of which a token uses {_per_layer(facts.get('experts_used')) or '?'}"
    active, total = facts.get("active_bytes"), sum(facts.get("bytes_per_type", {}).values())
    return text + (
        f": it reads {readable_size(active)} of {readable_size(total)} of weights" if active and total else ""
    )


def _positions(facts: Facts) -> str:
    if "rope_base" not in facts:
        return ""
    text = f"RoPE, base {facts['rope_base']:,.0f}, {facts.get('rope_dimensions', 0)} elements of a head"
    if facts.get("rope_scaling"):
        original = facts.get("rope_original_context")
        text += f"; {facts['rope_scaling']} ×{facts.get('rope_factor', 1):g}" + (
            f" from {original:,} tokens" if original else ""
        )
    return text


def _window(facts: Facts) -> str:
    if not facts.get("sliding_window"):
        return ""
    return f"{facts['sliding_window']:,} tokens in {facts.get('window_layers', 0)} layers"


def _kv_cache(facts: Facts) -> str:
    per_token, whole_bytes = facts.get("kv_bytes_per_token"), facts.get("kv_bytes")
    if not per_token:
        return ""
    whole = f", {readable_size(whole_bytes)} for the whole context" if whole_bytes else ""
    return f"{readable_size(per_token)} per token{whole} (f16)"


def _tokenizer(facts: Facts) -> str:
    if not facts.get("tokenizer"):
        return ""
    pre = f" ({facts['tokenizer_pre']})" if facts.get("tokenizer_pre") else ""
    return f"{facts['tokenizer']}{pre}, {facts.get('vocabulary', 0):,} tokens"


def _template(facts: Facts) -> str:
    if "chat_template" not in facts:
        return ""
    return (facts.get("template_kind") or "yes") if facts["chat_template"] else "none: try `--template chatml`"


def _others(facts: Facts) -> str:
    quants = facts.get("quants", ())
    if isinstance(quants, Mapping):
        return ", ".join(f"{quant} ({readable_size(n_bytes)})" for quant, n_bytes in quants.items())
    return ", ".join(quants)


def _listed(values: Mapping[str, object] | None) -> str:
    return " · ".join(f"{name} {value}" for name, value in (values or {}).items())


def _tokens(count: int | None) -> str:
    return f"{count:,} tokens" if count else ""


def _bytes(count: int | None) -> str:
    return readable_size(count) if count else ""
