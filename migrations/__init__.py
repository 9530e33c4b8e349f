"""Alembic migrations of the relational database, on SQLite and PostgreSQL.

`upgrade` is what `inferloop db upgrade` runs; commands that use the database call
`require_current` first. Tables are described in `replay.models` and `evaluation.models`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from replay.database import create_database_engine, shown

Result = TypeVar("Result")

BACKENDS = ("sqlite", "postgresql")
UPGRADE_LOCK = 0x1F10_0D5C
"""Key of the PostgreSQL advisory lock that makes concurrent upgrades wait for each other."""


class MigrationError(Exception):
    """The relational database cannot be used as it is; the message says what to do."""

    exit_code = 1


def head() -> str:
    """The newest revision this version of inferloop knows."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    if revision is None:
        raise MigrationError("the installation holds no migrations: reinstall inferloop")
    return revision


def current(url: str) -> str | None:
    """The revision of the database at `url`; None when it has no inferloop tables yet.

    Raises DatabaseError when the database cannot be reached. Creates nothing.
    """
    if _missing_sqlite_file(url):
        return None
    return _with_connection(url, _revision)


def upgrade(url: str) -> None:
    """Bring the database at `url` to `head()`, creating it (SQLite) when it does not exist.

    Runs in one transaction under a lock, so that commands started together do not collide and a
    failure leaves the database as it was. Raises MigrationError or DatabaseError.
    """

    def run(connection: Connection) -> None:
        _refuse_newer(_revision(connection))
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")

    _create_parent(url)
    _with_connection(url, run)


def require_current(url: str) -> None:
    """Check that the database at `url` is usable by this version; raises MigrationError if not.

    A SQLite database without any table is created on the spot: there is nothing to lose in it.
    """
    if sqlite_file(url) is None and _parse(url).get_backend_name() == "sqlite":
        raise MigrationError(
            f"{shown(url)} is a database in memory, which ends with the command: "
            "give sqlite:///FILE"
        )
    if _is_fresh_sqlite(url):
        upgrade(url)
        return
    found = current(url)
    _refuse_newer(found)
    if found != head():
        state = "has no inferloop tables" if found is None else f"is at revision {found}"
        raise MigrationError(
            f"the database {shown(url)} {state}, this version needs {head()}: "
            "run `inferloop db upgrade`"
        )


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database; None for others. Raises MigrationError for a wrong URL."""
    parsed = _parse(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return None
    if parsed.database == ":memory:":
        return None
    return Path(parsed.database)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def _parse(url: str) -> URL:
    """The message names no part of a URL that cannot be read: any may be its password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise MigrationError(
            "the database URL cannot be read: give sqlite:///FILE or "
            "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE in INFERLOOP_DATABASE_URL"
        ) from error
    if parsed.get_backend_name() not in BACKENDS:
        raise MigrationError(
            f"{parsed.get_backend_name()} is not supported: give sqlite:///FILE or "
            "postgresql+psycopg://... in INFERLOOP_DATABASE_URL"
        )
    return parsed


def _missing_sqlite_file(url: str) -> bool:
    path = sqlite_file(url)
    return path is not None and not path.exists()


def _create_parent(url: str) -> None:
    path = sqlite_file(url)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MigrationError(f"cannot create {path.parent}: {error.strerror}") from error


def _is_fresh_sqlite(url: str) -> bool:
    if sqlite_file(url) is None:
        return False
    if _missing_sqlite_file(url):
        return True
    return _with_connection(url, lambda connection: not inspect(connection).get_table_names())


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _refuse_newer(found: str | None) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if found is not None and found not in known:
        raise MigrationError(
            f"the database is at revision {found}, which this version of inferloop does not know "
            f"(newest: {head()}): upgrade inferloop"
        )


def _with_connection(url: str, action: Callable[[Connection], Result]) -> Result:
    """`action(connection)` inside one locked transaction."""
    try:
        engine = create_database_engine(url)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise MigrationError(f"no driver for {shown(url)}: {error}") from error
    if engine.dialect.name == "sqlite":
        _begin_immediately(engine)
    try:
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({UPGRADE_LOCK})"))
            return action(connection)
    finally:
        engine.dispose()


def _begin_immediately(engine: Engine) -> None:
    """Make SQLite's transactions cover DDL and take the write lock at their start."""

    @event.listens_for(engine, "connect")
    def without_implicit_begin(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
