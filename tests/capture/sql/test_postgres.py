"""User SQL over a PostgreSQL catalog: no password, no other table of that database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from capture.errors import QueryError
from capture.lake import LakePlace, open_connection
from capture.sql.query import QuerySession
from tests.migrations.postgres import postgres_server


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LakePlace]:
    """A lake whose database also holds a table that is nobody's business."""
    with postgres_server() as url:
        place = LakePlace(f"{url}&password=hunter2", str(tmp_path_factory.mktemp("lake") / "data"))
        open_connection(place, read_only=False).close()
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as database:
            database.execute("CREATE TABLE labels AS SELECT 'blind side' AS secret")
        yield place


ATTACKS = {
    "FROM __ducklake_metadata_lake.labels": "catalog's own tables are refused",
    "FROM __ducklake_metadata_lake.public.labels": "catalog's own tables are refused",
    "FROM histogram(__ducklake_metadata_lake.public.labels, secret)": "histogram is refused",
    "FROM histogram_values('__ducklake_metadata_lake.public.labels', 'secret')": "is refused",
    "FROM postgres_query('__ducklake_metadata_lake', 'SELECT * FROM labels')": "is refused",
    "FROM postgres_scan('host=/tmp', 'public', 'labels')": "is refused",
    "CALL postgres_execute('__ducklake_metadata_lake', 'DROP TABLE labels')": "CALL is refused",
    "FROM postgres_attach('host=/tmp')": "is refused",
    "CREATE SECRET s (TYPE postgres)": "is refused",
    "FROM duckdb_secrets()": "is refused",
    "SELECT getenv('PGPASSWORD')": "is refused",
    "FROM read_text('/proc/self/environ')": "is refused",
}


def test_neither_password_nor_other_tables_are_seen(place: LakePlace) -> None:
    with QuerySession(place) as session:
        for attack, message in ATTACKS.items():
            with pytest.raises(QueryError, match=message) as refused, session.run(attack):
                pass
            assert "hunter2" not in str(refused.value)
        for query in (
            "FROM duckdb_databases()",
            "FROM duckdb_settings()",
            "FROM ducklake_snapshots('lake')",
            "FROM ducklake_table_info('lake')",
            "SHOW DATABASES",
            "SHOW ALL TABLES",
        ):
            with session.run(query) as reader:
                assert "hunter2" not in str(reader.read_all().to_pylist()), query
        with session.run("SELECT count(*) AS n FROM tokens") as reader:
            assert reader.read_all().to_pylist() == [{"n": 0}]


@pytest.mark.parametrize(
    ("url", "bare", "password"),
    [
        ("postgresql://me:a%40b@db:5432/x", "postgresql://me@db:5432/x", "a@b"),
        ("postgresql://me@db/x?password=p", "postgresql://me@db/x", "p"),
        (
            "postgresql://me@/x?host=/run/pg&PASSWORD=p&sslmode=require",
            "postgresql://me@/x?host=/run/pg&sslmode=require",
            "p",
        ),
        ("postgresql:///x?password=a%26b", "postgresql:///x", "a&b"),
        ("postgresql://me@db/x", "postgresql://me@db/x", None),
    ],
)
def test_the_password_is_taken_out_of_the_url(url: str, bare: str, password: str | None) -> None:
    place = LakePlace(url, "d")
    assert (place.without_password(), place.password) == (LakePlace(bare, "d"), password)
    assert password is None or f"{password}/" not in place.described


def test_a_sqlite_catalog_has_no_password() -> None:
    place = LakePlace(str(Path("/a:b@c/catalog.sqlite")), "d")
    assert (place.without_password(), place.password) == (place, None)
