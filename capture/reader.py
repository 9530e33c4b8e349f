"""Following a trace ring: copies frames out, checks them, and counts exactly what was missed.

A reader never writes to the ring, and any number may follow one. Not for what the frames mean:
that is `capture.decode`. Protocol: docs/ring-format.md, "Reading".
"""

from __future__ import annotations

import mmap
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from capture.errors import RingError, RingFormatError
from capture.ring import (
    ALIGNMENT,
    CLOSED,
    FRAME_DTYPE,
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    FRAMES,
    HEADER_BYTES,
    INTENT,
    PADDING,
    STATE,
    TAIL,
    TEMPORARY_SUFFIX,
    TOKENS,
    RingHeader,
)
from capture.rings.frame_check import FoundFrame, check_frame
from capture.rings.liveness import Liveness, is_locked, liveness
from capture.rings.ring_label import LABEL_BYTES, LABEL_OFFSET, unpack_label

READ_BYTES = 4 << 20
STALL_S = 1.0
SCAN_SLOTS = 16384
MAX_ATTEMPTS = 32
LEFTOVER_S = 5.0


@dataclass(frozen=True)
class Cursor:
    """Where a reader stands: what it expects next, and what it has missed so far.

    `delivered` frames = sequence - lost_frames, tokens likewise. `torn` frames were cut off by the
    writer's death and are part of neither; `corrupt` ones are part of the lost.
    """

    sequence: int = 0
    tokens: int = 0
    position: int = 0
    lost_frames: int = 0
    lost_tokens: int = 0
    torn_frames: int = 0
    corrupt_frames: int = 0


@dataclass(frozen=True)
class Gap:
    """Frames and tokens that were overwritten before this reader saw them."""

    first_sequence: int
    frames: int
    tokens: int


