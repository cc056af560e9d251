"""llama.cpp driven by its own functions alone, in a process of its own: what llmrun's answers are held against.

Owns the plain loops: a greedy one, logits of whole chunks, and llama_model_quantize with llama-quantize's parameters.
Kernels round differently from one processor to the next, so there is no sentence and no figure that a test could know
beforehand; here the same kernels say them, on the same machine. Run as a program, it does one task from stdin.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmrun.engine.llama.library import import_llama
from llmrun.gguf.reader import read_header
from llmrun.planning.hardware import probe
from llmrun.planning.plan import make_plan
from llmrun.planning.preferences import LoadPreferences

TIE = 0.1
"""Logits of two tokens this close may change places with the number of threads."""
SECONDS = 300.0


def smollm2_prompt(*turns: str) -> str:
    """What SmolLM2's own template makes of a conversation, the user's turn first and last."""
    text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    for role, turn in zip(itertools.cycle(("user", "assistant")), turns, strict=False):
        text += f"<|im_start|>{role}\n{turn}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def assert_greedy(path: Path, *turns: tuple[str, str], ends: bool = True) -> None:
    """Every token of the last answer is the likeliest that llama.cpp finds after what comes before it.

    Args:
        path: of the model.
        turns: prompt and answer of what one engine was asked in turn, each prompt whole with its control tokens. What a
            prompt has in common with the turn before is kept, as llmrun does: tokens that are computed together are
            rounded otherwise than one by one. An answer before the last may be "" if no later prompt has it.
        ends: whether the answer was allowed to end, i.e. end tokens count among the likeliest.
    """
    assert turns[-1][1]
    flash = make_plan(read_header(path), probe(), LoadPreferences()).load.flash_attention != "off"
    problem = _do("follow", path=str(path), turns=turns, ends=ends, flash=flash)
    assert not problem, problem


def logits(path: Path, text: str, n_ctx: int, chunks: int, target: Path) -> Any:
    """As llama-perplexity reads: float32 [chunks, n_ctx - n_ctx // 2 - 1, n_vocab], and the tokens [chunks, n_ctx]."""
    import numpy as np

    tokens = _do("chunks", path=str(path), text=text, n_ctx=n_ctx, chunks=chunks, target=str(target))
    return np.load(target, mmap_mode="r"), np.array(tokens)


def column_sums(path: Path, text: str, n_ctx: int, chunks: int, names: Sequence[str]) -> dict[str, list[float]]:
    """What llama-imatrix sums up: squares of each column of what these matrices are multiplied with."""
    found = _do("column_sums", path=str(path), text=text, n_ctx=n_ctx, chunks=chunks, names=list(names))
    return dict(found)


def quantize(source: Path, targets: dict[str, Path], weights: dict[str, dict[str, list[float]]] | None = None) -> None:
    """What llama-quantize does, a file for each type.

    Args:
        weights: by type, those of an importance matrix, divided by their counts.
    """
    for kind, problem in _do(
        "quantize",
        source=str(source),
        targets={kind: str(path) for kind, path in targets.items()},
        weights=weights or {},
    ).items():
        assert not problem, (kind, problem)


def _do(task: str, **arguments: Any) -> Any:
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps([task, arguments]), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---- in the process of its own


class _Model:
    def __init__(self, path: str, n_ctx: int, eval_callback: Any = None, *, flash: bool = True) -> None:
        self.llama = llama = import_llama()
        self._quiet = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self._quiet, None)
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.n_vocab = llama.llama_vocab_n_tokens(self.vocab)
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        params.n_threads = params.n_threads_batch = 1  # beside busy neighbours several would wait for each other
        if not flash:
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if eval_callback:
            self._callback = params.cb_eval = llama.ggml_backend_sched_eval_callback(eval_callback)
        self.context = llama.llama_init_from_model(self.model, params)

    def tokens(self, text: str) -> list[int]:
        data = text.encode()
        room = (ctypes.c_int32 * (len(data) + 8))()
        count = self.llama.llama_tokenize(self.vocab, data, len(data), room, len(room), True, True)
        return list(room[:count])

    def ends(self) -> list[int]:
        return [token for token in range(self.n_vocab) if self.llama.llama_vocab_is_eog(self.vocab, token)]

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        count = self.llama.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, False)
        return buffer.raw[:count]

    def forget(self, start: int) -> None:
        self.llama.llama_memory_seq_rm(self.llama.llama_get_memory(self.context), 0, start, -1)

    def decode(self, tokens: list[int], start: int, first: int) -> Any:
        """float32 [positions from first on, n_vocab], after tokens at positions from start on."""
        import numpy as np

        batch = self.llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, start + i >= first
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert self.llama.llama_decode(self.context, batch) == 0
        rows = [self.llama.llama_get_logits_ith(self.context, i) for i in range(first - start, len(tokens))]
        self.llama.llama_batch_free(batch)
        return np.stack([np.ctypeslib.as_array(row, (self.n_vocab,)) for row in rows])


