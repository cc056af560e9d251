"""Files that are no model: one line of why, nothing on stdout, no hang, no crash of the engine."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import TensorSpec, gguf, runnable_metadata, runnable_model, runnable_tensors, write
from support.installed import Installed, only_error_line

from llmrun.errors import LlmrunError
from llmrun.gguf.pooling import makes_embeddings
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.model.loading import prepare
from llmrun.models.registry import ModelSpec
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.params import Limits
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import EngineHandle, launch

Refused = Callable[[Path], tuple[int, str]]

SECONDS = 120.0
OK, USAGE, NOT_FOUND, BAD_MODEL, CRASHED = 0, 2, 3, 7, 8


@pytest.fixture
def refused(llmrun: Installed, tmp_path: Path) -> Refused:
    """refused(path): exit status and stderr of running it, after the checks that hold for all of them."""

    def run(path: Path) -> tuple[int, str]:
        done = llmrun.run("run", str(path), "hi", seconds=SECONDS)
        stderr = done.stderr.decode()
        assert done.stdout == b""
        assert path.name in only_error_line(stderr)
        assert "  why: " in stderr or "  try: " in stderr
        assert "engine died" not in stderr
        return done.returncode, stderr

    return run


@pytest.mark.parametrize("share", [0.00001, 0.5])
def test_truncated(refused: Refused, model_path: Path, tmp_path: Path, share: float) -> None:
    whole = model_path.read_bytes()
    bad = tmp_path / "truncated.gguf"
    bad.write_bytes(whole[: int(len(whole) * share)])
    assert refused(bad)[0] == BAD_MODEL


def test_fifo(refused: Refused, tmp_path: Path) -> None:
    bad = tmp_path / "fifo.gguf"
    os.mkfifo(bad)
    assert refused(bad)[0] in {NOT_FOUND, BAD_MODEL}


def test_missing(refused: Refused, tmp_path: Path) -> None:
    assert refused(tmp_path / "missing.gguf")[0] == NOT_FOUND


def test_terminal_controls_in_a_file_name_are_not_obeyed(llmrun: Installed, tmp_path: Path) -> None:
    bad = tmp_path / "evil\x1b]0;pwned\x07.gguf"
    bad.write_bytes(b"no model")
    done = llmrun.run("run", str(bad), "hi", seconds=SECONDS)
    assert done.returncode in {USAGE, BAD_MODEL}
    assert b"\x1b" not in done.stderr
    assert b"\x07" not in done.stderr


def test_the_model_under_another_name_and_through_a_link(llmrun: Installed, model_path: Path, tmp_path: Path) -> None:
    link = tmp_path / "ein Modell é 模型.gguf"
    link.symlink_to(model_path)
    assert llmrun.run("run", str(link), "--max-tokens", "1", "hi").returncode == 0


# ---- files that pass the pre-check and are wrong all the same: llama.cpp decides

BATCHES, BATCH = 5, 25
_NUMBERS = (0, 1, 2, 3, 7, 15, 16, 31, 32, 33, 64, 255, 256, 513, 65_535, 2**31 - 1, 2**31, 2**32 - 1)
_FRACTIONS = (0.0, -1.0, 1e-45, 1e38, float("nan"), float("inf"), 0.5)
_TEXTS = ("", "none", "yarn", "longrope", "llama", "gpt2", "t5", "default", "<|im_end|>", "x" * 300)
_SETTINGS = (
    "context_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv", "attention.scale",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "vocab_size",
    "rope.scaling.original_context_length", "expert_feed_forward_length", "pooling_type", "attention.causal",
    "attention.clamp_kqv", "attention.max_alibi_bias", "embedding_length_out", "attention.key_length_swa",
    "attention.sliding_window", "rope.dimension_sections", "classifier.output_labels", "embedding_scale",
    "residual_scale", "logit_scale", "final_logit_softcapping", "rope.scaling.attn_factor", "expert_count",
)  # fmt: skip
_VOCABULARY = (
    "pre", "scores", "token_type", "merges", "bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id",
    "add_bos_token", "add_eos_token", "add_space_prefix", "token_type_count", "suppress_tokens", "eot_token_id",
    "remove_extra_whitespaces", "precompiled_charsmap", "fim_pre_token_id", "model",
)  # fmt: skip
# Type -> elements and bytes of a block.
_TYPES = {1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144), 24: (1, 1), 26: (1, 4), 30: (1, 2), 39: (32, 17)}


def any_value(source: random.Random) -> Any:
    """Something that may stand in metadata."""
    kind = source.randrange(10)
    if kind < 5:
        return source.choice(_NUMBERS)
    if kind < 7:
        return source.choice(_FRACTIONS)
    if kind < 8:
        return source.choice(_TEXTS)
    length = source.choice((0, 1, 2, 4, 261))
    return [source.choice((0, 1, 2, 6, -1)) for _ in range(length)]


def changed_tensor(tensor: TensorSpec, source: random.Random) -> TensorSpec:
    """The same with another type or shape."""
    kind = source.choice(list(_TYPES))
    elements, size = _TYPES[kind]
    shape = source.choice((tensor.shape, tensor.shape[::-1], (*tensor.shape, 1), (*tensor.shape, 2)))
    if shape[0] % elements:
        kind, elements, size = 0, 1, 4
    return TensorSpec(tensor.name, shape, kind, math.prod(shape) // elements * size)


def changed_model(source: random.Random) -> bytes:
    """The smallest model with something changed that a header can say, however wrong."""
    keys, tensors = runnable_metadata(), runnable_tensors()
    for _ in range(source.choice((1, 1, 2))):
        way = source.randrange(4)
        if way == 0:
            keys[f"llama.{source.choice(_SETTINGS)}"] = any_value(source)
        elif way == 1:
            keys[f"tokenizer.ggml.{source.choice(_VOCABULARY)}"] = any_value(source)
        elif way == 2:
            index = source.randrange(len(tensors))
            tensors[index] = changed_tensor(tensors[index], source)
        else:
            words = [*keys["tokenizer.ggml.tokens"]]
            words[source.randrange(3, len(words))] = source.choice(("", "<0x", "a", "x" * 5000, "</s>", "<|im_end|>"))
            keys["tokenizer.ggml.tokens"] = words
    return gguf(keys, tensors)


def that_pass(folder: Path, source: random.Random) -> Iterator[Path]:
    """Files that the pre-check lets through."""
    path = folder / "changed.gguf"
    while True:
        write(path, changed_model(source))
        try:
            check(read_header(path))
        except LlmrunError:
            continue
        yield path


def end_of(path: Path, launched: EngineHandle) -> int:
    """The exit status that running a file would have."""
    engine = EngineClient(launched)
    try:
        model = prepare(ModelSpec(path.name, path=path), path, LoadPreferences(n_ctx=256, threads=1))
        model.start(engine)
        for _ in model.generate("hi", limits=Limits(max_tokens=1)):
            pass
    except LlmrunError as error:
        return error.exit_status
    finally:
        engine.close()
    return OK


def test_the_smallest_model_runs(tmp_path: Path) -> None:
    assert end_of(write(tmp_path / "smallest.gguf", runnable_model()), launch()) == OK


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_what_passes_the_check_ends_well_or_is_named(tmp_path: Path, batch: int) -> None:
    source = random.Random(batch)
    ahead = launch()  # the next engine starts while this one works
    for _, path in zip(range(BATCH), that_pass(tmp_path, source), strict=False):
        launched, ahead = ahead, launch()
        status = end_of(path, launched)
        if status == USAGE:
            assert makes_embeddings(read_header(path))
        else:
            assert status in {OK, BAD_MODEL, CRASHED}, read_header(path).metadata
    EngineClient(ahead).close()


@pytest.mark.parametrize(
    "changes",
    [{"tokenizer.ggml.pre": "nonsense", "tokenizer.ggml.model": "gpt2"}, {"llama.feed_forward_length": 1000}],
)
def test_the_command_says_why(llmrun: Installed, tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write(tmp_path / "changed.gguf", runnable_model(changes))
    done = llmrun.run("run", str(path), "hi", "--max-tokens", "1", seconds=SECONDS)
    assert done.returncode == BAD_MODEL
    assert path.name in only_error_line(done.stderr.decode())
