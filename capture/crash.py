"""What an engine was doing when it died, read back from the lake once its ring is drained.

A JSON file under the home directory, for people and for tickets. Not for detecting the death:
`capture.collector` does that.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture.reader import Cursor
from capture.ring import RingHeader

if TYPE_CHECKING:
    import duckdb

LAST_STEPS = 20
LAST_EVENTS = 20
MAX_REQUESTS = 1000

_STEPS = f"""
SELECT * EXCLUDE (engine_id) FROM steps WHERE engine_id = $engine
ORDER BY step_id DESC LIMIT {LAST_STEPS}
"""
# A request that had a row in the last step and did not finish was in the step that never ended.
_OPEN = f"""
WITH members AS (
    SELECT slot, 'decode' AS phase, position, kv_blocks FROM tokens
    WHERE engine_id = $engine AND step_id = $step
    UNION ALL
    SELECT slot, 'prefill', position, kv_blocks FROM prefill_chunks
    WHERE engine_id = $engine AND step_id = $step
)
SELECT r.slot, r.request_id, r.tenant, r.route, r.class_key, r.arrived_at, r.prompt_tokens,
    members.slot IS NOT NULL AS in_open_step, members.phase, members.position, members.kv_blocks
FROM requests AS r
ANTI JOIN finishes AS f ON f.engine_id = r.engine_id AND f.slot = r.slot
LEFT JOIN members ON members.slot = r.slot
WHERE r.engine_id = $engine ORDER BY in_open_step DESC, r.slot LIMIT {MAX_REQUESTS}
"""
_EVENTS = f"""
SELECT * EXCLUDE (engine_id) FROM events WHERE engine_id = $engine
ORDER BY happened_at DESC LIMIT {LAST_EVENTS}
"""


def crash_report(
    connection: duckdb.DuckDBPyConnection, header: RingHeader, cursor: Cursor, written: int
) -> dict[str, Any]:
    """The report of a dead engine whose rows are all in the lake; `written`: frames in its ring."""
    engine = {"engine": str(header.engine_id)}
    steps = _rows(connection, _STEPS, engine)
    last_step = steps[0]["step_id"] if steps else -1
    requests = _rows(connection, _OPEN, {**engine, "step": last_step})
    return {
        "schema": "inferloop.crash/1",
        "engine_id": str(header.engine_id),
        "pid": header.pid,
        "noticed_at": datetime.now(UTC).isoformat(),
        "last_step_id": last_step,
        "open_step": [request for request in requests if request["in_open_step"]],
        "waiting": [request for request in requests if not request["in_open_step"]],
        "memory": {key: steps[0][key] for key in ("kv_used", "kv_total")} if steps else None,
        "frames": {
            "written": written,
            "delivered": cursor.sequence - cursor.lost_frames,
            "lost": cursor.lost_frames,
            "torn": cursor.torn_frames,
        },
        "tokens": {
            "delivered": cursor.tokens - cursor.lost_tokens,
            "lost": cursor.lost_tokens,
        },
        "last_steps": steps,
        "last_events": _rows(connection, _EVENTS, engine),
    }


def write_report(directory: Path, report: dict[str, Any]) -> Path:
    """Write the report as `<engine id>.json`, whole or not at all; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{report['engine_id']}.json"
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump(report, file, indent=2, default=str)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def _rows(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, Any]
) -> list[dict[str, Any]]:
    result = connection.execute(sql, parameters)
    names = [column[0] for column in result.description or []]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
