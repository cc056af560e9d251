"""A model's vocabulary in llama.cpp's form: texts, types, and scores or merges.

The supported kinds are byte-level BPE (tokenizer.json), SentencePiece BPE (tokenizer.model or tokenizer.json),
SentencePiece unigram (tokenizer.model) and WordPiece (BERT). Rules for the text that llama.cpp does not have are
written as engine/llama/text_rules.py reads them; what can't be kept is refused. The number of tokens equals the number
of rows of the embeddings; rows without a token become padding.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from llmrun.errors import BadModelError, ModelNotFoundError, UsageError
from llmrun.gguf.metadata import ADDED_FLAGS, CHARSMAP, NORMALIZER, SPACE_PREFIX
from llmrun.lab.convert.architectures import ANOTHER_WAY
from llmrun.lab.convert.folder import Folder, Json
from llmrun.lab.convert.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, read_pieces
from llmrun.lab.convert.special import added_tokens, lost_ends, special_metadata

MAX_MODEL_BYTES = 64 * 1024 * 1024
_SPACE = "\u2581"  # SentencePiece's space character
_BERT_TOKENS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_MAX_DIGITS = 10  # of an id
_ADDED_SCORE, _PADDING_SCORE = -1000.0, -10000.0


@dataclass
class _Tokens:
    """Tokens by id, under construction."""

    texts: list[bytes]
    types: list[int]
    scores: list[float]
    ignored: int = 0

    def put(self, number: int, text: str | bytes, kind: int, score: float) -> None:
        """Set a token; only count it if the embeddings have no row for it."""
        if number >= len(self.texts):
            self.ignored += 1
            return
        self.texts[number] = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        self.types[number] = kind
        self.scores[number] = score

    @property
    def by_id(self) -> dict[int, str]:
        return {
            number: text.decode("utf-8", "replace")
            for number, text in enumerate(self.texts)
            if self.types[number] != UNUSED
        }


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - 3} others" if len(texts) > 3 else ""
    return ", ".join(map(repr, texts[:3])) + more


def read_vocabulary(folder: Folder, config: Json, family: str, n_rows: int) -> tuple[dict[str, Any], list[str]]:
    """Read the vocabulary of a folder.

    Return its GGUF metadata in the file's order, and notes about differences that the user should know.

    Args:
        config: config.json.
        family: llama.cpp's name of the architecture.
        n_rows: number of rows of the embeddings.

    Raises:
        ModelNotFoundError: there is no tokenizer.
        UsageError: llama.cpp does not support the tokenizer.
        BadModelError: the tokenizer is damaged, or has more tokens than the embeddings have rows.
    """
    tokens = _Tokens([b"[PAD%d]" % number for number in range(n_rows)], [UNUSED] * n_rows, [_PADDING_SCORE] * n_rows)
    tokenizer = folder.json("tokenizer.json")
    if family == "bert":
        parts = _wordpiece(folder, tokenizer, config, tokens)
    elif folder.has("tokenizer.model"):
        parts = _sentencepiece(folder, tokenizer, tokens)
    elif not tokenizer:
        raise ModelNotFoundError(
            f"{str(folder.path)!r} has no tokenizer",
            why="neither tokenizer.json nor tokenizer.model is there",
            hint="download it into the folder; tokenizers in Python code can't be converted",
        )
    elif _has_byte_fallback(tokenizer):
        parts = _sentencepiece_as_json(tokenizer, folder, tokens)
    else:
        parts = _byte_level(tokenizer, folder, tokens)
    metadata = {"tokenizer.ggml.model": parts.pop("model"), "tokenizer.ggml.pre": parts.pop("pre")}
    kind, rules = metadata["tokenizer.ggml.model"], parts.pop("rules", None)
    # Before the tokens: the engine looks for it at the beginning of the file.
    metadata |= _rule_metadata(rules) if rules else {}
    metadata["tokenizer.ggml.tokens"] = tokens.texts
    if kind in ("llama", "t5"):
        metadata["tokenizer.ggml.scores"] = tokens.scores
    metadata["tokenizer.ggml.token_type"] = tokens.types
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in parts.items()}
    metadata |= _flag_metadata(folder, tokenizer, kind, n_rows, rules.pieces if rules else [])
    metadata |= special_metadata(folder, tokenizer, config, tokens.by_id, _BERT_TOKENS if family == "bert" else {})
    if kind == "t5":
        metadata = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False} | metadata
        metadata["tokenizer.ggml.unknown_token_id"] = tokens.types.index(UNKNOWN)
    notes = [f"{tokens.ignored} added tokens are left out: the model has no rows for them"] if tokens.ignored else []
    if rules and rules.missing_merges:
        notes.append(
            f"{_some(rules.missing_merges)} may be found where Hugging Face's tokenizer has more tokens: "
            "llama.cpp merges what is a token, whatever the list of merges"
        )
    if ends := lost_ends(folder, config, tokens.by_id, metadata):
        notes.append(f"{_some(ends)} end no answer: a file has three end tokens")
    return metadata, notes


@dataclass
class _Rules:
    """Rules for a text that llama.cpp does not have; see engine/llama/text_rules.py."""

    steps: list[Any] = field(default_factory=list)
    space_prefix: str = "never"
    charsmap: bytes = b""
    pieces: list[int] = field(default_factory=list)  # ids of user-defined pieces
    missing_merges: list[str] = field(default_factory=list)  # tokens


def _rule_metadata(rules: _Rules) -> dict[str, Any]:
    metadata = {SPACE_PREFIX: rules.space_prefix, NORMALIZER: json.dumps(rules.steps)}
    if rules.charsmap:
        metadata[CHARSMAP] = base64.b64encode(zlib.compress(rules.charsmap)).decode()
    return metadata


@dataclass(frozen=True)
class _AddedToken:
    """Added token of tokenizer.json or tokenizer_config.json."""

    text: str
    special: bool
    flags: frozenset[str] = frozenset()  # of ADDED_FLAGS

    @staticmethod
    def of(row: Json) -> _AddedToken:
        return _AddedToken(row["content"], bool(row.get("special")), frozenset(filter(row.get, ADDED_FLAGS)))


def _added(folder: Folder, tokenizer: Json) -> dict[int, _AddedToken]:
    """Return the added tokens by id. tokenizer_config.json takes precedence, as in transformers."""
    added = {row["id"]: _AddedToken.of(row) for row in added_tokens(tokenizer)}
    decoder = folder.json("tokenizer_config.json").get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise BadModelError("tokenizer_config.json is damaged", why="added_tokens_decoder is not an object")
    for number, row in decoder.items():
        is_id = number.isdecimal() and len(number) <= _MAX_DIGITS
        if not is_id or not isinstance(row, dict) or not isinstance(row.get("content"), str):
            raise BadModelError("tokenizer_config.json is damaged", why=f"added token {number[:40]!r} has no text")
        added[int(number)] = _AddedToken.of(row)
    if any(number < 0 for number in added):
        raise BadModelError("tokenizer.json is damaged", why="an added token has a negative id")
    return added


def _put_added(tokens: _Tokens, added: Mapping[int, _AddedToken], steps: Sequence[Any] = ()) -> None:
    # These are found behind a space only, which the text gets like the token.
    is_prepended = any(step[:1] == ["Prepend"] for step in steps)
    for number, row in sorted(added.items()):
        text = row.text
        if row.special or _looks_special(text):
            tokens.put(number, text, CONTROL, _ADDED_SCORE)
        elif "single_word" in row.flags or ("normalized" in row.flags and is_prepended):
            # llama.cpp would find it everywhere.
            tokens.put(number, text, NORMAL, _ADDED_SCORE)
        else:
            tokens.put(number, text.replace(_SPACE, " "), USER_DEFINED, _ADDED_SCORE)


def _flag_metadata(folder: Folder, tokenizer: Json, model: str, n_rows: int, pieces: Sequence[int]) -> dict[str, Any]:
    """Return the ids of the added tokens with each flag. Raises UsageError for flags that can't be kept."""
    ids: dict[str, list[str]] = {ADDED_FLAGS["piece"]: [str(number) for number in pieces]} if pieces else {}
    for number, row in sorted(_added(folder, tokenizer).items()):
        if "single_word" in row.flags and model == "bert":
            raise UsageError(
                f"the added token {row.text[:40]!r} can't be converted",
                why="it is found as a whole word only (single_word), which does not work with WordPiece",
            )
        for flag in row.flags if number < n_rows else ():
            ids.setdefault(ADDED_FLAGS[flag], []).append(str(number))
    return {key: " ".join(numbers) for key, numbers in ids.items()}


