"""The relational database: one declarative base, one way to open it.

SQLite (WAL) by default, PostgreSQL by URL. Tables are created by `migrations`, never here.
"""

from __future__ import annotations

import sqlite3
import time
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, URL, DateTime, Engine, MetaData, create_engine, event, make_url
from sqlalchemy.engine import Dialect, ExceptionContext
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker
from sqlalchemy.types import TypeDecorator

from replay.errors import DatabaseError


class UtcDateTime(TypeDecorator[datetime]):
    """Time-zone aware UTC timestamps on every backend (SQLite stores none of its own)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone: pass an aware datetime")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


BUSY_S = 30
CONSTRAINT_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
"""Keys and indexes have names that later migrations can refer to, the same on every backend."""


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=CONSTRAINT_NAMES)
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own class-level protocol
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        list[int]: JSON,
        list[float]: JSON,
    }


def now() -> datetime:
    return datetime.now(UTC)


def create_database_engine(url: str) -> Engine:
    """An engine for `url`; SQLite gets WAL, foreign keys and a 30 s busy timeout.

    What the database says no to is raised as DatabaseError, but for violated constraints.
    """
    engine = create_engine(url, pool_pre_ping=True)
    event.listen(engine, "handle_error", _explain)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _configure_sqlite)
    return engine


def open_sessions(url: str) -> sessionmaker[Session]:
    """Sessions on the database at `url`, whose tables must exist (`inferloop db upgrade`)."""
    return sessionmaker(create_database_engine(url), expire_on_commit=False)


def shown(url: str | URL) -> str:
    """`url` fit for a message: without its password."""
    parsed = make_url(url).difference_update_query(["password", "sslpassword", "passfile"])
    return parsed.render_as_string(hide_password=True)


def _explain(context: ExceptionContext) -> None:
    error = context.sqlalchemy_exception
    if isinstance(error, IntegrityError) or context.is_pre_ping:
        return
    if isinstance(error, DBAPIError) or isinstance(context.original_exception, OverflowError):
        url = "" if context.engine is None else f" {shown(context.engine.url)}"
        reason = " ".join(str(context.original_exception).split())
        raise DatabaseError(f"cannot use the database{url}: {reason}")


def _configure_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_S * 1000}")
    _switch_to_wal(cursor)
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _switch_to_wal(cursor: Any) -> None:
    """Of two connections that switch a new file at once SQLite refuses one without waiting."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
