"""Finding the requests to explain: by an id in any form a client saw, or the slowest ones.

A request that is not in the lake is an error that says what to do about it. Not for explaining:
that is `capture.why.report`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture.errors import CaptureError, RingError
from capture.why.pieces import MIN_PREFIX, request_key

if TYPE_CHECKING:
    import duckdb

RECENT = 3
SHOWN = 10
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class WhyError(CaptureError):
    """The request cannot be found, or what was asked makes no sense."""


class Ranking(StrEnum):
    """What `slowest` goes by: the whole request, its first token, or its longest gap."""

    duration = "duration"
    ttft = "ttft"
    gap = "gap"


@dataclass(frozen=True)
class Subject:
    """A request as the lake knows it. Token counts and times are None where it does not.

    `outcome` is that of `request_latency`, or "waiting" in the queue. Of one that has not ended,
    `as_of` is how far its engine's trace goes, and `preempted_at` when it was sent back to wait, if
    it has not resumed. Times are UTC, naive.
    """

    engine_id: str
    slot: int
    request_id: str
    tenant: str | None
    class_key: str | None
    priority: int | None
    adjustment: int | None
    arrived_at: datetime
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    outcome: str
    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    sending_ms: float | None
    duration_ms: float | None
    model: str | None
    is_proxied: bool
    as_of: datetime | None = None
    preempted_at: datetime | None = None

    @property
    def effective(self) -> int:
        """The priority that counts."""
        return max(0, min(100, (self.priority or 0) + (self.adjustment or 0)))


_SUBJECTS = """
SELECT l.engine_id::VARCHAR, slot, request_id, tenant, class_key, priority, adjustment, arrived_at,
    prompt_tokens, cached_tokens, output_tokens, outcome, queue_ms, ttft_ms, tpot_ms, sending_ms,
    duration_ms, e.model, coalesce(e.is_proxied, false)
FROM {source} AS l LEFT JOIN (
    SELECT engine_id, any_value(model) AS model, bool_or(info->>'kind' = 'proxy') AS is_proxied
    FROM engines GROUP BY engine_id
) AS e ON e.engine_id = l.engine_id
"""

_WAITING = r"""
SELECT q.engine_id::VARCHAR, q.slot, q.request_id, regexp_extract(q.detail, 'tenant=(\S+)', 1),
    regexp_extract(q.detail, 'class=(\S+)', 1),
    regexp_extract(q.detail, 'priority=(-?\d+)', 1)::INTEGER,
    regexp_extract(q.detail, 'adjustment=(-?\d+)', 1)::INTEGER,
    q.happened_at - to_microseconds(regexp_extract(q.detail, 'waited_us=(\d+)', 1)::BIGINT)
        AS arrived_at, regexp_extract(q.detail, 'prompt_tokens=(\d+)', 1)::INTEGER, NULL, NULL,
    if(gone.engine_id IS NULL, 'waiting', 'engine_gone'), NULL, NULL, NULL, NULL, NULL, e.model,
    false
