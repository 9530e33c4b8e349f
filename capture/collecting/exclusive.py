"""Locks that keep a second collector away from the same rings or the same lake.

`flock` on a file: the kernel releases it when the process dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import IO

from capture.errors import CollectorError


class CollectorLock:
    """Holds all of `files` or none. Raises CollectorError naming the process that has one."""

    def __init__(self, files: list[Path]) -> None:
        self._held: list[IO[bytes]] = []
        try:
            for path in files:
                self._take(path)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        for file in self._held:
            file.close()
        self._held.clear()

    def __enter__(self) -> CollectorLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _take(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b")
        except (FileExistsError, NotADirectoryError):
            raise CollectorError(f"cannot lock {path}: {path.parent} is no directory") from None
        except OSError as error:
            raise CollectorError(f"cannot lock {path}: {error.strerror}") from error
        self._held.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().decode() or "unknown"
            raise CollectorError(
                f"another collector (pid {owner}) is at work on {path.parent}: stop it, or choose "
                "another place with INFERLOOP_HOME"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
