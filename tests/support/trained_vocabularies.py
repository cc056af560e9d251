"""Tiny vocabularies that Hugging Face's tokenizers trained, as theirs and as GGUF files, and strings to try them on."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from support.gguf_writer import gguf, write

SAMPLES = (
    "The quick brown fox jumps over the lazy dog, doesn't it? It's naïve, they'll say: 1234.56 times!",
    "Die Straße war größer als üblich. Où est le garçon? ¿Dónde está el niño? Příliš žluťoučký kůň.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Привет, мир!",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Γειά σου Κόσμε.",
    "敏捷的棕色狐狸跳过了懒狗。你好，世界！ いろはにほへと ちりぬるを。カタカナもある。",
    "다람쥐 헌 쳇바퀴에 타고파. 안녕하세요 세계.",
    "صباح الخير يا عالم، كيف حالك؟ שלום עולם, מה שלומך?",
    "नमस्ते दुनिया, आप कैसे हैं? வணக்கம் உலகம். হ্যালো বিশ্ব।",
    "สวัสดีชาวโลก ยินดีต้อนรับ ກິນເຂົ້າ ជំរាបសួរ",
    "🙂 😂 👍🏽 🤷🏽‍♀️ 🇩🇪 👨‍👩‍👧‍👦 ❤️ ☃ ∑∫√ → ½ ℃ ™",
    "def f(x: int) -> str:\n    return f\"{x!r}\"  # comment\n\tif (a<=b && c!=d) { puts(\"ok\"); }\n",
    "https://example.org/a_b?q=1&r=%20#frag  user@mail.de   ALLCAPS CamelCase snake_case\r\n\n\n   indented",
)  # fmt: skip
_SPACE = "\u2581"


def strings(count: int, seed: int) -> list[str]:
    """Strings of all scripts, emoji and code, and of UTF-8 that is cut inside a character."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 4)):
            sample = rng.choice(SAMPLES)
            start = rng.randrange(len(sample))
            parts.append(sample[start : start + rng.randint(1, 24)])
        data = rng.choice(("", " ", "  ", "\n")).join(parts).encode()
        if rng.random() < 0.2:
            data = data[rng.randint(0, 3) : len(data) - rng.randint(0, 3)]
        found.append(data.decode("utf-8", "replace"))
    return found


def byte_pairs(folder: Path, pre: str = "gpt-2", *, splits: bool = True) -> tuple[Tokenizer, Path]:
    """BPE as GPT-2's, in a file that names a pre-tokenizer of llama.cpp's; without splits, tokens span words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SAMPLES * 3, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    model = json.loads(tokenizer.to_str())["model"]
    return tokenizer, _file(
        folder / f"bpe-{pre}.gguf",
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": _ordered(model["vocab"]),
            "tokenizer.ggml.token_type": [1] * len(model["vocab"]),
            "tokenizer.ggml.merges": [
                merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]
            ],
        },
    )


def sentence_piece(folder: Path) -> tuple[Tokenizer, Path]:
    """BPE as Llama 2's: scores in place of merges, bytes for characters that it lacks."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(SAMPLES[:6] * 3, trainers.BpeTrainer(vocab_size=500))
    learned = _ordered(trained.get_vocab())
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*first, *learned]
    vocabulary = {text: number for number, text in enumerate(tokens)}
    merges = [
        (text[:cut], text[cut:])
        for text in learned
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    return tokenizer, _file(
        folder / "spm.gguf",
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))],
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(learned)],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        },
    )


def word_piece(folder: Path) -> tuple[Tokenizer, Path]:
    """WordPiece as BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=1000))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(SAMPLES * 3, trainers.WordPieceTrainer(vocab_size=700, special_tokens=special))
    texts = _ordered(tokenizer.get_vocab())
    return tokenizer, _file(
        folder / "wpm.gguf",
        {
            "general.architecture": "bert",
            "tokenizer.ggml.model": "bert",
            "tokenizer.ggml.tokens": [
                text if text in special else text.removeprefix("##") if text.startswith("##") else _SPACE + text
                for text in texts
            ],
            "tokenizer.ggml.token_type": [3 if text in special else 1 for text in texts],
            "tokenizer.ggml.unknown_token_id": 1,
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.seperator_token_id": 3,
            "tokenizer.ggml.padding_token_id": 0,
        },
    )


def _ordered(vocabulary: Mapping[str, int]) -> list[str]:
    return sorted(vocabulary, key=lambda text: vocabulary[text])


def _file(path: Path, vocabulary: dict[str, Any]) -> Path:
    return write(path, gguf({"general.architecture": "llama", **vocabulary}))
