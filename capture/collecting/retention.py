"""Retention: drops the lake's oldest rows by age and under a hard limit of bytes.

Rows go in bites small enough that no ring fills up meanwhile; what went is counted in `losses`.
Not for merging files nor for deleting those that nothing needs any more: that is `upkeep`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from capture.lake import NAME, LakePlace
from capture.settings import Settings

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("inferloop.collector")

BITE_ROWS = 5_000_000  # deleting runs at about 10 M rows/s
DROP_SHARE = 0.90  # of the limit on disk: from here on the oldest rows go,
GOAL_SHARE = 0.80  # until those that stay take less than this;
HURRY_SHARE = 0.95  # from here on files are deleted without the usual grace
KEPT_SHARE = 0.50  # no rounding up to a whole day or hour that leaves less than this
CLOCK_SLACK = timedelta(days=1)  # rows are no older than the newest one and a day say
REQUEST_SLACK = timedelta(hours=1)  # a request outlives its arrival: its tokens may be younger
METADATA = f"__ducklake_metadata_{NAME}"

TIME_COLUMNS = {
    "tokens": "emitted_at",
    "steps": "started_at",
    "prefill_chunks": "computed_at",
    "kernels": "started_at",
    "events": "happened_at",
    "gpu_samples": "sampled_at",
    "memory_samples": "sampled_at",
    "marks": "marked_at",
    "requests": "arrived_at",
    "finishes": "finished_at",
    "latency_rollup": "minute",
}
OF_REQUESTS = ("requests", "finishes", "latency_rollup")
KEPT = ("engines", "losses", "ingest_cursor", "rollup_marks", "schema_versions")
"""Tables with a row per engine, loss or version: nothing of them is dropped."""

_FILES = f"""
SELECT t.table_name, (f.file_size_bytes + 4095) // 4096 * 4096, f.record_count,
    try_cast(s.max_value AS TIMESTAMP),
    f.data_file_id IN (
        SELECT data_file_id FROM {METADATA}.ducklake_delete_file WHERE end_snapshot IS NULL
    )
FROM {METADATA}.ducklake_data_file AS f
JOIN {METADATA}.ducklake_table AS t ON t.table_id = f.table_id AND t.end_snapshot IS NULL
LEFT JOIN {METADATA}.ducklake_column AS c ON c.table_id = f.table_id AND c.end_snapshot IS NULL
    AND (t.table_name, c.column_name) IN ({", ".join(map(str, TIME_COLUMNS.items()))})
LEFT JOIN {METADATA}.ducklake_file_column_stats AS s
    ON s.data_file_id = f.data_file_id AND s.column_id = c.column_id
WHERE f.end_snapshot IS NULL
"""
_COUNT = """
SELECT engine_id::VARCHAR AS engine_id, strftime(emitted_at, '%Y-%m-%d') AS day, count(*) AS tokens
FROM tokens WHERE emitted_at < $cut GROUP BY ALL
"""
_RECORD = """
INSERT INTO losses
SELECT d.engine_id::UUID, coalesce(e.epoch, 0), now()::TIMESTAMP, 'retention', NULL, 0,
    d.tokens + coalesce(b.tokens, 0), d.day
FROM dropped AS d
LEFT JOIN (SELECT engine_id, max(epoch) AS epoch FROM engines GROUP BY engine_id) AS e
    ON e.engine_id = d.engine_id::UUID
