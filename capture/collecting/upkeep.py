"""Keeping the lake's files few and its disk free: merges, forgets, deletes, within the limits.

Runs in the collector while it has nothing to do, in pieces small enough that no ring fills up.
Which rows have to go is decided in `capture.collecting.retention`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from capture.collecting.retention import METADATA, LakeFile, Limits, Retention, disk_use, lake_files
from capture.errors import first_line
from capture.lake import NAME, LakePlace

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("inferloop.collector")

MERGE_COMMITS = 20
FEW_FILES = 10  # of a table: not worth merging
SMALL_FILE_BYTES = 4 << 20  # half of what a merge makes of them
MERGE_BYTES = 16 << 20  # what a merge may take on disk at most; the lake's option bounds it
EXPIRE_S = 60.0
GRACE_S = 600.0  # longer than any reader's query
RETENTION_S = 10.0
STORE_GRACE_DAYS = 2  # in an object store
HURRY_S = 2.0  # when the byte limit is near, and
HURRIED_GRACE_S = 10.0  # then a reader's longer query may fail; over the limit any may
PRUNE_S = 300.0
ORPHANS_S = 3600.0
ORPHAN_AGE_S = 3600.0  # a file that a commit is just writing is no orphan

# The dashboard dates a loss by the last commit before it, so that commit's cursor stays.
_PRUNE = """
DELETE FROM ingest_cursor WHERE (engine_id, epoch, position) NOT IN (
    SELECT (engine_id, epoch, max(position)) FROM ingest_cursor GROUP BY engine_id, epoch
) AND (engine_id, committed_at) NOT IN (
    SELECT (c.engine_id, c.committed_at) FROM losses AS l ASOF JOIN ingest_cursor AS c
        ON c.engine_id = l.engine_id AND c.committed_at < l.noticed_at
    WHERE l.kind <> 'retention'
)
"""

# DuckLake's `older_than` compares texts in a SQLite catalog, right to the day at best: ages are
# computed here. A snapshot counts from its replacement: a reader may have begun with it just then.
# One of the future is old, too: the clock was set back, and the disk cannot wait until it is there.
CLOCKS_APART_S = 60  # of hosts that share a lake


def _is_old(time: str) -> str:
    """SQL: whether `time` is further away than {seconds}, to be filled in."""
    ages = [f"to_microseconds((({{seconds}} + {s}) * 1e6)::BIGINT)" for s in (0, CLOCKS_APART_S)]
    return f"({time} <= now() - {ages[0]} OR {time} > now() + {ages[1]})"


_SCHEDULED = f"{METADATA}.ducklake_files_scheduled_for_deletion"
_DATA_PATH = f"SELECT value FROM {METADATA}.ducklake_metadata WHERE key = 'data_path'"
_REPLACED = f"""
SELECT snapshot_id FROM (
    SELECT snapshot_id, lead(snapshot_time::TIMESTAMPTZ) OVER (ORDER BY snapshot_id) AS replaced_at
    FROM {METADATA}.ducklake_snapshot
) WHERE {_is_old("replaced_at")}
"""
_UNNEEDED = f"""
SELECT data_file_id, path FROM {_SCHEDULED} WHERE path_is_relative
    AND {_is_old("schedule_start::TIMESTAMPTZ")}
