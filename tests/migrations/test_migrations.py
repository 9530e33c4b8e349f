"""The migrations build exactly the tables of the models, on SQLite and on PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

import evaluation.models  # noqa: F401 - registers its tables
import migrations
from replay.database import Base, create_database_engine, open_sessions, shown
from replay.errors import DatabaseError
from replay.models import Build, Run
from tests.migrations.postgres import postgres_server
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'home' / 'test.sqlite'}"
        return
    url = request.getfixturevalue("postgres_url")
    yield url
    engine = create_database_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()


def test_migrated_tables_are_those_of_the_models(url: str) -> None:
    migrations.upgrade(url)
    engine = create_database_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        checks = {
            check["sqltext"]
            for table in ("experts", "presentations", "labels")
            for check in inspect(connection).get_check_constraints(table)
        }
    engine.dispose()
    assert len(checks) == 3


def test_upgrade_reports_its_revision_and_may_be_repeated(url: str) -> None:
    assert migrations.current(url) is None
    migrations.upgrade(url)
    migrations.upgrade(url)
    assert migrations.current(url) == migrations.head()
    migrations.require_current(url)


def test_rows_survive_a_round_trip_with_utc_times(url: str) -> None:
    migrations.upgrade(url)
    sessions = open_sessions(url)
    with sessions.begin() as session:
        build = Build(name="a", fingerprint="f", components={"weights": "x"})
        session.add(build)
        session.flush()
        session.add(
            Run(old_build_id=build.id, new_build_id=build.id, traffic_file="t", traffic_digest="d")
        )
    with sessions() as session:
        run = session.query(Run).one()
        assert run.status == "running"
        assert run.started_at.utcoffset() is not None
        assert run.old_build.components == {"weights": "x"}
    sessions.kw["bind"].dispose()


def test_upgrades_started_together_do_not_collide(url: str) -> None:
    program = "import sys, migrations; migrations.upgrade(sys.argv[1])"
    processes = [
        subprocess.Popen([sys.executable, "-c", program, url], stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, errors.decode()
    finally:
        for process in processes:
            process.kill()
    assert migrations.current(url) == migrations.head()


def test_a_fresh_sqlite_database_is_created_on_first_use(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new' / 'db.sqlite'}"
    migrations.require_current(url)
    assert migrations.current(url) == migrations.head()


def test_a_database_that_is_behind_is_refused_with_the_way_out(url: str) -> None:
    engine = create_database_engine(url)
    if engine.dialect.name == "sqlite":
        Path(str(engine.url.database)).parent.mkdir()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE something_else (id integer)"))
    engine.dispose()
    with pytest.raises(migrations.MigrationError, match="run `inferloop db upgrade`"):
        migrations.require_current(url)


def test_a_database_of_a_newer_version_is_left_alone(url: str) -> None:
    migrations.upgrade(url)
    engine = create_database_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(migrations.MigrationError, match="upgrade inferloop"):
        migrations.upgrade(url)
    with pytest.raises(migrations.MigrationError, match=r"9999.*upgrade inferloop"):
        migrations.require_current(url)


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "notes.sqlite"
    path.write_text("my notes\n" * 200)
    with pytest.raises(DatabaseError, match="not a database"):
        migrations.require_current(f"sqlite:///{path}")


def test_what_a_database_refuses_is_one_line_for_the_user(url: str) -> None:
    migrations.upgrade(url)
    sessions = open_sessions(url)
    with sessions() as session, pytest.raises(DatabaseError, match="no_such_table"):
        session.execute(text("SELECT 1 FROM no_such_table"))
    with sessions() as session, pytest.raises(DatabaseError, match=r"(?i)integer") as caught:
        session.get(Run, 10**30)
    assert "\n" not in str(caught.value)
    sessions.kw["bind"].dispose()


def test_a_database_in_memory_is_refused() -> None:
    with pytest.raises(migrations.MigrationError, match="in memory"):
        migrations.require_current("sqlite://")


def test_a_message_holds_no_password() -> None:
    url = "postgresql+psycopg://me:one@host/x?password=two&host=/run"
    assert shown(url) == "postgresql+psycopg://me:***@host/x?host=%2Frun"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("no url:hidden-word", "the database URL cannot be read"),
        ("postgresql://u:hidden-word@h:port/x", "the database URL cannot be read"),
        ("oracle+nothing://x/y", "oracle is not supported"),
        ("postgresql+nothing://x/y", "no driver"),
        ("postgresql+psycopg://u:hidden-word@127.0.0.1:1/x", "cannot use the database"),
        ("sqlite:////proc/nowhere/x.sqlite", "cannot create"),
    ],
)
def test_an_unusable_url_gives_one_clear_line(url: str, message: str) -> None:
    with pytest.raises((migrations.MigrationError, DatabaseError), match=message) as caught:
        migrations.upgrade(url)
    assert "\n" not in str(caught.value).strip()
    assert "hidden-word" not in str(caught.value)
