"""A lake that an earlier version wrote is brought up to date and loses nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import duckdb
import psycopg
import pytest

from capture.collector import Collector
from capture.errors import LakeVersionError
from capture.lake import LakePlace, attach, connect, open_connection, prepare_place
from capture.lake_migrations import OPTIONS, STEPS, migrate, stored_version
from capture.schema import SCHEMA_VERSION, TABLES
from capture.views import VIEWS, definitions_digest
from tests.capture.lakes import copied
from tests.capture.rings import engine
from tests.migrations.postgres import postgres_server

VERSION_1 = (Path(__file__).with_name("lake_v1.sql")).read_text()
TOKENS_1 = 1000
COLUMNS = (
    "SELECT table_name, column_name, data_type, is_nullable, comment FROM duckdb_columns() "
    "WHERE database_name = 'lake' ORDER BY table_name, column_index"
)


def new_place(home: Path) -> LakePlace:
    return LakePlace(str(home / "catalog.sqlite"), str(home / "data"))


def write_version_1(place: LakePlace) -> None:
    """The lake as version 1 left it."""
    prepare_place(place)
    with closing(connect(place)) as lake:
        attach(lake, place, read_only=False)
        lake.execute(f"BEGIN; {VERSION_1}; COMMIT")


@pytest.fixture(scope="module")
def version_1(tmp_path_factory: pytest.TempPathFactory) -> LakePlace:
    found = new_place(tmp_path_factory.mktemp("version_1"))
    write_version_1(found)
    return found


@pytest.fixture
def place(version_1: LakePlace, tmp_path: Path) -> LakePlace:
    return copied(version_1, new_place(tmp_path))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as url:
        yield url


def only(lake: duckdb.DuckDBPyConnection, sql: str) -> tuple[object, ...]:
    (row,) = lake.execute(sql).fetchall()
    return row


def check_upgraded(lake: duckdb.DuckDBPyConnection) -> None:
    assert stored_version(lake) == (SCHEMA_VERSION, definitions_digest())
    assert only(lake, "SELECT count(*), max(latency_us) FROM tokens") == (TOKENS_1, 30_000)
    assert only(lake, "SELECT kind, detail, duration_us FROM events") == (
        "preempted",
        "no blocks",
        None,
    )
    for view in VIEWS:
        lake.execute(view.example).fetchall()
    assert only(lake, "SELECT count(*), max(gap_ms) FROM token_gaps") == (980, 30)


def test_there_is_a_step_to_every_version() -> None:
    assert list(STEPS) == list(range(2, SCHEMA_VERSION + 1))


def test_readers_of_an_old_lake_are_told_how_to_upgrade_it(place: LakePlace) -> None:
    with pytest.raises(LakeVersionError, match="`inferloop collect --once` to upgrade it"):
        open_connection(place)


def test_an_old_lake_keeps_its_rows_and_its_views_work(place: LakePlace) -> None:
    open_connection(place, read_only=False).close()
    with open_connection(place) as lake:
        check_upgraded(lake)


def test_an_upgraded_lake_has_the_columns_of_a_new_one(place: LakePlace, tmp_path: Path) -> None:
    with (
        open_connection(place, read_only=False) as upgraded,
        open_connection(new_place(tmp_path / "new"), read_only=False) as new,
    ):
        assert upgraded.execute(COLUMNS).fetchall() == new.execute(COLUMNS).fetchall()


def test_an_upgrade_is_done_once(place: LakePlace) -> None:
    open_connection(place, read_only=False).close()
    with open_connection(place, read_only=False) as lake:
        assert only(lake, "SELECT count(*), min(version), max(version) FROM schema_versions") == (
            SCHEMA_VERSION,
            1,
            SCHEMA_VERSION,
        )


class Raced:
    """A connection whose first change of an option meets that of another collector."""

    def __init__(self, lake: duckdb.DuckDBPyConnection) -> None:
        self._lake = lake
        self.met: list[str] = []

    def execute(self, sql: str, *values: object) -> duckdb.DuckDBPyConnection:
        if "set_option" in sql and not self.met:
            self.met.append(sql)
            raise duckdb.TransactionException("could not serialize access: concurrent update")
        return self._lake.execute(sql, *values)


def test_options_are_set_once_whoever_else_sets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that sets them at every start would stop one that starts at the same time."""
    with open_connection(new_place(tmp_path), read_only=False) as lake:
        assert not migrate(lake, "a current lake")
        monkeypatch.setitem(OPTIONS, "parquet_compression_level", "2")
        raced = Raced(lake)
        assert migrate(raced, "one of an earlier build")  # type: ignore[arg-type]
        assert raced.met
        assert not migrate(lake, "a current lake")