def _looks_special(text: str) -> bool:
    """Return whether a token should be special although some models mark it as ordinary."""
    if text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]"):
        return True
    return any(
        text.startswith(start) and text.endswith(end) for start, end in (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    )


# ---- tokenizer.json: byte-level BPE


def _model_of(tokenizer: Json, kind: str) -> Json:
    model = tokenizer.get("model")
    stated = model.get("type", kind) if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or stated != kind:
        raise UsageError(
            f"a tokenizer of the type {str(stated)[:40]!r} can't be converted",
            why=f"models of this architecture require {kind}",
        )
    return model


def _vocabulary_of(model: Json, tokens: _Tokens, added: Mapping[int, object]) -> dict[str, int]:
    vocabulary: dict[str, int] = model["vocab"]
    for text, number in vocabulary.items():
        if type(number) is not int or number < 0:
            raise BadModelError("tokenizer.json is damaged", why=f"token {text[:40]!r} has the id {str(number)[:40]!r}")
        if number >= len(tokens.texts) and number not in added:
            raise BadModelError(
                "the tokenizer does not fit the model",
                why=f"token {text[:40]!r} has the id {number:,}, the embeddings have {len(tokens.texts):,} rows",
            )
    return vocabulary


def _byte_level(tokenizer: Json, folder: Folder, tokens: _Tokens) -> dict[str, Any]:
    model = _model_of(tokenizer, "BPE")
    _check_affixes(model)
    steps = _steps(tokenizer.get("normalizer"))
    pre = pretokenizer_name(tokenizer.get("pre_tokenizer"), ignores_merges=bool(model.get("ignore_merges")))
    added = _added(folder, tokenizer)
    for text, number in _vocabulary_of(model, tokens, added).items():
        tokens.put(number, text, NORMAL, 0.0)
    tokens.ignored = 0
    _put_added(tokens, added)
    return {"model": "gpt2", "pre": pre, "merges": _merges(model), "rules": _Rules(steps)}


def _check_affixes(model: Json) -> None:
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise UsageError("a tokenizer that marks parts of words can't be converted", why=f"the model has a {name}")


_MOST_STEPS = 100
_PLAIN_STEPS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"})


def _steps(normalizer: Any, *, has_charsmap: bool = False) -> list[Any]:
    """Return the steps of a normalizer in tokenizer.json. Raises UsageError for others than text_rules.py has.

    Args:
        has_charsmap: tokenizer.model has normalization rules, which are the same.
    """
    steps: list[Any] = []
    waiting = [normalizer] if normalizer is not None else []
    while waiting:
        step = waiting.pop(0)
        kind = step.get("type") if isinstance(step, dict) else None
        if kind == "Sequence" and isinstance(step.get("normalizers"), list):
            waiting = [*step["normalizers"], *waiting]
        elif kind in _PLAIN_STEPS:
            steps.append(kind)
        elif kind == "Strip":
            steps.append(["Strip", step.get("strip_left") is True, step.get("strip_right") is True])
        elif kind == "Prepend" and isinstance(step.get("prepend"), str):
            steps.append(["Prepend", step["prepend"]])
        elif kind == "Precompiled" and has_charsmap:
            steps.append("Charsmap")
        elif kind == "Replace":
            steps.append(_replacement(step))
        else:
            raise _normalizer_error(kind)
        if len(steps) + len(waiting) > _MOST_STEPS:
            raise UsageError(f"a tokenizer with more than {_MOST_STEPS} normalizers can't be converted")
    return steps


def _replacement(step: Json) -> Any:
    pattern, content = step.get("pattern"), step.get("content")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text and isinstance(content, str):
        return ["Replace", text, content]
    if pattern == {"Regex": " {2,}"} and content in (" ", _SPACE):
        return "Spaces"
    raise _normalizer_error(f"Replace of {pattern}")


def _merges(model: Json) -> list[str]:
    """Return the merges as pairs separated by a space, from either form of the file; a space inside becomes Ġ."""
    merges = model.get("merges")
    rows = merges if isinstance(merges, list) else []
    pairs = []
    for row in rows:
        pair = row.split(" ") if isinstance(row, str) else row
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise BadModelError("tokenizer.json is damaged", why=f"a merge is {str(row)[:80]!r}, not two texts")
        pairs.append(" ".join(part.replace(" ", "\u0120") for part in pair))
    if not pairs:
        raise BadModelError("tokenizer.json has no merges")
    return pairs


# ---- its pre-tokenizer, which splits text into words before merges
#
# llama.cpp has a fixed list of pre-tokenizers with built-in regular expressions (llama-vocab.cpp). Its own converter
# recognizes a vocabulary by a checksum of test ids. Here the description is compared, so a model with another
# vocabulary and the same rules converts too. An unknown pre-tokenizer is refused: text would be split wrongly.

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    f"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)  # fmt: skip
_GPT4O = (
    f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
    "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[" + "\r\n" + r"]*|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+",
)
_GPT2, _DIGITS = "ByteLevel", "Digits"  # steps without a regular expression of their own

# Steps, and "ignore_merges" (a word that is a token needs no merges; None for either value) -> llama.cpp's name.
_NAMES: dict[tuple[tuple[str, ...], bool | None], str] = {
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "dbrx",
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
    ((_GPT2,), False): "gpt-2",
    ((_DIGITS, _GPT2), False): "smollm",
    ((_TEKKEN,), True): "tekken",
    ((_GPT4O,), None): "gpt-4o",
    (_DEEPSEEK3, False): "deepseek-v3",
}
_MAX_DEPTH = 8


def pretokenizer_name(description: Any, *, ignores_merges: bool) -> str:
    """Return llama.cpp's name for a pre-tokenizer.

    Args:
        description: "pre_tokenizer" of tokenizer.json.
        ignores_merges: "ignore_merges" of the model in tokenizer.json.

    Raises:
        UsageError: llama.cpp has no equivalent one.
    """
    steps = tuple(_split_steps(description, _MAX_DEPTH))
    name = _NAMES.get((steps, ignores_merges)) or _NAMES.get((steps, None))
    if name is None:
        shown = " then ".join(step if len(step) < 200 else step[:200] + "…" for step in steps) or "nothing"
        _refuse_pretokenizer(f"it splits by {shown}{', and ignores merges' if ignores_merges else ''}")
    return name


def _split_steps(description: Any, depth: int) -> list[str]:
    kind = description.get("type") if isinstance(description, dict) else None
    if kind == "Sequence" and depth and isinstance(description.get("pretokenizers"), list):
        return [step for part in description["pretokenizers"] for step in _split_steps(part, depth - 1)]
    if kind == "ByteLevel":
        if description.get("add_prefix_space"):
            _refuse_pretokenizer("it prepends a space to the text")
        return [_GPT2] if description.get("use_regex", True) else []
    if kind == "Digits" and description.get("individual_digits"):
        return [_DIGITS]
    if kind != "Split":
        _refuse_pretokenizer(f"it has a step {str(kind)[:80]!r}")
    return [_split_pattern(description)]


def _split_pattern(description: dict[str, Any]) -> str:
    pattern = description.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    mode = (description.get("behavior"), bool(description.get("invert")))
    # An expression that matches every character splits the same way in both modes.
    if not isinstance(regex, str) or mode not in (("Isolated", False), ("Removed", True)):
        _refuse_pretokenizer(f"it splits at {str(pattern)[:120]} with {mode[0]!r}")
    return regex


def _refuse_pretokenizer(reason: str) -> NoReturn:
    raise UsageError("llama.cpp does not have this pre-tokenizer", why=reason, hint=ANOTHER_WAY)


# ---- SentencePiece


def _sentencepiece(folder: Folder, tokenizer: Json, tokens: _Tokens) -> dict[str, Any]:
    model = read_pieces(folder.bytes("tokenizer.model", MAX_MODEL_BYTES))
    if len(model.pieces) > len(tokens.texts):
        raise BadModelError(
            "the tokenizer does not fit the model",
            why=f"it has {len(model.pieces):,} tokens, the embeddings have {len(tokens.texts):,} rows",
        )
    for number, piece in enumerate(model.pieces):
        # llama.cpp finds merges among escaped spaces, but user-defined tokens before it escapes them.
        escaped = model.is_unigram or piece.type != USER_DEFINED
        piece_text = piece.text if escaped else piece.text.replace(_SPACE.encode(), b" ")
        tokens.put(number, piece_text, piece.type, piece.score)
    _check_bytes(tokens, is_unigram=model.is_unigram)
    for text, number in folder.json("added_tokens.json").items():
        if type(number) is not int or number < 0:
            raise BadModelError("added_tokens.json is damaged", why=f"{text[:40]!r} has the id {str(number)[:40]!r}")
        tokens.put(number, text, USER_DEFINED, _ADDED_SCORE)
    added = _added(folder, tokenizer)
    prefix = _space_prefix(folder, model.adds_space)
    if tokenizer:  # which transformers prefers
        rules = _metaspace_rules(tokenizer, tokens, model.charsmap)
    else:
        # With `legacy` false, transformers adds a space at the beginning of a text only.
        scheme = "first" if folder.json("tokenizer_config.json").get("legacy") is False else "prepend"
        rules = _Rules(
            [*(["Charsmap"] if model.charsmap else []), *(["ExtraSpaces"] if model.removes_spaces else [])],
            scheme if prefix.get("add_space_prefix", True) else "never",
            model.charsmap,
            [n for n, piece in enumerate(model.pieces) if piece.type == USER_DEFINED and n not in added],
        )
    _put_added(tokens, added, rules.steps)
    if not model.is_unigram:
        return {"model": "llama", "pre": "default", "rules": rules, **prefix}
    parts: dict[str, Any] = {"precompiled_charsmap": rules.charsmap} if rules.charsmap else {}
    parts |= {"add_space_prefix": model.adds_space, "remove_extra_whitespaces": model.removes_spaces}
    return {"model": "t5", "pre": "default", "rules": rules, **parts}


def _check_bytes(tokens: _Tokens, *, is_unigram: bool) -> None:
    """Raise UsageError unless llama.cpp has a token for characters that the vocabulary lacks."""
    n_bytes = tokens.types.count(BYTE)
    if is_unigram and n_bytes:
        raise UsageError(
            "the SentencePiece vocabulary can't be converted",
            why="it is a unigram vocabulary with tokens for bytes, which llama.cpp does not use (byte_fallback)",
        )
    if is_unigram and UNKNOWN not in tokens.types:
        raise BadModelError("tokenizer.model is damaged", why="it has no token for the unknown")
    if not is_unigram and n_bytes < 256:
        raise UsageError(
            "the vocabulary can't be converted",
            why=f"it has tokens for {n_bytes} of the 256 bytes, and llama.cpp requires all (byte_fallback)",
        )


def _space_prefix(folder: Folder, adds_space: bool) -> dict[str, Any]:
    """Return the metadata for prepending a space to the text, which is llama.cpp's default."""
    stated = folder.json("tokenizer_config.json").get("add_prefix_space")
    if isinstance(stated, bool):
        return {"add_space_prefix": stated and adds_space}
    return {} if adds_space else {"add_space_prefix": False}


def _has_byte_fallback(tokenizer: Json) -> bool:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) and model.get("byte_fallback") else None
    return isinstance(vocabulary, dict) and "<0x00>" in vocabulary


