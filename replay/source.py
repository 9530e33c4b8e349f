"""Reads traffic files, and makes traffic from plain prompts.

A line that is not a valid record is skipped and reported with its place and the reason; the rest
of its file is used. Not for writing what a server sees: that is `capture.mirror`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from capture.mirroring.traffic_files import TrafficFileError, numbered_lines, traffic_files
from capture.traffic import SCHEMA, Sampling, TrafficRecord
from replay.errors import TrafficError
from replay.stream import one_line

CLIENT_GONE = 499
"""Status of a request whose client left: nothing was wrong with it, so it is replayed in full."""

CLOCK_TOLERANCE_S = 60.0
"""A monotonic clock that leaves the wall clock by more belongs to another process or boot."""


LONGEST_PAUSE_S = 5.0
"""Time in which nothing was in flight is replayed no longer than this: it changes no answer."""


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line that could not be read. `line` counts from 1."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ScheduledRecord:
    """A record and when it arrived, in seconds after the first one."""

    record: TrafficRecord
    offset_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a traffic file holds: replayable records in order of arrival, and what was left out.

    `skipped` counts valid records that cannot be replayed, by reason: failed (an error when
    recorded), truncated, no content. `digest` is the SHA-256 of the files' lines, the same before
    and after compression; `shortened_s` the idle time that was taken out of the schedule.
    """

    records: list[ScheduledRecord]
    broken: list[BrokenLine]
    skipped: dict[str, int]
    digest: str
    files: list[Path] = field(default_factory=list)
    shortened_s: float = 0.0


def read_traffic(path: Path, *, limit: int | None = None) -> Traffic:
    """Read one traffic file, or all of a directory (`*.jsonl`, `.part` and `.zst` too).

    `limit` keeps the first so many replayable records. Raises TrafficError when there is no file
    or nothing to replay in it.
    """
    files = _files(path)
    broken: list[BrokenLine] = []
    skipped: Counter[str] = Counter()
    timed: list[tuple[float, TrafficRecord]] = []
    seen: set[str] = set()
    digest = hashlib.sha256()
    for file in files:
        clock = _ArrivalClock()
        for number, line in _lines(file, digest):
            try:
                record = parse_record(line)
            except ValueError as error:
                broken.append(BrokenLine(file, number, str(error)))
                continue
            arrival_s = clock.seconds(record)
            reason = "repeated id" if record.request_id in seen else unreplayable(record)
            if reason is not None:
                skipped[reason] += 1
                continue
            seen.add(record.request_id)
            timed.append((arrival_s, record))
    if not timed:
        raise TrafficError(_nothing_to_replay(path, files, broken, skipped))
    timed.sort(key=lambda item: item[0])
    records, shortened_s = _schedule(timed[:limit])
    return Traffic(records, broken, dict(skipped), digest.hexdigest(), files, shortened_s)


def _schedule(timed: Sequence[tuple[float, TrafficRecord]]) -> tuple[list[ScheduledRecord], float]:
    """Offsets from the first arrival, pauses shortened, and by how much in all (seconds)."""
    idle_since = timed[0][0]
    start = idle_since
    records = []
    for arrival_s, record in timed:
        start += max(0.0, arrival_s - idle_since - LONGEST_PAUSE_S)
        idle_since = max(idle_since, arrival_s + (record.duration_ms or 0.0) / 1000)
        records.append(ScheduledRecord(record, arrival_s - start))
    return records, start - timed[0][0]


def parse_record(line: bytes) -> TrafficRecord:
    """One line of a traffic file; ValueError says in one line what is wrong with it."""
    try:
        return TrafficRecord.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(one_line(f"{place}: {message}" if place else message)) from error


def unreplayable(record: TrafficRecord) -> str | None:
    """Why a record cannot be replayed; None when it can."""
    if record.status >= 400 and record.status != CLIENT_GONE:
        return "failed"
    if record.truncated:
        return "truncated"
    chat = record.endpoint == "/v1/chat/completions"
    content = record.messages if chat else record.prompt or record.prompt_token_ids
    return "no content" if record.dropped is not None or not content else None


