"""What an engine was doing when it died: from the end of its ring and, drained, from the lake.

A JSON file under the home directory, for people and for tickets. All its times are ISO 8601, UTC,
microseconds. Not for detecting the death nor for keeping the ring: that is `finishing`.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture.decode import KernelFrame, StepFrame, decode
from capture.errors import FrameError
from capture.frames import FrameType
from capture.reader import Cursor, FrameBatch, RingReader
from capture.ring import RingHeader

if TYPE_CHECKING:
    import duckdb

SCHEMA = "inferloop.crash/2"
LAST_FRAMES = 20
LAST_STEPS = 20
LAST_EVENTS = 20
MAX_REQUESTS = 1000
LOOK_BACK_BYTES = (1 << 20, 32 << 20)  # the second, where frames are longer than 50 KiB

_STEPS = f"""
SELECT * EXCLUDE (engine_id) FROM steps WHERE engine_id = $engine
ORDER BY step_id DESC LIMIT {LAST_STEPS}
"""
# A request that had a row in the last step and did not finish was in the step that never ended.
_REQUESTS = f"""
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
# The last sample of each device.
_SAMPLES = """
SELECT * EXCLUDE (engine_id) FROM {table} WHERE engine_id = $engine
QUALIFY row_number() OVER (PARTITION BY device ORDER BY sampled_at DESC) = 1 ORDER BY device
"""


def crash_report(connection: duckdb.DuckDBPyConnection, reader: RingReader) -> dict[str, Any]:
    """The report of a dead engine, drained by `reader`, whose rows are all in the lake.

    Raises duckdb.Error when the lake cannot be read.
    """
    header = reader.header
    engine = {"engine": str(header.engine_id)}
    frames = last_frames(reader.path)
    steps = _rows(connection, _STEPS, engine)
    last_step = steps[0]["step_id"] if steps else -1
    requests = _rows(connection, _REQUESTS, {**engine, "step": last_step})
    return {
        "schema": SCHEMA,
        "engine_id": str(header.engine_id),
        "pid": header.pid,
        "started_at": iso_time(wall_time(header, header.anchor_monotonic_ns)),
        "died_after": frames[-1]["at"] if frames else None,
        "noticed_at": iso_time(datetime.now(UTC)),
        "last_step_id": last_step,
        "open_step": _requests(requests, in_open_step=True),
        "waiting": _requests(requests, in_open_step=False),
        "memory": {
            "kv_used": steps[0]["kv_used"] if steps else None,
            "kv_total": steps[0]["kv_total"] if steps else None,
            "process": _rows(connection, _SAMPLES.format(table="memory_samples"), engine),
            "devices": _rows(connection, _SAMPLES.format(table="gpu_samples"), engine),
        },
        "committed": _committed(reader.cursor, reader.written),
        "last_frames": frames,
        "last_steps": steps,
        "last_events": _rows(connection, _EVENTS, engine),
    }


def last_frames(path: Path, count: int = LAST_FRAMES) -> list[dict[str, Any]]:
    """The last whole frames of a dead engine's ring, oldest first, each as a JSON object."""
    found: deque[dict[str, Any]] = deque(maxlen=count)
    for look_back in LOOK_BACK_BYTES:
        reader = RingReader(path)
        try:
            whole = reader.skip(look_back) is None
            found.clear()
            while len(batch := reader.read()):
                for index in range(max(0, len(batch) - count), len(batch)):
                    number = int(batch.headers[index]["sequence"])
                    found.append({"sequence": number, **_described(reader.header, batch, index)})
        finally:
            reader.close()
        if whole or len(found) == count:
            break
    return list(found)


def write_report(directory: Path, report: dict[str, Any]) -> Path:
    """Write the report as `<engine id>.json`, whole or not at all; returns its path.

    Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{report['engine_id']}.json"
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("w") as file:
            json.dump(report, file, indent=2, default=_as_json)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def wall_time(header: RingHeader, time_ns: int) -> datetime:
    """UTC of a monotonic time in a ring, by the ring's clock anchors."""
    wall_ns = header.anchor_wall_ns + time_ns - header.anchor_monotonic_ns
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=wall_ns // 1000)


def iso_time(moment: datetime) -> str:
    """ISO 8601 with microseconds and Z; a time without zone is UTC, as in the lake."""
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return aware.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _described(header: RingHeader, batch: FrameBatch, index: int) -> dict[str, Any]:
    """A frame as a JSON object: its fields, of columns only how many rows they have."""
    head = batch.headers[index]
    common = {"at": iso_time(wall_time(header, int(head["time_ns"])))}
    try:
        common["type"] = FrameType(int(head["type"])).name
        frame = decode(batch, index)
    except (FrameError, ValueError) as error:
        return {**common, "undecodable": str(error)}
    if isinstance(frame, StepFrame):
        return {**common, **_fields(header, frame.step), "rows": int(head["records"])}
    if isinstance(frame, KernelFrame):
        return {**common, "step_id": frame.step_id, "rows": int(head["records"])}
    return {**common, **_fields(header, frame._asdict())}


def _fields(header: RingHeader, values: dict[str, Any]) -> dict[str, Any]:
    """Values for JSON: monotonic times as ISO 8601 (0, which means never, as null), durations in
    microseconds, what was not measured as null."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if name == "time_ns":
            continue
        if name == "duration_ns":
            fields["duration_us"] = None if value is None else value // 1000
        elif name.endswith("_ns"):
            at = iso_time(wall_time(header, value)) if value else None
            fields[f"{name.removesuffix('_ns')}_at"] = at
        else:
            fields[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return fields


def _requests(rows: list[dict[str, Any]], *, in_open_step: bool) -> list[dict[str, Any]]:
    chosen = [row for row in rows if row["in_open_step"] == in_open_step]
    return [{name: row[name] for name in row if name != "in_open_step"} for row in chosen]


def _committed(cursor: Cursor, written: tuple[int, int]) -> dict[str, int]:
    """How far the ring's frames and tokens are in the lake."""
    return {
        "frames_written": written[0],
        "frames": cursor.sequence - cursor.lost_frames,
        "frames_lost": cursor.lost_frames,
        "frames_torn": cursor.torn_frames,
        "tokens_written": written[1],
        "tokens": cursor.tokens - cursor.lost_tokens,
        "tokens_lost": cursor.lost_tokens,
    }


def _rows(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, Any]
) -> list[dict[str, Any]]:
    result = connection.execute(sql, parameters)
    names = [column[0] for column in result.description or []]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def _as_json(value: object) -> str:
    return iso_time(value) if isinstance(value, datetime) else str(value)
