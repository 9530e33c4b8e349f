"""Query results in the formats people ask for: table, line, markdown, CSV, JSON lines, Parquet.

Streams batch by batch but for tables, whose column widths need all rows. Text that clients wrote
is printed as text: no markup, no terminal codes. Not for choosing a format: that is the caller.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROL_BUT_LINES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
WIDE = 10_000  # columns of a file, in which no table is folded
LONG_WORD = 40  # columns; longer ones may be broken


class Format(StrEnum):
    table = "table"
    csv = "csv"
    json = "json"
    parquet = "parquet"
    markdown = "markdown"
    line = "line"


_SUFFIXES = {
    ".csv": Format.csv,
    ".json": Format.json,
    ".jsonl": Format.json,
    ".md": Format.markdown,
    ".parquet": Format.parquet,
}


def format_of(path: Path) -> Format | None:
    """What a file's name promises."""
    return _SUFFIXES.get(path.suffix.lower())


class Written(NamedTuple):
    """Rows written, and whether there were more."""

    rows: int
    more: bool


def write(
    reader: pa.RecordBatchReader,
    form: Format,
    stream: IO[bytes],
    *,
    rows: int = 0,
    width: int | None = None,
) -> Written:
    """Write a result to a binary stream, `rows` at most (0: all).

    `width`: columns of the terminal a table is folded to and coloured for; None: a file. A table
    whose words would be broken is shown as lines.
    """
    batches = _Limited(reader, rows)
    if form is Format.table:
        _write_table(batches, stream, width)
    else:
        _WRITERS[form](batches, stream)
    return Written(batches.written, batches.more)


class _Limited:
    """The reader's batches up to a number of rows (0: all)."""

    def __init__(self, reader: pa.RecordBatchReader, rows: int) -> None:
        self.schema = reader.schema
        self.written = 0
        self.more = False
        self._reader = reader
        self._rows = rows

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._reader:
            room = self._rows - self.written if self._rows else batch.num_rows
            self.more = self.more or batch.num_rows > room
            self.written += min(room, batch.num_rows)
            if room:
                yield batch.slice(0, room)

    def records(self) -> Iterator[tuple[Any, ...]]:
        for batch in self:
            yield from zip(*map(_values, batch.columns), strict=True)


def distinct_names(columns: list[str]) -> list[str]:
    """The columns' names; of equal ones the later get _2, _3, ..."""
    names: list[str] = []
    taken = set(columns)
    for name in columns:
        number, distinct = 1, name
        while distinct in names or (number > 1 and distinct in taken):
            number += 1
            distinct = f"{name}_{number}"
        names.append(distinct)
    return names


def _write_table(batches: _Limited, stream: IO[bytes], width: int | None) -> None:
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    names = [cell(name) for name in batches.schema.names]
    rows = [[cell(value) for value in row] for row in batches.records()]
    words = [_longest_word(column) for column in zip(names, *rows, strict=True)]
    if width is not None and len(names) > 1 and sum(words) + 2 * (len(names) - 1) > width:
        _write_rows(names, rows, stream)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = zip(batches.schema, zip(names, *rows, strict=True), words, strict=True)
    for field, column, word in columns:
        table.add_column(
            Text(cell(field.name)),
            no_wrap=all(cell_len(text) <= word for text in column),  # folded are the others
            justify="right" if _is_number(field) else "left",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))  # plain: [x] is no markup
    if width is not None:
        console = Console(width=width, force_terminal=True)
    else:
        console = Console(width=WIDE, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    stream.write("".join(line.rstrip() + "\n" for line in lines).encode())


def _longest_word(texts: Iterable[str]) -> int:
    """The columns that it needs."""
    from rich.cells import cell_len

    return min(LONG_WORD, max(cell_len(word) for text in texts for word in text.split() or [""]))


def _write_markdown(batches: _Limited, stream: IO[bytes]) -> None:
    def line(cells: list[str]) -> None:
        stream.write(("| " + " | ".join(cells) + " |\n").encode())

    def escaped(value: Any) -> str:
        text = cell(value).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
        return text.replace("\n", "<br>")

    line([escaped(name) for name in batches.schema.names])
    line(["---:" if _is_number(field) else "---" for field in batches.schema])
    for row in batches.records():
        line([escaped(value) for value in row])


def _write_lines(batches: _Limited, stream: IO[bytes]) -> None:
    names = [cell(name) for name in batches.schema.names]
    _write_rows(names, ([cell(value) for value in row] for row in batches.records()), stream)


def _write_rows(names: list[str], rows: Iterable[list[str]], stream: IO[bytes]) -> None:
    width = max(map(len, names), default=0)
    for number, row in enumerate(rows):
        stream.write(b"\n" if number else b"")
        for name, text in zip(names, row, strict=True):
            stream.write(f"{name:>{width}} = {text}\n".encode())


def _write_csv(batches: _Limited, stream: IO[bytes]) -> None:
    import csv
    import io

    text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow(distinct_names(batches.schema.names))
    writer.writerows(map(_csv_value, row) for row in batches.records())
    text.detach()


def _csv_value(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    plain = _plain(value)
    return json.dumps(plain, ensure_ascii=False) if isinstance(plain, list | dict) else plain


def _write_json(batches: _Limited, stream: IO[bytes]) -> None:
    names = distinct_names(batches.schema.names)
    for row in batches.records():
        plain = dict(zip(names, map(_plain, row), strict=True))
        stream.write(json.dumps(plain, ensure_ascii=False).encode() + b"\n")


def _write_parquet(batches: _Limited, stream: IO[bytes]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = distinct_names(batches.schema.names)
    fields = (field.with_name(name) for field, name in zip(batches.schema, names, strict=True))
    schema = pa.schema(fields)
    with pq.ParquetWriter(stream, schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))


_WRITERS: dict[Format, Callable[[_Limited, IO[bytes]], None]] = {
    Format.csv: _write_csv,
    Format.json: _write_json,
    Format.parquet: _write_parquet,
    Format.markdown: _write_markdown,
    Format.line: _write_lines,
}


def cell(value: Any) -> str:
    """A value for people: six digits of a float, nothing for NULL, no terminal codes."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f"{value:.6g}" if isinstance(value, float) else str(_plain(value))
    return _CONTROL_BUT_LINES.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text: str) -> str:
    """`text` for a message: no terminal codes, no line breaks."""
    return _CONTROL.sub(" ", text)


def _is_number(field: pa.Field) -> bool:
    return str(field.type).startswith(("int", "uint", "float", "double", "decimal"))


def _values(column: pa.Array) -> list[Any]:
    """A column's values; as text where Python has none, such as a time after the year 9999."""
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        return f"{getattr(scalar, 'value', 'out of range')} {scalar.type}"


def _plain(value: Any) -> Any:
    """What JSON and CSV can hold: ISO 8601 times, text for identifiers, null for NaN."""
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    isoformat = getattr(value, "isoformat", None)
    return isoformat() if isoformat is not None else str(value)
