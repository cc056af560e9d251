"""The encoding of images and audio into embedding vectors that a model reads instead of tokens, through libmtmd.

Owns the projector of a model and every object of libmtmd; must not know prompts, batches or scheduling. The files
are untrusted input, and may crash this process in libmtmd.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun import _native
from llmrun.engine.llama.base import ALLOCATING, Aborted, CheckedFile, DecodeError, check_seconds
from llmrun.engine.llama.library import import_llama, import_mtmd
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import BadModelError, OutOfMemoryError, UsageError
from llmrun.protocol.loading import Load
from llmrun.protocol.media import PLURALS, Modality, conversion

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_TEXT, _AUDIO = 0, 2  # mtmd_input_chunk_type
_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_FLOAT_BYTES = 4
_NO_FFMPEG = os.fsencode(os.devnull)  # instead of a folder: libmtmd would pass unreadable files to ffmpeg
_HINT = "--mmproj FILE names another projector"


class MediaChunk:
    """An image, a tile of one, or half a minute of audio, as vectors instead of tokens.

    Attributes:
        ids: its token ids in a sequence, all negative, from the hash of the file.
        n_positions: positions that it occupies.
        causal: each vector sees only those before it; otherwise all are decoded in one batch.
        seconds: that encoding took.
    """

    def __init__(
        self,
        projector: Projector,
        pointer: int,
        ids: tuple[int, ...],
        n_positions: int,
        modality: Modality,
        *,
        causal: bool,
    ) -> None:
        self.ids, self.n_positions, self.causal, self.seconds = ids, n_positions, causal, 0.0
        self._projector, self._pointer, self._modality = projector, pointer, modality
        self._free = weakref.finalize(self, projector.free_chunk, pointer)
        self._vectors: ctypes.Array[ctypes.c_float] | None = None

    def positions(self, first: int, indexes: slice) -> Sequence[int]:
        """Return the positions of these vectors if the chunk begins at position first; see EmbeddedInput."""
        return self._projector.positions(self._pointer, first, len(self.ids), indexes)

    @property
    def encoded(self) -> float:
        """The share of the vectors that is computed, 0 if it is unknown. Safe from any thread."""
        return self._projector.share(self._modality) if self._vectors is None else 1.0

    def address(self, first: int) -> int:
        """Return the address of the floats from vector first on; compute the vectors at the first call."""
        if self._vectors is None:
            began = time.perf_counter()
            self._vectors = self._projector.encode(self._pointer, len(self.ids))
            self.seconds += time.perf_counter() - began
        return ctypes.addressof(self._vectors) + first * self._projector.n_embd * _FLOAT_BYTES

    def close(self) -> None:
        """Free the vectors."""
        self._vectors = None
        self._free()


def as_shown(pixels: NDArray[numpy.uint8], orientation: int) -> NDArray[numpy.uint8]:
    """Return the pixels of an image, shape (rows, columns, colors), turned and mirrored as Exif numbers it."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


class EncodedFile(NamedTuple):
    """An image or an audio file in a prompt."""

    pieces: list[list[int] | MediaChunk]  # its chunks, and the token ids around them
    seconds: float  # of audio


