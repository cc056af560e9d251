"""llama.cpp through the ctypes layer of llama-cpp-python: the only file that imports llama_cpp.

Owns the model, its context and the KV cache; must not know chat, sampling or scheduling. llama-cpp-python's
package `__init__` is not executed: it drags in numpy, jinja2 and diskcache, a third of a second for nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmrun import _native
from llmrun.engine.llama.base import Aborted, DecodeError, Entry
from llmrun.engine.llama.submodules import import_submodule, package_folder
from llmrun.errors import BadModelError, CancelledError, LlmrunError, OutOfMemoryError
from llmrun.protocol.messages import Load

VERSION = "0.3.36"
# sizeof of what crosses the border by value, on 64-bit machines; another layout would corrupt memory silently.
_SIZES = {"llama_model_params": 80, "llama_context_params": 160, "llama_batch": 56}
_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}  # llama_flash_attn_type
KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
"""Types that llama.cpp's KV cache can have -> ggml's number."""
_NO_TOKEN = -1
_CPU_DEVICE = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_SMALL_STACK = ctypes.create_string_buffer(2048)  # Linux's MINSIGSTKSZ on x86; tiles need 8 KiB more


@functools.cache
def import_llama() -> Any:
    """llama_cpp.llama_cpp without its package's `__init__`.

    Raises:
        LlmrunError: it is missing, or not the version this file was written for.
    """
    folder = package_folder("llama_cpp")
    if folder is None:
        raise LlmrunError("llama-cpp-python is not installed", hint=f"pip install llama-cpp-python=={VERSION}")
    found = re.search(r'__version__ = "([^"]+)"', (folder / "__init__.py").read_text(encoding="utf-8"))
    if not found or found[1] != VERSION:
        raise LlmrunError(
            f"llama-cpp-python is version {found[1] if found else 'unknown'}",
            why=f"llmrun is written for the memory layout of {VERSION}",
            hint=f"pip install llama-cpp-python=={VERSION}",
        )
    with _small_signal_stack():
        llama = import_submodule("llama_cpp", "llama_cpp")
        _choose_kernels(llama._lib)
    for struct, size in _SIZES.items():
        if ctypes.sizeof(getattr(llama, struct)) != size:
            raise LlmrunError(f"{struct} of llama-cpp-python has an unexpected size on this platform")
    return llama


class _SignalStack(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def _small_signal_stack() -> Iterator[None]:
    """Inside, the kernel refuses Intel's AMX tiles on Linux, where GCC miscompiles their set-up: prompts would crash.

    See ggml-org/llama.cpp issue 20824 and pull request 26954. The kernel grants tiles only if every thread's signal
    stack could hold them, so a small one on this thread makes ggml fall back to its AVX-512 kernels. Afterwards the
    thread has its own again: a signal handler would not fit on the small one.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    sigaltstack = ctypes.CDLL(None).sigaltstack
    small = _SignalStack(ctypes.addressof(_SMALL_STACK), 0, len(_SMALL_STACK))
    before = _SignalStack()
    sigaltstack(ctypes.byref(small), ctypes.byref(before))
    try:
        yield
    finally:
        sigaltstack(ctypes.byref(before), None)


def _choose_kernels(library: Any) -> None:
    """Let ggml decide now, and for good, which of the processor's special kernels it uses."""
    pointer, names = ctypes.c_void_p, "ggml_backend_dev_by_type ggml_backend_dev_backend_reg"
    for name in (*names.split(), "ggml_backend_reg_get_proc_address"):
        getattr(library, name).restype = pointer
    device = library.ggml_backend_dev_by_type(_CPU_DEVICE)
    registry = library.ggml_backend_dev_backend_reg(pointer(device))
    found = library.ggml_backend_reg_get_proc_address(pointer(registry), b"ggml_backend_dev_get_extra_bufts")
    if found:
        ctypes.CFUNCTYPE(pointer, pointer)(found)(device)


