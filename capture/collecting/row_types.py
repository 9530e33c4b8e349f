"""What the lake's columns can hold: checks rows of the small tables, and makes Arrow of them.

A value that the lake would refuse costs its frame here, else it would cost the whole commit. Not
for tokens, steps and prefill chunks, whose types cannot hold such a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from capture.errors import FrameError
from capture.schema import TABLES, Column

SQL_TABLES = {table.name: table for table in TABLES}
ARROW_TYPES = {
    "UUID": pa.string(),
    "VARCHAR": pa.string(),
    "JSON": pa.string(),
    "SMALLINT": pa.int16(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "BOOLEAN": pa.bool_(),
    "TIMESTAMP": pa.timestamp("us"),
}
LIMITS = {"SMALLINT": 1 << 15, "INTEGER": 1 << 31, "BIGINT": 1 << 63}


class _Type(NamedTuple):
    """A column as the lake knows it; `limit`: of whole numbers, 0 for other values."""

    column: Column
    arrow: pa.DataType
    nullable: bool
    limit: int


def _type(column: Column) -> _Type:
    kind, _, rest = column.type.partition(" ")
    return _Type(column, ARROW_TYPES[kind], not rest, LIMITS.get(kind, 0))


# Without the first column, the engine's id, which is the same for all rows of a ring.
_TYPES = {table.name: tuple(map(_type, table.columns[1:])) for table in TABLES}


def check_row(table: str, values: Sequence[Any]) -> None:
    """Raise FrameError when one of a row's values, in the order of the columns, does not fit."""
    for (column, _, nullable, limit), value in zip(_TYPES[table], values, strict=True):
        if value is None:
            fits = nullable
        elif limit:
            fits = -limit <= value < limit
        else:
            fits = not isinstance(value, str) or value.isascii() or _encodes(value)
        if not fits:
            raise FrameError(f"{table}.{column.name} ({column.type}) cannot hold {value!r:.100}")


def arrow_table(table: str, rows: list[tuple[Any, ...]]) -> pa.Table:
    """Rows without their engine id as columns."""
    columns = zip(_TYPES[table], zip(*rows, strict=True), strict=True)
    return pa.table({of.column.name: pa.array(values, of.arrow) for of, values in columns})


def _encodes(text: str) -> bool:
    """Whether it is free of half characters, which JSON's escapes can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