def _sentencepiece_as_json(tokenizer: Json, folder: Folder, tokens: _Tokens) -> dict[str, Any]:
    """Read a SentencePiece vocabulary from tokenizer.json, which has no scores, but the merges in their order."""
    model = _model_of(tokenizer, "BPE")
    ranks: dict[str, int] = {}
    merges = _merges(model)
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        ranks.setdefault(left + right, rank)
    added = _added(folder, tokenizer)
    vocabulary = _vocabulary_of(model, tokens, added)
    for text, number in vocabulary.items():
        kind = BYTE if len(text) == 6 and text.startswith("<0x") and text.endswith(">") else NORMAL
        tokens.put(number, text, UNKNOWN if text == model.get("unk_token") else kind, -float(ranks.get(text, 0)))
    tokens.ignored = 0
    _check_bytes(tokens, is_unigram=False)
    rules = _metaspace_rules(tokenizer, tokens)
    _put_added(tokens, {n: row for n, row in added.items() if row.text != model.get("unk_token")}, rules.steps)
    adds_space = rules.space_prefix != "never" or any(step[:1] == ["Prepend"] for step in rules.steps)
    rules.missing_merges = _missing_merges(vocabulary, merges, tokens)
    return {"model": "llama", "pre": "default", "rules": rules, **_space_prefix(folder, adds_space)}


