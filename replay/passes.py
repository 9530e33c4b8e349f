"""One pass of the traffic over one running build: the arm of a run, and its rows.

Rows are written in batches by a thread while requests are in flight, so that a killed run leaves
what it had, and the schedule never waits for the database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from sqlalchemy import insert
from sqlalchemy.orm import Session, sessionmaker

from capture.traffic import TrafficRecord
from replay.builds import RunningBuild
from replay.client import TIMEOUT, Client, uses_vendor_parameters
from replay.errors import BuildError
from replay.health import POLL_S
from replay.models import ReplayedRequest
from replay.pacing import Fidelity, Slot, fidelity, run_schedule
from replay.source import ScheduledRecord
from replay.stream import Answer

FLUSH_S = 0.5
ENDING_S = 30.0
"""At most so long a build that has failed requests and answers no more is waited for to end."""

Progress = Callable[[str, int, int], None]
"""Called with what is going on (`old_a`, `starting new`), how much is done, and of how much."""


@dataclass(slots=True)
class Pass:
    """What an arm did. `died` says in one line how the build ended when it did so by itself,
    `abilities` what could be asked of it at each endpoint (parameters that it does not know were
    left out)."""

    arm: str
    fingerprint: str
    failures: int = 0
    output_tokens: int = 0
    duration_s: float = 0.0
    died: str | None = None
    slots: list[Slot] = field(default_factory=list)
    abilities: dict[str, dict[str, bool]] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return len(self.slots)

    @property
    def fidelity(self) -> Fidelity:
        return fidelity(self.slots)


async def run_pass(
    build: RunningBuild,
    arm: str,
    records: Sequence[ScheduledRecord],
    *,
    run_id: int,
    sessions: sessionmaker[Session],
    speed: float,
    progress: Progress,
) -> Pass:
    """Replay `records` against a running build; one `ReplayedRequest` row per request."""
    result = Pass(arm, build.fingerprint)
    rows: list[dict[str, Any]] = []

    def finished(record: TrafficRecord, slot: Slot, answer: Answer) -> None:
        result.slots.append(slot)
        result.failures += answer.error is not None
        result.output_tokens += len(answer.token_ids or answer.itl_ms or ())
        rows.append(_row(run_id, arm, record, slot, answer))
        progress(arm, len(result.slots), len(records))

    progress(arm, 0, len(records))
    async with build.open_http(TIMEOUT) as http:
        client = Client(http, build.model)
        for endpoint in sorted({item.record.endpoint for item in records}):
            alike = [item.record for item in records if item.record.endpoint == endpoint]
            await client.warm_up(next(filter(uses_vendor_parameters, alike), alike[0]))
            result.abilities[endpoint] = asdict(client.abilities[endpoint])
        complete = asyncio.Event()
        flusher = asyncio.create_task(_flush_until(complete, sessions, rows))
        started = time.monotonic()
        try:
            await run_schedule(records, client.send, finished, speed=speed)
        finally:
            result.duration_s = time.monotonic() - started
            complete.set()
            await flusher
        if result.failures:
            await _await_end(build, http)
    try:
        build.check_alive()
    except BuildError as error:
        result.died = error.one_line
    return result


async def _await_end(build: RunningBuild, http: httpx.AsyncClient) -> None:
    """Requests fail at once when a command has ended; its launcher clears up before it ends too."""
    deadline = time.monotonic() + ENDING_S
    with suppress(BuildError):
        while time.monotonic() < deadline and not await _answers(http):
            build.check_alive()
            await asyncio.sleep(POLL_S)


async def _answers(http: httpx.AsyncClient) -> bool:
    try:
        await http.get("/health", timeout=ENDING_S)
    except httpx.HTTPError:
        return False
    return True


async def _flush_until(
    complete: asyncio.Event, sessions: sessionmaker[Session], rows: list[dict[str, Any]]
) -> None:
    while not complete.is_set():
        await asyncio.to_thread(_flush, sessions, rows)
        with suppress(TimeoutError):
            await asyncio.wait_for(complete.wait(), FLUSH_S)
    await asyncio.to_thread(_flush, sessions, rows)  # also what came while others were written


def _flush(sessions: sessionmaker[Session], rows: list[dict[str, Any]]) -> None:
    batch = rows[:]
    if batch:
        with sessions.begin() as session:
            session.execute(insert(ReplayedRequest), batch)
        del rows[: len(batch)]


def _row(
    run_id: int, arm: str, record: TrafficRecord, slot: Slot, answer: Answer
) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "arm": arm,
        "request_id": record.request_id,
        "class_key": storable(answer.class_key or record.class_key),
        "status": answer.status,
        "error": storable(answer.error),
        "rendered_prompt": storable(answer.rendered_prompt),
        "prompt_token_ids": answer.prompt_token_ids,
        "resolved_sampling": answer.sampling,
        "output_text": storable(answer.text),
        "output_token_ids": answer.token_ids,
        "logprobs": answer.logprobs,
        "margins": answer.margins,
        "finish_reason": storable(answer.finish_reason),
        "scheduled_ms": slot.scheduled_ms,
        "sent_ms": slot.sent_ms,
        "ttft_ms": answer.ttft_ms,
        "itl_ms": answer.itl_ms,
        "duration_ms": answer.duration_ms,
    }


def storable(text: str | None) -> str | None:
    """`text` as both databases can hold it: NUL and lone surrogates become U+FFFD."""
    if text is None or (text.isascii() and "\x00" not in text):
        return text
    text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text.replace("\x00", "\ufffd")
