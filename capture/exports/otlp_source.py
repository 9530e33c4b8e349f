"""Finished requests of the lake in the order they were committed, with a cursor to go on from.

An engine's finishes are committed in the order of their times, so one time per engine says what
was read; requests of that very microsecond are named. Whoever follows looks only at the commits
since the last look. Not for sending.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from capture.atomic_file import opened
from capture.errors import LakeError, first_line
from capture.exports.selection import ExportError
from capture.lake import NAME

if TYPE_CHECKING:
    import duckdb

Row = dict[str, Any]
SLOW_TOKENS = 8
SLOW_FACTOR = 4
SLOW_US = 10_000
MARGIN_US = 1_000_000  # after the last finish


@dataclass
class Cursor:
    """Per engine the time of the last finish read, us since 1970, and the slots of that time."""

    engines: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Cursor:
        """The cursor of a file, or a new one. Raises ExportError when it cannot be read."""
        try:
            stored = json.loads(path.read_text())
            return cls(
                {
                    str(UUID(engine)): (int(at), [int(slot) for slot in slots])
                    for engine, (at, slots) in stored.items()
                }
            )
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ExportError(
                f"cannot read how far the export was: {path} ({error}); remove the file to start "
                "again from the beginning of the lake"
            ) from None

    def save(self, path: Path) -> None:
        """Raises OutputError."""
        with opened(path) as file:
            file.write(json.dumps(self.engines).encode())

    def take(self, rows: list[Row]) -> Cursor:
        """The cursor after these rows, which are in the order of `finished`."""
        engines = dict(self.engines)
        for row in rows:
            at, slots = engines.get(row["engine_id"], (-1, []))
            if row["finished_us"] > at:
                engines[row["engine_id"]] = (row["finished_us"], [row["slot"]])
            elif row["finished_us"] == at:
                engines[row["engine_id"]] = (at, [*slots, row["slot"]])
        return Cursor(engines)


@contextmanager
def alone(cursor_file: Path) -> Iterator[None]:
    """Keep a second export with the same cursor away. Raises ExportError."""
    path = cursor_file.with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise ExportError(f"cannot lock {path}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().decode(errors="replace") or "unknown"
            raise ExportError(
                f"another export (pid {owner}) to this endpoint is at work: stop it first"
            ) from None
        with suppress(OSError):  # a full disk; the lock holds all the same
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        yield


class NewCommits:
    """Which part of `finishes` may hold what was not read yet: all of it at first, then what was
    committed since, by the lake's own numbers of its commits, so that nothing is too late to be
    seen and no older file is read."""

    def __init__(self) -> None:
        self._read: int | None = None
        self._last: int | None = None

    def source(self, lake: duckdb.DuckDBPyConnection) -> str | None:
        """SQL of a table with the columns of `finishes`; None: nothing was committed since."""
        with _reading():
            row = lake.execute(f"FROM ducklake_current_snapshot('{NAME}')").fetchone()
        self._last = None if row is None else int(row[0])
        if self._read is None or self._last is None or self._last < self._read:
            return "finishes"
        if self._last == self._read:
            return None
        span = f"{self._read + 1}, {self._last}"
        return f"ducklake_table_insertions('{NAME}', 'main', 'finishes', {span})"

    def done(self) -> None:
        """All of the last source was read."""
        self._read = self._last

    def forget(self) -> None:
        """Begin with all of it again: the lake has forgotten the commits in between."""
        self._read = None


_NEXT = """
CREATE OR REPLACE TEMP TABLE next AS
SELECT f.* FROM {source} AS f
LEFT JOIN (SELECT engine_id, max(at_us) AS at_us FROM exported GROUP BY engine_id) AS x
    ON x.engine_id = f.engine_id
WHERE (x.engine_id IS NULL OR f.finished_at >= make_timestamp(x.at_us))
    AND f.finished_at >= coalesce($start, '-infinity'::TIMESTAMP)
    AND f.finished_at < coalesce($end, 'infinity'::TIMESTAMP)
    AND (f.engine_id, f.slot, epoch_us(f.finished_at)) NOT IN
        (SELECT (engine_id, slot, at_us) FROM exported)
ORDER BY f.engine_id, f.finished_at, f.slot LIMIT $limit
"""

_SPAN = "SELECT min(slot), max(slot) FROM next"

_WHOLE = """
SELECT f.engine_id::VARCHAR AS engine_id, f.slot, r.request_id, r.tenant, r.route, r.class_key,
    r.priority, r.prompt_tokens, r.cached_tokens, r.max_tokens, f.reason, f.output_tokens,
    epoch_us(r.arrived_at) AS arrived_us, epoch_us(f.admitted_at) AS admitted_us,
    epoch_us(f.first_token_at) AS first_token_us, epoch_us(f.last_token_at) AS last_token_us,
    epoch_us(f.flushed_at) AS flushed_us, epoch_us(f.finished_at) AS finished_us,
    e.model, e.host, e.pid, e.fingerprint
