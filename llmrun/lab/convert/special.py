"""Special tokens: the first, last and padding tokens, automatic insertion, and the chat template.

The rules are those of gguf-py's SpecialVocab, so the metadata are what llama.cpp's own converter writes. SpecialVocab
itself is not used: it parses the untrusted files again (0.6 s for a large vocabulary), without limits, and 15 of 20
values of a wrong type end in an AttributeError or a TypeError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmrun.errors import BadModelError
from llmrun.lab.convert.folder import Folder, Json, parse_object

_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# GGUF's keys; "seperator" is its own spelling.
_KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
_ADDED_KEYS = ("bos", "eos", "sep")
# Texts that llama.cpp recognizes as the end of an answer (llama-vocab.cpp, special_eog_ids).
_KNOWN_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
    "<｜end▁of▁sentence｜>",
})  # fmt: skip


def special_metadata(
    folder: Folder, tokenizer: Json, config: Json, texts: Mapping[int, str], defaults: Mapping[str, str]
) -> dict[str, Any]:
    """Return the metadata of the special tokens and the chat template.

    Args:
        tokenizer: tokenizer.json; empty if there is none.
        config: config.json.
        texts: id -> text of the vocabulary.
        defaults: kind -> text of special tokens that the folder may omit.
    """
    settings = dict(folder.json("tokenizer_config.json"))
    added = {row["content"]: row["id"] for row in added_tokens(tokenizer)}
    for kind, text in defaults.items():
        settings.setdefault(f"{kind}_token", text)
    added |= {text: number for number, text in texts.items() if text in defaults.values()}
    adds: dict[str, bool] = {}
    kinds = list(_KINDS)
    if tokenizer or defaults:
        _read_post_processor(tokenizer, settings, adds, kinds)
    ids: dict[str, int] = {}
    for kind in kinds:
        if isinstance(settings.get(f"add_{kind}_token"), bool):
            adds.setdefault(kind, settings[f"add_{kind}_token"])
        ids |= _id_of(kind, added.get(_text(settings.get(f"{kind}_token"))), texts, ids)
    for kind in kinds:
        ids |= _id_of(kind, _stated_id(config, kind), texts, ids)
    ids |= _further_ends(folder, config, texts, ids)
    written = {kind: number for kind, number in ids.items() if kind != "cls"}  # llama.cpp uses bos instead
    keys: dict[str, Any] = {f"{_KEYS.get(kind, kind)}_token_id": number for kind, number in written.items()}
    keys |= {f"add_{kind}_token": adds[kind] for kind in _ADDED_KEYS if kind in adds}
    metadata: dict[str, Any] = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    template = _chat_template(folder, settings)
    return metadata | ({"tokenizer.chat_template": template} if template else {})


def added_tokens(tokenizer: Json) -> list[Json]:
    """Return the valid added tokens of tokenizer.json."""
    rows = tokenizer.get("added_tokens")
    return [
        row
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and type(row.get("id")) is int and isinstance(row.get("content"), str)
    ]


def _text(entry: Any) -> str:
    """Return the text of a token in tokenizer_config.json: a string, or an object with one."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def _id_of(kind: str, number: Any, texts: Mapping[int, str], ids: Mapping[str, int]) -> dict[str, int]:
    return {kind: number} if kind not in ids and type(number) is int and number in texts else {}


def _stated_id(config: Json, kind: str) -> Any:
    """Return the id in config.json; the first one of a list."""
    inner = config.get("text_config")
    number = config.get(f"{kind}_token_id")
    if number is None and isinstance(inner, dict):
        number = inner.get(f"{kind}_token_id")
    return number[0] if isinstance(number, list) and number else number


