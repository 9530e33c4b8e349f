"""A query run again every few seconds: a screen that is redrawn, or results one below the other.

Not for live rings: `inferloop top` reads those; this reads what the collector has committed.
"""

from __future__ import annotations

import io
import shutil
import time
from datetime import datetime
from typing import IO

from capture.console.output import Format, write
from capture.errors import QueryError
from capture.sql.query import QuerySession

HOME, CLEAR_LINE, CLEAR_BELOW = b"\x1b[H", b"\x1b[K", b"\x1b[J"
CUT_LINES, WRAP_LINES = b"\x1b[?7l", b"\x1b[?7h"  # where the terminal ends
HEADER_LINES, TABLE_LINES = 2, 2  # of a table: its columns' names, "first n rows"


def watch(
    session: QuerySession,
    sql: str,
    stream: IO[bytes],
    *,
    every_s: float,
    form: Format,
    rows: int,
    screen: bool,
) -> None:
    """Run `sql` until KeyboardInterrupt. An error ends it the first time, later it is shown.

    `screen`: the stream is a terminal, which is redrawn and shows no more rows than it has lines.
    """
    first = True
    while True:
        started = time.monotonic()
        lines = max(shutil.get_terminal_size().lines - HEADER_LINES - 1, 1)
        fitting = max(lines - TABLE_LINES, 1)
        rows_now = min(rows or fitting, fitting) if screen else rows
        try:
            text = result(session, sql, form, rows_now, screen=screen)
        except QueryError as error:
            if first:
                raise
            session.warm()
            text = f"{error}\n".encode()
        header = f"{datetime.now():%Y-%m-%d %H:%M:%S}  every {every_s:g} s".encode()
        if screen:
            stream.write(_picture(header + b", Ctrl-C ends", text.splitlines(), lines))
        else:
            stream.write(header + b"\n" + text + b"\n")
        stream.flush()
        first = False
        time.sleep(max(every_s - (time.monotonic() - started), 0.05))


def _picture(header: bytes, rows: list[bytes], lines: int) -> bytes:
    """The screen from its top; what does not fit is named, not scrolled away."""
    if len(rows) > lines:
        rows = [*rows[: lines - 1], b"... more than the screen holds"]
    shown = b"".join(row + CLEAR_LINE + b"\r\n" for row in (header, b"", *rows))
    return CUT_LINES + HOME + shown + CLEAR_BELOW + WRAP_LINES


def result(session: QuerySession, sql: str, form: Format, rows: int, *, screen: bool) -> bytes:
    """The result as bytes, with a line that says so when there is more of it."""
    text = io.BytesIO()
    width = shutil.get_terminal_size().columns if screen else None
    with session.run(sql, rows=rows) as reader:
        written = write(reader, form, text, rows=rows, width=width)
    if written.more and form is Format.table:
        text.write(f"first {written.rows:,} rows\n".encode())
    return text.getvalue()