class Projector:
    """The image and audio encoders of one model; their file is read for the first image or audio.

    Attributes:
        n_embd: floats of a vector.
        modalities: kinds of files that it encodes.
    """

    def __init__(self, model: LlamaModel, load: Load) -> None:
        self._model, self._path, self._load = model, Path(load.projector), load
        self.n_embd = int(model.llama.llama_model_n_embd_inp(model.pointer))
        self._max_tokens = min(load.n_batch, load.n_ubatch)  # of an image that must be decoded in one batch
        from llmrun.gguf.reader import read_encoders  # most engines read no file by themselves

        self._n_layers = read_encoders(self._path)
        self.modalities = frozenset(self._n_layers)
        self._mtmd: Any = None
        self._pointer = 0

    def pieces(self, file: CheckedFile, name: str) -> EncodedFile:
        """Return the parts of an image or an audio file in a prompt.

        Raises:
            BadModelError: the projector does not fit the model, or can't encode files of this kind.
            UsageError: the file can't be decoded, or is too large for the model.
        """
        modality = file.modality
        if not self._pointer:
            self._open(modality)
        mtmd = self._mtmd
        can_encode = mtmd.mtmd_support_audio if modality == "audio" else mtmd.mtmd_support_vision
        if not can_encode(self._pointer):
            raise self._refusal(f"it has no encoder for {PLURALS[modality]}", modality)
        with self._bitmap_of(file, name) as bitmap, self._chunks_of(bitmap, name) as chunks:
            seconds = 0.0
            if modality == "audio":
                seconds = mtmd.mtmd_bitmap_get_nx(bitmap) / mtmd.mtmd_get_audio_sample_rate(self._pointer)
            count = mtmd.mtmd_input_chunks_size(chunks)
            each = (mtmd.mtmd_input_chunks_get(chunks, index) for index in range(count))
            return EncodedFile([self._piece(chunk, index, file) for index, chunk in enumerate(each)], seconds)

    def _open(self, modality: Modality) -> None:
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
        params.cb_eval = llama.ggml_backend_sched_eval_callback(_native.eval_callback_address)
        params.cb_eval_user_data = self._model.flag.address
        pointer = mtmd.mtmd_init_from_file(os.fsencode(self._path), self._model.pointer, params)
        mtmd.mtmd_helper_log_set(llama.llama_log_callback(_native.log_callback_address), ctypes.c_void_p(0))
        if not pointer:
            reason = log[-1].splitlines()[0].rpartition("error: ")[2] if log else "llama.cpp refuses it"
            raise self._refusal(reason, modality)
        status = self._path.stat()
        self._key = f"{status.st_size} {status.st_mtime_ns} ".encode()
        self._pointer = pointer
        weakref.finalize(self, mtmd.mtmd_free, pointer).atexit = False

    def _refusal(self, why: str, modality: Modality) -> BadModelError:
        what = f"{self._path.name} can't encode {PLURALS[modality]} for {Path(self._model.path).name}"
        return BadModelError(what, why=why, hint=_HINT)

    @contextmanager
    def _bitmap_of(self, file: CheckedFile, name: str) -> Iterator[int]:
        """Yield the pixels or samples of a file as libmtmd's bitmap, freed afterwards."""
        mtmd, data = self._mtmd, file.data
        options = mtmd.mtmd_helper_init_opt_default()
        options.video_params.ffmpeg_bin_dir = _NO_FFMPEG
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(self._pointer, buffer, len(data), False, options)
        if not bitmap:
            hint = conversion(name) if file.modality == "audio" else "save it as PNG or JPEG"
            raise UsageError(f"{name} can't be read as {file.modality}", why="it is damaged", hint=hint)
        try:
            if file.modality == "audio":
                check_seconds(mtmd.mtmd_bitmap_get_nx(bitmap) / mtmd.mtmd_get_audio_sample_rate(self._pointer), name)
            elif file.orientation != 1:
                turned = self._turned(bitmap, file.orientation)
                mtmd.mtmd_bitmap_free(bitmap)
                bitmap = turned
            yield bitmap
        finally:
            mtmd.mtmd_bitmap_free(bitmap)

    def _turned(self, bitmap: int, orientation: int) -> int:
        """Return a new bitmap of an image as it is shown; libmtmd decodes it as it is stored."""
        import numpy as np  # few images are turned

        mtmd = self._mtmd
        width, height = mtmd.mtmd_bitmap_get_nx(bitmap), mtmd.mtmd_bitmap_get_ny(bitmap)
        stored = np.ctypeslib.as_array(mtmd.mtmd_bitmap_get_data(bitmap), (height, width, 3))
        shown = np.ascontiguousarray(as_shown(stored, orientation))
        pixels = shown.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return int(mtmd.mtmd_bitmap_init(shown.shape[1], shown.shape[0], pixels))

    @contextmanager
    def _chunks_of(self, bitmap: int, name: str) -> Iterator[int]:
        """Yield libmtmd's chunks of a bitmap, freed afterwards."""
        mtmd = self._mtmd
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            part = mtmd.mtmd_input_part(bitmap=bitmap)
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            if mtmd.mtmd_tokenize_from_parts(self._pointer, chunks, parts, 1, False) != 0:
                raise UsageError(f"{name} can't be used", why="the model's projector refuses it")
            yield chunks
        finally:
            mtmd.mtmd_input_chunks_free(chunks)

    def _piece(self, chunk: int, index: int, file: CheckedFile) -> list[int] | MediaChunk:
        mtmd = self._mtmd
        if mtmd.mtmd_input_chunk_get_type(chunk) == _TEXT:
            size = ctypes.c_size_t()
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(size))
            if min(tokens[: size.value], default=0) < 0:
                raise self._refusal(
                    f"its vocabulary lacks a token that delimits {PLURALS[file.modality]}", file.modality
                )
            return list(tokens[: size.value])
        n_tokens = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        causal = not mtmd.mtmd_decode_use_non_causal(self._pointer, chunk)
        if not causal and n_tokens > self._max_tokens:
            reason = f"its {n_tokens:,} tokens must fit into one batch of at most {self._max_tokens:,}"
            raise UsageError(f"the {file.modality} is too large for this model", why=reason)
        digest = hashlib.shake_256(self._key + struct.pack(">IB", index, file.orientation) + file.data).digest(
            4 * n_tokens
        )
        ids = tuple(-1 - (number >> 1) for number in struct.unpack(f">{n_tokens}I", digest))
        n_positions = mtmd.mtmd_input_chunk_get_n_pos(chunk)
        return MediaChunk(self, mtmd.mtmd_input_chunk_copy(chunk), ids, n_positions, file.modality, causal=causal)

    def positions(self, chunk: int, first: int, n_tokens: int, indexes: slice) -> Sequence[int]:
        """Return the positions of some of a chunk's tokens if the chunk begins at position `first`."""
        if not self._mtmd.mtmd_decode_use_mrope(self._pointer):
            return range(first, first + n_tokens)[indexes]
        if self._mtmd.mtmd_input_chunk_get_type(chunk) == _AUDIO:  # all dimensions as for text
            return [*range(first, first + n_tokens)[indexes]] * 4
        found = (self._mtmd.mtmd_decoder_pos * n_tokens)()
        image = self._mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        self._mtmd.mtmd_helper_image_get_decoder_pos(image, first, found)
        # llama.cpp's order of M-RoPE dimensions: time, row, column, and one that is 0.
        return [getattr(each, name) for name in "tyxz" for each in found[indexes]]

    def encode(self, chunk: int, n_tokens: int) -> ctypes.Array[ctypes.c_float]:
        """Compute the vectors of a chunk.

        Raises:
            Aborted: the cancel flag was set.
            DecodeError: libmtmd failed.
            OutOfMemoryError: there is no memory for the vectors.
        """
        with ALLOCATING:
            status = self._mtmd.mtmd_encode_chunk(self._pointer, chunk)
            self._model.flag.layer = -1
            if status != 0:
                raise DecodeError("llama.cpp could not encode an image or audio")
            if self._model.flag.is_set:  # the computation may be incomplete
                raise Aborted
            found = self._mtmd.mtmd_get_output_embd(self._pointer)
            try:
                vectors = (ctypes.c_float * (n_tokens * self.n_embd))()
            except MemoryError:
                raise OutOfMemoryError("there is no memory for an image or audio") from None
        ctypes.memmove(vectors, found, ctypes.sizeof(vectors))
        return vectors

    def share(self, modality: Modality) -> float:
        """Return the share of the running encode() that is computed, by the layers; 0 if it is unknown."""
        n_layers = self._n_layers[modality]
        return min(max(self._model.flag.layer, 0) / n_layers, 1.0) if n_layers else 0.0

    def free_chunk(self, chunk: int) -> None:
        self._mtmd.mtmd_input_chunk_free(chunk)
