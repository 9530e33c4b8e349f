"""Following the lake for an export: a look reads what was committed since, and misses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import duckdb
import pytest

from capture.collecting.upkeep import SmallFiles, expire, merge
from capture.exports.otlp_source import Cursor, NewCommits, after_new
from capture.lake import LakePlace, open_connection
from tests.capture.lakes import place_of

A, B = UUID(int=10), UUID(int=11)
ROWS = 20
"""Of a commit: fewer would be kept in the catalog instead of a file."""


@pytest.fixture
def place(tmp_path: Path) -> LakePlace:
    return place_of(tmp_path)


@pytest.fixture
def writer(place: LakePlace) -> Any:
    with open_connection(place, read_only=False) as connection:
        yield connection


def commit(writer: duckdb.DuckDBPyConnection, engine: UUID, first: int, *, second: int) -> None:
    """Twenty requests that finished in `second`, in a commit of their own."""
    writer.execute("BEGIN")
    times = "TIMESTAMP '2026-01-01' + to_seconds($second)"
    values = {"engine": engine, "first": first, "second": second}
    writer.execute(
        "INSERT INTO requests SELECT $engine, $first + i, 'r' || ($first + i), "
        f"{times}, 5, 0, 9, 50, 0, 't', 'chat', 't/chat/-' FROM range({ROWS}) AS r(i)",
        values,
    )
    writer.execute(
        "INSERT INTO finishes SELECT $engine, $first + i, 'stop', 5, NULL, NULL, NULL, NULL, "
        f"NULL, NULL, {times} FROM range({ROWS}) AS r(i)",
        values,
    )
    writer.execute("COMMIT")


class Following:
    """A follower that deals with whatever it finds."""

    def __init__(self, lake: duckdb.DuckDBPyConnection) -> None:
        self.lake, self.cursor, self.commits = lake, Cursor(), NewCommits()

    def look(self, limit: int = 500) -> list[tuple[UUID, int]]:
        """Engine and slot of what is new; requests must come whole."""
        rows = after_new(self.lake, self.cursor, limit, self.commits)
        assert all(row["request_id"] == f"r{row['slot']}" for row in rows)
        self.cursor = self.cursor.take(rows)
        if len(rows) < limit:
            self.commits.done()
        return [(UUID(row["engine_id"]), row["slot"]) for row in rows]


def rows_of(engine: UUID, first: int) -> list[tuple[UUID, int]]:
    return [(engine, first + i) for i in range(ROWS)]


def test_a_look_reads_only_the_files_of_new_commits(
    place: LakePlace, writer: duckdb.DuckDBPyConnection
) -> None:
    for number in range(8):
        commit(writer, A, 20 * number, second=number)
    with open_connection(place) as lake:
        following = Following(lake)
        assert following.commits.source(lake) == "finishes"
        assert len(following.look()) == 160
        assert following.commits.source(lake) is None
        assert following.look() == []
        commit(writer, A, 160, second=9)
        source = following.commits.source(lake)
        plan = lake.execute(f"EXPLAIN ANALYZE SELECT count(*) FROM {source}").fetchall()
        assert "Total Files Read: 1" in plan[0][1]
        assert following.look() == rows_of(A, 160)


def test_what_is_committed_late_is_not_missed_however_old(
    place: LakePlace, writer: duckdb.DuckDBPyConnection
) -> None:
    commit(writer, A, 0, second=1000)
    with open_connection(place) as lake:
        following = Following(lake)
        following.look()
        commit(writer, B, 0, second=1)
        assert following.look() == rows_of(B, 0), "a collector that was away for long"
        commit(writer, A, 20, second=1001)
        commit(writer, B, 20, second=2)
        assert following.look() == [*rows_of(A, 20), *rows_of(B, 20)]


def test_a_batch_that_is_full_or_not_dealt_with_is_read_on_from_its_end(
    place: LakePlace, writer: duckdb.DuckDBPyConnection
) -> None:
    commit(writer, A, 0, second=1)
    with open_connection(place) as lake:
        following = Following(lake)
        following.look()
        commit(writer, A, 20, second=2)
        unsent = after_new(lake, following.cursor, 500, following.commits)
        assert len(unsent) == 20, "the endpoint did not take them: no done()"
        assert following.look(limit=8) == rows_of(A, 20)[:8]
        commit(writer, B, 0, second=1)
        assert following.look(limit=8) == rows_of(A, 20)[8:16]
        rest = [*following.look(limit=8), *following.look(limit=8), *following.look(limit=8)]
        assert rest == [*rows_of(A, 20)[16:], *rows_of(B, 0)]
        assert following.look() == []


def test_merged_files_and_commits_that_the_lake_has_forgotten_lose_nothing(
    place: LakePlace, writer: duckdb.DuckDBPyConnection
) -> None:
    commit(writer, A, 0, second=1)
    with open_connection(place) as lake:
        following = Following(lake)
        following.look()
        for number in range(12):
            commit(writer, A, 20 * number + 20, second=number + 2)
        merge(writer, SmallFiles("finishes", 1 << 30, 1 << 30))
        assert len(following.look()) == 240
        commit(writer, A, 500, second=30)
        commit(writer, B, 500, second=30)
        expire(writer, 0.0, 0.0)
        assert following.look() == [*rows_of(A, 500), *rows_of(B, 500)]
        commit(writer, B, 520, second=31)
        source = following.commits.source(lake)
        assert source is not None
        assert "insertions" in source, "it has caught up"
        assert following.look() == rows_of(B, 520)
