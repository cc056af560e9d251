"""Buffers of ggml's processor, whose pages take memory when they are used, and whose reads can be noted.

llama.cpp clears a new KV cache with memset, which takes 0.5 s and the memory of all its cells for each GiB, used or
not. The system gives zeroed pages on demand, so clearing only has to give the pages back. ggml has no setting for it:
the buffers' function `clear` is replaced, in structures whose layout is checked first.

Must not know contexts.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmrun.engine.llama.library import function

_Pointer = ctypes.c_void_p
_Words = ctypes.POINTER(_Pointer)
_Allocate: Any = ctypes.CFUNCTYPE(_Pointer, _Pointer, ctypes.c_size_t)
_Clear: Any = ctypes.CFUNCTYPE(None, _Pointer, ctypes.c_uint8)
_Get: Any = ctypes.CFUNCTYPE(None, _Pointer, _Pointer, _Pointer, ctypes.c_size_t, ctypes.c_size_t)
_DONTNEED = getattr(mmap, "MADV_DONTNEED", 4)  # Windows has none
_SMALL = 1 << 20  # bytes; memset is as fast
_KEYS_AND_VALUES = b"cache_k", b"cache_v"  # the beginnings of their tensors' names; recurrent states have others
# struct ggml_backend_buffer_type begins with get_name, alloc_buffer, get_alignment, get_max_size, get_alloc_size.
_ALLOC, _MAX_SIZE, _ALLOC_SIZE = 1, 3, 4
# struct ggml_backend_buffer: functions up to clear and reset, then its type, the memory and its size.
_MOST_WORDS = 14
_CLEAR, _RESET, _BASE, _SIZE = -2, -1, 1, 2  # from the type on
# Its functions from the beginning on: get_tensor, two that the processor's buffers lack, cpy_tensor; and their number.
_GET, _SET_RECTANGLE, _GET_RECTANGLE, _COPY, _FUNCTIONS = 5, 6, 7, 8, 11
_installed: list[Any] = []  # callbacks that ggml holds
_cleared: list[int] = []  # buffers, since noting_cleared()


@functools.cache
def zeroes_on_demand() -> bool:
    """Make all later buffers of the processor take memory on use; return False where that is impossible."""
    if not sys.platform.startswith("linux"):
        return False
    buffer_type = function("ggml_backend_cpu_buffer_type", _Pointer)()
    place = _place_of_type(buffer_type)
    if not place:
        return False
    size_of = function("ggml_backend_buffer_get_size", ctypes.c_size_t, _Pointer)
    base_of = function("ggml_backend_buffer_get_base", _Pointer, _Pointer)
    functions = ctypes.cast(buffer_type, _Words)
    allocate = _Allocate(functions[_ALLOC])

    def clear(buffer: int, value: int) -> None:
        _cleared.append(buffer)
        zero(base_of(buffer), size_of(buffer), value)

    def allocate_clearable(buffer_type: int, size: int) -> int | None:
        buffer: int | None = allocate(buffer_type, size)
        if buffer and size >= _SMALL:
            ctypes.cast(buffer, _Words)[place + _CLEAR] = ctypes.cast(_installed[0], _Pointer).value
        return buffer

    _installed.extend((_Clear(clear), _Allocate(allocate_clearable)))
    functions[_ALLOC] = ctypes.cast(_installed[1], _Pointer).value
    return True


@contextmanager
def noting_cleared() -> Iterator[list[int]]:
    """Yield a list that gets the buffers that are cleared meanwhile, as those of a new KV cache are."""
    _cleared.clear()
    found: list[int] = []
    yield found
    found += _cleared


@contextmanager
def noting_reads(buffers: Sequence[int], note: Callable[[int, int, int], object]) -> Iterator[None]:
    """Call note(address, target, size) instead of copying the keys and values that ggml reads from these buffers.

    Recurrent states are copied: llama.cpp moves those of other sequences, too, when it decodes one.
    """
    data_of = function("ggml_get_data", ctypes.c_void_p, _Pointer)
    name_of = function("ggml_get_name", ctypes.c_char_p, _Pointer)

    def get(_: int, tensor: int, target: int, offset: int, size: int) -> None:
        source = data_of(tensor) + offset
        if name_of(tensor).startswith(_KEYS_AND_VALUES):
            note(source, target, size)
        else:
            ctypes.memmove(target, source, size)

    callback = _Get(get)
    words = [ctypes.cast(buffer, _Words) for buffer in buffers]
    before = [functions[_GET] for functions in words]
    try:
        for functions in words:
            functions[_GET] = ctypes.cast(callback, _Pointer).value
        yield
    finally:
        for functions, get_tensor in zip(words, before, strict=True):
            functions[_GET] = get_tensor


def can_note_reads(buffer: int) -> bool:
    """Return whether a buffer has the functions of the processor's buffers where they are expected."""
    words = ctypes.cast(buffer, _Words)
    buffer_type = function("ggml_backend_buffer_get_type", _Pointer, _Pointer)(buffer)
    has_functions = bool(words[_GET] and words[_COPY] and words[_FUNCTIONS] == buffer_type)
    return has_functions and not words[_SET_RECTANGLE] and not words[_GET_RECTANGLE]


def zero(base: int, size: int, value: int = 0) -> None:
    """Set private memory to a value; whole pages of zeros are given back to the system."""
    start, end = -(-base // mmap.PAGESIZE) * mmap.PAGESIZE, (base + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if value or start >= end or _madvise()(start, end - start, _DONTNEED):  # fails for locked memory
        ctypes.memset(base, value, size)
        return
    ctypes.memset(base, 0, start - base)
    ctypes.memset(end, 0, base + size - end)


@functools.cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (_Pointer, ctypes.c_size_t, ctypes.c_int)
    return madvise


def _place_of_type(buffer_type: int) -> int:
    """Return the index of a buffer's type among the words of its structure; 0 if a layout is not the expected one."""
    functions = ctypes.cast(buffer_type, _Words)
    buffer = function("ggml_backend_buft_alloc_buffer", _Pointer, _Pointer, ctypes.c_size_t)(buffer_type, mmap.PAGESIZE)
    if not buffer or functions[_MAX_SIZE] or functions[_ALLOC_SIZE]:
        return 0
    words = ctypes.cast(buffer, _Words)
    place = next((index for index in range(_MOST_WORDS) if words[index] == buffer_type), 0)
    is_known = place and not words[place + _RESET] and words[place + _SIZE] == mmap.PAGESIZE
    is_known = is_known and words[place + _BASE] == function("ggml_backend_buffer_get_base", _Pointer, _Pointer)(buffer)
    function("ggml_backend_buffer_free", None, _Pointer)(buffer)
    return place if is_known else 0
