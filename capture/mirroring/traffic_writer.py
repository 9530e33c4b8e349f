"""The traffic file that is being written: whole lines, on the disk when the policy says so.

`traffic-<UTC start>-<pid>.jsonl.part` while it is written, locked by its writer; `.jsonl` by an
atomic rename once it is large or old enough. Not for what becomes of it then
(`capture.mirroring.traffic_store`), nor for what a line says (`capture.mirror`).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

CHECK_SECONDS = 1.0
"""How often the file is synced (policy `second`) and looked for under its name."""

Fsync = Literal["always", "second", "rotate"]

_log = logging.getLogger("inferloop.mirror")


@dataclass(frozen=True, slots=True)
class FilePolicy:
    """How traffic is kept on the disk.

    A file ends at `rotate_bytes` or `rotate_seconds`, whichever comes first. `fsync`: every line is
    on the disk before it counts as written, or once a second, or only when a file ends. Finished
    files are compressed with zstd when `compress`; the oldest are deleted when all together would
    take more than `max_bytes`.
    """

    rotate_bytes: int = 64 << 20
    rotate_seconds: float = 3600.0
    fsync: Fsync = "second"
    compress: bool = True
    max_bytes: int | None = None

    @property
    def file_bytes(self) -> int:
        """Where a file ends: with a bound on all of them, at a quarter of it at the latest."""
        return min(self.rotate_bytes, (self.max_bytes or self.rotate_bytes * 4) // 4)


class TrafficWriter:
    """Appends lines to the active file. Used by one thread."""

    def __init__(self, directory: Path, policy: FilePolicy) -> None:
        self._directory, self._policy = directory, policy
        self._descriptor = -1
        self._path = Path()
        self._size = self._lines = 0
        self._opened = self._checked = 0.0
        self._dirty = False

    def append(self, line: bytes) -> None:
        """Add a whole line or nothing. Raises OSError (disk full), and can be called again."""
        if self._descriptor < 0:
            self._open()
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._policy.fsync == "always":
                os.fsync(self._descriptor)
        except OSError:
            self._take_back()
            raise
        self._size += len(line)
        self._lines += 1
        self._dirty = True

    def tick(self) -> bool:
        """Do what is due: sync, end the file. Call it after every line and every second; returns
        whether a file was finished."""
        now = time.monotonic()
        if self._descriptor >= 0 and now - self._checked >= CHECK_SECONDS:
            self._checked = now
            if self._is_gone():
                self._abandon()
            elif self._dirty and self._policy.fsync == "second":
                self._sync()
        if self._descriptor < 0:
            return False
        is_old = now - self._opened >= self._policy.rotate_seconds
        if self._size < self._policy.file_bytes and not is_old:
            return False
        return self.finish()

    def finish(self) -> bool:
        """Make the active file a finished one; returns whether there was one."""
        if self._descriptor < 0:
            return False
        try:
            if self._lines:
                os.fsync(self._descriptor)
                finish_file(self._path)
            else:
                self._path.unlink()
        except OSError as error:
            _log.warning("cannot finish %s: %s", self._path, error)
        self._close()
        return True

    def _take_back(self) -> None:
        """Cut a line off that was not written whole; where that fails it stays the file's last."""
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError as error:
            _log.warning("half a line stays at the end of %s: %s", self._path, error)
            self.finish()

    def _sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            _log.warning("cannot sync %s: %s", self._path, error)
        self._dirty = False

    def _is_gone(self) -> bool:
        """Whether somebody deleted or moved the file under the writer's hands."""
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return True
        except OSError:
            return False  # no answer from the file system is no sign

    def _abandon(self) -> None:
        _log.warning(
            "%s with %d records was deleted or moved by somebody: going on in a new file",
            self._path, self._lines,
        )  # fmt: skip
        self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor, self._dirty = -1, False

    def _open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._make_file()
        while self._is_gone():  # a process that started just now may have tidied it away
            self._close()
            self._make_file()
        self._size = self._lines = 0
        self._opened = self._checked = time.monotonic()

    def _make_file(self) -> None:
        started = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        self._path = self._directory / f"traffic-{started}-{os.getpid()}.jsonl.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            sync_directory(self._directory)
        except OSError:
            self._path.unlink(missing_ok=True)
            self._close()
            raise


def finish_file(path: Path) -> None:
    """Give a `.part` file its finished name. Raises OSError."""
    path.rename(path.with_suffix(""))
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory last beyond a power cut. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
