"""Bringing a lake's schema to this version: one version at a time, each step one transaction.

Run by whoever opens the lake for writing; several may, at the same time. Not for readers: they
refuse an older lake, and everybody refuses a newer one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from capture.errors import LakeError, LakeVersionError, first_line
from capture.schema import SCHEMA_VERSION, TABLES
from capture.views import VIEWS, definitions_digest

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("inferloop.lake")

ATTEMPTS = 8
FIRST_WAIT_S = 0.05
OPTIONS = {
    "parquet_compression": "zstd",
    "parquet_compression_level": "1",
    "parquet_row_group_size": "1000000",
    "target_file_size": "8388608B",
}
"""Options of the lake itself, kept in its catalog. Large row groups save a byte a token; zstd's
default level saves 2 % more than level 1 for a third of an insert's time. A file's size is also
that of one merge, for which commits wait: about half a second. Sizes are in bytes, as the catalog
has them: one that never equals its own would be set at every start, in the way of others."""

_COMMENTS = """
SELECT table_name, NULL, comment FROM duckdb_tables() WHERE database_name = 'lake'
UNION ALL
SELECT table_name, column_name, comment FROM duckdb_columns() WHERE database_name = 'lake'
"""

# Frozen: the tables as they were when the version was new. `capture.schema` goes on changing.
STEPS: dict[int, tuple[str, ...]] = {
    2: (
        "ALTER TABLE events ADD COLUMN duration_us BIGINT",
        "CREATE TABLE memory_samples (engine_id UUID NOT NULL, sampled_at TIMESTAMP NOT NULL, "
        "device INTEGER NOT NULL, rss_bytes BIGINT, reserved_bytes BIGINT, allocated_bytes BIGINT, "
        "peak_allocated_bytes BIGINT, largest_free_bytes BIGINT, fragmentation FLOAT, "
        "unavailable VARCHAR)",
        "CREATE TABLE latency_rollup (engine_id UUID NOT NULL, minute TIMESTAMP NOT NULL, "
        "class_key VARCHAR, position_bucket INTEGER NOT NULL, latency_bin SMALLINT NOT NULL, "
        "tokens BIGINT NOT NULL)",
        "CREATE TABLE rollup_marks (engine_id UUID NOT NULL, step_id BIGINT NOT NULL, "
        "emitted_from TIMESTAMP, rolled_at TIMESTAMP NOT NULL)",
    ),
}
"""What turns a lake of the version before into the version that is the key."""


def stored_version(connection: duckdb.DuckDBPyConnection) -> tuple[int, str] | None:
    """The lake's schema version and the digest of its views; None: an empty lake."""
    import duckdb

    try:
        row = connection.execute(
            "SELECT version, definitions FROM schema_versions "
            "ORDER BY version DESC, applied_at DESC LIMIT 1"
        ).fetchone()
    except duckdb.CatalogException:
        return None
    return None if row is None else (int(row[0]), str(row[1]))


def refuse_newer(version: int, lake: str) -> None:
    """Raise LakeVersionError when the lake at `lake` is of a version unknown to this one."""
    if version > SCHEMA_VERSION:
        raise LakeVersionError(
            f"the lake at {lake} has schema {version}, this version knows {SCHEMA_VERSION}: "
            "upgrade inferloop"
        )


def migrate(connection: duckdb.DuckDBPyConnection, lake: str) -> bool:
    """Create the tables, or take them version by version to this one; whether anything changed.

    A step that another collector takes at the same moment fails here and is found done. Raises
    LakeVersionError for a newer lake, LakeError when a step fails for another reason; `lake` names
    the place in messages.
    """
    changed = False
    while not _is_current(stored := stored_version(connection), connection):
        if stored is not None:
            refuse_newer(stored[0], lake)
        _take_step(connection, stored, lake)
        changed = True
    return _set_options(connection, lake) or changed