LEFT JOIN dropped_before AS b ON b.engine_id = d.engine_id AND b.day = d.day
"""
_OF_THE_DAYS = (
    "kind = 'retention' AND (engine_id::VARCHAR, detail) IN (SELECT engine_id, day FROM dropped)"
)


class LakeFile(NamedTuple):
    """A Parquet file that today's snapshot needs; `size_bytes`: in whole disk blocks; `newest`:
    time of its last row, if it has any; `has_deletes`: some of its rows were deleted."""

    table: str
    size_bytes: int
    rows: int
    newest: datetime | None
    has_deletes: bool = False


@dataclass(frozen=True)
class Limits:
    """How many whole days (UTC) are kept and how many bytes the lake may take; None: no limit."""

    days: int | None = None
    max_bytes: int | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Limits:
        gib = settings.lake_max_gib
        return cls(settings.retention_days, None if gib is None else int(gib * 2**30))

    def __bool__(self) -> bool:
        return self.days is not None or self.max_bytes is not None


class Retention:
    """Decides what has to go and drops it, one bite at each call."""

    def __init__(self, place: LakePlace, limits: Limits) -> None:
        self.limits = limits
        self.dropped_tokens = 0
        self._place = place
        self._cut: datetime | None = None
        self._said: set[str] = set()

    def run(self, connection: duckdb.DuckDBPyConnection, used_bytes: int) -> bool:
        """Drop one bite of what is over the limits; whether there is more to drop at once.

        `used_bytes`: what the lake takes on disk, from `disk_use`.
        """
        files = lake_files(connection)
        if self._cut is None:
            self._cut = self._too_old(files) or self._too_large(files, used_bytes)
        if self._cut is None:
            return False
        bite = _bite(files, self._cut)
        tokens = drop_before(connection, bite)
        self.dropped_tokens += tokens
        log.warning("retention: dropped %s tokens from before %s UTC", f"{tokens:,}", bite)
        if bite >= self._cut:
            self._cut = None
        return self._cut is not None

    def in_a_hurry(self, used_bytes: int) -> bool:
        """Whether files must go at once, even those that a running query may still want."""
        limit = self.limits.max_bytes
        return limit is not None and used_bytes > limit * HURRY_SHARE

    def is_over(self, used_bytes: int) -> bool:
        limit = self.limits.max_bytes
        return limit is not None and used_bytes > limit

    def has_room(self, used_bytes: int, merged_bytes: int) -> bool:
        """Whether a merge of so many bytes exceeds the limit by no more than its last few percent:
        for a while the files and what they were merged into are both there."""
        limit = self.limits.max_bytes
        if limit is None:
            return True
        return used_bytes + merged_bytes < limit or merged_bytes < limit * (1 - HURRY_SHARE)

    def _too_old(self, files: list[LakeFile]) -> datetime | None:
        """Midnight before which rows are over the age limit; None: there are no such rows.

        A clock that jumped ahead must not cost the lake its rows: a day after the newest of them
        counts as today at the latest.
        """
        if self.limits.days is None:
            return None
        now = datetime.now(UTC).replace(tzinfo=None)
        newest = max((f.newest for f in files if f.newest is not None), default=now)
        kept = timedelta(days=self.limits.days)
        cut = _day(min(now, newest + CLOCK_SLACK) - kept)
        tokens = [f.newest for f in files if f.table == "tokens" and f.newest is not None]
        if any(time < cut for time in tokens):
            return cut
        if any(time < _day(now - kept) for time in tokens):
            self._say_once(
                f"the clock ({now:%Y-%m-%d}) is far past the lake's newest row ({newest:%Y-%m-%d}):"
                " nothing is dropped by age until newer rows come"
            )
        return None

    def _too_large(self, files: list[LakeFile], used: int) -> datetime | None:
        """The time before which rows have to go for the lake to fit; None: it does."""
        limit = self.limits.max_bytes
        if limit is None or used <= limit * DROP_SHARE:
            return None
        catalog = catalog_bytes(self._place)
        if catalog > limit * GOAL_SHARE:
            self._say_once(
                f"the lake's catalog alone takes {catalog >> 20} MiB of the limit of "
                f"{limit >> 20} MiB, so no rows can stay: raise INFERLOOP_LAKE_MAX_GIB"
            )
        excess = catalog + sum(file.size_bytes for file in files) - int(limit * GOAL_SHARE)
        if excess > 0:
            return _cut_for(files, excess, int(limit * KEPT_SHARE))
        if used > limit:
            self._say_once(
                f"the lake takes more on disk than its limit of {limit >> 20} MiB, but its rows "
                f"fit: what is in {self._place.data} beside them goes within minutes, unless it is "
                "not the lake's"
            )
        return None

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)


def lake_files(connection: duckdb.DuckDBPyConnection) -> list[LakeFile]:
    """The files of today's snapshot, from the catalog."""
    return [LakeFile(*row) for row in connection.execute(_FILES).fetchall()]


