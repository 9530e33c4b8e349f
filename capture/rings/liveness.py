"""Whether the process that wrote a file still runs, also across containers and forked children.

Two witnesses: the process's identity (boot, pid namespace, pid, start time) and the `flock` it
holds. Not for what to do about a dead one. The rule: docs/ring-format.md, "Is the writer alive?".
"""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one boot. `start`: clock ticks since boot; `namespace`: inode number of its
    pid namespace, 0 where the system has none."""

    pid: int
    start: int
    boot_id: bytes
    namespace: int

    @classmethod
    def own(cls) -> ProcessIdentity:
        pid = os.getpid()
        return cls(pid, process_start(pid) or 0, boot_id(), pid_namespace())

    def running(self) -> bool | None:
        """Whether it runs; None: cannot be seen from here (another pid namespace, no /proc)."""
        if self.boot_id != boot_id():
            return False
        own = pid_namespace()
        if self.namespace != own and self.namespace and own:
            return None
        start = process_start(self.pid)
        if start is not None:
            return start == self.start
        if not own or not self.namespace or _hidden(self.pid):
            return None
        return False


@dataclass(frozen=True)
class Liveness:
    """Whether a writer is alive, and how that is known, for people."""

    alive: bool
    reason: str


def liveness(process: ProcessIdentity, descriptor: int, *, closed: bool) -> Liveness:
    """The state of a writer that holds `flock(LOCK_EX)` on an open file while it lives.

    `descriptor`: the reader's own, of the same file. `closed`: the file says that it was finished.
    """
    if closed:
        return Liveness(False, "closed by its writer")
    held = is_locked(descriptor)
    if held is False:
        return Liveness(False, "its process is gone: nobody holds the file's lock")
    running = process.running()
    if running:
        return Liveness(True, "running, holds the file's lock")
    if running is None:
        return Liveness(True, "the file's lock is held by a process that is not visible from here")
    if process.boot_id != boot_id():
        return Liveness(False, "written before this machine was started")
    children = ": only children it forked hold the file's lock" if held else ""
    return Liveness(False, f"its process is gone{children}")


def boot_id() -> bytes:
    """The running kernel's boot id (16 bytes), zeros where the system has none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return bytes(16)
    return UUID(text.strip()).bytes


def pid_namespace() -> int:
    """Inode number of this process's pid namespace (fits 32 bits), 0 where there is none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino & 0xFFFFFFFF
    except OSError:
        return 0


def process_start(pid: int) -> int | None:
    """Start of a living process in clock ticks since boot; None: no such process, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def is_locked(descriptor: int) -> bool | None:
    """Whether somebody holds an exclusive `flock` on this file; None: it cannot be told."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _hidden(pid: int) -> bool:
    """Whether a process that /proc does not show exists nevertheless: another user's (hidepid)."""
    if Path(f"/proc/{pid}").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except OverflowError:  # no pid at all
        return False
    return False
