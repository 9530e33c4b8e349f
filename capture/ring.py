"""The trace ring's layout and its writer: one memory-mapped file per engine process.

The engine imports this module and `capture.frames`, nothing else of the package. Not for reading
(`capture.reader`) and not for what frames mean (`capture.frames`). Format: docs/ring-format.md.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from capture.errors import (
    FrameTooLargeError,
    RingError,
    RingFormatError,
    RingInUseError,
    RingSpaceError,
)

MAGIC = b"INFLRING"
FORMAT_VERSION = 1
BYTE_ORDER = 0x01020304
HEADER_BYTES = 4096
ALIGNMENT = 64
MIN_CAPACITY = 64 * 1024
FRAME_HEADER_BYTES = 64
FRAME_MAGIC = 0x454D5246
PADDING = 0

FILE_HEADER = struct.Struct("<8sIIIIQQ16s16sQIIQqq")
FRAME_HEADER = struct.Struct("<QQQqQIIIHHII")
FRAME_DTYPE = np.dtype(
    [
        ("checksum", "<u8"),
        ("sequence", "<u8"),
        ("position", "<u8"),
        ("time_ns", "<i8"),
        ("tokens_before", "<u8"),
        ("length", "<u4"),
        ("records", "<u4"),
        ("tokens", "<u4"),
        ("type", "<u2"),
        ("schema", "<u2"),
        ("magic", "<u4"),
        ("reserved", "<u4"),
    ]
)

# Indices of the file header's counters, in 8-byte words.
INTENT, TAIL, FRAMES, TOKENS, STATE = 1024 // 8, 1152 // 8, 1160 // 8, 1168 // 8, 1280 // 8
OPEN, CLOSED = 0, 1


@dataclass(frozen=True)
class RingHeader:
    """The fixed part of a ring's file header."""

    engine_id: UUID
    epoch: int
    capacity: int
    frame_limit: int
    pid: int
    pid_start: int
    boot_id: bytes
    anchor_monotonic_ns: int
    anchor_wall_ns: int

    def pack(self) -> bytes:
        fixed = FILE_HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            BYTE_ORDER,
            HEADER_BYTES,
            ALIGNMENT,
            self.capacity,
            self.frame_limit,
            self.engine_id.bytes,
            self.boot_id,
            self.epoch,
            self.pid,
            0,
            self.pid_start,
            self.anchor_monotonic_ns,
            self.anchor_wall_ns,
        )
        return fixed + struct.pack("<Q", xxh3_64_intdigest(fixed))

    @classmethod
    def unpack(cls, data: bytes, path: Path, file_bytes: int) -> RingHeader:
        """Read and check a file's first bytes; RingFormatError says what does not fit."""
        if len(data) < HEADER_BYTES:
            raise RingFormatError(f"{path} is no ring: {file_bytes} bytes, too short for a header")
        fields = FILE_HEADER.unpack_from(data)
        magic, version, order, header_bytes, alignment, capacity, limit = fields[:7]
        if magic != MAGIC:
            raise RingFormatError(f"{path} is no ring: it starts with {magic!r}, not {MAGIC!r}")
        if version != FORMAT_VERSION:
            raise RingFormatError(
                f"{path} has ring format {version}, this version reads {FORMAT_VERSION}: "
                "run the collector of the version that wrote it"
            )
        (checksum,) = struct.unpack_from("<Q", data, FILE_HEADER.size)
        expected = (BYTE_ORDER, HEADER_BYTES, ALIGNMENT)
        if (order, header_bytes, alignment) != expected or checksum != xxh3_64_intdigest(
            data[: FILE_HEADER.size]
        ):
            raise RingFormatError(f"{path} has a damaged header: remove the file")
        if file_bytes != HEADER_BYTES + capacity:
            raise RingFormatError(
                f"{path} is {file_bytes} bytes, its header promises {HEADER_BYTES + capacity}: "
                "it was cut or overwritten, remove it"
            )
        engine, boot, epoch, pid, _, start, monotonic, wall = fields[7:]
        return cls(UUID(bytes=engine), epoch, capacity, limit, pid, start, boot, monotonic, wall)


def boot_id() -> bytes:
    """The running kernel's boot id (16 bytes), zeros where the system has none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return bytes(16)
    return UUID(text.strip()).bytes


def process_start(pid: int) -> int | None:
    """Start of a living process in clock ticks since boot; None: no such process, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def clock_anchors() -> tuple[int, int]:
    """Monotonic and wall clock of one moment, ns: the closest of five readings."""
    readings = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, (before + after) // 2, wall))
    _, monotonic, wall = min(readings)
    return monotonic, wall


@dataclass(frozen=True)
class WriterCounters:
    """What a writer has done since it was created; `refused` frames were over the limit."""

    frames: int
    tokens: int
    bytes: int
    refused: int