FROM events AS q
LEFT JOIN requests AS r ON r.engine_id = q.engine_id AND r.slot = q.slot
LEFT JOIN finishes AS f ON f.engine_id = q.engine_id AND f.slot = q.slot
LEFT JOIN (
    SELECT DISTINCT engine_id FROM events WHERE kind IN ('engine_closed', 'engine_crashed')
) AS gone ON gone.engine_id = q.engine_id
LEFT JOIN (
    SELECT engine_id, any_value(model) AS model FROM engines GROUP BY engine_id
) AS e ON e.engine_id = q.engine_id
WHERE q.kind = 'queued' AND r.slot IS NULL AND f.slot IS NULL AND {condition}
ORDER BY arrived_at, q.slot
"""
"""Requests without a row of their own yet: that is written when they get a seat, or end."""

_WORST_GAPS = """(
    SELECT l.*, g.gap_us FROM request_latency AS l JOIN (
        SELECT engine_id, slot, max(latency_us) AS gap_us FROM tokens
        WHERE NOT is_first AND emitted_at >= $since GROUP BY engine_id, slot
        ORDER BY gap_us DESC LIMIT $count
    ) AS g ON g.engine_id = l.engine_id AND g.slot = l.slot
)"""

OPEN = ("unfinished", "waiting")
"""Outcomes of requests that have not ended."""

EVER = datetime(1970, 1, 1)


def find(lake: duckdb.DuckDBPyConnection, text: str) -> list[Subject]:
    """The requests that `text` may mean, oldest first; several calls may share a trace id.

    Raises WhyError when `text` is no id or the beginning of one.
    """
    key = str(_row(lake, f"SELECT {request_key('$text')}", text=text)[0])
    if len(key) < MIN_PREFIX or not re.fullmatch("[0-9a-f]{1,32}", key):
        raise WhyError(
            f"{text!r} is no request id: give the X-Request-Id or the id of the answer "
            f"(chatcmpl-..., cmpl-...), or at least its first {MIN_PREFIX} hex digits"
        )
    sql = _SUBJECTS.format(source="request_latency") + "WHERE starts_with(request_id, $key)"
    found = _subjects(lake, f"{sql} ORDER BY arrived_at, slot", key=key)
    waiting = _WAITING.format(condition="starts_with(q.request_id, $key)")
    return _as_far_as_known(lake, [*found, *_subjects(lake, waiting, key=key)])


def running_and_waiting(
    lake: duckdb.DuckDBPyConnection, engine_id: str
) -> tuple[list[Subject], list[Subject]]:
    """The requests that an engine runs, and those that wait in its queue; oldest first."""
    running = _subjects(
        lake,
        _SUBJECTS.format(source="request_latency")
        + "WHERE l.engine_id = $engine::UUID AND outcome = 'unfinished' ORDER BY arrived_at, slot",
        engine=engine_id,
    )
    waiting = _WAITING.format(condition="q.engine_id = $engine::UUID")
    return running, _subjects(lake, waiting, engine=engine_id)


def slowest(
    lake: duckdb.DuckDBPyConnection,
    count: int,
    *,
    by: Ranking = Ranking.duration,
    since: datetime | None = None,
) -> list[Subject]:
    """The `count` slowest requests that arrived after `since` (UTC, naive), slowest first. Those
    without the figure (still running, for their duration; failed, for TTFT) are left out."""
    source = _WORST_GAPS if by is Ranking.gap else "request_latency"
    figure = "gap_us" if by is Ranking.gap else f"{by.value}_ms"
    sql = _SUBJECTS.format(source=source) + (
        f"WHERE arrived_at >= $since AND {figure} IS NOT NULL "
        f"ORDER BY {figure} DESC, arrived_at LIMIT $count"
    )
    return _as_far_as_known(lake, _subjects(lake, sql, since=since or EVER, count=count))


def parse_since(text: str, now: datetime) -> datetime:
    """A time in UTC, naive: "10m", "2h", "1d" before `now`, or ISO 8601. Raises WhyError."""
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip())
    if ago is not None:
        try:
            return max(EVER, now - timedelta(**{UNITS[ago[2]]: float(ago[1])}))
        except OverflowError:
            return EVER
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise WhyError(
            f"{text!r} is no time: give an age (90s, 10m, 2h, 1d) or a date (2026-01-31T12:00)"
        ) from None
    return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment


def ambiguous(text: str, subjects: list[Subject]) -> WhyError:
    """Several requests begin with `text`: which there are."""
    lines = [_listed(subject) for subject in subjects[:SHOWN]]
    more = len(subjects) - len(lines)
    if more > 0:
        lines.append(f"and {more} more")
    return WhyError(
        f"{len(subjects)} requests begin with {text!r}, give more of the id:\n  "
        + "\n  ".join(lines)
    )


def unknown(lake: duckdb.DuckDBPyConnection, text: str, ring_dir: Path) -> WhyError:
    """No request has this id: why that may be, and the newest ones there are."""
    recent = _subjects(
        lake,
        _SUBJECTS.format(source="request_latency") + f"ORDER BY arrived_at DESC LIMIT {RECENT}",
    )
    lines = [f"no request {text!r} is in the trace lake"]
    pending = _uncollected(lake, ring_dir)
    if pending:
        lines.append(
            f"frames in the rings of {ring_dir} that no collector reads: {pending:,}; "
            "is `inferloop collect` running?"
        )
    lines.append("if it has just been sent or served, ask again in 2 s")
    if recent:
        lines.append("the newest ones are:\n  " + "\n  ".join(map(_listed, recent)))
    return WhyError("\n".join(lines))


def _uncollected(lake: duckdb.DuckDBPyConnection, ring_dir: Path) -> int:
    """Frames in the rings that are not in the lake and that no collector is about to fetch."""
    from capture.reader import RingReader, discover
    from capture.rings.ring_report import reader_lags

    committed = dict(
        lake.execute(
            "SELECT engine_id::VARCHAR, max(sequence) FROM ingest_cursor GROUP BY engine_id"
        ).fetchall()
    )
    pending = 0
    for path in discover(ring_dir):
        try:
            reader = RingReader(path)
        except RingError:
            continue
        if any(lag.name == "collector" for lag in reader_lags(path, reader)):
            continue
        frames, _ = reader.written
        pending += max(0, frames - committed.get(str(reader.header.engine_id), 0))
        reader.close()
    return pending


def _listed(subject: Subject) -> str:
    return (
        f"{subject.request_id}  {subject.arrived_at:%Y-%m-%d %H:%M:%S}  "
        f"{subject.class_key or '-'}  {subject.outcome}"
    )


def _as_far_as_known(lake: duckdb.DuckDBPyConnection, subjects: list[Subject]) -> list[Subject]:
    """The subjects, those that have not ended with what is known of their present."""
    return [_with_present(lake, one) if one.outcome in OPEN else one for one in subjects]


def _with_present(lake: duckdb.DuckDBPyConnection, subject: Subject) -> Subject:
    (as_of,) = _row(
        lake,
        "SELECT max(committed_at) FROM ingest_cursor WHERE engine_id = $engine::UUID",
        engine=subject.engine_id,
    )
    (preempted_at,) = _row(
        lake,
        "SELECT if(max_by(kind, happened_at) = 'preempted', max(happened_at), NULL) FROM events "
        "WHERE engine_id = $engine::UUID AND slot = $slot AND kind IN ('preempted', 'resumed')",
        engine=subject.engine_id,
        slot=subject.slot,
    )
    return replace(subject, as_of=as_of, preempted_at=preempted_at)


def _subjects(lake: duckdb.DuckDBPyConnection, sql: str, **values: Any) -> list[Subject]:
    return [Subject(*row) for row in lake.execute(sql, values).fetchall()]


def _row(lake: duckdb.DuckDBPyConnection, sql: str, **values: Any) -> tuple[Any, ...]:
    row = lake.execute(sql, values).fetchone()
    return () if row is None else tuple(row)
