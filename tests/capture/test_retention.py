"""Retention: what is dropped, what is counted, and that the disk is really freed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from uuid import UUID

import duckdb
import pytest

from capture.collecting import retention
from capture.collecting.retention import (
    Limits,
    Retention,
    catalog_bytes,
    disk_use,
    drop_before,
    lake_files,
)
from capture.collecting.upkeep import expire
from capture.lake import LakePlace, open_connection
from capture.schema import TABLES

ENGINES = (UUID(int=1), UUID(int=2))
TODAY = datetime(2026, 3, 2)
FILE_TOKENS = 20_000


@pytest.fixture(autouse=True)
def it_is_noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day that ends between the rows and their retention would be counted as over."""
    set_clock(monkeypatch, TODAY + timedelta(hours=12))


def set_clock(monkeypatch: pytest.MonkeyPatch, now: datetime) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            assert tz is UTC
            return now.replace(tzinfo=UTC)

    monkeypatch.setattr(retention, "datetime", Stopped)


@pytest.fixture
def place(tmp_path: Path) -> LakePlace:
    return LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))


@pytest.fixture
def lake(place: LakePlace) -> Iterator[duckdb.DuckDBPyConnection]:
    connection = open_connection(place, read_only=False)
    connection.execute("SET ducklake_default_data_inlining_row_limit = 0")
    yield connection
    connection.close()


def add_tokens(
    lake: duckdb.DuckDBPyConnection, start: datetime, engine: UUID = ENGINES[0], step_ms: int = 1
) -> None:
    """A file of 20,000 tokens, one each `step_ms`, and a request and a step at its start."""
    lake.execute(
        "INSERT INTO tokens SELECT $e, i // 300, i, i % 300, i % 5000, false, "
        "$t + to_milliseconds(i * $ms), 3000, random(), random(), 3 FROM range($n) AS r(i)",
        {"e": engine, "t": start, "ms": step_ms, "n": FILE_TOKENS},
    )
    lake.execute(
        "INSERT INTO requests VALUES ($e, 0, 'ab', $t, 1, 0, 9, 0, 0, 'a', 'b', 'c')",
        {"e": engine, "t": start},
    )
    lake.execute(
        "INSERT INTO steps SELECT $e, 0, $t, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 2, 0, NULL",
        {"e": engine, "t": start},
    )


def one(lake: duckdb.DuckDBPyConnection, sql: str) -> object:
    (value,) = lake.execute(sql).fetchone() or (None,)
    return value


def test_every_table_is_either_dropped_by_time_or_kept() -> None:
    columns = {table.name: {column.name for column in table.columns} for table in TABLES}
    assert set(retention.TIME_COLUMNS) | set(retention.KEPT) == set(columns)
    assert all(column in columns[table] for table, column in retention.TIME_COLUMNS.items())


def test_days_over_the_age_limit_go_and_are_counted_by_engine_and_day(
    lake: duckdb.DuckDBPyConnection, place: LakePlace
) -> None:
    for days in (4, 3, 2, 1):
        add_tokens(lake, TODAY - timedelta(days=days), ENGINES[days % 2])
    lake.execute(
        "INSERT INTO engines VALUES ($1, 77, 'h', 1, NULL, NULL, NULL, NULL)", [ENGINES[0]]
    )
    subject = Retention(place, Limits(days=2))
    assert not subject.run(lake, disk_use(place, lake))
    assert one(lake, "SELECT count(*) FROM tokens") == 2 * FILE_TOKENS
    assert (
        one(lake, "SELECT min(emitted_at)::DATE FROM tokens") == (TODAY - timedelta(days=2)).date()
    )
    losses = lake.execute(
        "SELECT engine_id, epoch, kind, frames, tokens, detail FROM losses ORDER BY detail"
    ).fetchall()
    day = [(TODAY - timedelta(days=days)).strftime("%Y-%m-%d") for days in (4, 3)]
    assert losses == [
        (ENGINES[0], 77, "retention", 0, FILE_TOKENS, day[0]),
        (ENGINES[1], 0, "retention", 0, FILE_TOKENS, day[1]),
    ]
    assert one(lake, "SELECT count(*) FROM steps") == 2
    assert one(lake, "SELECT count(*) FROM requests") == 2
    assert not subject.run(lake, disk_use(place, lake))
    assert subject.dropped_tokens == 2 * FILE_TOKENS