class LlamaModel:
    """Weights and vocabulary of one model file.

    Attributes:
        path: of the file.
        gpu_layers: how many layers are on the GPU, as asked.
        repack: whether weights may be brought into another order, as asked.
        mmap: whether the file may be mapped into memory, as asked.
        n_vocab: tokens in the vocabulary.
        n_ctx_train: context window the model was trained on.
        description: llama.cpp's, e.g. "llama 135M Q4_1".
        chat_template: Jinja text from the file, or None.
        bos_text: text of the begin-of-sequence token, "" where there is none.
        eos_text: the same for the end-of-sequence token.
        suppressed: tokens the model's makers say must never be sampled.
        shown: control tokens that have a text all the same, because people want to see them.
    """

    shown: frozenset[int] = frozenset()

    def __init__(
        self,
        path: str,
        gpu_layers: int,
        flag: _native.CancelFlag,
        *,
        verbose: bool = False,
        repack: bool = True,
        mmap: bool = True,
    ) -> None:
        """Load the weights.

        Args:
            flag: setting it stops the load; its progress tells how far it is.
            verbose: llama.cpp's whole log goes to stderr, not only its warnings.
            repack: weights may be brought into the order that this processor's kernels like best.
            mmap: the file is mapped into memory, not read.

        Raises:
            BadModelError: llama.cpp refuses the file; its log says why.
            CancelledError: the flag was set.
        """
        self.llama = llama = import_llama()
        self.path, self.gpu_layers, self.flag = path, gpu_layers, flag
        self.repack, self.mmap = repack, mmap
        self._log = llama.llama_log_callback(_native.log_callback_address)
        llama.llama_log_set(self._log, ctypes.c_void_p(int(verbose)))
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.use_extra_bufts = repack
        if not mmap:
            params.load_mode = llama.LLAMA_LOAD_MODE_NONE
        params.progress_callback = llama.llama_progress_callback(_native.progress_callback_address)
        params.progress_callback_user_data = flag.address
        self.pointer = llama.llama_model_load_from_file(os.fsencode(path), params)
        if flag.is_set:
            raise CancelledError("loading was cancelled")
        if not self.pointer:
            raise BadModelError(f"llama.cpp can't load {Path(path).name}")
        self.vocab = llama.llama_model_get_vocab(self.pointer)
        self.n_vocab = int(llama.llama_vocab_n_tokens(self.vocab))
        self._describe()
        self._control = _ControlTexts(llama, self.vocab, self.n_vocab)

    def _describe(self) -> None:
        llama, vocab = self.llama, self.vocab
        self.n_ctx_train = int(llama.llama_model_n_ctx_train(self.pointer))
        buffer = ctypes.create_string_buffer(256)
        llama.llama_model_desc(self.pointer, buffer, len(buffer))
        self.description = buffer.value.decode("utf-8", "replace")
        template = llama.llama_model_chat_template(self.pointer, None)
        self.chat_template = template.decode("utf-8", "replace") if template else None
        self.bos = int(llama.llama_vocab_bos(vocab))
        self.bos_text = self._text(self.bos)
        self.eos_text = self._text(int(llama.llama_vocab_eos(vocab)))
        self._adds_bos = bool(llama.llama_vocab_get_add_bos(vocab)) and self.bos != _NO_TOKEN
        count = ctypes.c_int32()
        tokens = llama.llama_vocab_get_suppress_tokens(vocab, ctypes.byref(count))
        self.suppressed = tuple(tokens[: count.value]) if tokens else ()

    def is_for(self, load: Load) -> bool:
        """Whether these weights were loaded as this asks for."""
        asked = (load.path, load.gpu_layers, load.repack, load.mmap)
        return (self.path, self.gpu_layers, self.repack, self.mmap) == asked

    def close(self) -> None:
        """Free the weights; the model can't be used any more."""
        self._control.join()
        self.llama.llama_model_free(self.pointer)

    def _text(self, token: int) -> str:
        """A token's text in the vocabulary; "" for no token."""
        if token == _NO_TOKEN:
            return ""
        return bytes(self.llama.llama_vocab_get_text(self.vocab, token)).decode("utf-8", "replace")

    @property
    def devices(self) -> tuple[str, ...]:
        """What ggml can compute on, e.g. ("CPU",) or ("CUDA0", "CPU")."""
        library = self.llama._lib
        get, name = library.ggml_backend_dev_get, library.ggml_backend_dev_name
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        library.ggml_backend_dev_count.restype = ctypes.c_size_t
        return tuple(name(get(i)).decode() for i in range(library.ggml_backend_dev_count()))

    @property
    def control_texts(self) -> tuple[str, ...]:
        """Texts that llama.cpp's tokenizer turns into control tokens when it is told to parse them."""
        return self._control.texts

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """See base.Backend; lone surrogates become U+FFFD. Adds no begin-of-sequence token by itself."""
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        while True:
            tokens = (ctypes.c_int32 * room)()
            count = self.llama.llama_tokenize(self.vocab, data, len(data), tokens, room, False, special)
            if count >= 0:
                return tokens[:count]
            room = -count

    def with_bos(self, tokens: list[int]) -> list[int]:
        """The prompt's tokens with exactly one begin-of-sequence token, where the model wants one."""
        if not self._adds_bos or tokens[:1] == [self.bos]:
            return tokens
        return [self.bos, *tokens]

    @functools.cache  # noqa: B019 - one model lives as long as the process
    def token_bytes(self, token: int) -> bytes:
        """See base.Backend."""
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self.llama.llama_token_to_piece(self.vocab, token, buffer, room, 0, token in self.shown)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    @functools.cache  # noqa: B019
    def is_end(self, token: int) -> bool:
        """See base.Backend."""
        return bool(self.llama.llama_vocab_is_eog(self.vocab, token))