class RingWriter:
    """The one writer of a ring. Threads may share it: hold `lock` from `begin` to `commit`.

    `append` is enough for small frames; a hot path reserves a frame with `begin`, fills its payload
    in place through `data` (the data area) or its 4-byte views `words` / `floats`, and publishes it
    with `commit`.
    """

    def __init__(self, path: Path, header: RingHeader, descriptor: int) -> None:
        self.path = path
        self.header = header
        self.frame_limit = header.frame_limit
        self.lock = threading.Lock()
        self._descriptor = descriptor
        size = HEADER_BYTES + header.capacity
        populate = getattr(mmap, "MAP_POPULATE", 0)
        self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | populate)
        self._bytes = memoryview(self._map)
        self._counters = self._bytes[:HEADER_BYTES].cast("Q")
        self.data = self._bytes[HEADER_BYTES:]
        self.words: npt.NDArray[np.uint32] = np.frombuffer(self.data, np.uint32)
        self.floats: npt.NDArray[np.float32] = np.frombuffer(self.data, np.float32)
        self._intent = self._tail = self._frames = self._tokens = self._refused = 0

    @classmethod
    def create(cls, path: Path, *, capacity_bytes: int, engine_id: UUID) -> RingWriter:
        """Create the ring's file and take its lock.

        Raises RingInUseError when the file exists, RingSpaceError when it does not fit, RingError
        when the directory cannot be written or the size makes no sense.
        """
        if sys.byteorder != "little":
            raise RingError("rings need a little-endian machine")
        capacity = capacity_bytes // ALIGNMENT * ALIGNMENT
        if capacity < MIN_CAPACITY:
            raise RingError(
                f"a ring of {capacity_bytes} bytes is too small: {MIN_CAPACITY} at least"
            )
        if path.exists():
            raise RingInUseError(_in_use(path))
        header = _new_header(capacity, engine_id)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        descriptor = _allocate(temporary, HEADER_BYTES + capacity)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(descriptor, header.pack(), 0)
            os.link(temporary, path)
        except FileExistsError:
            os.close(descriptor)
            raise RingInUseError(_in_use(path)) from None
        finally:
            temporary.unlink(missing_ok=True)
        return cls(path, header, descriptor)

    @property
    def counters(self) -> WriterCounters:
        return WriterCounters(self._frames, self._tokens, self._tail, self._refused)

    def begin(self, payload_bytes: int) -> int:
        """Reserve a frame; returns the payload's offset in the data area (a multiple of 64).

        Raises FrameTooLargeError, counted, when it is over the ring's limit; the ring is unchanged.
        """
        length = FRAME_HEADER_BYTES + payload_bytes
        if length > self.frame_limit:
            self._refused += 1
            raise FrameTooLargeError(
                f"a frame of {length} bytes is over the ring's limit of {self.frame_limit}: "
                "set INFERLOOP_RING_MIB higher"
            )
        tail = self._tail
        offset = tail % self.header.capacity
        span = (length + ALIGNMENT - 1) & -ALIGNMENT
        rest = self.header.capacity - offset
        end = tail + span if span <= rest else tail + rest + span
        if end > self._intent:
            self._intent = end
            self._counters[INTENT] = end
        if span > rest:
            self._write_header(tail, rest, 0, 0, PADDING, 0)
            self._tail = tail + rest  # private until commit stores it
            offset = 0
        return offset + FRAME_HEADER_BYTES

    def commit(
        self, payload_bytes: int, kind: int, schema: int, records: int = 1, tokens: int = 0
    ) -> None:
        """Publish the frame reserved by the last `begin`."""
        tail = self._tail
        length = FRAME_HEADER_BYTES + payload_bytes
        self._write_header(tail, length, records, tokens, kind, schema)
        self._frames += 1
        self._tokens += tokens
        self._tail = tail = tail + ((length + ALIGNMENT - 1) & -ALIGNMENT)
        counters = self._counters
        counters[FRAMES] = self._frames
        counters[TOKENS] = self._tokens
        counters[TAIL] = tail

    def append(self, kind: int, schema: int, payload: bytes, records: int = 1) -> None:
        """Write one whole frame that holds no tokens."""
        with self.lock:
            start = HEADER_BYTES + self.begin(len(payload))
            self._map[start : start + len(payload)] = payload
            self.commit(len(payload), kind, schema, records)

    def close(self) -> None:
        """Mark the ring as closed, unmap it, release the lock; the file stays for its readers."""
        if self._map.closed:
            return
        with self.lock:
            self._counters[STATE] = CLOSED
            self.words = np.empty(0, np.uint32)
            self.floats = np.empty(0, np.float32)
            for view in (self._counters, self.data, self._bytes):
                view.release()
            self._map.close()
            os.close(self._descriptor)

    def _write_header(
        self, position: int, length: int, records: int, tokens: int, kind: int, schema: int
    ) -> None:
        start = HEADER_BYTES + position % self.header.capacity
        sequence = self._frames
        FRAME_HEADER.pack_into(
            self._map,
            start,
            0,
            sequence,
            position,
            time.monotonic_ns(),
            self._tokens,
            length,
            records,
            tokens,
            kind,
            schema,
            FRAME_MAGIC,
            0,
        )
        covered = FRAME_HEADER_BYTES if kind == PADDING else length
        checksum = xxh3_64_intdigest(self._bytes[start + 8 : start + covered], sequence)
        struct.pack_into("<Q", self._map, start, checksum)


def _new_header(capacity: int, engine_id: UUID) -> RingHeader:
    pid = os.getpid()
    monotonic, wall = clock_anchors()
    return RingHeader(
        engine_id=engine_id,
        epoch=wall,
        capacity=capacity,
        frame_limit=capacity // 8,
        pid=pid,
        pid_start=process_start(pid) or 0,
        boot_id=boot_id(),
        anchor_monotonic_ns=monotonic,
        anchor_wall_ns=wall,
    )


def _allocate(path: Path, size: int) -> int:
    """Create `path` with all its blocks; returns the descriptor."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as error:
        raise RingError(f"cannot create a ring in {path.parent}: {error.strerror}") from error
    try:
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


def _in_use(path: Path) -> str:
    """Why the ring at `path` cannot be created."""
    way_out = "let `inferloop collect` drain and remove it, or start under a new engine id"
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return f"the ring {path} is being written by another process: every engine needs its own"
    return f"the ring {path} exists, its writer is gone: {way_out}"