def _missing_merges(vocabulary: Mapping[str, int], merges: Sequence[str], tokens: _Tokens) -> list[str]:
    """Return the tokens that consist of two others without a merge of them, which llama.cpp merges all the same."""
    listed = set(merges)
    ordinary = {text for text, number in vocabulary.items() if number < len(tokens.types) and tokens.types[number] == 1}
    return [
        text
        for text in ordinary
        if any(
            text[:cut] in ordinary and text[cut:] in ordinary and f"{text[:cut]} {text[cut:]}" not in listed
            for cut in range(1, len(text))
        )
    ]


def _metaspace_rules(tokenizer: Json, tokens: _Tokens, charsmap: bytes = b"") -> _Rules:
    """Return the rules of a SentencePiece tokenizer in tokenizer.json. Raises UsageError for others."""
    model = tokenizer.get("model")
    if isinstance(model, dict):
        _check_affixes(model)
        if model.get("ignore_merges"):
            raise UsageError("a SentencePiece tokenizer that ignores merges can't be converted")
    rules = _Rules(_steps(tokenizer.get("normalizer"), has_charsmap=bool(charsmap)))
    rules.charsmap = charsmap if "Charsmap" in rules.steps else b""
    escapes = ["Replace", " ", _SPACE] in rules.steps
    splitter = tokenizer.get("pre_tokenizer")
    parts = splitter.get("pretokenizers") if isinstance(splitter, dict) and splitter.get("type") == "Sequence" else None
    for step in parts if isinstance(parts, list) else [splitter] if splitter else []:
        kind = step.get("type") if isinstance(step, dict) else None
        if kind == "Metaspace":
            rules.space_prefix = _space_scheme(step, tokens)
            escapes = True
        elif kind != "Split" or not escapes or step.get("pattern") != {"String": " "}:  # there are no spaces left
            raise UsageError(
                "the tokenizer can't be converted",
                why=f"it splits text by {str(kind)[:40]}, which llama.cpp does not do with SentencePiece",
                hint=ANOTHER_WAY,
            )
    if not escapes:
        raise UsageError("the tokenizer can't be converted", why=f"it does not write spaces as {_SPACE!r}")
    return rules


