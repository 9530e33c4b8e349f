"""The trace lake for Python programs: `from capture import open_lake`.

Reads only, and may be shared by threads. Not for our own code, which needs DuckDB's connection
(`capture.lake.open_connection`), nor for SQL of people we do not trust (`capture.sql.query`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from html import escape
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

from capture.console.output import distinct_names
from capture.errors import LakeError, QueryError, first_line
from capture.lake import LakePlace, new_cursor, open_connection
from capture.settings import Settings
from capture.sql.query import checked_text

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl
    import pyarrow as pa


SHOWN_ROWS = 20
"""Rows that a notebook shows of a result."""


def open_lake(
    home: str | Path | None = None,
    *,
    catalog: str | None = None,
    data: str | None = None,
    threads: int | None = None,
) -> Lake:
    """A trace lake, to be asked in SQL while engines write to it; close it, or use `with`.

    Without arguments the lake of the settings (INFERLOOP_*, inferloop.toml). `home` is a data
    directory as in INFERLOOP_HOME; `catalog` a SQLite file or postgresql:// URL, `data` where its
    files lie if not where the catalog says. `threads`: how many DuckDB uses, default all cores.
    Raises SettingsError, LakeMissingError, LakeVersionError or LakeError.
    """
    if home is None and catalog is None:
        if data is not None:
            raise LakeError(f"data={data!r} alone names no lake: give its catalog too")
        settings = Settings()
    else:
        place = {"home": home} if home is not None else {}
        settings = Settings(**place, lake_catalog=catalog, lake_data=data)
    return Lake(open_connection(LakePlace.from_settings(settings), threads=threads))


class Lake:
    """An open trace lake. Its tables, views and macros are in docs/sql.md."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._closed = False

    def sql(
        self, query: str, params: Sequence[object] | Mapping[str, object] | None = None
    ) -> Rows:
        """Run one query; `params` fill its `?` (a sequence) or `$name` (a mapping).

        Each call sees what was committed before it. Raises QueryError when the query is wrong or
        would write, or when the lake was closed.
        """
        import duckdb

        checked_text(query)
        try:
            with self._lock:
                if self._closed:
                    raise QueryError("the lake was closed: open it again with open_lake()")
                cursor = new_cursor(self._connection)
            with closing(cursor):
                found: duckdb.DuckDBPyConnection | None = cursor.execute(query, params)
                if found is None:
                    raise QueryError("the query is empty")
                return Rows(found.to_arrow_table())
        except duckdb.Error as error:
            raise QueryError(first_line(error)) from error

    def close(self) -> None:
        """Let go of the lake, after the queries of other threads; what `sql` returned stays."""
        with self._lock:
            self._closed = True
            self._connection.close()

    def __enter__(self) -> Lake:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Rows:
    """What a query found: all of it, in memory, as often as wanted and in any form.

    Iterating and indexing give a row as a dict by column name; where names repeat, later ones get
    `_2`, `_3`. Times are `datetime` in UTC without a zone.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def columns(self) -> list[str]:
        """The columns' names, in order."""
        return distinct_names(self._table.schema.names)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = self.columns
        for row in self.fetchall():
            yield dict(zip(names, row, strict=True))

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """The row at `index`, negative from the end. Raises IndexError when there is none, and
        TypeError for what is no number."""
        if not isinstance(index, SupportsIndex):
            raise TypeError(
                f"a row is chosen by its number, not by {index!r}: rows[0][column], or "
                "rows.df() and rows.pl() for columns and slices"
            )
        index = index.__index__()
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"there is no row {index}: the query found {len(self)}")
        return next(iter(Rows(self._table.slice(position, 1))))

    def fetchall(self) -> list[tuple[Any, ...]]:
        """All rows as tuples."""
        columns = [column.to_pylist() for column in self._table.columns]
        return list(zip(*columns, strict=True))

    def arrow(self) -> pa.Table:
        """As a pyarrow Table."""
        return self._table

    def df(self) -> pd.DataFrame:
        """As a pandas DataFrame. Raises QueryError when pandas is not installed."""
        try:
            import pandas  # noqa: F401  pyarrow says less clearly that it is missing
        except ImportError as error:
            raise _missing("pandas", "df") from error
        frame: pd.DataFrame = self._table.to_pandas()
        return frame

    def pl(self) -> pl.DataFrame:
        """As a polars DataFrame. Raises QueryError when polars is not installed."""
        try:
            import polars
        except ImportError as error:
            raise _missing("polars", "pl") from error
        frame = polars.from_arrow(self._table)
        return frame if isinstance(frame, polars.DataFrame) else frame.to_frame()

    def __repr__(self) -> str:
        return f"<{len(self)} rows of {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        """The first rows as a table, which notebooks show."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        shown = Rows(self._table.slice(0, SHOWN_ROWS)).fetchall()
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(_shown(value))}</td>' for value in row)}</tr>"
            for row in shown
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        more = len(self) - len(shown)
        return f"{table}<p>{len(self):,} rows, {more:,} more than shown</p>" if more else table


def _shown(value: object) -> str:
    return "" if value is None else str(value)


def _missing(library: str, method: str) -> QueryError:
    return QueryError(
        f"{library} is not installed, so there is no .{method}(): pip install {library}, or take "
        ".arrow()"
    )
