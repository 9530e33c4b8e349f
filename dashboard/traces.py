"""What the latency page reads from the trace lake: cells and figures, and a region's slowest rows.

Not for drawing (`dashboard.heatmap`) nor for the page (`dashboard.latency`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dashboard.heatmap import Cells, Loss, Mark

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

PERCENTILES = "[0.5, 0.99]"
EXACT_TOKENS = 4_000_000
"""Up to here a map is drawn from every token; more would take longer than a second."""
MARKS = 200
"""More lines than that hide the map; the newest ones are drawn."""
MINUTE = timedelta(minutes=1)


@dataclass(frozen=True)
class Overview:
    """Figures of the requests that arrived in a period; percentiles (p50, p99) in ms, or None."""

    requests: int
    failed: int
    output_tokens: int
    ttft_ms: tuple[float, float] | None
    tpot_ms: tuple[float, float] | None


@dataclass(frozen=True)
class HeatMap:
    """Cells of [start, end) in `time_bins` equal bins; `exact`: from the tokens themselves, else
    from histograms, within 2.2 % of the exact figures."""

    cells: Cells
    start: datetime
    end: datetime
    time_bins: int
    exact: bool


@dataclass(frozen=True)
class Region:
    """Requests that arrived in [start, end) (UTC), output positions first..last, both included."""

    start: datetime
    end: datetime
    first_position: int
    last_position: int


def arrivals(cursor: DuckDBPyConnection) -> tuple[datetime, datetime] | None:
    """First and last arrival (UTC) in the lake; None when it holds no request."""
    first, last = cursor.execute("SELECT min(arrived_at), max(arrived_at) FROM requests").fetchone()
    return None if first is None else (first.replace(tzinfo=UTC), last.replace(tzinfo=UTC))


def overview(cursor: DuckDBPyConnection, start: datetime, end: datetime) -> Overview:
    """Counts and percentiles from records of the requests that arrived in [start, end)."""
    row = cursor.execute(
        f"""
        SELECT count(*), count(*) FILTER (outcome NOT IN ('stop', 'length', 'unfinished')),
            coalesce(sum(output_tokens), 0),
            quantile_cont(ttft_ms, {PERCENTILES}), quantile_cont(tpot_ms, {PERCENTILES})
        FROM request_latency WHERE arrived_at >= ? AND arrived_at < ?
        """,
        [_naive(start), _naive(end)],
    ).fetchone()
    requests, failed, tokens, ttft, tpot = row
    return Overview(requests, failed, int(tokens), _pair(ttft), _pair(tpot))


def heat_map(
    cursor: DuckDBPyConnection,
    start: datetime,
    end: datetime,
    *,
    time_bins: int,
    position_bins: int,
    quantile: float,
    tokens: int,
) -> HeatMap:
    """The map of [start, end), which holds about `tokens` tokens: few are read one by one, many
    from the rollup, whose bins are whole minutes."""
    exact = tokens <= EXACT_TOKENS
    if not exact:
        start, end, time_bins = whole_minutes(start, end, time_bins)
    macro = "latency_heatmap" if exact else "latency_overview"
    columns = cursor.execute(
        f"""
        SELECT time_bin, position_bin, position_start, position_end, latency_ms, tokens
        FROM {macro}(?::TIMESTAMP, ?::TIMESTAMP, ?, ?, ?)
        """,
        [_naive(start), _naive(end), time_bins, position_bins, quantile],
    ).fetchnumpy()
    cells = Cells(**{name: np.asarray(values) for name, values in columns.items()})
    return HeatMap(cells, start, end, time_bins, exact)


def whole_minutes(start: datetime, end: datetime, time_bins: int) -> tuple[datetime, datetime, int]:
    """The bins of `latency_overview` for the same period: equal, of whole minutes, at most
    `time_bins`; the period grows to hold them."""
    first = start.replace(second=0, microsecond=0)
    minutes = max(1, -(-(end - first) // MINUTE))
    width = -(-minutes // time_bins)
    bins = -(-minutes // width)
    return first, first + bins * width * MINUTE, bins


def slowest_tokens(
    cursor: DuckDBPyConnection, region: Region, wanted: int
) -> dict[str, NDArray[Any]]:
    """The region's slowest tokens, first tokens left out, as columns."""
    return _rows_of(
        cursor,
        region,
        f"""
        SELECT r.request_id, t.position, t.latency_us / 1000 AS waited_ms, t.emitted_at,
            r.class_key AS class, t.step_id AS step
        FROM found AS t JOIN requests AS r USING (engine_id, slot)
        ORDER BY t.latency_us DESC, t.emitted_at LIMIT {wanted}
        """,
    )