def _space_scheme(metaspace: Json, tokens: _Tokens) -> str:
    """Return the space prefix of a Metaspace. Raises UsageError if it keeps words apart that llama.cpp merges."""
    if metaspace.get("split", True):
        pairs = zip(tokens.texts, tokens.types, strict=True)
        across = [
            text.decode("utf-8", "replace") for text, kind in pairs if kind == NORMAL and _SPACE.encode() in text[1:]
        ]
        if across:
            raise UsageError(
                "the tokenizer can't be converted",
                why=f"it splits text at spaces, but {_some(across)} have one inside, and llama.cpp finds these",
            )
    scheme = metaspace.get("prepend_scheme", "always" if metaspace.get("add_prefix_space", True) else "never")
    if scheme not in ("always", "first", "never") or metaspace.get("replacement", _SPACE) != _SPACE:
        raise UsageError("the tokenizer can't be converted", why=f"its Metaspace is {str(metaspace)[:120]}")
    return str(scheme)


def _normalizer_error(kind: object) -> UsageError:
    return UsageError(f"a tokenizer that normalizes text ({str(kind)[:40]}) can't be converted")


# ---- WordPiece


def _wordpiece(folder: Folder, tokenizer: Json, config: Json, tokens: _Tokens) -> dict[str, Any]:
    vocabulary: dict[str, int] = {}
    if tokenizer:
        model = _model_of(tokenizer, "WordPiece")
        if model.get("max_input_chars_per_word", 100) != 100:
            raise UsageError("a WordPiece tokenizer whose longest word is not 100 characters can't be converted")
        vocabulary = _vocabulary_of(model, tokens, {})
    elif folder.has("vocab.txt"):
        lines = folder.text("vocab.txt").split("\n")
        vocabulary = {text.rstrip("\r"): number for number, text in enumerate(lines) if text}
    if not vocabulary:
        raise ModelNotFoundError(
            f"{str(folder.path)!r} has no tokenizer", why="tokenizer.json or vocab.txt is required"
        )
    tokens.texts[:] = [_SPACE.encode() + text for text in tokens.texts]
    added = _added(folder, tokenizer) or {
        vocabulary[text]: _AddedToken(text, True) for text in _BERT_TOKENS.values() if text in vocabulary
    }
    for text, number in vocabulary.items():
        tokens.put(number, text[2:] if text.startswith("##") else _SPACE + text, NORMAL, 0.0)
    tokens.ignored = 0
    for number, row in added.items():
        text, kind = (row.text, CONTROL) if row.special else (_SPACE + row.text, USER_DEFINED)
        tokens.put(number, text, kind, 0.0)
    types = config.get("type_vocab_size", 2)
    parts = {"model": "bert", "pre": "default", "token_type_count": types if type(types) is int else 2}
    return parts | _normalizer(tokenizer)


def _normalizer(tokenizer: Json) -> dict[str, Any]:
    normalizer = tokenizer.get("normalizer")
    if not isinstance(normalizer, dict):
        return {}
    if normalizer.get("type") != "BertNormalizer":
        raise _normalizer_error(normalizer.get("type"))
    for name in ("clean_text", "handle_chinese_chars"):
        if normalizer.get(name) is False:
            raise _normalizer_error(f"without {name}")
    keys = {"normalizer.lowercase": "lowercase", "normalizer.strip_accents": "strip_accents"}
    return {key: normalizer[name] for key, name in keys.items() if isinstance(normalizer.get(name), bool)}
