"""What `inferloop ring` knows of a ring: its writer, rates, fill, readers and last frames.

Reads the whole ring once, as a reader of its own, and checks that delivered + lost == written.
Not for printing: that is `cli.ring_view`.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from capture.decode import EngineFrame, decode
from capture.errors import FrameError, RingError
from capture.frames import FrameType
from capture.reader import FrameBatch, RingReader
from capture.ring import FORMAT_VERSION, RingHeader
from capture.rings.attendance import KnownReader, attending
from capture.rings.frame_choice import FrameChoice
from capture.rings.frame_text import FrameLine, frame_name
from capture.rings.ring_files import ARCHIVE_SUFFIX, opened_ring, ring_files


@dataclass(frozen=True)
class Rates:
    """What was written in `window_s` seconds, per second."""

    window_s: float
    frames_per_s: float
    tokens_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class ReaderLag:
    """A known reader and how much it has not read: the ring holds `share` 1 at most."""

    name: str
    pid: int
    lag_bytes: int
    lag_frames: int
    lag_tokens: int
    share: float
    lost_frames: int
    lost_tokens: int
    seen_ago_s: float


@dataclass
class Scan:
    """One pass over the ring, up to what was written when it began.

    `written_*`: what the ring's counters say of the part that was read.
    """

    delivered_frames: int = 0
    delivered_tokens: int = 0
    lost_frames: int = 0
    lost_tokens: int = 0
    torn_frames: int = 0
    corrupt_frames: int = 0
    written_frames: int = 0
    written_tokens: int = 0
    frames_by_type: dict[str, int] = field(default_factory=dict)
    oldest_ns: int | None = None
    newest_ns: int | None = None
    engine: dict[str, Any] | None = None
    last: list[FrameLine] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether delivered + lost == written, for frames and for tokens."""
        frames = self.delivered_frames + self.lost_frames == self.written_frames
        return frames and self.delivered_tokens + self.lost_tokens == self.written_tokens


@dataclass(frozen=True)
class RingReport:
    """Times in seconds, ages before now; `fill`: share of the data area that was ever written."""

    path: str
    format_version: int
    header: RingHeader
    label: dict[str, str] | None
    alive: bool
    writer: str
    written_frames: int
    written_tokens: int
    written_bytes: int
    fill: float
    history_s: float | None
    oldest_age_s: float | None
    rates: Rates | None
    readers: list[ReaderLag]
    scan: Scan


@dataclass(frozen=True)
class RingSummary:
    """One line of `inferloop ring list`; `problem` says why a file cannot be read."""

    path: str
    name: str
    problem: str | None = None
    pid: int = 0
    alive: bool = False
    closed: bool = False
    writer: str = ""
    created_ns: int = 0
    capacity_bytes: int = 0
    fill: float = 0.0
    frames: int = 0
    tokens: int = 0
    model: str | None = None
    readers: tuple[ReaderLag, ...] = ()


def inspect(path: Path, *, window_s: float, last: int, raw: bool = False) -> RingReport:
    """Read a ring from its oldest frame on; a living one is also watched for `window_s` seconds.
    `last` and `raw` choose the frames of its scan as in `FrameChoice`.

    Raises RingError when it is none or cannot be read.
    """
    with opened_ring(path) as reader:
        rates = _rates(reader, window_s) if window_s and reader.writer_alive() else None
        scan = scan_ring(reader, FrameChoice(last, raw=raw))
        state = reader.writer_state()
        header, written = reader.header, reader.written
        history = None
        if scan.oldest_ns is not None and scan.newest_ns is not None:
            history = (scan.newest_ns - scan.oldest_ns) / 1e9
        return RingReport(
            path=str(path),
            format_version=FORMAT_VERSION,
            header=header,
            label=reader.label,
            alive=state.alive,
            writer=state.reason,
            written_frames=written[0],
            written_tokens=written[1],
            written_bytes=reader.written_bytes,
            fill=min(1.0, reader.written_bytes / header.capacity),
            history_s=history,
            oldest_age_s=_age_s(header, scan.oldest_ns, alive=state.alive),
            rates=rates,
            readers=reader_lags(path, reader),
            scan=scan,
        )


def summaries(ring_dir: Path, archive_dir: Path) -> list[RingSummary]:
    """Every ring of a directory and the archived ones; an archive's content is not unpacked."""
    return [_summary(path) for path in ring_files(ring_dir, archive_dir)]


def reader_lags(path: Path, reader: RingReader) -> list[ReaderLag]:
    """The known readers of a ring and how far each is behind its writer now."""
    frames, tokens = reader.written
    return [_lag(known, reader, frames, tokens) for known in attending(path)]


