"""`llmrun evaluate` with the real model beside llama-perplexity's arithmetic on llama.cpp's own logits.

The reference is the model itself; what is compared with it is a copy with another RoPE base, four bytes of its header.
llama-perplexity's figures differ by up to 1 % from one processor to the next. So they are computed here, from logits
that llama.cpp gives on this machine, as its tools/perplexity/perplexity.cpp does it: with `-c 128 --chunks 4`, and
`--kl-divergence`, but for the 16 bits in which that stores the reference's probabilities.
"""

from __future__ import annotations

import json
import math
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import plain_llama
from support.installed import Installed

CHUNKS, N_CTX = 4, 128

_NOUNS = [
    "river",
    "engine",
    "garden",
    "letter",
    "storm",
    "window",
    "teacher",
    "island",
    "bread",
    "clock",
    "shadow",
    "market",
]
_VERBS = ["crosses", "repairs", "forgets", "admires", "follows", "carries", "questions", "paints"]
_PLACES = ["in the old town", "near the sea", "behind the school", "at the end of the road", "under a grey sky"]


def some_text() -> str:
    """Prose of a kind."""
    lines = []
    for number in range(150):
        one, other = (_NOUNS[number * step % len(_NOUNS)] for step in (5, 7))
        verb, place = _VERBS[number * 3 % len(_VERBS)], _PLACES[number * number % len(_PLACES)]
        lines.append(f"In {1900 + number % 83} the {one} {verb} the {other} {place}, for the {number}th time.")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(some_text(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def other(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a RoPE base of 20,000 in place of 100,000."""
    data = bytearray(model_path.read_bytes())
    place = data.index(b"llama.rope.freq_base") + len(b"llama.rope.freq_base")
    assert struct.unpack_from("<If", data, place) == (6, 100_000.0)  # 6 is float32
    struct.pack_into("<f", data, place + 4, 20_000.0)
    path = tmp_path_factory.mktemp("other") / "other.gguf"
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def own(text: Path, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """log_probabilities() of the model."""
    return log_probabilities(model_path, text, tmp_path_factory.mktemp("logits") / "logits.npy")


def log_probabilities(path: Path, text: Path, target: Path) -> tuple[Any, Any]:
    """Of every token at every scored position, float32 [positions, n_vocab], and of the one that follows there."""
    logits, tokens = plain_llama.logits(path, text.read_text(encoding="utf-8"), N_CTX, CHUNKS, target)
    rows = logits.reshape(-1, logits.shape[-1]) - logits.max(-1).reshape(-1, 1)
    rows -= np.log(np.exp(rows).sum(1, dtype=np.float64)).astype(np.float32)[:, None]
    following = tokens[:, N_CTX // 2 + 1 :].reshape(-1)
    return rows, rows[np.arange(len(rows)), following].astype(np.float64)


def mean_and_error(values: Any) -> tuple[float, float]:
    """As llama-perplexity computes both."""
    return float(values.mean()), float(values.std() / math.sqrt(len(values) - 1))


def options(text: Path) -> list[str]:
    return ["--text", str(text), "--ctx", str(N_CTX), "--chunks", str(CHUNKS), "--json"]


def test_perplexity_is_llama_perplexitys(llmrun: Installed, text: Path, own: tuple[Any, Any]) -> None:
    done = llmrun.run("evaluate", "smollm2", *options(text))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    mean, error = mean_and_error(-own[1])
    assert 2 < math.exp(mean) < 10, "a model that understands the text, on every processor"
    assert found["perplexity"]["value"] == pytest.approx(math.exp(mean), rel=1e-3)
    assert found["perplexity"]["error"] == pytest.approx(math.exp(mean) * error, rel=1e-3)
    assert (found["chunks"], found["positions"], found["divergence"]) == (CHUNKS, CHUNKS * (N_CTX // 2 - 1), None)


@pytest.mark.slow
def test_divergence_is_llama_perplexitys(
    llmrun: Installed, text: Path, other: Path, own: tuple[Any, Any], tmp_path: Path
) -> None:
    done = llmrun.run("evaluate", str(other), "--reference", "smollm2", *options(text))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    divergence = found["divergence"]
    (base, base_following), (rows, following) = own, log_probabilities(other, text, tmp_path / "logits.npy")
    kld = np.array([np.dot(np.exp(p, dtype=np.float64), p - q) for p, q in zip(base, rows, strict=True)])
    mean, error = mean_and_error(kld)
    change = np.exp(following) - np.exp(base_following)
    for figure, expected in (
        (found["perplexity"], math.exp(-following.mean())),
        (divergence["reference_perplexity"], math.exp(-base_following.mean())),
        (divergence["ratio"], math.exp((base_following - following).mean())),
        (divergence["mean"], mean),
        (divergence["median"], np.median(kld)),
        (divergence["p90"], np.quantile(kld, 0.9)),
        (divergence["p99"], np.quantile(kld, 0.99)),
        (divergence["same_top"], (base.argmax(1) == rows.argmax(1)).mean()),
        (divergence["rms_change"], math.sqrt((change**2).mean())),
    ):
        assert figure["value"] == pytest.approx(expected, rel=2e-3)
    assert divergence["mean"]["error"] == pytest.approx(error, rel=2e-3)
    assert mean > 0.005, "another RoPE base is another model, on every processor"


@pytest.mark.slow
def test_a_quantized_kv_cache_is_the_models_alone(llmrun: Installed, text: Path) -> None:
    again = ("evaluate", "smollm2", "--reference", "smollm2", "--chunks", "1", "--json", "--text", str(text))
    plain, quantized = (json.loads(llmrun.run(*again, *more).stdout) for more in ((), ("-ctk", "q8_0")))
    assert plain["divergence"]["mean"]["value"] == 0
    assert quantized["divergence"]["mean"]["value"] > 0


@pytest.mark.slow
def test_long_texts(llmrun: Installed, text: Path) -> None:
    done = llmrun.run("evaluate", "smollm2", "--text", str(text), "--ctx", "1024", "--chunks", "1", "--long", "--json")
    found = json.loads(done.stdout)
    near, far = found["by_position"]
    assert (near["start"], near["end"], far["end"], far["positions"]) == (0, 512, 1024, 511)
    assert far["perplexity"]["value"] < near["perplexity"]["value"]  # the text repeats itself
    assert [needle["n_tokens"] for needle in found["needles"]] == [512] * 11 + [1024] * 11
    assert sum(needle["found"] for needle in found["needles"]) > 8


def test_ctrl_c_keeps_the_figures(llmrun: Installed, text: Path) -> None:
    terminal = llmrun.terminal("evaluate", "smollm2", "--text", str(text), "--ctx", "64", "--chunks", "all")
    terminal.wait(lambda: any("chunks, perplexity" in line for line in terminal.lines))
    terminal.press("c")
    assert terminal.end() == -signal.SIGINT
    assert terminal.lines[0].startswith("model"), "the bar is gone"
    assert terminal.lines[-1] == "stopped: these are the figures so far"


def test_a_text_that_is_too_short(llmrun: Installed, text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short.", encoding="utf-8")
    done = llmrun.run("evaluate", "smollm2", "--text", str(short))
    assert done.returncode == 2
    assert b"it has 3 tokens, and one chunk takes 512" in done.stderr
    assert not done.stdout


def test_score_has_the_perplexity_of_one_chunk(llmrun: Installed, text: Path) -> None:
    alike = [
        "--ctx",
        str(N_CTX),
        "--json",
        "--flash-attention",
        "on",
    ]  # `evaluate` has llama-perplexity's, `score` run's
    one = llmrun.run("evaluate", "smollm2", "--text", str(text), "--chunks", "1", *alike)
    cut = text.read_text(encoding="utf-8")[:800]  # a few more tokens than a chunk has
    scored = llmrun.run("score", "smollm2", "-", *alike, stdin=cut)
    assert (one.returncode, scored.returncode) == (0, 0), scored.stderr
    found = json.loads(scored.stdout)
    assert found["windows"] > 1
    half = [token["logprob"] for token in found["tokens"][N_CTX // 2 + 1 : N_CTX]]
    assert math.exp(-sum(half) / len(half)) == pytest.approx(json.loads(one.stdout)["perplexity"]["value"], rel=1e-6)
