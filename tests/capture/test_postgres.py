"""The same lake with a PostgreSQL catalog: several collectors write to it at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from capture.collector import Collector
from capture.errors import LakeError, LakeMissingError
from capture.lake import LakePlace, open_connection
from capture.query import run_query
from tests.capture.rings import engine
from tests.migrations.postgres import postgres_server


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LakePlace]:
    with postgres_server() as url:
        yield LakePlace(url, str(tmp_path_factory.mktemp("lake") / "data"))


def test_an_empty_database_is_no_lake_yet(place: LakePlace) -> None:
    with pytest.raises(LakeMissingError, match="inferloop collect"):
        open_connection(place)


def test_a_server_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(LakeError, match="cannot open the lake at postgresql://localhost:1/x") as e:
        open_connection(LakePlace("postgresql://me:secret@localhost:1/x", "/tmp"))
    assert "secret" not in str(e.value)


def test_user_sql_does_not_see_the_password(place: LakePlace) -> None:
    open_connection(place, read_only=False).close()
    named = LakePlace(place.catalog.replace("inferloop@", "inferloop:secret@"), place.data)
    with run_query(named, "SELECT * FROM duckdb_databases()") as reader:
        assert "secret" not in str(reader.read_all().to_pylist())


def test_three_collectors_write_to_one_lake_at_once(place: LakePlace, tmp_path: Path) -> None:
    open_connection(place, read_only=False).close()
    failures: list[Exception] = []

    def collect(rings: Path) -> None:
        try:
            for steps in (50, 60, 70):
                engine(rings, requests=10, steps=steps).close()
                Collector(place, ring_dir=rings, crash_dir=tmp_path, stop=threading.Event()).run(
                    once=True
                )
        except Exception as error:  # noqa: BLE001  handed to the test's thread
            failures.append(error)

    threads = [threading.Thread(target=collect, args=(tmp_path / str(n),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    query = "SELECT count(*) AS tokens, count(DISTINCT engine_id) AS engines FROM tokens"
    with run_query(place, query) as reader:
        assert reader.read_all().to_pylist() == [{"tokens": 3 * 10 * 180, "engines": 9}]
