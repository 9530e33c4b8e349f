"""The collector: follows every ring of a directory and commits its rows to the lake, exactly once.

The cursor of a ring is committed in the transaction of its rows: killed anywhere, the collector
goes on where the lake says. Not for decoding (`capture.ingest`) nor the lake's upkeep
(`capture.upkeep`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from capture.crash import crash_report, write_report
from capture.errors import (
    CollectorError,
    LakeError,
    LakeMissingError,
    LakeVersionError,
    RingError,
    first_line,
)
from capture.exclusive import CollectorLock
from capture.follower import Follower, Status
from capture.lake import LakePlace, open_lake
from capture.reader import Cursor, RingReader, discover
from capture.upkeep import Upkeep

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")
log = logging.getLogger("inferloop.collector")

COMMIT_S = 1.0
COMMIT_TOKENS = 200_000
POLL_S = 0.02
DISCOVER_S = 0.25
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
UPKEEP_LAG_SHARE = 0.1
LAKE_RETRIES = 3  # inside one commit, about half a second; beyond that we wait and say so
PASSING = ("locked", "disk I/O error", "disk is full", "No space left")
STOP_PATIENCE_S = 10.0
MAX_RINGS = 256


class Collector:
    """Collects until `stop` is set, then drains what is there and returns."""

    def __init__(
        self,
        place: LakePlace,
        *,
        ring_dir: Path,
        crash_dir: Path,
        stop: threading.Event,
        on_status: Callable[[Status], None] | None = None,
    ) -> None:
        self.status = Status()
        self._place = place
        self._ring_dir = ring_dir
        self._crash_dir = crash_dir
        self._stop = stop
        self._on_status = on_status or (lambda _: None)
        self._followers: dict[Path, Follower] = {}
        self._refused: set[Path] = set()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._upkeep = Upkeep()
        self._patience_ends_s: float | None = None
        self._committed_s = time.monotonic()
        self._discovered_s = float("-inf")

    def run(self, *, once: bool = False) -> Status:
        """Collect. `once`: until every ring that is there now has been read to its end.

        Raises CollectorError when another collector is at work, LakeError when the lake cannot be
        used at all.
        """
        with self._lock():
            try:
                self._first_connect()
                self._discover()
                while not once and not self._stop.is_set():
                    if not self._round():
                        self._stop.wait(POLL_S)
                self._drain()
                while self._discover():  # more rings than are followed at once
                    self._drain()
            finally:
                self._close()
        return self.status

    def _round(self) -> bool:
        """Discover, read each ring once, commit when it is time; whether there was anything."""
        now = time.monotonic()
        if now - self._discovered_s >= DISCOVER_S:
            self._discovered_s = now
            self._discover()
        busy = False
        for follower in list(self._followers.values()):
            if not follower.drained:
                busy |= self._poll(follower)
        pending = sum(follower.rows.tokens for follower in self._followers.values())
        if pending >= COMMIT_TOKENS or time.monotonic() - self._committed_s >= COMMIT_S:
            self.commit()
        # One at a time: finishing many stale rings must not leave a living one to overflow.
        for follower in [f for f in self._followers.values() if f.drained][:1]:
            self._finish(follower)
            busy = True
        return busy

    def _poll(self, follower: Follower) -> bool:
        """Read a ring once; one that was cut meanwhile is given up and does not stop the others."""
        try:
            return follower.poll(self.status)
        except RingError as error:
            log.warning("given up: %s", error)
            path = follower.reader.path
            follower.give_up(str(error))
            follower.drained = True
            self._refused.add(path)
            del self._followers[path]  # first: nothing may touch its lost pages again
            self._commit([follower], finished=False)
            follower.reader.close()
            return False

    def _drain(self) -> None:
        """Read what is there at this moment, not what a busy engine goes on writing."""
        targets = {f: f.reader.written[0] for f in self._followers.values()}
        for follower, target in targets.items():
            gone = follower.abandoned
            while not follower.drained and (gone or follower.reader.cursor.sequence < target):
                if not self._poll(follower):
                    if not gone:
                        break
                    time.sleep(POLL_S)
                if follower.rows.tokens >= COMMIT_TOKENS:
                    self.commit()
        self.commit()
        for follower in [f for f in self._followers.values() if f.drained]:
            self._finish(follower)

    def _discover(self) -> bool:
        """Follow the rings that are new; whether there were any."""
        before = self.status.rings
        for path in discover(self._ring_dir):
            if path in self._followers or path in self._refused:
                continue
            if len(self._followers) >= MAX_RINGS:
                break  # a file handle each: the rest comes when these are finished
            try:
                self._patiently(partial(self._follow, path))
            except RingError as error:
                self._refused.add(path)
                log.warning("ignored: %s", error)
        return self.status.rings > before

    def _follow(self, path: Path) -> None:
        reader = RingReader(path)
        stored = self._stored_cursor(reader)
        if stored is not None and stored[1]:
            reader.close()
            path.unlink(missing_ok=True)  # a collector was killed between commit and removal
            return
        if stored is not None:
            reader.cursor = stored[0]
        self._followers[path] = Follower(reader, committed=stored is not None)
        self.status.rings += 1
        log.info("following engine %s (pid %d)", reader.header.engine_id, reader.header.pid)

    def _stored_cursor(self, reader: RingReader) -> tuple[Cursor, bool] | None:
        """The last committed cursor of a ring and whether the ring is finished."""
        row = (
            self._lake()
            .execute(
                "SELECT sequence, tokens, position, lost_frames, lost_tokens, torn_frames, "
                "corrupt_frames, finished FROM ingest_cursor "
                "WHERE engine_id = ?::UUID AND epoch = ? "
                "ORDER BY position DESC, finished DESC LIMIT 1",
                [str(reader.header.engine_id), reader.header.epoch],
            )
            .fetchone()
        )
        return None if row is None else (Cursor(*row[:7]), bool(row[7]))

    def commit(self) -> None:
        """Write all pending rows and cursors in one transaction; waits while the lake cannot."""
        followers = [f for f in self._followers.values() if f.rows]
        self._commit(followers, finished=False)
        lag = max((f.lag_share for f in self._followers.values()), default=0.0)
        if self._connection is not None and lag < UPKEEP_LAG_SHARE:
            self._upkeep.run_if_due(self._connection)

    def _commit(self, followers: list[Follower], *, finished: bool) -> None:
        self._committed_s = time.monotonic()
        self.status.lag_bytes = sum(f.reader.lag_bytes for f in self._followers.values())
        if not followers:
            self._on_status(self.status)
            return
        for follower in followers:
            rows = follower.rows
            if not follower.engine_known and (
                rows.has("engines") or rows.has("losses") or finished
            ):
                if not rows.has("engines"):
                    rows.add_engine(None)
                follower.engine_known = True
            rows.add_cursor(follower.reader.cursor, finished=finished)
        self._patiently(lambda: self._transaction(followers, finished=finished))
        for follower in followers:
            follower.rows.clear()
        spent = time.monotonic() - self._committed_s
        self.status.commits += 1
        self.status.last_commit_s = spent
        self.status.longest_commit_s = max(self.status.longest_commit_s, spent)
        self._upkeep.commits += 1
        self._on_status(self.status)

    def _transaction(self, followers: list[Follower], *, finished: bool) -> None:
        """Insert and commit; after a failure first look whether only the answer got lost."""
        if self._connection is None and self._is_stored(followers[0], finished):
            return
        connection = self._lake()
        connection.execute("BEGIN")
        for follower in followers:
            follower.rows.insert(connection)
        connection.execute("COMMIT")

    def _is_stored(self, follower: Follower, finished: bool) -> bool:
        return self._stored_cursor(follower.reader) == (follower.reader.cursor, finished)

    def _patiently(self, action: Callable[[], T]) -> T:
        """Run `action` on the lake until it succeeds, waiting ever longer in between.

        For a catalog that somebody has locked, a full disk, a database that restarts. Raises
        LakeError for what waiting does not cure, CollectorError when told to stop meanwhile.
        """
        import duckdb

        backoff = FIRST_BACKOFF_S
        while True:
            try:
                result = action()
            except (LakeMissingError, LakeVersionError):
                raise
            except _permanent_errors() as error:
                raise LakeError(f"the lake refuses the rows: {first_line(error)}") from error
            except (duckdb.Error, LakeError) as error:
                self._disconnect()
                self._wait(first_line(error), backoff)
                backoff = min(2 * backoff, LONGEST_BACKOFF_S)
                continue
            if self.status.waiting_for is not None:
                log.warning("the lake is back; what the rings still hold is not lost")
                self.status.waiting_for = None
            return result

    def _wait(self, reason: str, backoff: float) -> None:
        if self.status.waiting_for is None:
            log.warning("cannot use the lake, waiting: %s", reason)
        self.status.waiting_for = reason
        self._on_status(self.status)
        if not self._stop.wait(backoff):
            return
        if self._patience_ends_s is None:
            self._patience_ends_s = time.monotonic() + STOP_PATIENCE_S
        if time.monotonic() > self._patience_ends_s:
            raise CollectorError(
                f"stopped while the lake could not be written ({reason}): what is not in it is "
                "still in the rings, start `inferloop collect` again"
            )
        time.sleep(backoff)

    def _finish(self, follower: Follower) -> None:
        """A drained ring whose engine is gone: report, commit the end, remove the file."""
        reader = follower.reader
        self._commit([f for f in [follower] if f.rows], finished=False)
        if reader.closed_by_writer:
            follower.rows.add_end("engine_closed", "")
        else:
            report = self._patiently(
                lambda: crash_report(self._lake(), reader.header, reader.cursor, reader.written[0])
            )
            path = self._written_report(report)
            follower.rows.add_end("engine_crashed", path)
            self.status.crashes += 1
            log.error(
                "engine %s (pid %d) died with %d requests in its open step: %s",
                reader.header.engine_id,
                reader.header.pid,
                len(report["open_step"]),
                path,
            )
        self._commit([follower], finished=True)
        reader.path.unlink(missing_ok=True)
        del self._followers[reader.path]
        reader.close()

    def _written_report(self, report: dict[str, Any]) -> str:
        """Its path, or why there is none: a full disk must not keep the rows from the lake."""
        try:
            return str(write_report(self._crash_dir, report))
        except OSError as error:
            return f"no report in {self._crash_dir}: {error.strerror}"

    def _lake(self) -> duckdb.DuckDBPyConnection:
        """The connection, made anew after a failure."""
        if self._connection is None:
            connection = open_lake(self._place, read_only=False)
            # Rows inlined in the catalog vanish for readers while they are flushed to files.
            connection.execute("SET ducklake_default_data_inlining_row_limit = 0")
            connection.execute(f"SET ducklake_max_retry_count = {LAKE_RETRIES}")
            self._connection = connection
        return self._connection

    def _first_connect(self) -> None:
        """Open the lake: a busy or full one is waited for, one that cannot be used is an error."""

        def attempt() -> LakeError | None:
            try:
                self._lake()
            except LakeError as error:
                if any(reason in str(error) for reason in PASSING):
                    raise
                return error
            return None

        failure = self._patiently(attempt)
        if failure is not None:
            raise failure

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()
        self._connection = None

    def _lock(self) -> CollectorLock:
        """One collector per ring directory, and per lake where its catalog is a local file."""
        files = [self._ring_dir / ".collector.lock"]
        catalog = self._place.catalog_file
        if catalog is not None:
            files.append(catalog.with_name(f"{catalog.name}.collector.lock"))
        return CollectorLock(files)

    def _close(self) -> None:
        for follower in self._followers.values():
            follower.reader.close()
        self._followers.clear()
        self._disconnect()


def _permanent_errors() -> tuple[type[Exception], ...]:
    """Errors that waiting does not cure: they would mean a defect, never a busy or full lake."""
    import duckdb

    return (
        duckdb.BinderException,
        duckdb.CatalogException,
        duckdb.ConversionException,
        duckdb.OutOfRangeException,
        duckdb.ParserException,
        duckdb.SyntaxException,
    )