def test_a_clock_a_year_ahead_drops_nothing_and_is_named_once(
    lake: duckdb.DuckDBPyConnection,
    place: LakePlace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for days in (40, 2):
        add_tokens(lake, TODAY - timedelta(days=days))

    set_clock(monkeypatch, TODAY + timedelta(days=365, hours=12))
    subject = Retention(place, Limits(days=30))
    for _ in range(3):
        subject.run(lake, 0)
    assert one(lake, "SELECT count(*) FROM tokens") == FILE_TOKENS, "older than the newest by 38"
    assert one(lake, "SELECT sum(tokens) FROM losses") == FILE_TOKENS
    said = [record.message for record in caplog.records if "far past" in record.message]
    assert len(said) == 1


def test_a_limit_smaller_than_the_catalog_says_what_to_raise(
    lake: duckdb.DuckDBPyConnection, place: LakePlace, caplog: pytest.LogCaptureFixture
) -> None:
    add_tokens(lake, TODAY)
    subject = Retention(place, Limits(max_bytes=catalog_bytes(place)))
    for _ in range(2):
        subject.run(lake, disk_use(place, lake))
    said = [record.message for record in caplog.records if "catalog alone" in record.message]
    assert len(said) == 1
    assert "INFERLOOP_LAKE_MAX_GIB" in said[0]


def test_bites_add_up_to_one_row_a_day(
    lake: duckdb.DuckDBPyConnection, place: LakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BITE_ROWS", FILE_TOKENS)
    for hours in range(3):
        add_tokens(lake, TODAY - timedelta(days=9) + timedelta(hours=hours))
    add_tokens(lake, TODAY)
    subject = Retention(place, Limits(days=1))
    calls = 1
    while subject.run(lake, 0):
        calls += 1
    assert calls == 3
    assert one(lake, "SELECT count(*) FROM tokens") == FILE_TOKENS
    assert lake.execute("SELECT tokens FROM losses").fetchall() == [(3 * FILE_TOKENS,)]


def data_bytes(lake: duckdb.DuckDBPyConnection, place: LakePlace) -> int:
    """On disk, without the catalog, which outweighs the rows of so small a lake."""
    return disk_use(place, lake) - catalog_bytes(place)


def test_over_the_byte_limit_the_oldest_day_goes_and_the_disk_is_freed(
    lake: duckdb.DuckDBPyConnection, place: LakePlace
) -> None:
    for days in (5, 4, 3, 2, 1, 0):
        add_tokens(lake, TODAY - timedelta(days=days))
    used, data = disk_use(place, lake), data_bytes(lake, place)
    limit = int(used * 1.1)
    subject = Retention(place, Limits(max_bytes=limit))
    assert not subject.run(lake, used)
    assert one(lake, "SELECT min(emitted_at) FROM tokens") > TODAY - timedelta(days=5)  # type: ignore[operator]
    assert int(str(one(lake, "SELECT sum(tokens) FROM losses"))) % FILE_TOKENS == 0
    expire(lake, 0, 0)
    assert data_bytes(lake, place) < data * 0.9
    assert not subject.run(lake, int(limit * retention.DROP_SHARE))


def test_when_the_current_day_alone_is_over_its_oldest_hours_go(
    lake: duckdb.DuckDBPyConnection, place: LakePlace
) -> None:
    yesterday = TODAY - timedelta(days=1)
    for hour in range(10):
        add_tokens(lake, yesterday + timedelta(hours=hour))
    live = sum(file.size_bytes for file in lake_files(lake))
    subject = Retention(place, Limits(max_bytes=live))
    assert not subject.run(lake, live)
    oldest = one(lake, "SELECT min(emitted_at) FROM tokens")
    assert oldest in [yesterday + timedelta(hours=hour) for hour in range(2, 6)], (
        "hours, not the day"
    )


def test_a_huge_hour_loses_its_oldest_files_only(
    lake: duckdb.DuckDBPyConnection, place: LakePlace
) -> None:
    for minute in range(0, 50, 5):
        add_tokens(lake, TODAY + timedelta(minutes=minute))
    live = sum(file.size_bytes for file in lake_files(lake))
    Retention(place, Limits(max_bytes=live)).run(lake, live)
    left = int(str(one(lake, "SELECT count(*) FROM tokens")))
    assert 6 * FILE_TOKENS <= left <= 8 * FILE_TOKENS


def test_files_that_are_not_the_lakes_are_named_and_cost_no_rows(
    lake: duckdb.DuckDBPyConnection, place: LakePlace, caplog: pytest.LogCaptureFixture
) -> None:
    add_tokens(lake, TODAY)
    (Path(place.data) / "dump.bin").write_bytes(bytes(8 << 20))
    subject = Retention(place, Limits(max_bytes=4 << 20))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not subject.run(lake, disk_use(place, lake))
    assert one(lake, "SELECT count(*) FROM tokens") == FILE_TOKENS
    assert [record.message for record in caplog.records if place.data in record.message]
    assert len(caplog.records) == 1
    assert subject.in_a_hurry(disk_use(place, lake))


def test_a_failed_drop_changes_nothing(
    lake: duckdb.DuckDBPyConnection, place: LakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_tokens(lake, TODAY - timedelta(days=9))
    monkeypatch.setitem(retention.TIME_COLUMNS, "no_such_table", "happened_at")
    with pytest.raises(duckdb.CatalogException):
        drop_before(lake, TODAY)
    assert one(lake, "SELECT count(*) FROM tokens") == FILE_TOKENS
    assert one(lake, "SELECT count(*) FROM losses") == 0