def test_two_builds_with_other_views_do_not_replace_them_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start of either, and each reconnection, would rewrite what both use."""
    place = new_place(tmp_path)
    for digest in ("older", "newer", "older", "newer"):
        monkeypatch.setattr("capture.lake_migrations.definitions_digest", lambda d=digest: d)
        open_connection(place, read_only=False).close()
    with open_connection(place) as lake:
        history = "SELECT definitions FROM schema_versions ORDER BY applied_at"
        assert lake.execute(history).fetchall() == [("older",), ("newer",)]


def test_a_build_with_other_views_disturbs_no_commit(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = LakePlace(new_database(server, "shared"), str(tmp_path))
    with open_connection(place, read_only=False) as collector:
        collector.execute("BEGIN")
        for table in TABLES:
            columns = ", ".join(_any_value(column.type) for column in table.columns)
            collector.execute(f"INSERT INTO {table.name} SELECT {columns}")
        monkeypatch.setattr("capture.lake_migrations.definitions_digest", lambda: "another")
        open_connection(place, read_only=False).close()
        collector.execute("COMMIT")
        assert only(collector, "SELECT count(*) FROM marks") == (1,)


def _any_value(sql_type: str) -> str:
    kind = sql_type.removesuffix(" NOT NULL")
    text = {"UUID": "uuid()::VARCHAR", "TIMESTAMP": "'2026-03-01'"}.get(kind, "'1'")
    return f"{text}::{kind}"


def test_an_upgrade_that_fails_changes_nothing(
    place: LakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STEPS, SCHEMA_VERSION, (*STEPS[SCHEMA_VERSION], "ALTER TABLE x DROP y"))
    with pytest.raises(Exception, match=f"to schema {SCHEMA_VERSION}: .*x"):
        open_connection(place, read_only=False)
    monkeypatch.undo()
    with closing(connect(place)) as lake:
        attach(lake, place, read_only=True)
        assert stored_version(lake) == (1, "75d43e46d8097e29")
    open_connection(place, read_only=False).close()
    with open_connection(place) as lake:
        check_upgraded(lake)


def test_the_collector_upgrades_a_lake_and_adds_to_it(place: LakePlace, tmp_path: Path) -> None:
    engine(tmp_path / "rings", requests=4, steps=25).close()
    Collector(place, ring_dir=tmp_path / "rings", crash_dir=tmp_path, stop=threading.Event()).run(
        once=True
    )
    with open_connection(place) as lake:
        assert only(lake, "SELECT count(*) FROM tokens") == (TOKENS_1 + 100,)
        assert only(lake, "SELECT count(*) FROM request_latency") == (24,)
        kinds = "SELECT kind FROM events ORDER BY happened_at"
        assert lake.execute(kinds).fetchall() == [("preempted",), ("engine_closed",)]


def new_database(server: str, name: str) -> str:
    with closing(psycopg.connect(server.replace("+psycopg", ""), autocommit=True)) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.replace("/postgres?", f"/{name}?")


def open_at_once(place: LakePlace, collectors: int) -> list[Exception]:
    """Open it for writing from several threads at the same moment; what failed."""
    failures: list[Exception] = []
    together = threading.Barrier(collectors)

    def work() -> None:
        together.wait()
        try:
            open_connection(place, read_only=False).close()
        except Exception as error:  # noqa: BLE001  handed to the test's thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(collectors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_collectors_that_create_a_lake_at_once_all_succeed(server: str, tmp_path: Path) -> None:
    place = LakePlace(server, str(tmp_path))
    assert open_at_once(place, 3) == []
    with open_connection(place) as lake:
        versions = lake.execute("SELECT version, definitions FROM schema_versions")
        assert versions.fetchall() == [(SCHEMA_VERSION, definitions_digest())]
        tables = lake.execute("SELECT table_name FROM duckdb_tables() WHERE database_name = 'lake'")
        assert sorted(name for (name,) in tables.fetchall()) == sorted(t.name for t in TABLES)


def test_collectors_that_upgrade_a_lake_at_once_all_succeed(server: str, tmp_path: Path) -> None:
    place = LakePlace(new_database(server, "old"), str(tmp_path))
    write_version_1(place)
    assert open_at_once(place, 3) == []
    with open_connection(place) as lake:
        assert only(lake, "SELECT count(*) FROM schema_versions") == (SCHEMA_VERSION,)
        check_upgraded(lake)