def make_records(
    prompts: Iterable[dict[str, Any]],
    *,
    model: str,
    interval_s: float = 0.25,
    start: datetime | None = None,
) -> list[TrafficRecord]:
    """Traffic from prompts, one every `interval_s`, greedy unless a prompt says otherwise.

    A prompt holds `messages` or `prompt`, and may hold tenant, route, conversation, priority and
    any sampling parameter. Request ids derive from position and content: the same prompts give
    the same traffic. Raises TrafficError naming the prompt that is wrong.
    """
    start = start or datetime.now(UTC)
    records = []
    for index, prompt in enumerate(prompts):
        arrival = start + timedelta(seconds=index * interval_s)
        try:
            records.append(_make_record(index, prompt, model, arrival, interval_s))
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(str(part) for part in problem["loc"])
            raise TrafficError(f"prompt {index + 1}: {place}: {problem['msg']}") from error
    return records


def write_records(path: Path, records: Sequence[TrafficRecord]) -> None:
    """Write a traffic file."""
    lines = (record.model_dump_json(by_alias=True, exclude_none=True) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _make_record(
    index: int, prompt: dict[str, Any], model: str, arrival: datetime, interval_s: float
) -> TrafficRecord:
    given = {name: prompt[name] for name in Sampling.model_fields if name in prompt}
    defaults = {"max_tokens": 64, "temperature": 0.0, "top_p": 1.0}
    messages, text = prompt.get("messages"), prompt.get("prompt")
    tenant = prompt.get("tenant", "default")
    route = prompt.get("route", "chat" if messages else "completions")
    content = json.dumps([index, messages, text], sort_keys=True).encode()
    request_id = hashlib.blake2s(content, digest_size=16).hexdigest()
    return TrafficRecord.model_validate(
        {
            "schema": SCHEMA,
            "request_id": request_id,
            "conversation_id": prompt.get("conversation", request_id),
            "arrival": arrival.isoformat(timespec="microseconds"),
            "arrival_ns": int(index * interval_s * 1e9),
            "endpoint": "/v1/chat/completions" if messages else "/v1/completions",
            "stream": True,
            "tenant": tenant,
            "route": route,
            "class_key": f"{tenant}/{route}/-",
            "priority": prompt.get("priority", 50),
            "model": model,
            "messages": messages,
            "prompt": text,
            "sampling": defaults | given,
            "sampling_set": sorted(defaults | given),
        }
    )


class _ArrivalClock:
    """Arrival times in seconds since the Unix epoch that do not jump when the wall clock does.

    Within a file differences come from the monotonic clock; the wall clock anchors the first
    record, and again when the two disagree by more than a correction of the clock explains.
    """

    def __init__(self) -> None:
        self._wall_s = self._monotonic_ns = 0.0

    def seconds(self, record: TrafficRecord) -> float:
        arrival = datetime.fromisoformat(record.arrival)
        wall = (arrival if arrival.tzinfo else arrival.replace(tzinfo=UTC)).timestamp()
        derived = self._wall_s + (record.arrival_ns - self._monotonic_ns) / 1e9
        if abs(derived - wall) > CLOCK_TOLERANCE_S:
            self._wall_s, self._monotonic_ns = wall, record.arrival_ns
            return wall
        return derived


def _files(path: Path) -> list[Path]:
    try:
        return traffic_files(path)
    except TrafficFileError as error:
        raise TrafficError(str(error)) from error


def _lines(path: Path, digest: Any) -> Iterator[tuple[int, bytes]]:
    try:
        for number, line in numbered_lines(path):
            digest.update(line)
            if line.strip():
                yield number, line.rstrip(b"\r\n")
    except TrafficFileError as error:
        raise TrafficError(str(error)) from error


def _nothing_to_replay(
    path: Path, files: list[Path], broken: list[BrokenLine], skipped: Counter[str]
) -> str:
    counts = [f"{len(broken)} broken lines"] if broken else []
    counts += [f"{count} {reason}" for reason, count in skipped.items()]
    found = ", ".join(counts) or f"{len(files)} empty files"
    first = f"; the first: {broken[0]}" if broken else ""
    return f"nothing to replay in {path}: {found}{first}"
