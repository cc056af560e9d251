"""The limits of Python code that a model wrote: the process limits itself, and becomes the interpreter of the code.

A program of its own, which imports nothing of ours. Everywhere: processor time, memory, files. On Linux a filter of
system calls takes away the network, other programs and signals to them, and Landlock (Linux 5.13) all files but the
interpreter's, the system's, and the current folder. Both hold until the process ends, whatever it executes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

SECONDS = 30
CODE = "code.py"
_MEMORY = 1 << 30  # bytes of address space
_FILE = 64 << 20  # bytes
_DESCRIPTORS = 256

# From unistd.h of each architecture: numbers of the calls that are refused, of clone and of clone3.
_COMMON = {"io_uring_setup": 425, "pidfd_send_signal": 424}
_CALLS = {
    "x86_64": {
        **_COMMON,
        "socket": 41, "fork": 57, "vfork": 58, "kill": 62, "ptrace": 101, "rt_sigqueueinfo": 129, "tkill": 200,
        "tgkill": 234, "rt_tgsigqueueinfo": 297,
    },
    "aarch64": {
        **_COMMON,
        "socket": 198, "kill": 129, "ptrace": 117, "rt_sigqueueinfo": 138, "tkill": 130, "tgkill": 131,
        "rt_tgsigqueueinfo": 240,
    },
}  # fmt: skip
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_OTHER_ABI = 0x40000000  # x32 has the numbers above it

# prctl.h, capability.h, seccomp.h, bpf_common.h, sched.h
_NO_NEW_PRIVILEGES, _DROP_POWER, _POWERS, _SET_SECCOMP, _FILTER = 38, 24, 64, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FLAGS = 0, 4, 16  # offsets in struct seccomp_data; the flags are clone's first argument
_CLONE_THREAD = 0x10000

# landlock.h: system calls, access rights
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ, _WRITE_FILE, _FILE_RIGHTS = 0b1101, 0b10, 0b100_0000_0000_0111  # execute, write, read; truncate
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # by version of the interface
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/dev/urandom", "/proc/cpuinfo", "/sys/devices/system/cpu")


def cuts_off() -> bool:
    """Return whether this system lets a process give up the network."""
    return sys.platform == "linux" and platform.machine() in _CALLS and sys.maxsize > 1 << 32


def hides_files() -> bool:
    """Return whether this system lets a process give up its user's files."""
    return cuts_off() and _landlock_version() > 0


def _landlock_version() -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def main() -> None:
    """Limit this process, and execute the code in the current folder."""
    if sys.platform == "win32":
        raise OSError("Windows has no such limits")
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "darwin":  # which refuses it
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    if cuts_off():
        libc = ctypes.CDLL(None, use_errno=True)
        for power in range(_POWERS):  # of root
            libc.prctl(_DROP_POWER, power, 0, 0, 0)
        _call(libc.prctl, _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _restrict_files(libc)
        _refuse_calls(libc, platform.machine())
    os.execv(sys.executable, [sys.executable, "-I", "-B", "-X", "utf8", os.path.abspath(CODE)])  # noqa: PTH100, S606


def _call(function: object, *arguments: object) -> int:
    """Return the result of a function of the C library. Raises OSError."""
    assert callable(function)
    found = int(function(*arguments))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the system refuses to limit the code: {os.strerror(number)}")
    return found


def _refuse_calls(libc: ctypes.CDLL, machine: str) -> None:
    """Let system calls fail that reach the network, other processes, or start some."""
    refused = sorted(_CALLS[machine].values())
    refuse, no_such = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, refuse),
        (_LOAD, 0, 0, _NUMBER),
        *(each for call in refused for each in ((_EQUAL, 0, 1, call), (_RETURN, 0, 0, refuse))),
        (_AT_LEAST, 0, 1, _OTHER_ABI),
        (_RETURN, 0, 0, refuse),
        (_EQUAL, 0, 1, _CLONE3),  # its flags are in memory, which a filter can't read: C libraries then use clone
        (_RETURN, 0, 0, no_such),
        (_EQUAL, 1, 0, _CLONE[machine]),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FLAGS),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, refuse),
    ]
    lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    whole = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(lines)))
    _call(libc.prctl, _SET_SECCOMP, _FILTER, whole, 0, 0)


def _restrict_files(libc: ctypes.CDLL) -> None:
    """Allow reading what the interpreter and the system need, and all in the current folder, where Landlock is."""
    version = _landlock_version()
    if version < 1:
        return
    rights = _RIGHTS[max(each for each in _RIGHTS if each <= version)]
    rules = _call(libc.syscall, _CREATE_RULESET, struct.pack("Q", rights), ctypes.c_size_t(8), 0)

    def allow(path: str, allowed: int) -> None:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            return  # it is not on this system
        allowed &= rights if os.path.isdir(path) else _FILE_RIGHTS & rights  # noqa: PTH112
        _call(libc.syscall, _ADD_RULE, rules, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)

    with open("/proc/self/maps") as maps:  # noqa: PTH123
        libraries = {os.path.dirname(path) for line in maps if (path := line.split(maxsplit=5)[-1].strip())[:1] == "/"}  # noqa: PTH120
    for path in {*libraries, *_SYSTEM, *sys.path, sys.prefix, sys.base_prefix}:
        allow(path, _READ)
    allow("/dev/null", _READ | _WRITE_FILE)
    allow(".", rights)
    _call(libc.syscall, _RESTRICT_SELF, rules, 0)
    os.close(rules)


if __name__ == "__main__":
    main()
