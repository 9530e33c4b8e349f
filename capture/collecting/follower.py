"""Following one ring for the collector: reads it, keeps its rows, notices its engine's end.

Not for the lake: what is read here waits in `rows` until `capture.collector` commits it. Which
rings are followed is decided in `capture.collecting.roster`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from capture.collecting.ingest import RingRows
from capture.reader import RingReader
from capture.rings.attendance import Attendance

LIVENESS_S = 0.5
ATTENDANCE = "collector"


class EngineLag(NamedTuple):
    """How far the collector is behind one engine. `lag_share`: at 1 the ring overwrites the rest;
    `rollup_lag_tokens`: committed but not yet in the rollup."""

    engine_id: str
    lag_bytes: int
    lag_share: float
    lost_frames: int
    lost_tokens: int
    rollup_lag_tokens: int


@dataclass
class Status:
    """What the collector has done since it started; `waiting_for` says why it does not commit."""

    rings: int = 0
    frames: int = 0
    tokens: int = 0
    lost_frames: int = 0
    lost_tokens: int = 0
    torn_frames: int = 0
    commits: int = 0
    failed_commits: int = 0
    last_commit_s: float = 0.0
    longest_commit_s: float = 0.0
    lag_bytes: int = 0
    largest_lag_share: float = 0.0
    crashes: int = 0
    rolled_tokens: int = 0
    dropped_tokens: int = 0
    upkeep_runs: int = 0
    upkeep_failures: int = 0
    lake_bytes: int = 0
    stale_rings: int = 0
    engines: tuple[EngineLag, ...] = field(default=())
    waiting_for: str | None = None


class Follower:
    """One ring: its reader, the rows it gave and where the lake stands.

    `committed_step`: the largest step id in the lake; `unrolled_tokens`: there, not in the rollup.
    `written`, `lag_bytes` and `closed` are as of the last poll: looking into a ring that was cut
    meanwhile ends the process.
    """

    def __init__(self, reader: RingReader, *, committed: bool) -> None:
        """`committed`: the lake has rows of this ring already."""
        self.reader = reader
        self.rows = RingRows(reader.header)
        self.engine_known = committed
        self.abandoned = not reader.writer_alive()
        self.drained = self.closed = False
        self.written = reader.written
        self.lag_bytes = reader.lag_bytes
        self.committed_step = -1
        self.unrolled_tokens = 0
        self.rolled_s = time.monotonic()
        self._attendance = Attendance(reader.path, ATTENDANCE)
        self._checked_s = 0.0

    def poll(self, status: Status) -> bool:
        """Read once; whether there was anything. Raises RingError when the ring was cut."""
        self.reader.check_size()
        before = self.reader.cursor
        status.largest_lag_share = max(status.largest_lag_share, self.lag_share)
        batch = self.reader.read()
        if not len(batch) and not batch.gaps and self._look_for_writer():
            # Frames may have come between the read and the look at the writer.
            batch = self.reader.read()
            if not len(batch) and not batch.gaps:
                batch = self.reader.read_open_frame()
                self.drained = not len(batch)
        self.rows.add(batch)
        self.written, self.lag_bytes = self.reader.written, self.reader.lag_bytes
        self.closed = self.reader.closed_by_writer
        after = self.reader.cursor
        torn = after.torn_frames - before.torn_frames
        if torn:
            self.rows.add_loss("torn", after.sequence, torn, 0, "the engine died inside a frame")
        status.frames += len(batch)
        status.tokens += batch.tokens
        status.lost_frames += after.lost_frames - before.lost_frames
        status.lost_tokens += after.lost_tokens - before.lost_tokens
        status.torn_frames += torn
        self._attendance.report(after, self.lag_bytes)
        return after != before

    def committed(self, rows: RingRows) -> None:
        """`rows` of this ring are in the lake. Like the rollup, work of the lake's thread."""
        self.committed_step = rows.last_step
        self.unrolled_tokens += rows.tokens

    def frames_now(self) -> int:
        """Frames written until now; notices an engine that is gone at once. Raises RingError when
        the ring was cut."""
        self.reader.check_size()
        self._look_for_writer(now=True)
        return self.reader.written[0]

    def _look_for_writer(self, *, now: bool = False) -> bool:
        """Whether its engine is gone, closed or dead; looks only now and then unless `now`."""
        if not self.abandoned and self.reader.closed_by_writer:
            self.abandoned = True
        if not self.abandoned:
            clock_s = time.monotonic()
            if now or clock_s - self._checked_s >= LIVENESS_S:
                self._checked_s = clock_s
                self.abandoned = not self.reader.writer_alive()
        return self.abandoned

    def give_up(self, reason: str) -> None:
        """The ring cannot be read any more: what it said was written and did not come is lost."""
        cursor = self.reader.cursor
        frames, tokens = self.written[0] - cursor.sequence, self.written[1] - cursor.tokens
        self.rows.add_loss("undecodable", cursor.sequence, max(frames, 0), max(tokens, 0), reason)
        self.abandoned = self.drained = True

    def leave(self) -> None:
        """Take this reader's note beside the ring away."""
        self._attendance.leave()

    def close(self) -> None:
        self.leave()
        self.reader.close()

    @property
    def lag_share(self) -> float:
        """How much of the ring is not yet read: at 1 the engine overwrites what was not."""
        return self.lag_bytes / self.reader.header.capacity

    @property
    def lag(self) -> EngineLag:
        cursor = self.reader.cursor
        return EngineLag(
            self.rows.engine_id,
            self.lag_bytes,
            self.lag_share,
            cursor.lost_frames,
            cursor.lost_tokens,
            self.unrolled_tokens,
        )
