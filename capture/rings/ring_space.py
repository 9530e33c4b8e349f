"""Room for a ring's file, taken in full and locked at its creation, or a clear reason why not.

Not for what is in the file: that is `capture.ring`.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from capture.errors import RingError, RingSpaceError
from capture.rings.liveness import is_locked

MODE = 0o640  # shared memory is everybody's, and tokens tell what was answered


def allocate(path: Path, size: int) -> int:
    """Create `path` with all its blocks and lock it; returns the descriptor.

    Raises RingSpaceError when there is no room for `size` bytes, RingError when the place cannot be
    written or locked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, MODE)
    except OSError as error:
        raise RingError(f"cannot create a ring in {path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # first: unlocked, it is what a dead process left
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise RingError(f"cannot allocate a ring in {path.parent}: {error.strerror}") from error
        stat = os.statvfs(path.parent)
        raise RingSpaceError(
            f"no room for a ring of {size >> 20} MiB in {path.parent} ({error.strerror}, "
            f"{stat.f_bavail * stat.f_frsize >> 20} MiB free): set INFERLOOP_RING_MIB lower or "
            "INFERLOOP_RING_DIR to another place"
        ) from error
    return descriptor


def why_in_use(path: Path) -> str:
    """Why the ring at `path` cannot be created."""
    way_out = "let `inferloop collect` drain and remove it, or start under a new engine id"
    try:
        with path.open("rb") as file:
            held = is_locked(file.fileno())
    except OSError:
        held = None
    if held:
        return f"the ring {path} is being written by another process: every engine needs its own"
    return f"the ring {path} exists, its writer is gone: {way_out}"
