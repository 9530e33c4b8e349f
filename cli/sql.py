"""`inferloop sql`: one query, a watched query, or a shell over the trace lake."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capture.console.output import Format, format_of
from cli.main import app

if TYPE_CHECKING:
    from capture.console.output import Written
    from capture.sql.query import QuerySession

TABLE_ROWS = 100


class SqlError(Exception):
    """The options do not fit together."""

    exit_code = 1


@app.command()
def sql(
    query: Annotated[
        str | None,
        typer.Argument(
            help="One SELECT; - reads it from standard input. None: a shell on a terminal, "
            "else standard input.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            "-f",
            help="json: one object a line. Default: what the output's name ends in, else table.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0, max=1 << 62, help="Rows at most, 0: all. Default: 100 as a table, else all."
        ),
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, max=86_400, help="Run it again every so many seconds until Ctrl-C."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="Seconds a query may take.")
    ] = 30.0,
    memory_mib: Annotated[
        int, typer.Option(min=64, max=1 << 20, help="Memory a query may use.")
    ] = 1024,
) -> None:
    """Query the trace lake, also while engines run and the collector writes. Read-only.

    Tables, views and macros with units and examples: docs/sql.md,
    or `.tables` and `.schema tokens` in the shell.

    Example:  inferloop sql

    Example:  inferloop sql "SELECT * FROM slow_tokens(10)"

    Example:  inferloop sql "FROM request_latency" --format parquet --output latency.parquet

    Example:  inferloop sql --watch 2 "SELECT count(*) AS tokens FROM tokens"
    """
    from capture.lake import LakePlace
    from capture.settings import Settings
    from capture.sql.query import QueryLimits, QuerySession, checked_text

    form = form or (output and format_of(output)) or Format.table
    if form is Format.parquet and output is None:
        raise SqlError("parquet is for files: add --output FILE")
    if watch is not None and output is not None:
        raise SqlError("--watch shows results and writes no file: leave out --output")
    if sys.stdout is None:
        raise SqlError("there is no standard output to write to")
    interactive = query is None and sys.stdin.isatty() and sys.stdout.isatty()
    if watch is not None and interactive:
        raise SqlError('--watch needs a query: inferloop sql --watch 2 "FROM engines"')
    settings = Settings()
    rows = limit if limit is not None else TABLE_ROWS if form is Format.table else 0
    limits = QueryLimits(timeout_s=timeout, memory_mib=memory_mib, rows=rows)
    text = "" if interactive else sys.stdin.read() if query in (None, "-") else query or ""
    checked_text(text)
    with QuerySession(LakePlace.from_settings(settings), limits) as session:
        if interactive:
            _shell(session, rows, settings.home)
        elif watch is not None:
            _watch(session, text, watch, form, rows)
        else:
            _once(session, text, form, output, rows)


def _shell(session: QuerySession, rows: int, home: Path) -> None:
    from capture.console.shell import Shell

    Shell(session, rows=rows).run(home / "sql_history")


def _watch(session: QuerySession, text: str, every_s: float, form: Format, rows: int) -> None:
    from capture.console.watch import watch

    screen = sys.stdout.isatty()
    try:
        watch(
            session,
            text,
            sys.stdout.buffer,
            every_s=every_s,
            form=form,
            rows=rows,
            screen=screen,
        )
    except KeyboardInterrupt:
        return


def _printed(write: Callable[[], Written]) -> Written:
    """Have standard output written to; the disk below it may be full."""
    try:
        written = write()
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SqlError(f"cannot write the result: {error.strerror or error}") from error
    return written


def _once(session: QuerySession, text: str, form: Format, output: Path | None, rows: int) -> None:
    from capture.atomic_file import opened
    from capture.console.output import write

    with session.run(text) as reader:
        if output is None:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            written = _printed(
                lambda: write(reader, form, sys.stdout.buffer, rows=rows, width=width)
            )
        else:
            with opened(output) as file:
                written = write(reader, form, file, rows=rows)
    if written.more:
        typer.echo(f"first {written.rows:,} rows; --limit 0 shows all", err=True)
    if output is not None:
        typer.echo(f"{written.rows:,} rows written to {output}", err=True)
