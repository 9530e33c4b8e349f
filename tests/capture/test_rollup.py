"""The rollup counts every token that is not a first one once, whatever is killed or comes late."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import duckdb
import pytest

from capture.collecting.follower import Status
from capture.collecting.rollup_schedule import RollupSchedule
from capture.collector import Collector
from capture.frames import TraceWriter
from capture.lake import LakePlace, open_connection
from capture.rollup import ALL_STEPS, CELLS, roll_up
from tests.capture.children import started
from tests.capture.lakes import said
from tests.capture.rings import new_ring, write_request, write_step

ENGINE = UUID(int=7)
OTHER = UUID(int=8)
EXACT = f"{CELLS} WHERE r.engine_id = t.engine_id AND NOT t.is_first GROUP BY ALL ORDER BY ALL"
ROLLED = """
SELECT engine_id, minute, class_key, position_bucket, latency_bin, sum(tokens)::BIGINT
FROM latency_rollup GROUP BY ALL ORDER BY ALL
"""


@pytest.fixture
def place(tmp_path: Path) -> LakePlace:
    return LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))


@pytest.fixture
def lake(place: LakePlace) -> Iterator[duckdb.DuckDBPyConnection]:
    with open_connection(place, read_only=False) as connection:
        yield connection


def add_requests(lake: duckdb.DuckDBPyConnection, engine: UUID, slots: int) -> None:
    """One every 7 s, in three classes."""
    lake.execute(
        """
        INSERT INTO requests SELECT ?::UUID, i, printf('%032x', i),
            TIMESTAMP '2026-03-01 12:00:00' + to_seconds(7 * i), 1, 0, 9, 50, 0, 'acme', 'chat',
            if(i % 3 = 0, NULL, 'class' || i % 3)
        FROM range(?) AS r(i)
        """,
        [str(engine), slots],
    )


def add_steps(
    lake: duckdb.DuckDBPyConnection, engine: UUID, steps: range, slots: range = range(20)
) -> None:
    """Each step gives a token to each slot; position = step."""
    lake.execute(
        """
        INSERT INTO tokens SELECT ?::UUID, slot, step, step, 1, step = 0,
            TIMESTAMP '2026-03-01 12:00:00' + to_milliseconds(20 * step),
            (hash(slot, step) % 50000)::BIGINT, -0.5, 0.5, 1
        FROM range(?, ?) AS s(step), range(?, ?) AS r(slot)
        """,
        [str(engine), steps.start, steps.stop, slots.start, slots.stop],
    )


def rolled(lake: duckdb.DuckDBPyConnection) -> int:
    (tokens,) = lake.execute("SELECT coalesce(sum(tokens), 0) FROM latency_rollup").fetchone()
    return int(tokens)


def check_exact(lake: duckdb.DuckDBPyConnection) -> None:
    assert lake.execute(ROLLED).fetchall() == lake.execute(EXACT).fetchall()


def test_bins_are_sixteenths_of_an_octave_and_zero_has_its_own(
    lake: duckdb.DuckDBPyConnection,
) -> None:
    add_requests(lake, ENGINE, 1)
    latencies = [0, 1, 2, 1023, 1024, 1070, 1 << 40]
    for step, latency_us in enumerate(latencies, start=1):
        lake.execute(
            "INSERT INTO tokens "
            "VALUES (?, 0, ?, ?, 1, false, '2026-03-01 12:01', ?, NULL, NULL, 1)",
            [ENGINE, step, step, latency_us],
        )
    assert roll_up(lake, ENGINE, ALL_STEPS) == len(latencies)
    bins = lake.execute("SELECT latency_bin FROM latency_rollup ORDER BY latency_bin").fetchall()
    assert [found for (found,) in bins] == [-1, 0, 16, 159, 160, 161, 640]


def test_an_empty_lake_and_a_mark_that_does_not_move(lake: duckdb.DuckDBPyConnection) -> None:
    assert roll_up(lake, ENGINE, ALL_STEPS) == 0
    add_requests(lake, OTHER, 20)
    add_steps(lake, OTHER, range(10))
    assert roll_up(lake, OTHER, 5) == 80, "the first tokens of 20 requests are left out"
    assert roll_up(lake, OTHER, 5) == 0
    assert roll_up(lake, OTHER, 3) == 0, "a mark never goes back"
    assert lake.execute("SELECT count(*) FROM rollup_marks").fetchone() == (2,)


def test_piece_by_piece_is_the_same_as_at_once(lake: duckdb.DuckDBPyConnection) -> None:
    for engine in (ENGINE, OTHER):
        add_requests(lake, engine, 20)
        add_steps(lake, engine, range(200))
    total = sum(roll_up(lake, engine, to) for to in (1, 2, 90, 200) for engine in (ENGINE, OTHER))
    assert total == rolled(lake) == 2 * 20 * 199
    check_exact(lake)


def test_a_step_that_comes_in_two_commits_is_counted_whole(
    lake: duckdb.DuckDBPyConnection,
) -> None:
    add_requests(lake, ENGINE, 20)
    add_steps(lake, ENGINE, range(1, 10))
    add_steps(lake, ENGINE, range(10, 11), range(12))
    assert roll_up(lake, ENGINE, 10) == 20 * 9, "the last step may not be complete"
    add_steps(lake, ENGINE, range(10, 11), range(12, 20))
    add_steps(lake, ENGINE, range(11, 12))
    roll_up(lake, ENGINE, 11)
    roll_up(lake, ENGINE, ALL_STEPS)
    check_exact(lake)


def test_tokens_of_a_lost_request_have_no_cell(lake: duckdb.DuckDBPyConnection) -> None:
    add_requests(lake, ENGINE, 5)
    add_steps(lake, ENGINE, range(1, 50))
    assert roll_up(lake, ENGINE, ALL_STEPS) == 5 * 49
    check_exact(lake)


def test_a_failure_changes_nothing_and_can_be_repeated(lake: duckdb.DuckDBPyConnection) -> None:
    add_requests(lake, ENGINE, 20)
    add_steps(lake, ENGINE, range(1, 50))
    lake.execute("ALTER TABLE rollup_marks RENAME TO away")
    with pytest.raises(duckdb.Error, match="rollup_marks"):
        roll_up(lake, ENGINE, ALL_STEPS)
    lake.execute("ALTER TABLE away RENAME TO rollup_marks")
    assert rolled(lake) == 0
    assert roll_up(lake, ENGINE, ALL_STEPS) == 20 * 49
    check_exact(lake)


def test_what_a_collector_brought_is_rolled_up(place: LakePlace, tmp_path: Path) -> None:
    ring = new_ring(tmp_path / "rings", engine_id=ENGINE)
    trace = TraceWriter(ring)
    for slot in range(8):
        write_request(trace, slot)
    for step in range(30):
        write_step(trace, step, 8, phase=1 if step == 0 else 0)
    ring.close()
    Collector(place, ring_dir=tmp_path / "rings", crash_dir=tmp_path, stop=threading.Event()).run(
        once=True
    )
    with open_connection(place, read_only=False) as lake:
        roll_up(lake, ENGINE, ALL_STEPS)
        assert rolled(lake) == 8 * 29
        check_exact(lake)


ROLL_UP = """
import sys
from capture.lake import LakePlace, open_connection
from capture.rollup import roll_up
with open_connection(LakePlace(*sys.argv[1:3]), read_only=False) as connection:
    for before in range(1, int(sys.argv[4])):
        if roll_up(connection, sys.argv[3], before):
            print(before, flush=True)
