"""Which part of the lake is exported: requests by id, the slowest, or all of a time window.

The chosen requests become a temporary table of the reader's own connection; the lake is only read.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from capture.errors import CaptureError

if TYPE_CHECKING:
    import duckdb

RECENT = timedelta(seconds=60)
MARGIN = timedelta(milliseconds=50)  # shown before and after chosen requests


class ExportError(CaptureError):
    """An export cannot be made."""


@dataclass(frozen=True)
class Selection:
    """What to export. With nothing given: the lake's last minute.

    `request_ids`: W3C trace ids, dashes allowed; `slowest`: so many requests by duration among
    those of the window; `start` and `end`: UTC without a time zone.
    """

    request_ids: tuple[str, ...] = ()
    slowest: int | None = None
    start: datetime | None = None
    end: datetime | None = None


@dataclass(frozen=True)
class Window:
    """From `start` up to and without `end`, UTC."""

    start: datetime
    end: datetime


def parse_time(text: str) -> datetime:
    """An ISO 8601 time as UTC without zone; a time without zone is UTC. Raises ExportError."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ExportError(
            f"{text!r} is no time: write 2026-11-29T14:00:00, in UTC or with an offset"
        ) from None
    return time.astimezone(UTC).replace(tzinfo=None) if time.tzinfo is not None else time


def choose(lake: duckdb.DuckDBPyConnection, selection: Selection) -> Window:
    """Make the temporary table `chosen` (a row per request with its finish) and say its window.

    Raises ExportError when nothing in the lake is meant.
    """
    window = _asked(lake, selection)
    conditions: list[str] = ["true"]
    values: list[object] = []
    if selection.request_ids:
        ids = [identity.replace("-", "").lower() for identity in selection.request_ids]
        conditions.append("r.request_id IN (SELECT unnest(?))")
        values.append(ids)
    if window is not None:
        conditions.append("r.arrived_at < ?")
        conditions.append(f"coalesce({_END}, r.arrived_at + INTERVAL 1 DAY) >= ?")
        values += [window.end, window.start]
    order = ""
    if selection.slowest is not None:
        order = f"ORDER BY {_END} - r.arrived_at DESC NULLS LAST LIMIT {int(selection.slowest)}"
    lake.execute(
        f"CREATE OR REPLACE TEMP TABLE chosen AS SELECT r.*, f.* EXCLUDE (engine_id, slot)\n"
        "FROM requests AS r LEFT JOIN finishes AS f"
        " ON f.engine_id = r.engine_id AND f.slot = r.slot\n"
        f"WHERE {' AND '.join(conditions)} {order}",
        values,
    )
    if selection.request_ids:
        _check_found(lake, ids)
    if window is not None and selection.slowest is None:
        if not _one(lake, "SELECT count(*) FROM chosen")[0]:
            raise ExportError(
                f"no request was at work from {window.start} to {window.end} UTC: see  "
                'inferloop sql "SELECT min(arrived_at), max(arrived_at) FROM requests"'
            )
        return window
    return _around(lake)


_END = "greatest(f.finished_at, f.flushed_at)"


def _asked(lake: duckdb.DuckDBPyConnection, selection: Selection) -> Window | None:
    """The window to look in; None: requests are named, wherever they are."""
    start, end = selection.start, selection.end
    if start is not None and end is not None and start >= end:
        raise ExportError(f"the time window is empty: {start} is not before {end}")
    everything = selection.request_ids or selection.slowest is not None
    if everything and start is None and end is None:
        return None
    first, last = _one(
        lake,
        "SELECT least((SELECT min(started_at) FROM steps), (SELECT min(arrived_at) FROM requests)),"
        " greatest((SELECT max(started_at) FROM steps), (SELECT max(arrived_at) FROM requests),"
        " (SELECT max(finished_at) FROM finishes))",
    )
    if first is None:
        raise ExportError("the lake holds no requests and no steps yet")
    last += MARGIN
    if start is None and end is None:
        start = max(first, last - RECENT)
    return Window(start or first, end or last)


def _around(lake: duckdb.DuckDBPyConnection) -> Window:
    start, end = _one(
        lake,
        "SELECT min(arrived_at), greatest(max(coalesce(flushed_at, finished_at, arrived_at)), "
        "(SELECT max(t.emitted_at) FROM tokens AS t JOIN chosen USING (engine_id, slot))) "
        "FROM chosen",
    )
    if start is None:
        raise ExportError("no request of the lake is in the selection")
    return Window(start - MARGIN, end + MARGIN)


def _check_found(lake: duckdb.DuckDBPyConnection, ids: list[str]) -> None:
    found = {row[0] for row in lake.execute("SELECT DISTINCT request_id FROM chosen").fetchall()}
    absent = [identity for identity in ids if identity not in found]
    if absent:
        raise ExportError(
            f"the lake holds no request {', '.join(absent)}: is it older than the lake's "
            "retention, or not yet collected?"
        )


def _one(lake: duckdb.DuckDBPyConnection, sql: str) -> tuple[Any, ...]:
    row = lake.execute(sql).fetchone()
    return row if row is not None else ()