def _follow(path: str, turns: list[tuple[str, str]], ends: bool, flash: bool) -> str:
    """Why the last answer is not greedy; "" if it is."""
    model = _Model(path, 4096, flash=flash)
    forbidden = [] if ends else model.ends()
    there: list[int] = []
    for number, (prompt, answer) in enumerate(turns):
        tokens = model.tokens(prompt)
        kept = min(_common(there, tokens), len(tokens) - 1)
        model.forget(kept)
        there, tokens, left = tokens[:kept], tokens[kept:], answer.encode()
        while True:
            (row,) = model.decode(tokens, len(there), len(there) + len(tokens) - 1)
            there += tokens
            if not left:
                break
            row[forbidden] = -math.inf
            likeliest = sorted((row >= row.max() - TIE).nonzero()[0].tolist(), key=lambda token: -float(row[token]))
            pieces = {token: model.piece(token) for token in likeliest}
            tokens = [token for token, piece in pieces.items() if piece and left.startswith(piece)][:1]
            if not tokens:
                return f"turn {number}: llama.cpp goes on with one of {list(pieces.values())}, not with {left!r}"
            left = left[len(pieces[tokens[0]]) :]
            if not left:  # the last token of an answer is not computed
                break
    return ""


def _common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _chunks(path: str, text: str, n_ctx: int, chunks: int, target: str) -> list[list[int]]:
    import numpy as np

    model = _Model(path, n_ctx)
    tokens = model.tokens(text)
    cut = [tokens[start : start + n_ctx] for start in range(0, chunks * n_ctx, n_ctx)]
    rows = np.lib.format.open_memmap(target, "w+", np.float32, (chunks, n_ctx - n_ctx // 2 - 1, model.n_vocab))
    begins = model.llama.llama_vocab_get_add_bos(model.vocab)
    for index, chunk in enumerate(cut):
        read = [model.llama.llama_vocab_bos(model.vocab), *chunk[1:]] if begins else chunk
        model.forget(0)
        rows[index] = model.decode(read, 0, n_ctx // 2)[:-1]
    return cut


class _Tensor(ctypes.Structure):
    """struct ggml_tensor, up to its name."""

    _fields_ = (
        ("type", ctypes.c_int32), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10), ("view_src", ctypes.c_void_p), ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64),
    )  # fmt: skip


def _column_sums(path: str, text: str, n_ctx: int, chunks: int, names: list[str]) -> dict[str, list[float]]:
    import numpy as np

    sums: dict[str, Any] = dict.fromkeys(names, 0.0)

    def look(address: int, ask: bool, _: Any) -> bool:
        tensor = _Tensor.from_address(address)
        name = _Tensor.from_address(tensor.src[0]).name.decode() if tensor.src[0] else ""
        if name not in sums or not tensor.src[1]:
            return not ask
        if not ask:
            inputs = _Tensor.from_address(tensor.src[1])
            columns, rows = inputs.ne[0], inputs.ne[1]
            values = np.ctypeslib.as_array((ctypes.c_float * (columns * rows)).from_address(inputs.data))
            sums[name] += (values.reshape(rows, columns).astype("f8") ** 2).sum(0)
        return True

    model = _Model(path, n_ctx, look)
    tokens = model.tokens(text)
    for start in range(0, chunks * n_ctx, n_ctx):
        model.forget(0)
        model.decode(tokens[start : start + n_ctx], 0, 0)  # all rows of logits, or the last layer leaves rows out
    return {name: values.tolist() for name, values in sums.items()}


def _quantize(source: str, targets: dict[str, str], weights: dict[str, dict[str, list[float]]]) -> dict[str, str]:
    return {kind: _quantize_to(source, target, kind, weights.get(kind, {})) for kind, target in targets.items()}


def _quantize_to(source: str, target: str, kind: str, weights: dict[str, list[float]]) -> str:
    llama = import_llama()
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
    rows = (llama.llama_model_imatrix_data * (len(weights) + 1))()
    for row, (name, values) in zip(rows, weights.items(), strict=False):
        row.name, row.size, row.data = name.encode(), len(values), (ctypes.c_float * len(values))(*values)
    if weights:
        params.imatrix = rows
    status = llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    return f"status {status}" if status else ""


if __name__ == "__main__":
    tasks = {"follow": _follow, "chunks": _chunks, "column_sums": _column_sums, "quantize": _quantize}
    task, arguments = json.load(sys.stdin)
    print(json.dumps(tasks[task](**arguments)))
