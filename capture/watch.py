"""Follows all living engines of a directory for `inferloop top`: no collector needed.

Reads within a time budget; where that is not enough it skips ahead and says so. Not for summing up
(`capture.live`) nor for showing (`cli.top_view`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from capture.errors import RingError, RingIncompleteError
from capture.live import LiveEngine, LiveSnapshot
from capture.reader import RingReader, check_directory, discover
from capture.rings.attendance import Attendance
from capture.rings.ring_report import ReaderLag, reader_lags

WINDOW_S = 10.0
DISCOVER_S = 0.5
FIRST_READ_S = 5.0
KEEP_BYTES = 4 << 20
ENDED_SHOWN_S = 30.0


@dataclass(frozen=True)
class EngineView:
    """One engine as `top` shows it. `ended_ago_s`: None while its writer lives; `lag_bytes`: this
    view's own."""

    engine_id: str
    model: str | None
    build: str | None
    pid: int
    anchor_monotonic_ns: int
    anchor_wall_ns: int
    writer: str
    ended_ago_s: float | None
    lag_bytes: int
    fill: float
    readers: list[ReaderLag]
    live: LiveSnapshot


@dataclass(frozen=True)
class WatchView:
    """All engines; `waiting_rings` were left by engines that had ended before this view began,
    `problems` says which files cannot be read."""

    directory: str
    engines: list[EngineView]
    waiting_rings: int
    problems: list[str]


class Watch:
    """Engines may start, end and crash meanwhile. Close it when done."""

    def __init__(self, directory: Path, window_s: float = WINDOW_S) -> None:
        self._directory = directory
        self._window_s = window_s
        self._engines: dict[Path, _Watched] = {}
        self._ended: set[Path] = set()
        self._problems: dict[Path, str] = {}
        self._discovered_s = float("-inf")

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def poll(self, budget_s: float) -> None:
        """Read what is new, for about `budget_s` seconds in all; skip what does not fit."""
        if time.monotonic() - self._discovered_s >= DISCOVER_S:
            self._discover()
        for path, engine in list(self._engines.items()):
            if engine.is_over():
                self._drop(path)
                continue
            share_s = budget_s / len(self._engines)
            try:
                engine.poll(share_s)
            except RingError as error:
                self._problems[path] = str(error)
                self._drop(path)

    def view(self) -> WatchView:
        """What is known now, the busiest engine first."""
        engines = [engine.view() for engine in self._engines.values()]
        engines.sort(key=lambda engine: (-engine.live.tokens_per_s, engine.engine_id))
        problems = list(self._problems.values())
        return WatchView(str(self._directory), engines, len(self._ended), problems)

    def close(self) -> None:
        for path in list(self._engines):
            self._drop(path)

    def _discover(self) -> None:
        self._discovered_s = time.monotonic()
        found = set(discover(self._directory))
        self._ended &= found
        cut = {path: why for path, why in self._problems.items() if path in self._ended}
        self._problems = cut | self._directory_problem()
        for path in found - self._engines.keys() - self._ended:
            try:
                reader = RingReader(path)
            except RingIncompleteError:
                continue  # still being copied
            except RingError as error:
                if path.exists():  # else it is gone again
                    self._problems[path] = str(error)
                continue
            if reader.writer_alive():
                self._engines[path] = _Watched(reader, self._window_s)
            else:
                reader.close()
                self._ended.add(path)

    def _directory_problem(self) -> dict[Path, str]:
        try:
            check_directory(self._directory)
        except RingError as error:
            return {self._directory: str(error)}
        return {}

    def _drop(self, path: Path) -> None:
        self._engines.pop(path).close()
        self._ended.add(path)


class _Watched:
    """One ring that is followed."""

    def __init__(self, reader: RingReader, window_s: float) -> None:
        header = reader.header
        self._reader = reader
        self._live = LiveEngine(started_ns=header.anchor_monotonic_ns, window_s=window_s)
        self._attendance = Attendance(reader.path, "top")
        self._state = reader.writer_state()
        self._ended_s: float | None = None
        self._known = False

    def is_over(self) -> bool:
        """Whether the engine ended so long ago that it need not be shown any more."""
        return self._ended_s is not None and time.monotonic() - self._ended_s > ENDED_SHOWN_S

    def poll(self, budget_s: float) -> None:
        """Read until nothing is left or the time is over; then skip. Raises RingError when the
        ring was cut."""
        reader = self._reader
        deadline = time.monotonic() + (budget_s if self._known else FIRST_READ_S)
        self._known = True
        while True:
            reader.check_size()
            batch = reader.read()
            if not len(batch) and not batch.gaps:
                break
            self._live.add(batch, time.monotonic_ns())
            if time.monotonic() > deadline:
                gap = reader.skip(KEEP_BYTES)
                if gap is not None:
                    self._live.skip(gap, time.monotonic_ns())
                break
        self._attendance.report(reader.cursor, reader.lag_bytes)
        if self._ended_s is None:
            self._state = reader.writer_state()
            if not self._state.alive:
                self._ended_s = time.monotonic()

    def view(self) -> EngineView:
        reader, header = self._reader, self._reader.header
        label = reader.label or {}
        ended = None if self._ended_s is None else time.monotonic() - self._ended_s
        lags = reader_lags(reader.path, reader)
        others = [lag for lag in lags if not self._attendance.is_own(lag.name, lag.pid)]
        return EngineView(
            engine_id=str(header.engine_id),
            model=label.get("model"),
            build=label.get("fingerprint"),
            pid=header.pid,
            anchor_monotonic_ns=header.anchor_monotonic_ns,
            anchor_wall_ns=header.anchor_wall_ns,
            writer=self._state.reason,
            ended_ago_s=ended,
            lag_bytes=reader.lag_bytes,
            fill=min(1.0, reader.written_bytes / header.capacity),
            readers=others,
            live=self._live.snapshot(time.monotonic_ns()),
        )

    def close(self) -> None:
        self._attendance.leave()
        self._reader.close()
