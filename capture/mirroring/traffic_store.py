"""What becomes of finished traffic files: compressed, and deleted when they take too much room.

Several processes may keep one directory: whoever works on a file holds its lock. A kill at any
point loses no record: a compressed file takes its name when it is complete and on the disk, and
only then its original goes; readers take one of the two (`traffic_files`). Not for the file being
written (`traffic_writer`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from capture.mirroring.traffic_writer import FilePolicy, finish_file, sync_directory

RETRY_SECONDS = 60.0
"""After this long what could not be done (disk full) is tried again."""

COMPRESSION_LEVEL = 3
TAIL_BYTES = 1 << 16

_log = logging.getLogger("inferloop.mirror")


class TrafficStore:
    """Looks after the finished files of a directory; compresses in a thread of its own.

    `compressed` and `deleted` count files, `deleted_bytes` what they held.
    """

    def __init__(self, directory: Path, policy: FilePolicy) -> None:
        """Takes over what processes that are gone have left. Raises OSError."""
        self._directory, self._policy = directory, policy
        self.compressed = self.deleted = self.deleted_bytes = 0
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("traffic-*.jsonl.part"):
            _adopt(path)
        self._make_room()
        self._due = threading.Event()
        self._due.set()
        self._closing = False
        self._thread = threading.Thread(target=self._compress_always, name="traffic", daemon=True)
        self._thread.start()

    def tidy(self) -> None:
        """A file was finished: keep the bound now, compress soon. For one thread to call."""
        try:
            self._make_room()
        except OSError as error:
            _log.warning("cannot delete the oldest traffic in %s: %s", self._directory, error)
        self._due.set()

    def close(self, timeout_s: float) -> None:
        """Compress what is left, then stop; what takes too long stays as it is."""
        self._closing = True
        self._due.set()
        self._thread.join(timeout_s)

    def _compress_always(self) -> None:
        while True:
            self._due.wait(RETRY_SECONDS)
            self._due.clear()
            closing = self._closing
            if self._policy.compress:
                for path in sorted(self._directory.glob("traffic-*.jsonl")):
                    self._compress(path)
            if closing:
                return

    def _compress(self, path: Path) -> None:
        try:
            with _locked(path) as file:
                if file is not None:
                    compress(file, path)
                    self.compressed += 1
        except (OSError, MemoryError) as error:
            _log.warning("cannot compress %s, it stays as it is: %s", path, error)

    def _make_room(self) -> None:
        """Delete the oldest finished files until those that are being written can grow to their
        end within the bound. Raises OSError."""
        max_bytes = self._policy.max_bytes
        if max_bytes is None:
            return
        sizes = {path: _size(path) for path in self._directory.glob("traffic-*")}
        active = sum(path.suffix == ".part" for path in sizes)
        excess = sum(size for path, size in sizes.items() if path.suffix != ".part")
        excess += max(1, active) * self._policy.file_bytes - max_bytes
        for path in sorted(sizes):
            if excess > 0 and path.suffix in (".jsonl", ".zst") and _delete(path):
                excess -= sizes[path]
                self.deleted += 1
                self.deleted_bytes += sizes[path]
                _log.warning(
                    "deleted %s, the oldest traffic: all together may take %d bytes "
                    "(INFERLOOP_MIRROR_MAX_GIB)", path, max_bytes,
                )  # fmt: skip


def compress(file: BinaryIO, path: Path) -> None:
    """Replace a finished file, open as `file`, by `<path>.zst`. Raises OSError (disk full), and
    leaves the file as it was then. The caller holds the file's lock."""
    import zstandard

    target = path.with_name(f"{path.name}.zst")
    temporary = _temporary(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as packed:
            compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True)
            compressor.copy_stream(file, packed)
            packed.flush()
            os.fsync(packed.fileno())
        temporary.rename(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    path.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO | None]:
    """The file, locked; None when another process has it, it is there no longer or it is another
    user's."""
    try:
        file = path.open("rb")
    except (FileNotFoundError, PermissionError):
        yield None
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.stat(path), os.fstat(file.fileno()))
        except (BlockingIOError, FileNotFoundError):
            is_there = False
        yield file if is_there else None


def _adopt(path: Path) -> None:
    """Finish the file of a process that is gone: nobody holds its lock. A line that the process
    did not complete goes, and so does a file without any."""
    with _locked(path) as file:
        if file is None:
            return
        size = os.fstat(file.fileno()).st_size
        whole = _end_of_last_line(file, size)
        if whole < size:
            _log.warning("%s ends in the middle of a record: it is cut off", path)
            os.truncate(path, whole)
        if whole:
            finish_file(path)
        else:
            path.unlink()


def _end_of_last_line(file: BinaryIO, size: int) -> int:
    """Where the last complete line ends, in bytes; 0 without one."""
    end = size
    while end > 0:
        start = max(0, end - TAIL_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _delete(path: Path) -> bool:
    with _locked(path) as file:
        if file is not None:
            path.unlink()
            _temporary(path).unlink(missing_ok=True)
    return file is not None


def _temporary(path: Path) -> Path:
    """What a finished file is compressed into; left by a kill."""
    return path.with_name(f"{path.name}.zst.tmp")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
