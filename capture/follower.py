"""Following one ring for the collector: reads it, keeps its rows, notices its engine's end.

Not for the lake: what is read here waits in `rows` until `capture.collector` commits it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from capture.ingest import RingRows
from capture.reader import RingReader

LIVENESS_S = 0.5


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
    last_commit_s: float = 0.0
    longest_commit_s: float = 0.0
    lag_bytes: int = 0
    largest_lag_share: float = 0.0
    crashes: int = 0
    waiting_for: str | None = None


class Follower:
    """One ring: its reader, the rows it gave and where the lake stands."""

    def __init__(self, reader: RingReader, *, committed: bool) -> None:
        self.reader = reader
        self.rows = RingRows(reader.header)
        self.engine_known = committed
        self.drained = False
        self.written = reader.written
        self._checked_s = 0.0

    def poll(self, status: Status) -> bool:
        """Read once; whether there was anything. Raises RingError when the ring was cut."""
        self.reader.check_size()
        before = self.reader.cursor
        status.largest_lag_share = max(status.largest_lag_share, self.lag_share)
        batch = self.reader.read()
        if not len(batch) and not batch.gaps and self._writer_gone():
            # Frames may have come between the read and the look at the writer.
            batch = self.reader.read()
            if not len(batch) and not batch.gaps:
                batch = self.reader.read_open_frame()
                self.drained = not len(batch)
        self.rows.add(batch)
        self.written = self.reader.written
        after = self.reader.cursor
        torn = after.torn_frames - before.torn_frames
        if torn:
            self.rows.add_loss("torn", after.sequence, torn, 0, "the engine died inside a frame")
        status.frames += len(batch)
        status.tokens += batch.tokens
        status.lost_frames += after.lost_frames - before.lost_frames
        status.lost_tokens += after.lost_tokens - before.lost_tokens
        status.torn_frames += torn
        return after != before

    def give_up(self, reason: str) -> None:
        """The ring cannot be read any more: what it said was written and did not come is lost."""
        cursor = self.reader.cursor
        frames, tokens = self.written[0] - cursor.sequence, self.written[1] - cursor.tokens
        self.rows.add_loss("undecodable", cursor.sequence, max(frames, 0), max(tokens, 0), reason)

    @property
    def lag_share(self) -> float:
        """How much of the ring is not yet read: at 1 the engine overwrites what was not."""
        return self.reader.lag_bytes / self.reader.header.capacity

    @property
    def abandoned(self) -> bool:
        """Whether its engine is gone, closed or dead."""
        return self.reader.closed_by_writer or not self.reader.writer_alive()

    def _writer_gone(self) -> bool:
        """Like `abandoned`, but looks for the process only now and then."""
        if self.reader.closed_by_writer:
            return True
        now = time.monotonic()
        if now - self._checked_s < LIVENESS_S:
            return False
        self._checked_s = now
        return not self.reader.writer_alive()