def lost_ends(folder: Folder, config: Json, texts: Mapping[int, str], metadata: Mapping[str, Any]) -> list[str]:
    """Return the texts of end tokens that a file has no key for."""
    kept = {metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    ends = (number for number in _stated_ends(folder, config) if number in texts and number not in kept)
    return [texts[number] for number in ends if texts[number] not in _KNOWN_ENDS]


def _stated_ends(folder: Folder, config: Json) -> list[int]:
    stated = [folder.json("generation_config.json").get("eos_token_id"), config.get("eos_token_id")]
    numbers = [number for value in stated for number in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(number for number in numbers if type(number) is int))


def _further_ends(folder: Folder, config: Json, texts: Mapping[int, str], ids: Mapping[str, int]) -> dict[str, int]:
    """Return the additional end tokens that llama.cpp would not recognize by their text."""
    ends: dict[str, int] = {}
    for number in _stated_ends(folder, config):
        text = texts.get(number)
        if text is None or text in _KNOWN_ENDS or number in (ids.get("eos"), *ends.values()):
            continue
        free = next((kind for kind in ("eot", "eom") if kind not in ids and kind not in ends), None)
        if free:
            ends[free] = number
    return ends


# ---- the post-processor of tokenizer.json


def _read_post_processor(tokenizer: Json, settings: Json, adds: dict[str, bool], kinds: list[str]) -> None:
    # BERT's names of the first and last token.
    for plain, bert in (("bos", "cls"), ("eos", "sep")):
        if not settings.get(f"{plain}_token") and settings.get(f"{bert}_token"):
            settings[f"{plain}_token"] = settings[f"{bert}_token"]
    for processor in _processors(tokenizer.get("post_processor")):
        if processor.get("type") == "ByteLevel":
            adds.setdefault("bos", False)
            adds.setdefault("eos", False)
        elif processor.get("type") == "TemplateProcessing":
            _read_template(processor, settings, adds, kinds)


def _processors(post: Any) -> Iterator[Json]:
    if isinstance(post, dict):
        parts = post.get("processors", [post])
        yield from (part for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ()


def _read_template(processor: Json, settings: Json, adds: dict[str, bool], kinds: list[str]) -> None:
    """Read the first, last and separator tokens that the template adds to every text."""
    single, pair = _entries(processor.get("single")), _entries(processor.get("pair"))
    first = last = ""
    if len(single) > 1:
        first, last = single[0][0], single[-1][0]
    if first:
        if first not in (_text(settings.get("bos_token")), _text(settings.get("cls_token"))):
            for kind in ("bos", "cls"):
                if not settings.get(f"{kind}_token"):
                    settings[f"{kind}_token"] = first
        adds["bos"] = first in (_text(settings.get("bos_token")), _text(settings.get("cls_token")))
    if last:
        end = _text(settings.get("eos_token"))
        if last != end and "eot" not in kinds:
            kinds.append("eot")
            settings["eot_token"] = end
            settings["eos_token"] = last
        adds["eos"] = True
    if pair:
        inner = pair[1 if first and pair[0][0] == first else 0 : -1 if last and pair[-1][0] == last else None]
        between = inner[1:-1]
        if between and inner[0][1] == "A" and inner[-1][1] == "B":
            separators = {_text(settings.get("sep_token")), _text(settings.get("eos_token"))}
            adds["sep"] = (between[0][0] in separators and not last) or (
                len(between) == 2 and between[1][0] in separators
            )


def _entries(template: Any) -> list[tuple[str, str]]:
    """Return special token and sequence of each entry of a template; one of them is empty."""
    entries = []
    for row in template if isinstance(template, list) else []:
        special = row.get("SpecialToken") if isinstance(row, dict) else None
        sequence = row.get("Sequence") if isinstance(row, dict) else None
        texts = [part.get("id") if isinstance(part, dict) else None for part in (special, sequence)]
        entries.append((texts[0] if isinstance(texts[0], str) else "", texts[1] if isinstance(texts[1], str) else ""))
    return entries


# ---- the chat template


def _chat_template(folder: Folder, settings: Json) -> str:
    """Return the template in a file of its own, else in tokenizer_config.json; of several the one named "default"."""
    template = settings.get("chat_template")
    if folder.has("chat_template.jinja"):  # which wins in transformers too
        template = folder.text("chat_template.jinja")
    elif template is None and folder.has("chat_template.json"):
        template = parse_object(folder.text("chat_template.json").encode(), "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {str(row.get("name")): row.get("template") for row in template if isinstance(row, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    if template is not None and not isinstance(template, str):
        raise BadModelError(
            "the chat template is not a string", why=f"tokenizer_config.json has {str(template)[:80]!r}"
        )
    return template or ""
