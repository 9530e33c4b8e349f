"""Finding a ring by what people type, and opening it: a live file, a copy, or a crash's archive.

Archived rings (`.ring.zst`) are unpacked into a file without a name: nothing of it stays, however
this process ends.
Not for following rings: that is `capture.reader`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from capture.errors import RingError, RingFormatError, RingIncompleteError
from capture.reader import RingReader, check_directory, discover
from capture.ring import HEADER_BYTES, RingHeader

ARCHIVE_SUFFIX = ".ring.zst"
COPY_BYTES = 1 << 20


def ring_files(ring_dir: Path, archive_dir: Path) -> list[Path]:
    """The rings of a directory, oldest first, after the archived ones of crashed engines.

    Raises RingError when the directory cannot be listed.
    """
    check_directory(ring_dir)
    return [*sorted(archive_dir.glob(f"*{ARCHIVE_SUFFIX}")), *discover(ring_dir)]


def find_ring(which: str | None, ring_dir: Path, archive_dir: Path) -> Path:
    """The ring meant by an engine id, its first characters, or a path; None: the only one alive,
    or else the only one.

    Raises RingError that says which rings there are when there is none or more than one.
    """
    if which and ("/" in which or os.path.exists(which)):
        return Path(which)
    files = ring_files(ring_dir, archive_dir)
    if not files:
        raise RingError(
            f"there is no ring in {ring_dir}: engines put them there (`inferloop serve`); another "
            "place is set with INFERLOOP_HOME or INFERLOOP_RING_DIR"
        )
    fitting = [path for path in files if path.name.startswith(which or "")]
    if which is None:
        fitting = [path for path in files if _alive(path)] or files
    engines = {_engine(path): path for path in fitting}  # the ring itself rather than its archive
    if len(engines) == 1:
        return engines.popitem()[1]
    known = list(engines or {_engine(path): path for path in files})
    some = ", ".join(known[-5:])
    if which is None:
        raise RingError(f"name one of the {len(known)} rings in {ring_dir}, for example {some}")
    if engines:
        raise RingError(f"{which!r} is the start of {len(engines)} engine ids: {some}")
    raise RingError(
        f"no ring in {ring_dir} or {archive_dir} starts with {which!r}; there are {some}"
    )


@contextmanager
def opened_ring(path: Path) -> Iterator[RingReader]:
    """A reader of a ring or of an archived one. Raises RingError as `RingReader` does."""
    if not path.name.endswith(".zst"):
        reader = RingReader(path)
        try:
            yield reader
        finally:
            reader.close()
        return
    with tempfile.TemporaryFile() as file:
        _unpack(path, cast("BinaryIO", file))
        reader = RingReader(Path(f"/proc/self/fd/{file.fileno()}"))
        reader.path = path
        try:
            yield reader
        finally:
            reader.close()


def _unpack(path: Path, target: BinaryIO) -> None:
    """Decompress an archived ring, never more than its own header says it holds."""
    import zstandard

    try:
        with (
            path.open("rb") as packed,
            zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True) as ring,
        ):
            head = ring.read(HEADER_BYTES)
            left = _promised_bytes(head, path) - len(head)
            target.write(head)
            while left and (data := ring.read(min(COPY_BYTES, left))):
                target.write(data)
                left -= len(data)
    except zstandard.ZstdError as error:
        raise RingFormatError(f"{path} is no archived ring: {error}") from error
    except OSError as error:
        raise RingError(f"cannot unpack the ring {path}: {error.strerror}") from error
    if left:
        raise RingIncompleteError(f"{path} was cut: {left} bytes of the ring are missing in it")
    target.flush()


def _promised_bytes(head: bytes, path: Path) -> int:
    """Size of the ring whose first bytes these are."""
    promised = HEADER_BYTES + int.from_bytes(head[24:32], "little")
    RingHeader.unpack(head, path, promised if len(head) == HEADER_BYTES else len(head))
    return promised


def _engine(path: Path) -> str:
    return path.name.partition(".")[0]


def _alive(path: Path) -> bool:
    if path.name.endswith(ARCHIVE_SUFFIX):
        return False
    try:
        reader = RingReader(path)
    except RingError:
        return False
    try:
        return reader.writer_alive()
    finally:
        reader.close()