@dataclass(frozen=True)
class FrameBatch:
    """Frames copied out of a ring, checked, in order, padding removed.

    `headers`: structured array of capture.ring.FRAME_DTYPE; `offsets`: of each frame in `data`
    (bytes, a multiple of 64); `data`: uint8. `gaps` were found on the way, before these frames.
    """

    headers: npt.NDArray[np.void]
    offsets: npt.NDArray[np.int64]
    data: npt.NDArray[np.uint8]
    gaps: tuple[Gap, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def tokens(self) -> int:
        return int(self.headers["tokens"].sum())

    def payload(self, index: int) -> memoryview:
        start = int(self.offsets[index])
        end = start + int(self.headers["length"][index])
        return self.data.data[start + FRAME_HEADER_BYTES : end]


def discover(directory: Path) -> list[Path]:
    """The ring files in a directory, oldest first; none when there is no such directory.

    Removes what engines left there that were killed while they created their ring.
    """
    _remove_leftovers(directory)
    found = []
    for path in directory.glob("*.ring"):
        try:
            found.append((path.stat().st_mtime_ns, path))
        except OSError:  # gone meanwhile, or a link to nowhere
            continue
    return [path for _, path in sorted(found)]


def check_directory(directory: Path) -> None:
    """Raise RingError when the directory cannot be listed: `discover` finds nothing in it then."""
    try:
        os.listdir(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RingError(f"cannot look for rings in {directory}: {error.strerror}") from error


def _remove_leftovers(directory: Path) -> None:
    """Temporary ring files that nobody holds the lock of, which their creator takes first."""
    for path in directory.glob(f".*.ring.*{TEMPORARY_SUFFIX}"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                age_s = time.time() - os.fstat(descriptor).st_mtime
                if abs(age_s) > LEFTOVER_S and is_locked(descriptor) is False:
                    path.unlink()
            finally:
                os.close(descriptor)


class RingReader:
    """Follows one ring from a cursor (default: its first frame). Not for use by two threads."""

    def __init__(self, path: Path, cursor: Cursor | None = None) -> None:
        """Raises RingIncompleteError when the file is too short yet, RingFormatError when it is no
        ring, RingError when it cannot be read."""
        descriptor = -1
        try:
            # Without O_NONBLOCK a named pipe would wait here for its writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise RingFormatError(f"{path} is no ring: not a regular file")
            size = status.st_size
            self.header = RingHeader.unpack(os.pread(descriptor, HEADER_BYTES, 0), path, size)
            self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        except (OSError, RingError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, RingError):
                raise
            raise RingError(f"cannot read the ring {path}: {error.strerror}") from error
        self._descriptor = descriptor  # to look at the writer's lock
        self.path = path
        self.cursor = cursor or Cursor()
        self._bytes = memoryview(self._map)
        self._counters = self._bytes[:HEADER_BYTES].cast("Q")
        self._data = self._bytes[HEADER_BYTES:]
        self._stalled_since: float | None = None

    @property
    def closed_by_writer(self) -> bool:
        return self._counters[STATE] == CLOSED

    @property
    def written(self) -> tuple[int, int]:
        """Frames and tokens written so far."""
        return self._counters[FRAMES], self._counters[TOKENS]

    @property
    def written_bytes(self) -> int:
        """Position of the next frame: bytes written so far, padding included."""
        return self._ends()[0]

    @property
    def lag_bytes(self) -> int:
        return max(0, self.written_bytes - self.cursor.position)

    @property
    def label(self) -> dict[str, str] | None:
        """Model and build fingerprint of the engine; None when the writer has not said them."""
        return unpack_label(bytes(self._bytes[LABEL_OFFSET : LABEL_OFFSET + LABEL_BYTES]))

    def writer_alive(self) -> bool:
        """Whether the engine still writes; also true of one that is stopped or out of sight."""
        return self.writer_state().alive

    def writer_state(self) -> Liveness:
        """Whether the engine still writes, and how that is known."""
        return liveness(self.header.writer, self._descriptor, closed=self.closed_by_writer)

    def check_size(self) -> None:
        """Raise RingError when somebody has cut the file: touching lost pages ends the process."""
        if self._map.size() < len(self._map):
            raise RingError(f"{self.path} was cut while it was followed: what was unread is lost")

    def close(self) -> None:
        if self._map.closed:
            return
        os.close(self._descriptor)
        for view in (self._counters, self._data, self._bytes):
            view.release()
        self._map.close()

    def read(self, limit_bytes: int = READ_BYTES) -> FrameBatch:
        """Copy out the frames that are there, `limit_bytes` at most (but one frame at least).

        Empty when there is nothing new. Never blocks, never raises for what a writer does.
        """
        gaps: list[Gap] = []
        for attempt in range(MAX_ATTEMPTS):
            (tail, intent), position = self._ends(), self.cursor.position
            if position >= tail:
                break
            batch = self._copy(tail, limit_bytes)
            if len(batch):
                self._stalled_since = None
                return replace(batch, gaps=tuple(gaps))
            if self.cursor.position > position:
                continue  # padding, or the end of the data area
            if self._lapped():
                # The writer is overwriting right where we look: each new attempt leaves more room.
                room = (self.header.capacity >> 6) * attempt
                gap = self._resync(intent - self.header.capacity + room, corrupt=0)
            elif self._given_up():
                gap = self._resync(position + ALIGNMENT, corrupt=1)
            else:
                break  # not yet visible
            if gap is not None and gap.frames:
                gaps.append(gap)
        return replace(_EMPTY, gaps=tuple(gaps))

    def skip(self, keep_bytes: int) -> Gap | None:
        """Jump ahead until `keep_bytes` at most are unread: for who wants the newest only.

        What is passed over counts as lost for this reader. None: there was no need.
        """
        tail, intent = self._ends()
        start = max(tail - keep_bytes, intent - self.header.capacity)
        return self._resync(start, corrupt=0) if start > self.cursor.position else None

    def read_open_frame(self) -> FrameBatch:
        """The frame a dead writer was in, after `read` has returned everything else.

        Delivered when it is whole; counted as torn when it is not. Call it once the writer is
        known to be gone.
        """
        tail, intent = self._ends()
        if self.cursor.position < tail:
            return _EMPTY
        while self.cursor.position < intent:
            position = self.cursor.position
            batch = self._copy(intent, intent - position)
            if len(batch):
                return batch
            if self.cursor.position == position:
                torn = self.cursor.torn_frames + 1
                self.cursor = replace(self.cursor, position=intent, torn_frames=torn)
        return _EMPTY

    def _copy(self, end: int, limit_bytes: int) -> FrameBatch:
        """Copy [position, end) up to the data area's end and keep the frames that check out."""
        cursor = self.cursor
        start = cursor.position % self.header.capacity
        there = min(end - cursor.position, self.header.capacity - start)
        size = min(there, max(limit_bytes // ALIGNMENT, 1) * ALIGNMENT)
        buffer = bytes(self._data[start : start + size])
        offsets: list[int] = []
        at, sequence, tokens = 0, cursor.sequence, cursor.tokens
        while at < size:
            found = check_frame(buffer, at, cursor.position + at)
            if found is None or found.sequence != sequence or found.tokens_before != tokens:
                break
            if found.kind != PADDING:
                offsets.append(at)
                sequence += 1
                tokens += found.tokens
            at += (found.length + ALIGNMENT - 1) & -ALIGNMENT
        if not at:
            # Perhaps the frame is longer than what was copied of it.
            longest = min(there, self.header.frame_limit)
            return self._copy(end, longest) if size < longest else _EMPTY
        position = cursor.position + at
        self.cursor = replace(cursor, position=position, sequence=sequence, tokens=tokens)
        data = np.frombuffer(buffer, np.uint8)
        places = np.asarray(offsets, np.int64)
        return FrameBatch(data.view(FRAME_DTYPE)[places // ALIGNMENT], places, data)

    def _lapped(self) -> bool:
        return self.cursor.position < self._ends()[1] - self.header.capacity

    def _ends(self) -> tuple[int, int]:
        """`tail` and `intent`, where they can be true; else nothing is new or, once the writer is
        gone and cannot store them anew, they are found again from the frames."""
        counters = self._counters
        tail, intent, later = counters[TAIL], counters[INTENT], counters[TAIL]
        furthest = later + 2 * self.header.frame_limit + ALIGNMENT
        if (tail | intent) % ALIGNMENT == 0 and tail <= intent <= furthest:
            return tail, intent
        if self.writer_alive():
            return self.cursor.position, self.cursor.position
        self._recover_counters()
        return self._counters[TAIL], self._counters[INTENT]

    def _recover_counters(self) -> None:
        """Replace damaged counters by what the newest whole frame says."""
        headers = np.frombuffer(self._data, FRAME_DTYPE)
        offsets = np.arange(len(headers), dtype=np.uint64) * ALIGNMENT
        own = (headers["position"] % np.uint64(self.header.capacity) == offsets) & (
            headers["magic"] == FRAME_MAGIC
        )
        slots = np.flatnonzero(own)
        end, frames, tokens = self.cursor.position, self.cursor.sequence, self.cursor.tokens
        for slot in slots[np.argsort(headers["position"][slots])[::-1]].tolist():
            position = int(headers["position"][slot])
            found = check_frame(self._data, slot * ALIGNMENT, position)
            if found is not None and position >= end:
                end = position + ((found.length + ALIGNMENT - 1) & -ALIGNMENT)
                frames = found.sequence + (found.kind != PADDING)
                tokens = found.tokens_before + found.tokens
                break
        state = self._counters[STATE]
        self._counters.release()
        self._counters = memoryview(bytearray(HEADER_BYTES)).cast("Q")
        for word, value in zip(
            (TAIL, INTENT, FRAMES, TOKENS, STATE), (end, end, frames, tokens, state), strict=True
        ):
            self._counters[word] = value

    def _given_up(self) -> bool:
        now = time.monotonic()
        if self._stalled_since is None:
            self._stalled_since = now
        return not self.writer_alive() or now - self._stalled_since > STALL_S

    def _resync(self, start: int, corrupt: int) -> Gap | None:
        """Jump to the first whole frame at or after `start` and count what lies before it.

        None: there is none yet.
        """
        cursor = self.cursor
        tail, _ = self._ends()
        found = self._find(-(-start // ALIGNMENT) * ALIGNMENT, tail)
        if found is not None:
            sequence, tokens, position = found.sequence, found.tokens_before, found.position
        elif not self.writer_alive():
            (sequence, tokens), position = self.written, tail
        else:
            return None
        sequence, tokens = max(sequence, cursor.sequence), max(tokens, cursor.tokens)
        gap = Gap(cursor.sequence, sequence - cursor.sequence, tokens - cursor.tokens)
        self._stalled_since = None
        self.cursor = replace(
            cursor,
            sequence=sequence,
            tokens=tokens,
            position=position,
            lost_frames=cursor.lost_frames + gap.frames,
            lost_tokens=cursor.lost_tokens + gap.tokens,
            corrupt_frames=cursor.corrupt_frames + corrupt,
        )
        return gap

    def _find(self, start: int, tail: int) -> FoundFrame | None:
        """First whole frame whose position lies in [start, tail)."""
        capacity = self.header.capacity
        headers = np.frombuffer(self._data, FRAME_DTYPE)
        while start < tail:
            slot = start % capacity // ALIGNMENT
            count = min(SCAN_SLOTS, capacity // ALIGNMENT - slot, (tail - start) // ALIGNMENT)
            part = headers[slot : slot + count]
            expected = start + ALIGNMENT * np.arange(count, dtype=np.uint64)
            hits = np.flatnonzero((part["position"] == expected) & (part["magic"] == FRAME_MAGIC))
            for hit in hits.tolist():
                offset = (slot + hit) * ALIGNMENT
                found = check_frame(self._data, offset, start + hit * ALIGNMENT)
                if found is not None and found.sequence >= self.cursor.sequence:
                    return found
            start += count * ALIGNMENT
        return None


_EMPTY = FrameBatch(np.empty(0, FRAME_DTYPE), np.empty(0, np.int64), np.empty(0, np.uint8))
