"""Keeping the lake's files few: merges small ones, forgets old snapshots, deletes what they held.

Runs in the collector while it has nothing to do, in pieces small enough that no ring fills up.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("inferloop.collector")

MERGE_COMMITS = 20
MERGE_FILES = 20
SMALL_FILE_BYTES = 16 << 20
EXPIRE_S = 60.0
SNAPSHOT_MINUTES = 10  # longer than any reader's query


class Upkeep:
    """Due after some commits (merging) or some time (expiry). Failures wait for the next time."""

    def __init__(self) -> None:
        self.commits = 0
        self._expired_s = time.monotonic()

    def run_if_due(self, connection: duckdb.DuckDBPyConnection) -> None:
        import duckdb

        try:
            if self.commits >= MERGE_COMMITS:
                self.commits = 0
                merge(connection)
            elif time.monotonic() - self._expired_s >= EXPIRE_S:
                self._expired_s = time.monotonic()
                expire(connection, SNAPSHOT_MINUTES)
        except duckdb.Error as error:
            log.warning("upkeep of the lake put off: %s", str(error).split("\n")[0])


def merge(connection: duckdb.DuckDBPyConnection) -> None:
    """Merge a bounded number of small files. Readers see the same rows before, during and after."""
    connection.execute(
        f"CALL ducklake_merge_adjacent_files('lake', max_compacted_files => {MERGE_FILES}, "
        f"max_file_size => {SMALL_FILE_BYTES})"
    ).fetchall()


def expire(connection: duckdb.DuckDBPyConnection, minutes: int) -> None:
    """Forget snapshots older than `minutes`, and delete the files only they held a while later."""
    before = f"now() - INTERVAL {minutes} MINUTE"
    for function in ("ducklake_expire_snapshots", "ducklake_cleanup_old_files"):
        connection.execute(f"SELECT count(*) FROM {function}('lake', older_than => {before})")
