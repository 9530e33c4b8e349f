"""The rollup of token latencies: histograms per minute, class and position, counted exactly once.

The mark says up to which step an engine's tokens are in it and is committed with them. Not for
reading the histograms: that is the macro `latency_overview`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    import duckdb

ALL_STEPS = (1 << 63) - 1
"""As `before_step`: the engine has ended, everything it wrote is in the lake."""
BINS_PER_OCTAVE = 16
POSITION_BUCKET = 16
STEPS_OVERLAP_S = 60
"""More than a step can ever end before one that began earlier."""
RELATIVE_ERROR = 2 ** (1 / (2 * BINS_PER_OCTAVE)) - 1
"""Of a latency read back as the geometric middle of its bin: at most 2.2 %."""

CELLS = f"""
SELECT t.engine_id, date_trunc('minute', r.arrived_at) AS minute, r.class_key,
    t.position // {POSITION_BUCKET} AS position_bucket,
    CASE WHEN t.latency_us >= 1 THEN floor({BINS_PER_OCTAVE} * log2(t.latency_us)) ELSE -1
        END::SMALLINT AS latency_bin,
    count(*) AS tokens
FROM tokens AS t JOIN requests AS r ON r.slot = t.slot
"""
"""Cells of the tokens that a WHERE and GROUP BY ALL after it choose. The WHERE must say that token
and request are of one engine: naming the engine for both saves a third of the time. A token whose
request was lost has no arrival and is in no cell."""
_NEW = f"""
{CELLS}
WHERE t.engine_id = $engine::UUID AND r.engine_id = $engine::UUID AND NOT t.is_first
    AND t.step_id >= $mark AND t.step_id < $before AND t.emitted_at >= $since
GROUP BY ALL ORDER BY minute, r.class_key, position_bucket, latency_bin
"""
_MARK = """
SELECT coalesce(max(step_id), 0),
    coalesce(
        max(emitted_from),
        (SELECT min(arrived_at) FROM requests WHERE engine_id = $engine::UUID),
        TIMESTAMP '1970-01-01'
    )
FROM rollup_marks WHERE engine_id = $engine::UUID
"""
_SET_MARK = f"""
INSERT INTO rollup_marks SELECT $engine::UUID, $before,
    greatest($since, max(emitted_at) - INTERVAL {STEPS_OVERLAP_S} SECOND), now()::TIMESTAMP
FROM tokens
WHERE engine_id = $engine::UUID AND step_id >= $mark AND step_id < $before AND emitted_at >= $since
"""


def roll_up(connection: duckdb.DuckDBPyConnection, engine_id: UUID | str, before_step: int) -> int:
    """Add an engine's tokens of steps from its mark up to `before_step` (excluded); the number.

    Rows and the new mark are one transaction of their own: killed anywhere, called again, it
    counts each token once. A step may come in two commits, so `before_step` must be one whose
    predecessors are complete in the lake: the last one committed, or ALL_STEPS after the engine's
    end. Raises duckdb.Error with nothing changed.
    """
    engine = str(engine_id)
    connection.execute("BEGIN")
    try:
        mark, since = connection.execute(_MARK, {"engine": engine}).fetchone() or (0, None)
        if before_step <= mark:
            connection.execute("ROLLBACK")
            return 0
        values = {"engine": engine, "mark": mark, "before": before_step, "since": since}
        tokens = _add_cells(connection, values)
        connection.execute(_SET_MARK, values)
        connection.execute("COMMIT")
    except BaseException:
        import duckdb

        with contextlib.suppress(duckdb.Error):  # a failed commit has ended it already
            connection.execute("ROLLBACK")
        raise
    return tokens


def _add_cells(connection: duckdb.DuckDBPyConnection, values: dict[str, Any]) -> int:
    cells = connection.execute(_NEW, values).to_arrow_table()
    if not cells.num_rows:
        return 0
    connection.register("rolled", cells)
    try:
        connection.execute("INSERT INTO latency_rollup SELECT * FROM rolled")
        (tokens,) = connection.execute("SELECT sum(tokens) FROM rolled").fetchone() or (0,)
    finally:
        connection.unregister("rolled")
    return int(tokens)