def drop_before(connection: duckdb.DuckDBPyConnection, cut: datetime) -> int:
    """Drop all rows from before `cut` (UTC) and count them in `losses`, in one transaction.

    Returns the number of tokens. A file all of whose rows go is not rewritten but dropped; it is
    deleted from disk once no snapshot needs it. Requests are kept an hour longer than tokens.
    """
    connection.execute("BEGIN")
    try:
        dropped = connection.execute(_COUNT, {"cut": cut}).to_arrow_table()
        if dropped.num_rows:
            _record(connection, dropped)
        for table, column in TIME_COLUMNS.items():
            before = cut - REQUEST_SLACK if table in OF_REQUESTS else cut
            connection.execute(f"DELETE FROM {table} WHERE {column} < $1", [before])
        connection.execute("COMMIT")
    except BaseException:
        import duckdb

        with contextlib.suppress(duckdb.Error):  # a failed commit has ended it already
            connection.execute("ROLLBACK")
        raise
    return int(sum(dropped.column("tokens").to_pylist()))


def disk_use(place: LakePlace, connection: duckdb.DuckDBPyConnection) -> int:
    """Bytes that the lake takes: blocks on disk of its data directory and SQLite catalog.

    In an object store: the sizes of the files in the catalog, those to be deleted included.
    """
    if "://" in place.data:
        (size,) = connection.execute(
            f"SELECT coalesce(sum(file_size_bytes), 0) FROM {METADATA}.ducklake_data_file"
        ).fetchone() or (0,)
        return int(size)
    return _blocks(place.data) + catalog_bytes(place)


def catalog_bytes(place: LakePlace) -> int:
    """Bytes on disk of a SQLite catalog; 0 for one in PostgreSQL."""
    if place.catalog_file is None:
        return 0
    return sum(_blocks_of(f"{place.catalog_file}{suffix}") for suffix in ("", "-wal", "-shm"))


def _record(connection: duckdb.DuckDBPyConnection, dropped: object) -> None:
    """One row in `losses` for each engine and day, whatever the number of bites it took."""
    connection.register("dropped", dropped)
    try:
        before = connection.execute(
            "SELECT engine_id::VARCHAR AS engine_id, detail AS day, sum(tokens)::BIGINT AS tokens "
            f"FROM losses WHERE {_OF_THE_DAYS} GROUP BY ALL"
        ).to_arrow_table()
        connection.execute(f"DELETE FROM losses WHERE {_OF_THE_DAYS}")
        connection.register("dropped_before", before)
        try:
            connection.execute(_RECORD)
        finally:
            connection.unregister("dropped_before")
    finally:
        connection.unregister("dropped")


def _cut_for(files: list[LakeFile], excess: int, kept: int) -> datetime | None:
    """The time whose earlier files hold `excess` bytes, rounded up to the end of its day, else of
    its hour, where at least `kept` bytes would be left."""
    dated = sorted((f.newest, f.size_bytes) for f in files if f.newest is not None)
    live = sum(file.size_bytes for file in files)
    freed, cut = 0, None
    for newest, size in dated:
        freed += size
        cut = newest
        if freed >= excess:
            break
    if cut is None:
        return None
    exact = cut + timedelta(microseconds=1)
    for rounded in (_day(cut) + timedelta(days=1), _hour(cut) + timedelta(hours=1)):
        gone = sum(size for newest, size in dated if newest < rounded)
        if live - gone >= kept:
            return rounded
    return exact


def _bite(files: list[LakeFile], cut: datetime) -> datetime:
    """The latest time up to `cut` before which the whole files hold at most BITE_ROWS tokens; of
    files larger than that, one."""
    rows, last = 0, None
    for newest, count in sorted(
        (f.newest, f.rows) for f in files if f.table == "tokens" and f.newest
    ):
        if newest >= cut:
            break
        rows += count
        if last is not None and rows > BITE_ROWS:
            return last + timedelta(microseconds=1)
        last = newest
    return cut


def _day(time: datetime) -> datetime:
    return time.replace(hour=0, minute=0, second=0, microsecond=0)


def _hour(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


def _blocks(directory: str) -> int:
    """Bytes on disk of all files under a directory; those that vanish meanwhile do not count."""
    return sum(
        _blocks_of(os.path.join(folder, name))
        for folder, _, names in os.walk(directory)
        for name in names
    )


def _blocks_of(path: str) -> int:
    try:
        return 512 * Path(path).lstat().st_blocks
    except OSError:
        return 0
