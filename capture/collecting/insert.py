"""Writing rows of several rings to the lake: one INSERT, and so one file, for each table.

Inside the caller's transaction. Not for gathering the rows: that is `capture.collecting.ingest`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from capture.collecting.ingest import Columns, RingRows
from capture.collecting.row_types import SQL_TABLES
from capture.schema import Column

if TYPE_CHECKING:
    import duckdb

Part = tuple[str, "Columns | pa.Table"]


def insert_rows(connection: duckdb.DuckDBPyConnection, rings: list[RingRows]) -> None:
    """Insert the rows of all rings. Raises duckdb.Error."""
    parts: dict[str, list[Part]] = {}
    for ring in rings:
        for name, rows in ring.tables():
            parts.setdefault(name, []).append((ring.engine_id, rows))
    for name, of_rings in parts.items():
        _insert(connection, name, of_rings)


def _insert(connection: duckdb.DuckDBPyConnection, name: str, parts: list[Part]) -> None:
    columns = ", ".join(_selected(column) for column in SQL_TABLES[name].columns[1:])
    queries = [
        f"SELECT '{engine_id}'::UUID, {columns} FROM incoming_{index}"
        for index, (engine_id, _) in enumerate(parts)
    ]
    try:
        for index, (_, rows) in enumerate(parts):
            connection.register(f"incoming_{index}", rows)
        connection.execute(f"INSERT INTO {name} {' UNION ALL '.join(queries)}")
    finally:
        for index in range(len(parts)):
            connection.unregister(f"incoming_{index}")


def _selected(column: Column) -> str:
    """The expression for one of the lake's columns: what was not measured becomes NULL."""
    if column.name == "graph_bucket":
        return "nullif(graph_bucket, -1)"
    return f"nullif({column.name}, 'NaN'::FLOAT)" if column.type == "FLOAT" else column.name