def scan_ring(reader: RingReader, choice: FrameChoice) -> Scan:
    """Read everything that is there now, and a dead writer's open frame; keep what is chosen."""
    scan = Scan()
    types: Counter[int] = Counter()
    alive, target = reader.writer_alive(), reader.written[0]
    while True:
        reader.check_size()
        batch = reader.read()
        if not len(batch) and not batch.gaps:
            batch = batch if alive else reader.read_open_frame()
            if not len(batch):
                break
        _account(scan, batch, types)
        choice.add(batch)
        if alive and reader.cursor.sequence >= target:
            break
    cursor, written = reader.cursor, reader.written
    scan.torn_frames, scan.corrupt_frames = cursor.torn_frames, cursor.corrupt_frames
    scan.written_frames, scan.written_tokens = cursor.sequence, cursor.tokens
    if not alive:  # its counters stand still: they must agree
        scan.written_frames = max(written[0], cursor.sequence)
        scan.written_tokens = max(written[1], cursor.tokens)
    scan.frames_by_type = {frame_name(kind): count for kind, count in sorted(types.items())}
    scan.last = choice.lines(reader.header)
    return scan


def _account(scan: Scan, batch: FrameBatch, types: Counter[int]) -> None:
    for gap in batch.gaps:
        scan.lost_frames += gap.frames
        scan.lost_tokens += gap.tokens
    if not len(batch):
        return
    scan.delivered_frames += len(batch)
    scan.delivered_tokens += batch.tokens
    times, kinds = batch.headers["time_ns"], batch.headers["type"]
    if scan.oldest_ns is None:
        scan.oldest_ns = int(times[0])
    scan.newest_ns = int(times[-1])
    types.update(kinds.tolist())
    if scan.engine is None:
        scan.engine = _engine_info(batch)


def _engine_info(batch: FrameBatch) -> dict[str, Any] | None:
    for index in np.flatnonzero(batch.headers["type"] == FrameType.ENGINE).tolist():
        try:
            frame = decode(batch, index)
        except FrameError:
            continue
        if isinstance(frame, EngineFrame):
            return frame.info
    return None


def _counters(reader: RingReader) -> tuple[float, int, int, int]:
    return time.monotonic(), *reader.written, reader.written_bytes


def _rates(reader: RingReader, window_s: float) -> Rates:
    began = _counters(reader)
    time.sleep(window_s)
    reader.check_size()
    now = _counters(reader)
    spent = now[0] - began[0]
    frames, tokens, size = (new - old for new, old in zip(now[1:], began[1:], strict=True))
    return Rates(spent, frames / spent, tokens / spent, size / spent)


def _age_s(header: RingHeader, time_ns: int | None, *, alive: bool) -> float | None:
    """Age of a frame; of another boot's only the wall clock tells."""
    if time_ns is None:
        return None
    if alive:
        return max(0.0, (time.monotonic_ns() - time_ns) / 1e9)
    wall_ns = header.anchor_wall_ns + time_ns - header.anchor_monotonic_ns
    return max(0.0, (time.time_ns() - wall_ns) / 1e9)


def _lag(known: KnownReader, reader: RingReader, frames: int, tokens: int) -> ReaderLag:
    cursor = known.cursor
    behind = max(0, reader.written_bytes - cursor.position)
    return ReaderLag(
        name=known.name,
        pid=known.pid,
        lag_bytes=behind,
        lag_frames=max(0, frames - cursor.sequence),
        lag_tokens=max(0, tokens - cursor.tokens),
        share=behind / reader.header.capacity,
        lost_frames=cursor.lost_frames,
        lost_tokens=cursor.lost_tokens,
        seen_ago_s=known.seen_ago_s,
    )


def _summary(path: Path) -> RingSummary:
    name = path.name.removesuffix(ARCHIVE_SUFFIX).removesuffix(".ring")
    if path.name.endswith(ARCHIVE_SUFFIX):
        return RingSummary(
            str(path), name, writer="crashed, archived", created_ns=_changed_ns(path)
        )
    try:
        reader = RingReader(path)
    except RingError as error:
        return RingSummary(str(path), name, problem=str(error))
    try:
        state, header = reader.writer_state(), reader.header
        return RingSummary(
            path=str(path),
            name=name,
            pid=header.pid,
            alive=state.alive,
            closed=reader.closed_by_writer,
            writer=state.reason,
            created_ns=header.anchor_wall_ns,
            capacity_bytes=header.capacity,
            fill=min(1.0, reader.written_bytes / header.capacity),
            frames=reader.written[0],
            tokens=reader.written[1],
            model=(reader.label or {}).get("model"),
            readers=tuple(reader_lags(path, reader)),
        )
    finally:
        reader.close()


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
