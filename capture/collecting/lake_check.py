"""Whether a lake's catalog and its files still belong together, and what to do when they do not.

A lost catalog must never be replaced by an empty one beside the old files, which the next clean-up
would take for leftovers; lost files must be noticed before more rows are committed to the ruin.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from capture.errors import LakeError
from capture.lake_migrations import stored_version

if TYPE_CHECKING:
    import duckdb

    from capture.lake import LakePlace

METADATA = "__ducklake_metadata_lake"

# One file of each table: a lost disk or directory shows, whatever part of it is lost.
_OLDEST = f"""
SELECT s.path, t.path, f.path FROM {METADATA}.ducklake_data_file AS f
JOIN {METADATA}.ducklake_table AS t ON t.table_id = f.table_id AND t.end_snapshot IS NULL
JOIN {METADATA}.ducklake_schema AS s ON s.schema_id = t.schema_id AND s.end_snapshot IS NULL
WHERE f.data_file_id IN (
    SELECT min(data_file_id) FROM {METADATA}.ducklake_data_file
    WHERE end_snapshot IS NULL AND path_is_relative GROUP BY table_id
)
"""


def refuse_files_without_catalog(connection: duckdb.DuckDBPyConnection, place: LakePlace) -> None:
    """Raise LakeError when the catalog is empty though the lake's directory holds rows.

    For a lake about to be created through `connection`.
    """
    if "://" in place.data:
        return
    rows = next(Path(place.data).glob("main/ingest_cursor/*.parquet"), None)
    if rows is not None and stored_version(connection) is None:
        raise LakeError(
            f"{place.data} holds the files of a lake, but its catalog {place.described} is empty: "
            "restore the catalog from a backup, or move the files away to begin a new lake"
        )


def check_files(connection: duckdb.DuckDBPyConnection, place: LakePlace) -> None:
    """Raise LakeError when files that the catalog lists are not in the lake's directory."""
    if "://" in place.data:
        return
    for parts in connection.execute(_OLDEST).fetchall():
        path = Path(place.data).joinpath(*parts)
        if not os.path.exists(path):  # Path.exists raises on a disk that is failing
            raise LakeError(
                f"the lake's files are gone: {path} is missing, though the catalog "
                f"{place.described} lists it. Bring {place.data} back (is its disk mounted?), or "
                "move the catalog away to begin an empty lake"
            )


class CatalogGoneError(LakeError):
    """The catalog is not the one that was opened: nothing may be written any more."""


class Belongings:
    """The catalog file and the directory of an open lake, to notice when they are swapped."""

    def __init__(self, place: LakePlace) -> None:
        self._place = place
        self._catalog = _identity(place.catalog_file)
        self._data = self._data_now()

    def check_catalog(self) -> None:
        """Raise CatalogGoneError when the catalog is another file than at first, or none."""
        file = self._place.catalog_file
        if _identity(file) != self._catalog:
            raise CatalogGoneError(
                f"the lake's catalog {file} was removed or replaced while the collector ran: "
                "restore it and start `inferloop collect` again; what is not in it is still in "
                "the rings"
            )

    def check_data(self) -> None:
        """Raise LakeError when the lake's directory is another than when it was opened."""
        if self._data_now() != self._data:
            raise LakeError(f"the lake's directory {self._place.data} was removed or replaced")

    def check_writable(self) -> None:
        """Raise LakeError when a disk has turned read-only; SQLite says less than that."""
        catalog = self._place.catalog_file
        directories = [] if catalog is None else [catalog.parent]
        if "://" not in self._place.data:
            directories.append(Path(self._place.data))
        for directory in directories:
            try:
                read_only = os.statvfs(directory).f_flag & os.ST_RDONLY
            except FileNotFoundError:
                continue  # DuckDB makes it, or says so
            except OSError as error:  # of a disk or a server that went away
                raise LakeError(f"cannot look at {directory}: {error.strerror}") from error
            if read_only:
                raise LakeError(f"the file system of {directory} has turned read-only")

    def renew(self) -> None:
        """The directory that is there now is the lake's."""
        self._data = self._data_now()

    def _data_now(self) -> tuple[int, int] | None:
        return _identity(None if "://" in self._place.data else Path(self._place.data))


def _identity(path: Path | None) -> tuple[int, int] | None:
    """Device and inode; None: nothing there, or nothing that is looked at."""
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
