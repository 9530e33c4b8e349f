"""Opening the trace lake: DuckDB with DuckLake, a SQLite or PostgreSQL catalog, Parquet files.

Reading is safe from any number of processes while the collector writes. One DuckDB connection is
not safe for several threads: give each its own with `new_cursor`. Not for writing rows: that is
`capture.collecting.ingest`; not for a user's SQL: that is `capture.sql.query`.
"""

from __future__ import annotations

import importlib.util
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from capture.collecting.lake_check import refuse_files_without_catalog
from capture.errors import (
    LakeError,
    LakeMissingError,
    LakeVersionError,
    first_line,
    without_passwords,
)
from capture.lake_migrations import migrate, refuse_newer, stored_version
from capture.schema import SCHEMA_VERSION
from capture.settings import Settings

if TYPE_CHECKING:
    import duckdb

READER_BUSY_MS = 5000
WRITER_BUSY_MS = 1000  # the collector waits by itself, and says so
CREATION_WAITS_S = (0.05, 0.2, 0.8)
NAME = "lake"


@dataclass(frozen=True)
class LakePlace:
    """Where a lake is: a SQLite file or a postgresql:// URL, and the directory of its files."""

    catalog: str
    data: str

    @classmethod
    def from_settings(cls, settings: Settings) -> LakePlace:
        """Raises LakeError when the catalog is a URL of another kind."""
        home = settings.lake.resolve()
        catalog = settings.lake_catalog or str(home / "catalog.sqlite")
        data = settings.lake_data or str(home / "data")
        if not _is_postgres(catalog):
            file = catalog.removeprefix("sqlite:///")
            scheme, separator, _ = file.partition("://")
            if separator:
                raise LakeError(
                    f"the lake's catalog is a {scheme}:// URL: it must be a SQLite file or a "
                    "postgresql:// URL"
                )
            catalog = str(Path(file).resolve())
        if "://" not in data:
            data = str(Path(data).resolve())
        return cls(catalog, data)

    @property
    def catalog_file(self) -> Path | None:
        """The SQLite catalog; None when it is a PostgreSQL database."""
        return None if _is_postgres(self.catalog) else Path(self.catalog)

    @property
    def described(self) -> str:
        """For messages: a URL without user and password."""
        if not _is_postgres(self.catalog):
            return self.catalog
        scheme, _, rest = self.catalog.partition("://")
        return without_passwords(f"{scheme}://{rest.rpartition('@')[2]}")

    @property
    def password(self) -> str | None:
        """The password in the catalog's URL: before the host or, as libpq allows, a parameter."""
        if not _is_postgres(self.catalog):
            return None
        parts = urlsplit(self.catalog)
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name.lower() == "password":
                return value
        return None if parts.password is None else unquote(parts.password)

    def without_password(self) -> LakePlace:
        """The same place for a process that gets the password as PGPASSWORD."""
        if self.password is None:
            return self
        parts = urlsplit(self.catalog)
        user, at, host = parts.netloc.rpartition("@")
        parameters = parse_qsl(parts.query, keep_blank_values=True)
        kept = [pair for pair in parameters if pair[0].lower() != "password"]
        query = urlencode(kept, quote_via=quote, safe="/")
        bare = f"{parts.scheme}://{user.partition(':')[0]}{at}{host}{parts.path}"
        return LakePlace(f"{bare}?{query}" if query else bare, self.data)


def _is_postgres(catalog: str) -> bool:
    return catalog.startswith(("postgresql://", "postgres://", "postgresql+psycopg://"))


def open_connection(
    place: LakePlace | Settings, *, read_only: bool = True, threads: int | None = None
) -> duckdb.DuckDBPyConnection:
    """A connection with the lake attached and in use; the caller closes it.

    `read_only=False` creates the lake or brings its schema up to date first; it is for the
    collector. Raises LakeMissingError when there is none, LakeVersionError when its schema is
    not this version's, LakeError when it cannot be opened.
    """
    if isinstance(place, Settings):
        place = LakePlace.from_settings(place)
    if read_only:
        require_catalog(place)
    else:
        prepare_place(place)
    connection = _attached(place, read_only, threads)
    try:
        if read_only:
            check_version(connection, place)
            return connection
        refuse_files_without_catalog(connection, place)
        _check_wal(connection, place)
        if migrate(connection, place.described):
            # Inserting after a lake's option was set through the same attachment crashes DuckLake.
            connection.execute(f"USE memory; DETACH {NAME}")
            attach(connection, place, read_only=False)
    except BaseException:
        connection.close()
        raise
    return connection