"""


@pytest.mark.kill
def test_killed_at_any_moment_it_counts_each_token_once(
    place: LakePlace, lake: duckdb.DuckDBPyConnection
) -> None:
    steps = 1000
    add_requests(lake, ENGINE, 20)
    add_steps(lake, ENGINE, range(steps))
    lake.close()
    command = [sys.executable, "-c", ROLL_UP, place.catalog, place.data, ENGINE, steps]
    chance = random.Random(3)
    counted = []
    for _ in range(3):
        process = started(command, stdout=subprocess.PIPE)
        reached = int(said(process))
        time.sleep(0.1 * chance.random())
        process.kill()
        process.wait()
        with open_connection(place) as reader:
            counted.append(rolled(reader))
        assert counted[-1] >= 20 * (reached - 1), "what it said it had done"
    assert counted == sorted(set(counted))
    assert counted[-1] < 20 * (steps - 1), "killed in the middle"
    with open_connection(place, read_only=False) as last:
        roll_up(last, ENGINE, ALL_STEPS)
        check_exact(last)


def end_engine(lake: duckdb.DuckDBPyConnection, engine: UUID, seconds_ago: int) -> None:
    lake.execute(
        "INSERT INTO ingest_cursor SELECT ?::UUID, 1, 9, 9, 9, 0, 0, 0, 0, true, "
        "now()::TIMESTAMP - to_seconds(?)",
        [str(engine), seconds_ago],
    )


@pytest.mark.parametrize(("shared", "expected"), [(False, 380), (True, 190)])
def test_the_fresh_end_of_another_collectors_engine_is_left_to_it(
    lake: duckdb.DuckDBPyConnection, shared: bool, expected: int
) -> None:
    """Two that roll up one end at the same time would count it twice."""
    for engine, seconds_ago in ((ENGINE, 1), (OTHER, 3600)):
        add_requests(lake, engine, 10)
        add_steps(lake, engine, range(20), range(10))
        end_engine(lake, engine, seconds_ago)
    schedule = RollupSchedule(Status(), shared=shared)
    while schedule.run_if_due(lake, []):
        pass
    assert rolled(lake) == expected