"""

_PRUNE_MARKS = """
DELETE FROM rollup_marks WHERE (engine_id, step_id) NOT IN (
    SELECT (engine_id, max(step_id)) FROM rollup_marks GROUP BY engine_id
)
"""


class Upkeep:
    """One piece of work at each call, the first that is due. Failures wait for the next time."""

    def __init__(self, place: LakePlace, limits: Limits) -> None:
        self.commits = 0  # since the last merge
        self.runs = 0
        self.failures = 0
        self.lake_bytes = 0
        self.retention = Retention(place, limits)
        self._place = place
        now = time.monotonic()
        self._due_s: dict[Callable[[duckdb.DuckDBPyConnection], None], float] = {
            self._prune: now + PRUNE_S,
            self._expire: now + EXPIRE_S,
            self._orphans: now + ORPHANS_S,
        }
        if limits:
            self._due_s = {self._retain: now, **self._due_s}

    def run_if_due(self, connection: duckdb.DuckDBPyConnection, *, calm: bool) -> bool:
        """Do what is due; whether there was anything. Not `calm`: only what cannot wait."""
        import duckdb

        work = self._next(calm)
        if work is None:
            return False
        self.runs += 1
        try:
            work(connection)
        except (duckdb.Error, OSError) as error:  # the second: of files that it deletes or sizes
            self.failures += 1
            log.warning("upkeep of the lake put off: %s", first_line(error))
        return True

    def _next(self, calm: bool) -> Callable[[duckdb.DuckDBPyConnection], None] | None:
        now = time.monotonic()
        for work, due_s in self._due_s.items():
            if now >= due_s and (calm or self.retention.in_a_hurry(self.lake_bytes)):
                return work
        if calm and self.commits >= MERGE_COMMITS:
            return self._merge
        return None

    def _merge(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.commits = 0
        for small in worth_merging(lake_files(connection)):
            room = self.retention.has_room(self.lake_bytes, min(small.size_bytes, MERGE_BYTES))
            if room and merge(connection, small):
                self.commits = MERGE_COMMITS  # there may be more
                return

    def _retain(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._due_s[self._retain] = time.monotonic() + RETENTION_S
        self.lake_bytes = disk_use(self._place, connection)
        more = self.retention.run(connection, self.lake_bytes)
        if self.retention.in_a_hurry(self.lake_bytes):
            grace_s = 0.0 if self.retention.is_over(self.lake_bytes) else HURRIED_GRACE_S
            expire(connection, grace_s, grace_s)
            self.lake_bytes = disk_use(self._place, connection)
            self._due_s[self._retain] = time.monotonic() + HURRY_S
        if more:
            self._due_s[self._retain] = 0.0

    def _expire(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._due_s[self._expire] = time.monotonic() + EXPIRE_S
        expire(connection, GRACE_S, GRACE_S)
        self.lake_bytes = disk_use(self._place, connection)

    def _prune(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._due_s[self._prune] = time.monotonic() + PRUNE_S
        connection.execute(_PRUNE)
        connection.execute(_PRUNE_MARKS)

    def _orphans(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._due_s[self._orphans] = time.monotonic() + ORPHANS_S
        deleted = delete_orphans(connection, ORPHAN_AGE_S)
        if deleted:
            log.info("deleted %d files of commits that never came to their end", deleted)


class SmallFiles(NamedTuple):
    """The files of a table below a size; `size_bytes`: of all of them."""

    table: str
    below_bytes: int
    size_bytes: int


def worth_merging(files: list[LakeFile]) -> list[SmallFiles]:
    """What should be merged, the table with most small files first.

    Of each table the smallest, and larger ones while they are no larger than all smaller ones
    together: a row is rewritten each time its file doubles, not at each merge. DuckLake merges no
    file of which rows were deleted.
    """
    of_tables: dict[str, list[int]] = {}
    for file in files:
        if file.size_bytes < SMALL_FILE_BYTES and not file.has_deletes:
            of_tables.setdefault(file.table, []).append(file.size_bytes)
    most_first = sorted(of_tables.items(), key=lambda of_table: len(of_table[1]), reverse=True)
    return [
        _no_larger_than_the_rest(table, sorted(sizes))
        for table, sizes in most_first
        if len(sizes) > FEW_FILES
    ]


def _no_larger_than_the_rest(table: str, sizes: list[int]) -> SmallFiles:
    """The smallest of these files, and each larger one while those before it outweigh it."""
    taken, count = sum(sizes[:FEW_FILES]), FEW_FILES
    while count < len(sizes) and sizes[count] <= taken:
        taken += sizes[count]
        count += 1
    return SmallFiles(table, sizes[count - 1] + 1, taken)


def merge(connection: duckdb.DuckDBPyConnection, small: SmallFiles) -> bool:
    """Make one larger file of as many of the small ones as fit in; whether there were any. Readers
    see the same rows before, during and after."""
    merged = connection.execute(
        f"CALL ducklake_merge_adjacent_files('{NAME}', '{small.table}', max_compacted_files => 1, "
        f"max_file_size => {small.below_bytes})"
    ).fetchall()
    return bool(merged)


def expire(connection: duckdb.DuckDBPyConnection, snapshots_s: float, files_s: float) -> None:
    """Forget snapshots that were replaced more than `snapshots_s` seconds ago, and delete files
    that no snapshot has needed for `files_s` seconds. A query that still reads one fails."""
    replaced = connection.execute(_REPLACED.format(seconds=snapshots_s)).fetchall()
    if replaced:
        versions = ", ".join(str(version) for (version,) in replaced)
        function = f"ducklake_expire_snapshots('{NAME}', versions => [{versions}])"
        connection.execute(f"SELECT count(*) FROM {function}").fetchall()
    (data,) = connection.execute(_DATA_PATH).fetchall()[0]
    if "://" in data:
        age = f"now() - INTERVAL {STORE_GRACE_DAYS} DAY"
        function = f"ducklake_cleanup_old_files('{NAME}', older_than => {age})"
        connection.execute(f"SELECT count(*) FROM {function}").fetchall()
    else:
        _delete_unneeded(connection, Path(data), files_s)


def _delete_unneeded(connection: duckdb.DuckDBPyConnection, data: Path, files_s: float) -> None:
    """What DuckLake's own clean-up does, but by the age of each file."""
    due = connection.execute(_UNNEEDED.format(seconds=files_s)).fetchall()
    for _, path in due:
        (data / path).unlink(missing_ok=True)
    if due:
        ids = [identity for identity, _ in due]
        connection.execute(
            f"DELETE FROM {_SCHEDULED} WHERE data_file_id IN (SELECT unnest($1))", [ids]
        )


def delete_orphans(connection: duckdb.DuckDBPyConnection, age_s: float) -> int:
    """Delete files in the lake's directory that its catalog does not know and that are older than
    `age_s` seconds: leftovers of a collector that was killed while it wrote. Returns how many."""
    # A result that nobody fetches is a function that never came to its end.
    before = f"now() - to_microseconds({round(age_s * 1e6)})"
    function = f"ducklake_delete_orphaned_files('{NAME}', older_than => {before})"
    (count,) = connection.execute(f"SELECT count(*) FROM {function}").fetchall()[0]
    return int(count)
