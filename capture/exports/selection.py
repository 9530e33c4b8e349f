"""Which part of the lake is exported: requests by id, the slowest, or all of a time window.

The chosen requests become a temporary table of the reader's own connection; the lake is only read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from capture.errors import CaptureError
from capture.why.pieces import MIN_PREFIX, request_key

if TYPE_CHECKING:
    import duckdb

RECENT = timedelta(seconds=60)
MARGIN = timedelta(milliseconds=50)  # shown before and after chosen requests


class ExportError(CaptureError):
    """An export cannot be made."""


@dataclass(frozen=True)
class Selection:
    """What to export. With nothing given: the lake's last minute.

    `request_ids`: in any form that a client saw, or at least the first 8 hex digits; `slowest`: so
    many requests by duration among those of the window; `start` and `end`: UTC without a time zone.
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
        keys = _keys(lake, selection.request_ids)
        conditions.append("EXISTS (FROM unnest(?) AS k(key) WHERE starts_with(r.request_id, key))")
        values.append(keys)
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
        _check_found(lake, selection.request_ids, keys)
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


def _keys(lake: duckdb.DuckDBPyConnection, ids: tuple[str, ...]) -> list[str]:
    """The hex digits of request ids, or of their beginnings, as `inferloop why` takes them."""
    keys = []
    for identity in ids:
        key = str(_one(lake, f"SELECT {request_key('$1')}", [identity])[0])
        if len(key) < MIN_PREFIX or not re.fullmatch("[0-9a-f]{1,32}", key):
            raise ExportError(
                f"{identity!r} is no request id: give the X-Request-Id or the id of the answer "
                f"(chatcmpl-..., cmpl-...), or at least its first {MIN_PREFIX} hex digits"
            )
        keys.append(key)
    return keys


def _check_found(lake: duckdb.DuckDBPyConnection, ids: tuple[str, ...], keys: list[str]) -> None:
    found = [row[0] for row in lake.execute("SELECT DISTINCT request_id FROM chosen").fetchall()]
    absent = [
        identity
        for identity, key in zip(ids, keys, strict=True)
        if not any(name.startswith(key) for name in found)
    ]
    if absent:
        raise ExportError(
            f"the lake holds no request {', '.join(absent)}: is it older than the lake's "
            "retention, or not yet collected?"
        )


def _one(
    lake: duckdb.DuckDBPyConnection, sql: str, values: Sequence[object] = ()
) -> tuple[Any, ...]:
    row = lake.execute(sql, values).fetchone()
    return row if row is not None else ()