class LlamaBackend:
    """A model's context and KV cache: base.Backend over llama.cpp.

    The KV cache begins small and doubles when a sequence outgrows it, up to the context window that was asked for:
    a window of 128k tokens costs its gigabytes only when they are used, and no start waits for their zeroing.
    """

    def __init__(self, model: LlamaModel, load: Load) -> None:
        """Make the context.

        Raises:
            BadModelError: the model has no KV cache, so it can't generate text.
            OutOfMemoryError: the context does not fit.
        """
        self.model = model
        self._llama = model.llama
        self._load = load
        self.n_vocab = model.n_vocab
        self.n_ctx = load.n_ctx
        self.n_batch = load.n_batch
        self.n_seq_max = load.n_seq_max
        self.suppressed = model.suppressed
        self.tokenize = model.tokenize
        self.token_bytes = model.token_bytes
        self.is_end = model.is_end
        self._room = min(load.n_ctx_start, load.n_ctx)
        self._context = self._make_context(self._room)
        self._memory = self._llama.llama_get_memory(self._context)
        if not self._memory:
            raise BadModelError("this model can't generate text", why="it is an encoder, made for embeddings")
        # Indexing a library makes a function object of our own, whose result is the bare address.
        self._get_logits = self._llama._lib["llama_get_logits_ith"]
        self._get_logits.argtypes, self._get_logits.restype = (ctypes.c_void_p, ctypes.c_int32), ctypes.c_void_p
        self._batch = self._llama.llama_batch_init(self.n_batch, 0, 1)
        for i in range(self.n_batch):
            self._batch.n_seq_id[i] = 1
        if load.warm_up:
            self._warm_up()

    def close(self) -> None:
        """Free the context and its KV cache; the backend can't be used any more."""
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)

    def _make_context(self, n_ctx: int) -> Any:
        llama, load = self._llama, self._load
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx * load.n_seq_max
        params.n_batch = load.n_batch
        params.n_ubatch = min(load.n_batch, load.n_ubatch)
        params.n_seq_max = load.n_seq_max
        params.n_threads = load.threads
        params.n_threads_batch = load.threads_batch or load.threads
        params.flash_attn_type = _FLASH_ATTENTION[load.flash_attention]
        params.type_k, params.type_v = KV_TYPES[load.kv_type_k], KV_TYPES[load.kv_type_v]
        params.abort_callback = llama.ggml_abort_callback(_native.abort_callback_address)
        params.abort_callback_data = self.model.flag.address
        context = llama.llama_init_from_model(self.model.pointer, params)
        if not context:
            raise OutOfMemoryError(
                f"there is no memory for a context window of {n_ctx:,} tokens",
                hint="ask for a smaller one with --ctx",
            )
        return context

    def _warm_up(self) -> None:
        """One decode of one token, so that pages and threads are there when the first prompt comes."""
        self.decode([Entry(max(self.model.bos, 0), 0, 0, False)])
        self.forget(0, 0)

    def decode(self, batch: Sequence[Entry]) -> None:
        """See base.Backend."""
        native = self._batch
        native.n_tokens = len(batch)
        tokens, positions, sequences, logits = native.token, native.pos, native.seq_id, native.logits
        for i, (token, position, sequence_id, wants_logits) in enumerate(batch):
            tokens[i] = token
            positions[i] = position
            sequences[i][0] = sequence_id
            logits[i] = wants_logits
        needed = max(entry.position for entry in batch) + 1
        if needed > self._room:
            self._grow(needed)
        status = self._llama.llama_decode(self._context, native)
        if status == 2:
            raise Aborted
        if status != 0:
            raise DecodeError(f"llama.cpp could not decode a batch of {len(batch)} tokens", why=f"status {status}")

    def _grow(self, needed: int) -> None:
        """Move every sequence into a context with room for more tokens."""
        llama = self._llama
        room = min(self.n_ctx, max(2 * self._room, needed))
        bigger = self._make_context(room)
        for sequence in range(self.n_seq_max):
            state = self.save(sequence)
            if llama.llama_state_seq_set_data(bigger, _bytes_of(state), len(state), sequence) != len(state):
                llama.llama_free(bigger)
                raise DecodeError("llama.cpp could not move the KV cache into a larger context")
        llama.llama_free(self._context)
        self._context, self._room = bigger, room
        self._memory = llama.llama_get_memory(bigger)

    def drop(self, sequence_id: int, start: int, end: int) -> bool:
        """See base.Backend."""
        llama = self._llama
        if not llama.llama_memory_can_shift(self._memory):
            return False
        if not llama.llama_memory_seq_rm(self._memory, sequence_id, start, end):
            return False
        llama.llama_memory_seq_add(self._memory, sequence_id, end, -1, start - end)
        return True

    def save(self, sequence_id: int) -> bytearray:
        """See base.Backend."""
        llama = self._llama
        state = bytearray(llama.llama_state_seq_get_size(self._context, sequence_id))
        copied = llama.llama_state_seq_get_data(self._context, _bytes_of(state), len(state), sequence_id)
        del state[copied:]
        return state

    def restore(self, sequence_id: int, state: bytes, n_tokens: int) -> bool:
        """See base.Backend."""
        if n_tokens > self.n_ctx:
            return False
        if n_tokens > self._room:
            self._grow(n_tokens)
        self.forget(sequence_id, 0)
        pointer = ctypes.cast(ctypes.c_char_p(state), ctypes.POINTER(ctypes.c_uint8))
        if self._llama.llama_state_seq_set_data(self._context, pointer, len(state), sequence_id) == len(state):
            return True
        self.forget(sequence_id, 0)
        return False

    def logits(self, index: int) -> int:
        """See base.Backend."""
        return self._get_logits(self._context, index) or 0

    def forget(self, sequence_id: int, start: int) -> bool:
        """See base.Backend."""
        return bool(self._llama.llama_memory_seq_rm(self._memory, sequence_id, start, -1))


def _bytes_of(data: bytearray) -> Any:
    """A bytearray's memory for llama.cpp; nothing is copied."""
    return (ctypes.c_uint8 * len(data)).from_buffer(data)


class _ControlTexts:
    """Collects the control tokens' texts beside the making of the context, which needs no Python."""

    def __init__(self, llama: Any, vocab: Any, n_vocab: int) -> None:
        self._llama, self._vocab, self._n_vocab = llama, vocab, n_vocab
        self._texts: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        llama, vocab = self._llama, self._vocab
        attribute = llama.llama_vocab_get_attr
        special = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN
        tokens = [token for token in range(self._n_vocab) if attribute(vocab, token) & special]
        texts = (llama.llama_vocab_get_text(vocab, token).decode("utf-8", "replace") for token in tokens)
        self._texts = tuple(texts)

    def join(self) -> None:
        self._thread.join()

    @property
    def texts(self) -> tuple[str, ...]:
        self.join()
        return self._texts
