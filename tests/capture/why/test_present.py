"""`inferloop why` of requests that have not ended, and of those whose chunks were sent late."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import duckdb
import pytest
from rich.console import Console
from typer.testing import CliRunner

from capture.frames import TraceWriter
from capture.lake import open_connection
from capture.ring import RingWriter
from capture.why.lookup import find
from capture.why.report import Explanation, explain, render
from cli.main import app, load_commands
from tests.capture.lakes import commit_rings, place_of
from tests.capture.rings import new_ring
from tests.capture.stage import Clock, Stage
from tests.capture.why.plays import SUBJECT

load_commands()

FIRST, SECOND, NEXT, LAST = 1, 2, 3, 4


def queued(stage: Stage, slot: int, *, priority: int = 50, adjustment: int = 0) -> UUID:
    """A request that found no seat when it came, 800 us ago."""
    identity = uuid4()
    stage.trace.event(
        kind="queued",
        request_id=identity.bytes,
        slot=slot,
        detail=f"waited_us=800 running=2 waiting=1 priority={priority} adjustment={adjustment} "
        "prompt_tokens=57 max_tokens=9 tenant=b class=b/chat/-",
    )
    return identity


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("present")


@pytest.fixture(scope="module")
def waiting(house: Path) -> Iterator[dict[int, UUID]]:
    """An engine that lives: it runs FIRST and SECOND, which is preempted; NEXT and LAST wait."""
    ring: RingWriter = new_ring(house / "rings")
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr("capture.ring.time", clock)
        trace = TraceWriter(ring)
        trace.engine({"model": "tiny"})
        stage = Stage(trace, clock)
        stage.arrive(FIRST, tenant="a", class_key="a/chat/-", priority=70, adjustment=-5)
        stage.arrive(SECOND)
        stage.step((), {FIRST: 12, SECOND: 12})
        found = {NEXT: queued(stage, NEXT), LAST: queued(stage, LAST, priority=60, adjustment=-20)}
        stage.step((FIRST,), decisions=(("preempted", SECOND, "out of KV blocks"),))
        stage.run((FIRST,), 10, waiting=3)
    commit_rings(house)
    found |= {slot: player.request_id for slot, player in stage.players.items()}
    yield found
    ring.close()


@pytest.fixture(scope="module")
def here(house: Path, waiting: dict[int, UUID]) -> Iterator[duckdb.DuckDBPyConnection]:
    with open_connection(place_of(house)) as connection:
        yield connection


def of(lake: duckdb.DuckDBPyConnection, identity: UUID) -> Explanation:
    (explanation,) = explain(lake, find(lake, str(identity)))
    return explanation


def words(explanation: Explanation) -> str:
    console = Console(width=160, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(render(explanation))
    return " ".join(captured.get().split())


def test_a_request_in_the_queue_says_so_since_when_and_behind_whom(
    here: duckdb.DuckDBPyConnection, waiting: dict[int, UUID]
) -> None:
    explanation = of(here, waiting[LAST])
    subject = explanation.subject
    assert (subject.outcome, subject.prompt_tokens, subject.effective) == ("waiting", 57, 40)
    assert subject.as_of is not None
    assert subject.as_of > subject.arrived_at
    text = words(explanation)
    assert "priority 60 (-20 by the feedback policy) · tiny on engine" in text
    assert "still waiting in the queue · 57 prompt tokens, 0 output tokens" in text
    assert "so far, at " in text
    first = str(waiting[FIRST])[:8]
    assert f"it waits behind 2 running: {first} (tenant a, a/chat/-, priority 65, -5 of it" in text
    assert "others that wait: 1, 1 with a higher priority and 0 of the same" in text
    assert "its priority is 40, -20 of it by the feedback policy" in text


def test_those_that_run_or_were_preempted_say_so(
    here: duckdb.DuckDBPyConnection, waiting: dict[int, UUID]
) -> None:
    running = words(of(here, waiting[FIRST]))
    assert "still running · 12 prompt tokens" in running
    assert "so far, at " in running
    assert "preempted, waits to be resumed" in words(of(here, waiting[SECOND]))


def test_the_command_tells_programs_the_same(house: Path, waiting: dict[int, UUID]) -> None:
    result = CliRunner().invoke(
        app,
        ["why", waiting[NEXT].hex[:8], "--json"],
        env={"INFERLOOP_HOME": str(house), "INFERLOOP_RING_DIR": str(house / "rings")},
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["request"]["outcome"] == "waiting"
    assert found["request"]["as_of"] > found["request"]["arrived_at"]
    assert (found["ahead"]["running"], found["ahead"]["waiting"]) == (2, 1)
    assert (found["slow"], found["gaps_ms"]) == ([], [])


def test_one_that_was_in_the_queue_when_its_engine_ended_is_not_said_to_wait(
    tmp_path: Path,
) -> None:
    ring = new_ring(tmp_path / "rings")
    trace = TraceWriter(ring)
    trace.engine({"model": "tiny"})
    identity = queued(Stage(trace, Clock()), 7)
    ring.close()
    commit_rings(tmp_path)
    with open_connection(place_of(tmp_path)) as lake:
        assert "its engine ended before it did" in words(of(lake, identity))


def test_one_that_got_its_seat_is_told_once(tmp_path: Path) -> None:
    ring = new_ring(tmp_path / "rings")
    trace = TraceWriter(ring)
    trace.engine({"model": "tiny"})
    stage = Stage(trace, Clock())
    identity = queued(stage, 7)
    stage.arrive(7, request_id=identity)
    stage.step((), {7: 12})
    commit_rings(tmp_path)
    with open_connection(place_of(tmp_path)) as lake:
        (subject,) = find(lake, str(identity))
    assert subject.outcome == "unfinished"
    ring.close()


def test_a_chunk_that_was_sent_late_has_a_row_and_is_no_gap_of_the_engine(
    lake: duckdb.DuckDBPyConnection, stages: dict[str, Stage]
) -> None:
    explanation = of(lake, stages["late chunk"].players[SUBJECT].request_id)
    (late,) = [slow for slow in explanation.slow if slow.cause == "sending slow"]
    assert (late.position, late.latency_ms) == (31, 350)
    assert late.step_id is not None
    text = words(explanation)
    assert "31 sent" in text
    assert "was handed to the socket 350.0 ms after it was drawn" in text
    assert "4 of the answer's were over 50 ms late" in text
    assert "went to: sending slow" in text


def test_an_id_may_be_pasted_with_white_space_around_it(
    here: duckdb.DuckDBPyConnection, waiting: dict[int, UUID]
) -> None:
    for text in (f" {waiting[FIRST].hex}\r\n", f"\t{waiting[NEXT]}\n"):
        assert len(find(here, text)) == 1


def test_one_that_only_waited_beside_it_is_not_told_as_running_ahead(tmp_path: Path) -> None:
    """Its end, which would say when it was admitted, is not there yet."""
    ring = new_ring(tmp_path / "rings")
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr("capture.ring.time", clock)
        trace = TraceWriter(ring)
        trace.engine({"model": "tiny"})
        stage = Stage(trace, clock)
        stage.arrive(FIRST)
        stage.step((), {FIRST: 12})
        stage.arrive(SECOND)
        stage.run((FIRST,), 5, waiting=1)
        stage.arrive(SUBJECT)
        stage.run((FIRST,), 20, waiting=2)
        stage.step((FIRST,), {SECOND: 12, SUBJECT: 12})
        stage.run((FIRST, SECOND, SUBJECT), 5)
    commit_rings(tmp_path)
    ring.close()
    with open_connection(place_of(tmp_path)) as lake:
        text = words(of(lake, stage.players[SUBJECT].request_id))
    assert f"in the queue behind 1 running: {stage.players[FIRST].request_id.hex[:8]}" in text
    assert stage.players[SECOND].request_id.hex[:8] not in text
