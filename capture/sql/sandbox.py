"""What the operating system forbids a process that runs other people's SQL: Landlock and rlimits.

The rules hold for the calling thread and all it starts later, and nothing lifts them again: so
they are set before DuckDB starts its threads. Not for judging SQL: that is `capture.sql.statement`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import site
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION_FLAG = 1
_PATH_BENEATH, _NET_PORT = 1, 2
_NO_NEW_PRIVILEGES = 38  # of prctl

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_TCP = 0b11  # bind, connect
_TCP_CONNECT = 0b10
_FILE_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}  # number of rights the kernel knows; 5: 16

FILE_BYTES = 1 << 20
SYSTEM_PATHS = (
    *("/usr", "/lib", "/lib64", "/etc", "/sys", "/dev/null", "/dev/urandom"),
    # Not all of /proc: it shows this process's environment. Without its cgroup DuckDB dies, and
    # an allocator that cannot see the overcommit setting maps memory past RLIMIT_DATA.
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/self/cgroup", "/proc/self/status"),
    "/proc/sys/vm/overcommit_memory",
)


def landlock_version() -> int:
    """The kernel's Landlock version; 0: it has none, or it is turned off."""
    return max(_syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG), 0)


def confine(readable: Iterable[Path], written: Iterable[Path], tcp_port: int | None) -> bool:
    """Take this process's rights to files and TCP but for those given; whether the kernel did.

    `readable`: files and directories with all below; `written`: files that exist. Python and the
    system's libraries stay readable. No file can be made, removed or renamed afterwards, and but
    for `tcp_port` no TCP connection opened. False on a kernel without Landlock (before 5.13).
    """
    version = landlock_version()
    if version < 1:
        return False
    rights = (1 << _FILE_RIGHTS_BY_ABI.get(version, 16)) - 1
    network = _TCP if version >= 4 else 0
    attributes = struct.pack("QQ", rights, network)[: 16 if version >= 4 else 8]
    ruleset = _syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        for path in (*readable, *_python(), *map(Path, SYSTEM_PATHS)):
            _allow(ruleset, path, _READ & rights)
        for path in written:
            _allow(ruleset, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & rights)
        if network and tcp_port is not None:
            rule = struct.pack("QQ", _TCP_CONNECT, tcp_port)
            _syscall(_ADD_RULE, ruleset, _NET_PORT, rule, 0)
        ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return _syscall(_RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def limit_files_and_memory(memory_bytes: int) -> None:
    """No file of any size can be written any more; `memory_bytes` more than now can be had."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    data = _data_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))


def limit_cpu(seconds: int) -> None:
    """End this process once it has computed for `seconds` more, should nobody else do it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    used = int(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))


def _python() -> list[Path]:
    """Where modules are imported from, without the working directory."""
    here = Path(__file__).parents[1]
    imported = {path for path in sys.path if Path(path).is_absolute()} - {os.getcwd()}
    places = {sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages(), *imported}
    return [here, Path(site.getusersitepackages()), *map(Path, places)]


def _allow(ruleset: int, path: Path, rights: int) -> None:
    """Grant `rights` on a path and all below; a path that is not there needs none."""
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not path.is_dir():
            rights &= ~_READ_DIR
        _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)


def _data_bytes() -> int:
    """Private writable memory of this process, reserved or used, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


def _syscall(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return int(libc.syscall(ctypes.c_long(number), *words))
