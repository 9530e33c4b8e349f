"""`inferloop sql`: one query over the trace lake, printed or written to a file."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from cli.main import app

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

TABLE_ROWS = 100
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)  # a client's tenant may hold a terminal's codes


class Format(StrEnum):
    table = "table"
    csv = "csv"
    json = "json"
    parquet = "parquet"


class SqlError(Exception):
    """The query's options do not fit together, or its output cannot be written."""

    exit_code = 1


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="One SELECT; - reads it from standard input.")],
    format_: Annotated[
        Format, typer.Option("--format", "-f", help="json: one object a line.")
    ] = Format.table,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help="Rows at most, 0: all. Default: 100 as a table, else all."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds the query may take.")] = 30.0,
    memory_mib: Annotated[int, typer.Option(min=64, help="Memory the query may use.")] = 1024,
) -> None:
    """Query the trace lake, also while engines run and the collector writes. Read-only.

    Tables, views and macros with units and examples: docs/sql.md,
    or `SHOW TABLES` and `DESCRIBE tokens`.

    Example:  inferloop sql "SELECT * FROM slow_tokens(10)"

    Example:  inferloop sql "FROM request_latency" --format parquet --output latency.parquet
    """
    from capture.lake import LakePlace
    from capture.query import QueryLimits, run_query
    from capture.settings import Settings

    if format_ is Format.parquet and output is None:
        raise SqlError("parquet is for files: add --output FILE")
    rows = limit if limit is not None else TABLE_ROWS if format_ is Format.table else 0
    text = sys.stdin.read() if query == "-" else query
    limits = QueryLimits(timeout_s=timeout, memory_mib=memory_mib, rows=rows)
    with run_query(LakePlace.from_settings(Settings()), text, limits) as reader:
        written, more = _write(reader, format_, output, rows)
    if more:
        typer.echo(f"first {written:,} rows; --limit 0 shows all", err=True)
    if output is not None:
        typer.echo(f"{written:,} rows written to {output}", err=True)


def _write(
    reader: pa.RecordBatchReader, format_: Format, output: Path | None, rows: int
) -> tuple[int, bool]:
    """Rows written, and whether there were more than `rows`."""
    batches = _Limited(reader, rows)
    try:
        with _opened(output) as stream:
            if format_ is Format.table:
                _write_table(batches, stream, to_terminal=output is None)
            elif format_ is Format.csv:
                _write_csv(batches, stream)
            elif format_ is Format.json:
                _write_json(batches, stream)
            else:
                _write_parquet(batches, stream)
    except OSError as error:
        if output is None:
            raise
        raise SqlError(f"cannot write {output}: {error.strerror or error}") from error
    return batches.written, batches.more


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


@contextmanager
def _opened(output: Path | None) -> Iterator[IO[bytes]]:
    """Standard output, or a file that is there whole or not at all."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if output.exists() and not output.is_file():  # /dev/null, a pipe: nothing to put in its place
        with output.open("wb") as file:
            yield file
        return
    output = output.resolve()  # a link goes on pointing where it does
    temporary = output.with_name(f".{output.name}.part")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def _write_table(batches: _Limited, stream: IO[bytes], *, to_terminal: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for field in batches.schema:
        numeric = str(field.type).startswith(("int", "uint", "float", "double", "decimal"))
        table.add_column(Text(field.name), justify="right" if numeric else "left", overflow="fold")
    for batch in batches:
        for row in zip(*map(_values, batch.columns), strict=True):
            table.add_row(*(Text(_cell(value)) for value in row))  # plain: [x] is no markup
    terminal = to_terminal and sys.stdout.isatty()
    console = Console() if terminal else Console(width=10_000, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    stream.write("".join(line.rstrip() + "\n" for line in lines).encode())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(_plain(value))
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _write_csv(batches: _Limited, stream: IO[bytes]) -> None:
    import csv
    import io

    text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow(batches.schema.names)
    for batch in batches:
        columns = (map(_plain, _values(column)) for column in batch.columns)
        writer.writerows(zip(*columns, strict=True))
    text.detach()


def _write_json(batches: _Limited, stream: IO[bytes]) -> None:
    names = batches.schema.names
    for batch in batches:
        for row in zip(*map(_values, batch.columns), strict=True):
            plain = dict(zip(names, map(_plain, row), strict=True))
            stream.write(json.dumps(plain, ensure_ascii=False).encode() + b"\n")


def _write_parquet(batches: _Limited, stream: IO[bytes]) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(stream, batches.schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)


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