def _is_current(stored: tuple[int, str] | None, connection: duckdb.DuckDBPyConnection) -> bool:
    """Whether the tables are this version's, and its views are or once were in the lake.

    Once replaced, they were replaced by a newer build's. Two builds that each put theirs back would
    do so at every start, and each time make the commits of the other fail.
    """
    if stored is None or stored[0] != SCHEMA_VERSION:
        return False
    query = "SELECT count(*) FROM schema_versions WHERE version = ? AND definitions = ?"
    row = connection.execute(query, [SCHEMA_VERSION, definitions_digest()]).fetchone()
    return row is not None and row[0] > 0


def _take_step(
    connection: duckdb.DuckDBPyConnection, stored: tuple[int, str] | None, lake: str
) -> None:
    """One version forward, by this collector or by another that was faster."""
    import duckdb

    for is_last in _attempts():
        try:
            _run_step(connection, stored)
            return
        except duckdb.Error as error:
            with contextlib.suppress(duckdb.Error):  # a failed commit has ended it already
                connection.execute("ROLLBACK")
            if stored_version(connection) != stored:
                return
            if is_last or not _passes(error):
                raise LakeError(
                    f"cannot bring the lake at {lake} to schema {SCHEMA_VERSION}: "
                    f"{first_line(error)}"
                ) from error


def _attempts() -> Iterator[bool]:
    """For as many attempts, with a pause before each but the first; whether it is the last."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
        yield attempt == ATTEMPTS - 1


def _passes(error: Exception) -> bool:
    """Whether it says that somebody else was at work on the same lake."""
    signs = ("conflict", "already exists", "duplicate", "could not serialize")
    return any(sign in str(error).lower() for sign in signs)


def _run_step(connection: duckdb.DuckDBPyConnection, stored: tuple[int, str] | None) -> None:
    """Whatever comes next, in one transaction that also says that it is done."""
    connection.execute("BEGIN")
    if stored is not None and _is_current(stored_version(connection), connection):
        connection.execute("ROLLBACK")  # somebody else has done it since `stored` was read
        return
    if stored is None:
        version = SCHEMA_VERSION
        for table in TABLES:
            connection.execute(table.ddl)
    else:
        version = min(stored[0] + 1, SCHEMA_VERSION)
        for statement in STEPS[version] if version > stored[0] else ():
            connection.execute(statement)
    if version == SCHEMA_VERSION:
        _describe(connection)
    digest = definitions_digest() if version == SCHEMA_VERSION else ""
    connection.execute(
        "INSERT INTO schema_versions VALUES (?, ?, now()::TIMESTAMP)", [version, digest]
    )
    connection.execute("COMMIT")
    if stored is not None and version > stored[0]:
        log.info("the lake went from schema %d to %d", stored[0], version)


def _describe(connection: duckdb.DuckDBPyConnection) -> None:
    """This version's comments on tables and columns, its views and macros.

    A comment that is there already stays: setting it alters its table, and a commit of another
    collector that adds rows to it at this moment would fail.
    """
    present = set(connection.execute(_COMMENTS).fetchall())
    for table in TABLES:
        for column, comment, statement in table.comments:
            if (table.name, column, comment) not in present:
                connection.execute(statement)
    for view in VIEWS:
        connection.execute(view.ddl)


def _set_options(connection: duckdb.DuckDBPyConnection, lake: str) -> bool:
    import duckdb

    changed = False
    for is_last in _attempts():
        try:
            for name, value in _options_to_set(connection).items():
                connection.execute(f"CALL lake.set_option('{name}', '{value}')")
                changed = True
            break
        except duckdb.Error as error:
            if is_last or not _passes(error):
                raise LakeError(f"cannot set up the lake at {lake}: {first_line(error)}") from error
    return changed


def _options_to_set(connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
    query = "SELECT option_name, value FROM ducklake_options('lake') WHERE scope = 'GLOBAL'"
    present = dict(connection.execute(query).fetchall())
    wanted = {name: (value, value.removesuffix("B")) for name, value in OPTIONS.items()}
    return {name: value for name, (value, kept) in wanted.items() if present.get(name) != kept}
