"""The callbacks that llama.cpp's threads call, and the watch on the front: called from C, as they will be."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest

from llmrun import _native
from llmrun.engine.llama.ggml import GgmlTensor

ABORT = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
PROGRESS = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)
LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

DEBUG, INFO, WARN, ERROR, CONTINUE = 1, 2, 3, 4, 5


# ---- cancelling ----


def test_abort_follows_the_flag() -> None:
    abort = ABORT(_native.abort_callback_address)
    flag, other = _native.CancelFlag(), _native.CancelFlag()
    assert not abort(flag.address)
    flag.set()
    assert flag.is_set
    assert abort(flag.address)
    assert not abort(other.address)
    flag.clear()
    assert not flag.is_set
    assert not abort(flag.address)


def test_progress_is_noted_until_cancelled() -> None:
    report = PROGRESS(_native.progress_callback_address)
    flag = _native.CancelFlag()
    assert flag.progress == 0.0
    assert report(0.25, flag.address)
    assert flag.progress == 0.25
    flag.set()
    assert not report(0.5, flag.address)
    assert flag.progress == 0.5


def test_another_thread_can_set_the_flag_meanwhile() -> None:
    abort = ABORT(_native.abort_callback_address)
    flag = _native.CancelFlag()
    threading.Timer(0.05, flag.set).start()
    deadline = time.monotonic() + 60
    while not abort(flag.address) and time.monotonic() < deadline:
        pass
    assert flag.is_set


# ---- the log ----


def logged(capfd: pytest.CaptureFixture[str], *calls: tuple[int, str], verbose: bool = False) -> str:
    log = LOG(_native.log_callback_address)
    for level, text in calls:
        log(level, text.encode(), 1 if verbose else None)
    log(DEBUG, b"", None)  # ends an open line
    out, err = capfd.readouterr()
    assert out == ""
    return err


def test_only_warnings_and_errors_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    calls = [(DEBUG, "d\n"), (INFO, "i\n"), (WARN, "w\n"), (ERROR, "e\n"), (0, "none\n")]
    assert logged(capfd, *calls) == "w\ne\n"
    assert logged(capfd, *calls, verbose=True) == "i\nw\ne\nnone\n"


def test_a_continuation_shares_its_beginnings_fate(capfd: pytest.CaptureFixture[str]) -> None:
    calls = [(INFO, "loading"), (CONTINUE, ".."), (CONTINUE, "\n"), (ERROR, "no "), (CONTINUE, "luck\n")]
    assert logged(capfd, *calls) == "no luck\n"


def test_lines_come_out_whole(capfd: pytest.CaptureFixture[str]) -> None:
    log = LOG(_native.log_callback_address)
    log(ERROR, b"first\nsec", None)
    assert capfd.readouterr().err == "first\n"
    log(CONTINUE, b"ond\n", None)
    assert capfd.readouterr().err == "second\n"
    assert logged(capfd, (ERROR, "cut off"), (WARN, "next\n")) == "cut off\nnext\n"


def test_an_endless_line_is_broken(capfd: pytest.CaptureFixture[str]) -> None:
    calls = [(ERROR, "x" * 1000)] + [(CONTINUE, "x" * 1000)] * 199
    lines = logged(capfd, *calls).split("\n")
    assert sum(map(len, lines)) == 200_000
    assert max(map(len, lines)) < 70_000


# ---- the watch ----

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no hang-up to poll for")

# Says when the watch has begun, then sleeps in C while holding the GIL: no Python thread could end it.
WATCHING = """
import ctypes
from llmrun import _native
_native.exit_when_closed(0)
print("watching", flush=True)
ctypes.PyDLL(None).sleep(30)
"""


def start(code: str) -> subprocess.Popen[bytes]:
    # Not in the checkout, whose llmrun has no extension where the installed one is tested.
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")
    assert child.stdout is not None
    assert child.stdout.readline() == b"watching\n"
    return child


@posix_only
def test_the_process_ends_with_its_front_even_when_python_is_stuck() -> None:
    with start(WATCHING) as child:
        assert child.stdin is not None
        child.stdin.write(b"never read")
        child.stdin.close()
        assert child.wait(timeout=60) == 0


@posix_only
def test_the_process_lives_while_its_front_does() -> None:
    with start(WATCHING) as child:
        assert child.stdin is not None
        child.stdin.write(b"data is no hang-up")
        child.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.3)
        child.kill()


@posix_only
def test_closing_the_watched_descriptor_oneself_is_harmless() -> None:
    code = WATCHING.replace('print("watching"', 'import os; os.close(0); print("watching"')
    with start(code) as child:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.3)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(timeout=60) == 0


@posix_only
def test_a_closed_descriptor_can_not_be_watched() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    with pytest.raises(OSError, match="descriptor"):
        _native.exit_when_closed(reading)


def test_an_encoder_looks_at_the_flag_every_few_operations() -> None:
    look = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)(
        _native.eval_callback_address
    )
    flag, tensor = _native.CancelFlag(), GgmlTensor()
    asks = [look(ctypes.addressof(tensor), True, flag.address) for _ in range(64)]
    assert sum(asks) == 4
    assert look(None, False, flag.address)
    flag.set()
    assert not look(None, False, flag.address)
    seen = []
    for name in ("patch_bias", "Qcur-3", "Qcur-3 (view)", "node_9", "v-blk", "-", "ffn_out-12"):
        tensor.name = name.encode()
        look(ctypes.addressof(tensor), True, flag.address)
        seen.append(flag.layer)
    assert seen == [-1, 3, 3, 3, 3, 3, 12], "the layer stays until another one begins"
