"""The collector's connection to the lake: commits exactly once, waits while the lake cannot.

For a catalog that somebody has locked, a full disk, a database that restarts. Not for deciding
what is committed when: that is `capture.collector`.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from capture.collecting.follower import Status
from capture.collecting.ingest import RingRows
from capture.collecting.insert import insert_rows
from capture.collecting.lake_check import Belongings, CatalogGoneError, check_files
from capture.errors import (
    CollectorError,
    LakeError,
    LakeMissingError,
    LakeVersionError,
    first_line,
)
from capture.lake import LakePlace, open_connection
from capture.reader import Cursor
from capture.ring import RingHeader

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")
log = logging.getLogger("inferloop.collector")

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
LAKE_RETRIES = 3  # inside one commit, about half a second; beyond that we wait and say so
SHARED_RETRIES = 10  # where several collectors write, losing a race is no outage
STOP_PATIENCE_S = 10.0
MEMORY_LIMIT = "2GiB"  # of DuckDB; a merge and a rollup take a tenth of it
THREADS = 1  # a second one costs a third more CPU for each token, which readers and engines miss
QUIET_RACES = 5
"""Commits lost in a row to other collectors' before that counts as an outage: DuckLake repeats one
that met an insert by itself, not one that met a deletion (of old cursors, by retention)."""
PASSING = ("locked", "disk I/O error", "disk is full", "No space left")


class LakeWriter:
    """One connection for one thread; made anew after a failure."""

    def __init__(
        self,
        place: LakePlace,
        status: Status,
        stop: threading.Event,
        on_status: Callable[[Status], None],
    ) -> None:
        self._place = place
        self._status = status
        self._stop = stop
        self._on_status = on_status
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._belongings: Belongings | None = None
        self._patience_ends_s: float | None = None

    def open(self) -> None:
        """Open the lake, made or upgraded where need be.

        A busy or full one is waited for. Raises LakeError for one that cannot be used.
        """

        def attempt() -> LakeError | None:
            try:
                self.connection()
            except LakeError as error:
                if any(reason in str(error) for reason in PASSING):
                    raise
                return error
            return None

        failure = self.patiently(attempt)
        if failure is not None:
            raise failure

    def connection(self) -> duckdb.DuckDBPyConnection:
        """The connection, made if there is none. Raises LakeError or duckdb.Error."""
        if self._connection is None:
            self._connection = self._connected()
        return self._connection

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def write(self, rings: list[RingRows]) -> None:
        """Commit the rows of all rings in one transaction, waiting while the lake cannot.

        Raises LakeError for what waiting does not cure, CollectorError when told to stop meanwhile.
        """
        self.patiently(partial(self._transaction, rings))

    def stored_cursor(self, ring: RingHeader) -> tuple[Cursor, bool] | None:
        """The last committed cursor of a ring and whether the ring is finished."""
        row = (
            self.connection()
            .execute(
                "SELECT sequence, tokens, position, lost_frames, lost_tokens, torn_frames, "
                "corrupt_frames, finished FROM ingest_cursor "
                "WHERE engine_id = ?::UUID AND epoch = ? "
                "ORDER BY position DESC, finished DESC LIMIT 1",
                [str(ring.engine_id), ring.epoch],
            )
            .fetchone()
        )
        return None if row is None else (Cursor(*row[:7]), bool(row[7]))

    def patiently(self, action: Callable[[], T]) -> T:
        """Run `action` on the lake until it succeeds, waiting ever longer in between.

        Raises LakeError for what waiting does not cure, CollectorError when told to stop meanwhile.
        """
        import duckdb

        backoff = FIRST_BACKOFF_S
        races = 0
        while True:
            try:
                result = action()
            except (LakeMissingError, LakeVersionError, CatalogGoneError):
                raise
            except _permanent_errors() as error:
                if self._belongings is not None:
                    self._belongings.check_catalog()
                raise LakeError(f"the lake refuses the rows: {first_line(error)}") from error
            except (duckdb.Error, LakeError) as error:
                self._status.failed_commits += 1
                self.close()
                if "Transaction conflict" in str(error) and races < QUIET_RACES:
                    races += 1
                    self._stop.wait(backoff * random.random())
                    continue
                self._wait(first_line(error), backoff)
                backoff = min(2 * backoff, LONGEST_BACKOFF_S)
                continue
            if self._status.waiting_for is not None:
                log.warning("the lake is back; what the rings still hold is not lost")
                self._status.waiting_for = None
            return result

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()
        self._connection = None

    def _connected(self) -> duckdb.DuckDBPyConnection:
        if self._belongings is not None:
            self._belongings.check_catalog()
        connection = open_connection(self._place, read_only=False, threads=THREADS)
        try:
            check_files(connection, self._place)
            # Rows inlined in the catalog vanish for readers while they are flushed to files.
            connection.execute("SET ducklake_default_data_inlining_row_limit = 0")
            shared = self._place.catalog_file is None
            retries = SHARED_RETRIES if shared else LAKE_RETRIES
            connection.execute(f"SET ducklake_max_retry_count = {retries}")
            # Files are read once, by a merge or a rollup; kept in memory they only grow it.
            connection.execute("SET enable_external_file_cache = false")
            connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
        except BaseException:
            connection.close()
            raise
        if self._belongings is None:
            self._belongings = Belongings(self._place)
        self._belongings.renew()
        return connection

    def _transaction(self, rings: list[RingRows]) -> None:
        """Insert and commit; after a failure first look whether only the answer got lost."""
        if self._belongings is not None:
            self._belongings.check_writable()
        if self._connection is None and self._is_stored(rings[0]):
            return
        connection = self.connection()
        if self._belongings is not None:
            self._belongings.check_catalog()
            self._belongings.check_data()
        connection.execute("BEGIN")
        insert_rows(connection, rings)
        connection.execute("COMMIT")

    def _is_stored(self, rows: RingRows) -> bool:
        """Whether the commit of these rows went through; by its time, because what a ring that was
        cut has lost is committed with the same cursor as the rows before."""
        found = self.connection().execute(
            "SELECT count(*) FROM ingest_cursor "
            "WHERE engine_id = ?::UUID AND epoch = ? AND committed_at = make_timestamp(?)",
            [rows.engine_id, rows.header.epoch, rows.cursor_us],
        )
        return found.fetchall() != [(0,)]

    def _wait(self, reason: str, backoff: float) -> None:
        if self._status.waiting_for != reason:
            log.warning("cannot use the lake, waiting: %s", reason)
        self._status.waiting_for = reason
        self._on_status(self._status)
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
