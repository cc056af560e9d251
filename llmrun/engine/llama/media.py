"""Image encoding: images become embedding vectors that a model reads instead of tokens, through llama.cpp's libmtmd.

Owns the projector of a model and every object of libmtmd; must not know prompts, batches or scheduling. Images are
untrusted input, and may crash this process in libmtmd.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmrun import _native
from llmrun.engine.llama.base import ALLOCATING, DecodeError
from llmrun.engine.llama.library import import_llama, import_mtmd
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import BadModelError, OutOfMemoryError, UsageError
from llmrun.protocol.loading import Load

_TEXT, _IMAGE = 0, 1  # mtmd_input_chunk_type
_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_FLOAT_BYTES = 4
_NO_FFMPEG = os.fsencode(os.devnull)  # instead of a folder: libmtmd would pass unreadable files to ffmpeg
_HINT = "--mmproj FILE names another projector"


class MediaChunk:
    """An image or a tile of one: an engine.core.images.ImageChunk. Its ids are negative, from the hash of the image."""

    def __init__(
        self, projector: Projector, pointer: int, ids: tuple[int, ...], n_positions: int, *, causal: bool
    ) -> None:
        self.ids, self.n_positions, self.causal, self.seconds = ids, n_positions, causal, 0.0
        self._projector, self._pointer = projector, pointer
        self._free = weakref.finalize(self, projector.free_chunk, pointer)
        self._vectors: ctypes.Array[ctypes.c_float] | None = None

    def positions(self, first: int, indexes: slice) -> Sequence[int]:
        return self._projector.positions(self._pointer, first, len(self.ids), indexes)

    def address(self, first: int) -> int:
        if self._vectors is None:
            began = time.perf_counter()
            self._vectors = self._projector.encode(self._pointer, len(self.ids))
            self.seconds += time.perf_counter() - began
        return ctypes.addressof(self._vectors) + first * self._projector.n_embd * _FLOAT_BYTES

    def close(self) -> None:
        self._vectors = None
        self._free()


class Projector:
    """The image encoder of one model; its file is read for the first image.

    Attributes:
        n_embd: floats of a vector.
    """

    def __init__(self, model: LlamaModel, load: Load) -> None:
        self._model, self._path, self._load = model, Path(load.projector), load
        self.n_embd = int(model.llama.llama_model_n_embd_inp(model.pointer))
        self._max_tokens = min(load.n_batch, load.n_ubatch)  # of an image that must be decoded in one batch
        self._mismatch = f"{self._path.name} can't encode images for {Path(model.path).name}"
        self._mtmd: Any = None
        self._pointer = 0

    def pieces(self, data: bytes, name: str) -> list[list[int] | MediaChunk]:
        """Return an image's parts in a prompt: its tiles and the token ids around them.

        Raises:
            BadModelError: the projector does not fit the model.
            UsageError: the image can't be decoded, or is too large for the model.
        """
        if not self._pointer:
            self._open()
        with self._chunks_of(data, name) as chunks:
            mtmd = self._mtmd
            count = mtmd.mtmd_input_chunks_size(chunks)
            return [self._piece(mtmd.mtmd_input_chunks_get(chunks, index), index, data) for index in range(count)]

    def _open(self) -> None:
        self._mtmd = mtmd = import_mtmd()
        llama, log = import_llama(), list[str]()

        def collect(level: int, text: bytes, data: Any) -> None:
            if level == _ERROR:
                log.append(text.decode("utf-8", "replace"))

        callback = llama.llama_log_callback(collect)
        mtmd.mtmd_helper_log_set(callback, None)
        params = mtmd.mtmd_context_params_default()
        # libmtmd would take an RPC worker for a GPU.
        params.use_gpu = self._load.gpu_layers != 0 and not self._load.workers
        params.print_timings = params.warmup = False
        params.n_threads = self._load.threads_batch or self._load.threads
        pointer = mtmd.mtmd_init_from_file(os.fsencode(self._path), self._model.pointer, params)
        mtmd.mtmd_helper_log_set(llama.llama_log_callback(_native.log_callback_address), ctypes.c_void_p(0))
        if not pointer:
            reason = log[-1].splitlines()[0].rpartition("error: ")[2] if log else "llama.cpp refuses it"
            raise BadModelError(self._mismatch, why=reason, hint=_HINT)
        if not mtmd.mtmd_support_vision(pointer):
            mtmd.mtmd_free(pointer)
            raise BadModelError(self._mismatch, why="it is for sound, not for images")
        status = self._path.stat()
        self._key = f"{status.st_size} {status.st_mtime_ns} ".encode()
        self._pointer = pointer

    @contextmanager
    def _chunks_of(self, data: bytes, name: str) -> Iterator[int]:
        """Yield libmtmd's chunks of an image, freed afterwards."""
        mtmd = self._mtmd
        options = mtmd.mtmd_helper_init_opt_default()
        options.video_params.ffmpeg_bin_dir = _NO_FFMPEG
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(self._pointer, buffer, len(data), False, options)
        if not bitmap:
            raise UsageError(f"{name} can't be read as an image", why="it is damaged", hint="save it as PNG or JPEG")
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            part = mtmd.mtmd_input_part(bitmap=bitmap)
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            if mtmd.mtmd_tokenize_from_parts(self._pointer, chunks, parts, 1, False) != 0:
                raise UsageError(f"{name} can't be used", why="the model's projector refuses it")
            yield chunks
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _piece(self, chunk: int, index: int, data: bytes) -> list[int] | MediaChunk:
        mtmd = self._mtmd
        if mtmd.mtmd_input_chunk_get_type(chunk) == _TEXT:
            size = ctypes.c_size_t()
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(size))
            if min(tokens[: size.value], default=0) < 0:
                reason = "its vocabulary lacks a token that delimits images"
                raise BadModelError(self._mismatch, why=reason, hint=_HINT)
            return list(tokens[: size.value])
        n_tokens = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        causal = not mtmd.mtmd_decode_use_non_causal(self._pointer, chunk)
        if not causal and n_tokens > self._max_tokens:
            reason = f"its {n_tokens:,} tokens must fit into one batch of at most {self._max_tokens:,}"
            raise UsageError("the image is too large for this model", why=reason)
        digest = hashlib.shake_256(self._key + index.to_bytes(4, "big") + data).digest(4 * n_tokens)
        ids = tuple(-1 - (number >> 1) for number in struct.unpack(f">{n_tokens}I", digest))
        n_positions = mtmd.mtmd_input_chunk_get_n_pos(chunk)
        return MediaChunk(self, mtmd.mtmd_input_chunk_copy(chunk), ids, n_positions, causal=causal)

    def positions(self, chunk: int, first: int, n_tokens: int, indexes: slice) -> Sequence[int]:
        """Return the positions of some of a chunk's tokens if the chunk begins at position `first`."""
        if not self._mtmd.mtmd_decode_use_mrope(self._pointer):
            return range(first, first + n_tokens)[indexes]
        found = (self._mtmd.mtmd_decoder_pos * n_tokens)()
        image = self._mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        self._mtmd.mtmd_helper_image_get_decoder_pos(image, first, found)
        # llama.cpp's order of M-RoPE dimensions: time, row, column, and one that is 0.
        return [getattr(each, name) for name in "tyxz" for each in found[indexes]]

    def encode(self, chunk: int, n_tokens: int) -> ctypes.Array[ctypes.c_float]:
        """Compute the vectors of a chunk.

        Raises:
            DecodeError: libmtmd failed.
            OutOfMemoryError: there is no memory for the vectors.
        """
        with ALLOCATING:
            if self._mtmd.mtmd_encode_chunk(self._pointer, chunk) != 0:
                raise DecodeError("llama.cpp could not encode an image")
            found = self._mtmd.mtmd_get_output_embd(self._pointer)
            try:
                vectors = (ctypes.c_float * (n_tokens * self.n_embd))()
            except MemoryError:
                raise OutOfMemoryError("there is no memory for an image") from None
        ctypes.memmove(vectors, found, ctypes.sizeof(vectors))
        return vectors

    def free_chunk(self, chunk: int) -> None:
        self._mtmd.mtmd_input_chunk_free(chunk)
