"""The trace ring's layout and its writer: one memory-mapped file per engine process.

The engine imports this module and `capture.frames`, nothing else of the package. Not for reading
(`capture.reader`) and not for what frames mean (`capture.frames`). Format: docs/ring-format.md.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
import weakref
from contextlib import suppress
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
    RingIncompleteError,
    RingInUseError,
)
from capture.rings.liveness import ProcessIdentity
from capture.rings.ring_label import LABEL_OFFSET, pack_label
from capture.rings.ring_space import allocate, why_in_use

MAGIC = b"INFLRING"
FORMAT_VERSION = 1
BYTE_ORDER = 0x01020304
HEADER_BYTES = 4096
ALIGNMENT = 64
MIN_CAPACITY = 64 * 1024
FRAME_HEADER_BYTES = 64
FRAME_MAGIC = 0x454D5246
PADDING = 0
TEMPORARY_SUFFIX = ".tmp"

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
    pid_namespace: int = 0

    @property
    def writer(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.pid_start, self.boot_id, self.pid_namespace)

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
            self.pid_namespace,
            self.pid_start,
            self.anchor_monotonic_ns,
            self.anchor_wall_ns,
        )
        return fixed + struct.pack("<Q", xxh3_64_intdigest(fixed))

    @classmethod
    def unpack(cls, data: bytes, path: Path, file_bytes: int) -> RingHeader:
        """Read and check a file's first bytes.

        Raises RingFormatError saying what does not fit; RingIncompleteError while the file may
        still be on its way into the directory.
        """
        if len(data) < HEADER_BYTES or not any(data):
            raise RingIncompleteError(
                f"{path} has no header yet ({file_bytes} bytes): it is still being copied, or it "
                "was cut and can be removed"
            )
        fields = FILE_HEADER.unpack_from(data)
        magic, version, order, header_bytes, alignment, capacity, limit = fields[:7]
        if magic != MAGIC:
            raise RingFormatError(f"{path} is no ring: it starts with {magic!r}, not {MAGIC!r}")
        if version != FORMAT_VERSION:
            newer = version > FORMAT_VERSION
            way_out = (
                "upgrade inferloop here" if newer else "read it with the version that wrote it"
            )
            raise RingFormatError(
                f"{path} has ring format {version}, this version reads format {FORMAT_VERSION}: "
                f"the engine that wrote it is {'newer' if newer else 'older'}, {way_out}"
            )
        (checksum,) = struct.unpack_from("<Q", data, FILE_HEADER.size)
        expected = (BYTE_ORDER, HEADER_BYTES, ALIGNMENT)
        if (order, header_bytes, alignment) != expected or checksum != xxh3_64_intdigest(
            data[: FILE_HEADER.size]
        ):
            raise RingFormatError(f"{path} has a damaged header: remove the file")
        sizes = f"{path} is {file_bytes} bytes, its header promises {HEADER_BYTES + capacity}"
        if file_bytes < HEADER_BYTES + capacity:
            raise RingIncompleteError(
                f"{sizes}: it is still being copied, or it was cut and can be removed"
            )
        if file_bytes > HEADER_BYTES + capacity:
            raise RingFormatError(f"{sizes}: something else was written behind it, remove it")
        engine, boot, epoch, pid, namespace, start, monotonic, wall = fields[7:]
        identity = UUID(bytes=engine)
        return cls(identity, epoch, capacity, limit, pid, start, boot, monotonic, wall, namespace)


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
        _writers.add(self)

    @classmethod
    def create(cls, path: Path, *, capacity_bytes: int, engine_id: UUID) -> RingWriter:
        """Create the ring's file and take its lock.

        Raises RingInUseError when the file exists, RingSpaceError when it does not fit, RingError
        when the directory cannot be written or locked or the size makes no sense.
        """
        if sys.byteorder != "little":
            raise RingError("rings need a little-endian machine")
        capacity = capacity_bytes // ALIGNMENT * ALIGNMENT
        if capacity < MIN_CAPACITY:
            raise RingError(
                f"a ring of {capacity_bytes} bytes is too small: {MIN_CAPACITY} at least"
            )
        if path.exists():
            raise RingInUseError(why_in_use(path))
        header = _new_header(capacity, engine_id)
        temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
        descriptor = allocate(temporary, HEADER_BYTES + capacity)
        writer = None
        try:
            os.pwrite(descriptor, header.pack(), 0)
            writer = cls(path, header, descriptor)
            os.link(temporary, path)  # last: a reader sees the whole ring or none
        except OSError as error:
            if writer is None:
                os.close(descriptor)
            else:
                writer._let_go()
            if isinstance(error, FileExistsError):
                raise RingInUseError(why_in_use(path)) from None
            raise RingError(f"cannot create the ring {path}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return writer

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

    def label(self, model: str, fingerprint: str) -> None:
        """Say in the file's header whose ring this is: its ENGINE frame will be overwritten."""
        data = pack_label(model, fingerprint)
        self._bytes[LABEL_OFFSET : LABEL_OFFSET + len(data)] = data

    def append(self, kind: int, schema: int, payload: bytes, records: int = 1) -> None:
        """Write one whole frame that holds no tokens."""
        with self.lock:
            start = HEADER_BYTES + self.begin(len(payload))
            self._map[start : start + len(payload)] = payload
            self.commit(len(payload), kind, schema, records)

    def close(self) -> None:
        """Mark the ring as closed, unmap it, release the lock; the file stays for its readers.

        In a forked child it does nothing: the ring is its parent's.
        """
        if self._map.closed or os.getpid() != self.header.pid:
            return
        with self.lock:
            self._counters[STATE] = CLOSED
            self._let_go()

    def _let_go(self) -> None:
        os.close(self._descriptor)
        self.words = np.empty(0, np.uint32)
        self.floats = np.empty(0, np.float32)
        for view in (self._counters, self.data, self._bytes):
            view.release()
        self._map.close()

    def _leave_to_parent(self) -> None:
        """In a forked child: it must neither write to the ring nor keep its lock alive."""
        self.lock = threading.Lock()  # a thread that did not come along may have held it
        if not self._map.closed:
            with suppress(BufferError):  # a thread was filling a frame: see docs/ring-format.md
                self._let_go()

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
    writer = ProcessIdentity.own()
    monotonic, wall = clock_anchors()
    return RingHeader(
        engine_id=engine_id,
        epoch=wall,
        capacity=capacity,
        frame_limit=capacity // 8,
        pid=writer.pid,
        pid_start=writer.start,
        boot_id=writer.boot_id,
        anchor_monotonic_ns=monotonic,
        anchor_wall_ns=wall,
        pid_namespace=writer.namespace,
    )


_writers: weakref.WeakSet[RingWriter] = weakref.WeakSet()


def _leave_rings_to_parent() -> None:
    for writer in list(_writers):
        writer._leave_to_parent()


os.register_at_fork(after_in_child=_leave_rings_to_parent)