def slowest_requests(
    cursor: DuckDBPyConnection, region: Region, wanted: int
) -> dict[str, NDArray[Any]]:
    """The requests that waited longest for each of the region's tokens on average, as columns."""
    return _rows_of(
        cursor,
        region,
        f"""
        SELECT r.request_id, avg(t.latency_us) / 1000 AS mean_ms,
            max(t.latency_us) / 1000 AS longest_ms, count(*) AS tokens, r.arrived_at,
            r.class_key AS class
        FROM found AS t JOIN requests AS r USING (engine_id, slot)
        GROUP BY ALL ORDER BY mean_ms DESC, r.arrived_at LIMIT {wanted}
        """,
    )


def _rows_of(cursor: DuckDBPyConnection, region: Region, query: str) -> dict[str, NDArray[Any]]:
    """Run `query` over `found`, the region's tokens; only files of their time are read."""
    period = [_naive(region.start), _naive(region.end)]
    (until,) = cursor.execute(
        """
        SELECT if(bool_or(f.slot IS NULL), NULL, max(f.finished_at))
        FROM requests AS r LEFT JOIN finishes AS f ON f.engine_id = r.engine_id AND f.slot = r.slot
        WHERE r.arrived_at >= ? AND r.arrived_at < ?
        """,
        period,
    ).fetchone()
    return cursor.execute(
        f"""
        WITH found AS (
            SELECT t.* FROM tokens AS t
            JOIN requests AS q ON q.engine_id = t.engine_id AND q.slot = t.slot
            WHERE q.arrived_at >= $start AND q.arrived_at < $end
                AND t.emitted_at >= $start AND t.emitted_at <= $until
                AND t.position BETWEEN $first AND $last AND NOT t.is_first
        ) {query}
        """,
        {
            "start": period[0],
            "end": period[1],
            "until": until or datetime.max,
            "first": region.first_position,
            "last": region.last_position,
        },
    ).fetchnumpy()


def losses(cursor: DuckDBPyConnection, start: datetime, end: datetime) -> list[Loss]:
    """Losses noticed in [start, end); each lies between the commit before it and its notice."""
    rows = cursor.execute(
        """
        SELECT coalesce(c.committed_at, l.noticed_at), l.noticed_at, l.tokens, l.kind
        FROM losses AS l ASOF LEFT JOIN ingest_cursor AS c
            ON c.engine_id = l.engine_id AND c.committed_at < l.noticed_at
        WHERE l.noticed_at >= ? AND l.noticed_at < ? AND l.kind <> 'retention'
        ORDER BY l.noticed_at
        """,
        [_naive(start), _naive(end)],
    ).fetchall()
    return [
        Loss(begin.replace(tzinfo=UTC), noticed.replace(tzinfo=UTC), tokens, kind)
        for begin, noticed, tokens, kind in rows
    ]


def marks(cursor: DuckDBPyConnection, start: datetime, end: datetime) -> list[Mark]:
    """The operators' notes in [start, end), at most `MARKS`; one set on several engines at once is
    one."""
    rows = cursor.execute(
        """
        SELECT min(marked_at) AS earliest, text FROM marks WHERE marked_at >= ? AND marked_at < ?
        GROUP BY text, date_trunc('second', marked_at) ORDER BY earliest DESC LIMIT ?
        """,
        [_naive(start), _naive(end), MARKS],
    ).fetchall()
    return [Mark(at.replace(tzinfo=UTC), text) for at, text in reversed(rows)]


def _naive(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(tzinfo=None)


def _pair(values: list[float | None] | None) -> tuple[float, float] | None:
    if not values or values[0] is None or values[1] is None:
        return None
    return float(values[0]), float(values[1])