def new_cursor(connection: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
    """A cursor for another thread; a plain `connection.cursor()` forgets the schema in use."""
    cursor = connection.cursor()
    cursor.execute(f"SET enable_progress_bar = false; USE {NAME}")
    return cursor


def _attached(place: LakePlace, read_only: bool, threads: int | None) -> duckdb.DuckDBPyConnection:
    connection = connect(place, threads=threads)
    try:
        attach(connection, place, read_only=read_only)
    except BaseException:
        connection.close()
        raise
    return connection


def connect(place: LakePlace, *, threads: int | None = None) -> duckdb.DuckDBPyConnection:
    """An in-memory DuckDB with the extensions the place needs, loaded from installed packages."""
    import duckdb

    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    if threads is not None:
        if threads < 1:
            raise LakeError(f"threads is {threads}: DuckDB needs at least 1")
        config["threads"] = threads
    connection = duckdb.connect(config=config)
    scanner = "sqlite_scanner" if place.catalog_file is not None else "postgres_scanner"
    try:
        for name in ("ducklake", scanner):
            connection.execute(f"LOAD '{extension_path(name, duckdb.__version__)}'")
        if place.catalog_file is not None:
            # Else each scan of a catalog table opens a SQLite handle of its own, outside the
            # reader's transaction but bounded by the row ids that this saw: a merged file gets a
            # new one, and a reader loses all its rows.
            connection.execute("SET GLOBAL sqlite_disable_multithreaded_scans = true")
        connection.execute("SET enable_progress_bar = false")  # stdout is for rows
        connection.execute("SET TimeZone = 'UTC'")  # now()::TIMESTAMP is UTC like all else
    except duckdb.Error as error:
        connection.close()
        raise LakeError(f"cannot load DuckDB's extensions: {first_line(error)}") from error
    return connection


def extension_path(name: str, version: str) -> Path:
    """The extension's binary inside its installed package; LakeError names an absent package."""
    spec = importlib.util.find_spec(f"duckdb_extension_{name}")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in Path(folder).glob(f"extensions/v{version}/{name}.duckdb_extension"):
            return path
    package = f"duckdb-extension-{name.replace('_', '-')}=={version}"
    raise LakeError(f"DuckDB's extension {name} is not installed: pip install {package}")


def attach(connection: duckdb.DuckDBPyConnection, place: LakePlace, *, read_only: bool) -> None:
    """Attach the lake and make it the default schema. Raises LakeError or LakeMissingError."""
    import duckdb

    file = place.catalog_file
    busy_ms = READER_BUSY_MS if read_only else WRITER_BUSY_MS
    if file is not None:
        uri, options = f"ducklake:sqlite:{file}", [f"META_BUSY_TIMEOUT {busy_ms}"]
    else:
        url = place.catalog.replace("postgresql+psycopg://", "postgresql://")
        uri, options = f"ducklake:postgres:{url}", []
    if read_only:
        options.append("READ_ONLY")
    else:
        options.append(f"DATA_PATH '{escaped(place.data)}'")
    statement = f"ATTACH '{escaped(uri)}' AS {NAME} ({', '.join(options)})"
    try:
        _attach_when_created(connection, statement)
        connection.execute(f"USE {NAME}")
    except duckdb.Error as error:
        if "does not exist" in str(error) and read_only:
            raise LakeMissingError(missing(place)) from error
        reason = _explained(first_line(error), file)
        if place.password:
            for written in (quote(place.password, safe=""), place.password):
                reason = reason.replace(written, "***")
        raise LakeError(f"cannot open the lake at {place.described}: {reason}") from None


def _attach_when_created(connection: duckdb.DuckDBPyConnection, statement: str) -> None:
    """Run ATTACH; again when another collector is creating the same catalog at this moment."""
    import duckdb

    for wait_s in CREATION_WAITS_S:
        try:
            connection.execute(statement)
            return
        except duckdb.Error as error:
            if "duplicate key" not in str(error) and "already exists" not in str(error):
                raise
        time.sleep(wait_s)
    connection.execute(statement)


def check_version(connection: duckdb.DuckDBPyConnection, place: LakePlace) -> None:
    """Raise LakeMissingError or LakeVersionError unless readers of this version fit the lake."""
    stored = stored_version(connection)
    if stored is None:
        raise LakeMissingError(missing(place))
    if stored[0] < SCHEMA_VERSION:
        raise LakeVersionError(
            f"the lake at {place.described} has schema {stored[0]}, this version reads "
            f"{SCHEMA_VERSION}: run `inferloop collect --once` to upgrade it"
        )
    refuse_newer(stored[0], place.described)


def prepare_place(place: LakePlace) -> None:
    """Make the directories, and a SQLite catalog in WAL mode: without it readers block writers.

    Only a new catalog is touched. Closing a second handle on one that DuckDB has open in this
    process would drop DuckDB's locks on it: POSIX locks belong to the process, not to the handle.
    """
    file = place.catalog_file
    try:
        if file is not None and file.is_dir():
            raise LakeError(f"the lake's catalog {file} is a directory: name a file in it")
        if file is not None and file.exists():
            return  # and no new directory either: a lost one must be noticed
        if "://" not in place.data:
            Path(place.data).mkdir(parents=True, exist_ok=True)
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        catalog = sqlite3.connect(file, timeout=WRITER_BUSY_MS / 1000)
        try:
            (mode,) = catalog.execute("PRAGMA journal_mode=WAL").fetchone()
        finally:
            catalog.close()
    except sqlite3.Error as error:
        raise LakeError(f"cannot create the lake's catalog {file}: {error}") from error
    except OSError as error:
        raise LakeError(f"cannot create the lake in {place.data}: {error.strerror}") from error
    if mode != "wal":
        raise LakeError(f"the file system of {file} cannot hold a SQLite database in WAL mode")


def _check_wal(connection: duckdb.DuckDBPyConnection, place: LakePlace) -> None:
    """Refuse an attached SQLite catalog that somebody made without WAL."""
    file = place.catalog_file
    if file is None:
        return
    connection.execute("BEGIN")
    connection.execute("SHOW TABLES").fetchall()  # the file is open only while it is in use
    wal = file.with_name(f"{file.name}-wal").exists()
    connection.execute("COMMIT")
    if not wal:
        raise LakeError(
            f"the catalog {file} is not in WAL mode, so its readers would block the collector: "
            f"with nothing using it, run  sqlite3 {file} 'PRAGMA journal_mode=WAL'"
        )


def require_catalog(place: LakePlace) -> None:
    """Raise LakeMissingError when there is no catalog file, LakeError when this user may not even
    look."""
    file = place.catalog_file
    try:
        found = file is None or file.exists()
        if file is not None and file.is_dir():
            raise LakeError(f"the lake's catalog {file} is a directory: name the file in it")
    except OSError as error:
        raise LakeError(f"cannot look for the lake at {file}: {error.strerror}") from error
    if not found:
        raise LakeMissingError(missing(place))


def _explained(reason: str, file: Path | None) -> str:
    """What SQLite says of a file that this user may not use, with the way out."""
    if file is None:
        return reason
    if "readonly database" in reason:
        return (
            f"no collector has it open, and this user may not write in {file.parent}, where "
            "SQLite then puts its index file: read it as the collector's user, start the "
            "collector, or make the directory writable"
        )
    if "unable to open database file" in reason:
        return "this user may not read it: use the collector's user"
    return reason


def missing(place: LakePlace) -> str:
    """What to tell somebody who reads a lake that is not there."""
    return (
        f"there is no trace lake at {place.described} yet: start `inferloop collect` beside an "
        "engine, or set INFERLOOP_HOME / INFERLOOP_LAKE_CATALOG to where one is"
    )


def escaped(text: str) -> str:
    """`text` for use between single quotes in SQL."""
    return text.replace("'", "''")
