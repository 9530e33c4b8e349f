"""Rings of crashed engines, kept compressed for whoever looks into the crash: the newest few.

`<directory>/<engine id>.ring.zst`; `zstd -d` gives back the ring that `inferloop ring inspect`
reads. Not for the crash report: that is `capture.collecting.crash`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from capture.rings.attendance import remove_ring
from capture.rings.ring_files import ARCHIVE_SUFFIX

log = logging.getLogger("inferloop.collector")

KEPT_RINGS = 8

FREE_SHARE = 0.05  # of the disk: stays free whatever the archive would like
LEVEL = 1


def retire_ring(path: Path, directory: Path, *, keep: bool) -> None:
    """Remove a ring that was read to its end and its readers' notes; `keep`: archive it first.

    A ring that cannot be archived is removed all the same, and the log says so: the next engine
    needs its memory. Raises OSError when the ring cannot be removed.
    """
    if keep and path.exists():
        try:
            archive_ring(path, directory)
        except OSError as error:
            reason = error.strerror or error
            log.warning("the ring of a crashed engine is not kept: %s (%s)", path.name, reason)
    remove_ring(path)


def archive_ring(path: Path, directory: Path) -> Path:
    """Compress a ring into `directory`, whole or not at all, and drop all but the newest archives.

    Raises OSError, also when it would leave the disk nearly full.
    """
    import zstandard

    directory.mkdir(parents=True, exist_ok=True)
    _leave_room(directory, path.stat().st_blocks * 512)
    target = directory / f"{path.stem}{ARCHIVE_SUFFIX}"
    temporary = target.with_suffix(".tmp")
    try:
        with path.open("rb") as ring, temporary.open("wb") as file:
            zstandard.ZstdCompressor(level=LEVEL).copy_stream(
                ring, file, size=os.stat(path).st_size
            )
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    _drop_old(directory)
    return target


def is_archived(engine_id: object, directory: Path) -> bool:
    return (directory / f"{engine_id}{ARCHIVE_SUFFIX}").exists()


def _leave_room(directory: Path, size_bytes: int) -> None:
    """Raise OSError unless the disk has room for `size_bytes` and its share of free space."""
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize - int(FREE_SHARE * disk.f_blocks * disk.f_frsize)
    if free < size_bytes:
        raise OSError(
            f"{directory} has {max(free, 0) >> 20} MiB to spare, {size_bytes >> 20} needed"
        )


def _drop_old(directory: Path) -> None:
    archives = sorted(
        directory.glob(f"*{ARCHIVE_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns
    )
    for path in archives[:-KEPT_RINGS]:
        path.unlink(missing_ok=True)
