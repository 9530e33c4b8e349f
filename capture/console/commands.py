"""The shell's dot commands: what they are called, what they take, what they do.

Names, comments and units come from the schema in the code, which is what the lake holds. Not for
anything that runs SQL.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from capture.atomic_file import OutputError
from capture.console.output import Format
from capture.schema import TABLES, Column, View
from capture.views import VIEWS

if TYPE_CHECKING:
    from capture.console.shell import Shell

SHOWN_PARAMETERS = 20  # characters of them; .schema shows them all
SHOWN_MODES = (Format.table, Format.csv, Format.json, Format.line, Format.markdown)
HELP = f"""\
.tables          the lake's tables, views and macros
.schema NAME     columns of one of them, with units and an example
.mode MODE       {", ".join(SHOWN_MODES)}
.output FILE     write the results that follow to FILE, as its name ends (.parquet, .csv,
                 .json, .md) or else in the mode; without FILE show them here again
.timer on|off    show how long a query took
.help            this
.quit            end, like Ctrl-D; Ctrl-C stops a running query
SQL ends with ;  and may take several lines. Tab completes names."""


def show_tables(shell: Shell, _: str) -> None:
    entries = [(table.name, table.comment) for table in TABLES]
    for view in VIEWS:
        taken = "..." if len(view.parameters or "") > SHOWN_PARAMETERS else view.parameters
        shown = view.name if taken is None else f"{view.name}({taken})"
        entries.append((shown, view.comment))
    width = max(len(name) for name, _ in entries)
    for name, comment in entries:
        shell.say(_cut(f"{name:{width}}  {comment.partition('. ')[0].rstrip('.')}"))


def _cut(line: str) -> str:
    """As much of a line as the terminal shows in one."""
    columns = shutil.get_terminal_size().columns
    return line if len(line) <= columns or not os.isatty(1) else f"{line[: columns - 3]}..."


def show_schema(shell: Shell, name: str) -> None:
    if not name:
        raise OutputError(".schema takes a name: .tables lists them")
    for entry in (*TABLES, *VIEWS):
        if entry.name == name.lower():
            break
    else:
        raise OutputError(f"there is no table, view or macro {name}: .tables lists them")
    if isinstance(entry, View) and entry.parameters is not None:
        shell.say(f"{entry.name}({entry.parameters})")
    shell.say(entry.comment)
    _show_columns(shell, entry.columns)
    shell.say(f"\nExample:\n{entry.example};")


def _show_columns(shell: Shell, columns: tuple[Column, ...]) -> None:
    names = max(len(column.name) for column in columns)
    types = max(len(_short(column)) for column in columns)
    for column in columns:
        shell.say(f"  {column.name:{names}}  {_short(column):{types}}  {column.comment}")


def _short(column: Column) -> str:
    return column.type.removesuffix(" NOT NULL")


def set_mode(shell: Shell, mode: str) -> None:
    if mode not in {form.value for form in SHOWN_MODES}:
        raise OutputError(f".mode takes {', '.join(SHOWN_MODES)}, not {mode or 'nothing'}")
    shell.mode = Format(mode)


def set_output(shell: Shell, name: str) -> None:
    shell.output = Path(name).expanduser() if name else None


def set_timer(shell: Shell, state: str) -> None:
    if state not in ("on", "off"):
        raise OutputError(f".timer takes on or off, not {state or 'nothing'}")
    shell.timer = state == "on"


def quit_shell(_: Shell, __: str) -> None:
    raise EOFError


COMMANDS: dict[str, Callable[[Shell, str], None]] = {
    ".tables": show_tables,
    ".schema": show_schema,
    ".mode": set_mode,
    ".output": set_output,
    ".timer": set_timer,
    ".help": lambda shell, _: shell.say(HELP),
    ".quit": quit_shell,
}
