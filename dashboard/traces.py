"""What the latency page reads from the trace lake: aggregates only, never single tokens."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from dashboard.heatmap import Cells, Loss

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

PERCENTILES = "[0.5, 0.99]"


@dataclass(frozen=True)
class Overview:
    """Figures of the requests that arrived in a period; percentiles (p50, p99) in ms, or None."""

    requests: int
    failed: int
    output_tokens: int
    ttft_ms: tuple[float, float] | None
    tpot_ms: tuple[float, float] | None


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


def heatmap_cells(
    cursor: DuckDBPyConnection,
    start: datetime,
    end: datetime,
    *,
    time_bins: int,
    position_bins: int,
    quantile: float,
) -> Cells:
    """The cells of [start, end) that hold tokens, from the lake's macro `latency_heatmap`."""
    columns = cursor.execute(
        """
        SELECT time_bin, position_bin, position_start, position_end, latency_ms, tokens
        FROM latency_heatmap(?::TIMESTAMP, ?::TIMESTAMP, ?, ?, ?)
        """,
        [_naive(start), _naive(end), time_bins, position_bins, quantile],
    ).fetchnumpy()
    return Cells(**{name: np.asarray(values) for name, values in columns.items()})


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


def _naive(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(tzinfo=None)


def _pair(values: list[float | None] | None) -> tuple[float, float] | None:
    if not values or values[0] is None or values[1] is None:
        return None
    return float(values[0]), float(values[1])