FROM next AS f
LEFT JOIN (
    FROM requests WHERE slot BETWEEN $first AND $last
) AS r ON r.engine_id = f.engine_id AND r.slot = f.slot
LEFT JOIN engines AS e ON e.engine_id = f.engine_id
ORDER BY f.engine_id, f.finished_at, f.slot
"""


def after(
    lake: duckdb.DuckDBPyConnection,
    cursor: Cursor,
    limit: int,
    start: datetime | None = None,
    end: datetime | None = None,
    source: str = "finishes",
) -> list[Row]:
    """The next finished requests, `limit` at most, ordered by engine and finish.

    `request_id` is None where the ring lost a request's arrival, and kept its end.
    `start`, `end`: only those that finished then, `end` excluded; UTC. `source`: where to look.
    """
    engines = [
        (engine, at_us, slot) for engine, (at_us, slots) in cursor.engines.items() for slot in slots
    ]
    with _reading():
        lake.execute(
            "CREATE OR REPLACE TEMP TABLE exported (engine_id UUID, at_us BIGINT, slot BIGINT)"
        )
        if engines:
            lake.executemany("INSERT INTO exported VALUES (?, ?, ?)", engines)
        values = {"start": start, "end": end, "limit": limit}
        lake.execute(_NEXT.format(source=source), values)
        span = lake.execute(_SPAN).fetchone()
        if span is None or span[0] is None:
            return []
        # Constants, so that only their part of the files of `requests` is read.
        return _rows(lake, _WHOLE, {"first": span[0], "last": span[1]})


def after_new(
    lake: duckdb.DuckDBPyConnection, cursor: Cursor, limit: int, commits: NewCommits
) -> list[Row]:
    """What `after` finds among the commits that were not read yet. Call `commits.done()` once
    fewer than `limit` rows came and were dealt with."""
    source = commits.source(lake)
    if source is None:
        return []
    try:
        return after(lake, cursor, limit, source=source)
    except LakeError as error:
        if "No snapshot found" not in str(error):
            raise
        commits.forget()
        return after(lake, cursor, limit)


def events_of(lake: duckdb.DuckDBPyConnection, rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    """Preemptions and slow tokens of these requests, by engine and slot, in the order of time.

    Slow: above SLOW_FACTOR times the request's median and SLOW_US, the SLOW_TOKENS slowest.
    """
    import pyarrow as pa

    batch = pa.table(
        {
            "engine_id": [row["engine_id"] for row in rows],
            "slot": [row["slot"] for row in rows],
        }
    )
    times = {
        "start": min(row["arrived_us"] for row in rows),
        "end": max(max(row["finished_us"], row["flushed_us"] or 0) for row in rows) + MARGIN_US,
    }
    with _reading():
        lake.register("batch", batch)
        try:
            found = _rows(lake, _EVENTS, times)
        finally:
            lake.unregister("batch")
    events: dict[tuple[str, int], list[Row]] = {}
    for row in found:
        attributes = {
            "inferloop.token.position": row["position"],
            "inferloop.token.latency_ms": row["latency_ms"],
            "inferloop.token.usual_ms": row["usual_ms"],
            "inferloop.step_id": row["step_id"],
        }
        known = {name: value for name, value in attributes.items() if value is not None}
        event = {"at_us": row["at_us"], "name": row["name"], "attributes": known}
        events.setdefault((row["engine_id"], row["slot"]), []).append(event)
    return events


_EVENTS = f"""
WITH meant AS (SELECT engine_id::UUID AS engine_id, slot FROM batch),
measured AS (
    SELECT t.engine_id, t.slot, t.position, t.step_id, t.latency_us, t.emitted_at,
        median(t.latency_us) OVER (PARTITION BY t.engine_id, t.slot) AS usual_us
    FROM tokens AS t SEMI JOIN meant USING (engine_id, slot)
    WHERE t.emitted_at BETWEEN make_timestamp($start) AND make_timestamp($end) AND NOT t.is_first
), slow AS (
    FROM measured
    WHERE latency_us > {SLOW_FACTOR} * usual_us AND latency_us > {SLOW_US}
    QUALIFY row_number() OVER (PARTITION BY engine_id, slot ORDER BY latency_us DESC)
        <= {SLOW_TOKENS}
)
SELECT engine_id::VARCHAR AS engine_id, slot, epoch_us(emitted_at) AS at_us,
    'inferloop.slow_token' AS name, position, latency_us / 1000 AS latency_ms,
    usual_us / 1000 AS usual_ms, step_id
FROM slow
UNION ALL
SELECT engine_id::VARCHAR, slot, epoch_us(happened_at), 'inferloop.' || kind, NULL, NULL, NULL, NULL
FROM events SEMI JOIN meant USING (engine_id, slot)
WHERE kind IN ('preempted', 'resumed')
    AND happened_at BETWEEN make_timestamp($start) AND make_timestamp($end)
ORDER BY at_us
"""


@contextmanager
def _reading() -> Iterator[None]:
    """Raises LakeError when the lake cannot be read now, such as while its database restarts."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        raise LakeError(f"cannot read the lake: {first_line(error)}") from error


def _rows(lake: duckdb.DuckDBPyConnection, sql: str, values: dict[str, Any]) -> list[Row]:
    rows: list[Row] = lake.execute(sql, values).to_arrow_table().to_pylist()
    return rows
