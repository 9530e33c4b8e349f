"""The interactive SQL shell: reads statements up to `;`, runs them in a warm query process.

Errors are one line and never end the shell; Ctrl-C stops a query or clears the line, Ctrl-D quits.
Not for scripts: they give the query as an argument or on standard input.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from capture.atomic_file import OutputError, opened
from capture.console.completion import SqlCompleter, Vocabulary, read_vocabulary
from capture.console.output import Format, Written, format_of, one_line, write
from capture.errors import CaptureError, QueryError
from capture.sql.query import QuerySession

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

_SKIPPED = re.compile(
    r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/|\$\$.*?\$\$", re.DOTALL
)
_OPEN = re.compile(r"['\"]|/\*|\$\$")
_PLAIN = {"exit": ".quit", "quit": ".quit", "help": ".help", "\\q": ".quit", "\\d": ".tables"}
BANNER = "SQL over the trace lake, read-only. .help lists commands, a query ends with ;"


def is_complete(text: str) -> bool:
    """Whether what was typed can be run: empty, a dot command, or SQL that ends with `;`."""
    if not text.strip() or text.startswith(".") or _habit(text) is not None:
        return True
    rest = _SKIPPED.sub(" ", text)
    return rest.rstrip().endswith(";") and not _OPEN.search(rest)


def _habit(text: str) -> str | None:
    """The dot command that somebody meant who is used to other shells."""
    return _PLAIN.get(text.strip("; \n").lower())


def open_history(path: Path) -> History:
    """The file of past queries, which only its owner may read; memory where none can be kept."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class File(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk ends no session
                super().store_string(string)

    try:
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return File(str(path))


class Shell:
    """One interactive session; `execute` is what the prompt calls for each input."""

    def __init__(self, session: QuerySession, *, rows: int, out: IO[bytes] | None = None) -> None:
        from capture.console.commands import COMMANDS

        self.session = session
        self.mode = Format.table
        self.output: Path | None = None
        self.timer = False
        self.words = Vocabulary()
        self._commands: dict[str, Callable[[Shell, str], None]] = COMMANDS
        self._rows = rows
        self._out = out or sys.stdout.buffer

    def run(self, history: Path) -> None:
        """Prompt until `.quit` or Ctrl-D."""
        self.words = read_vocabulary(self.session)
        self.say(BANNER)
        prompt = self._prompt(history)
        while True:
            try:
                self.execute(prompt.prompt("inferloop> "))
            except KeyboardInterrupt:  # also a second one, while the first was being said
                continue
            except EOFError:
                return

    def execute(self, text: str) -> None:
        """Run one input. Raises EOFError for `.quit`; says all other errors in one line."""
        text = _habit(text) or text.strip()
        sql = text.rstrip("; \n")
        try:
            if text.startswith("."):
                self._command(text)
            elif sql:
                self._query(text)
        except KeyboardInterrupt:
            self.session.warm()
            self.say("stopped")
        except QueryError as error:
            self.session.warm()
            self._say_where(text, error)
            self.say(f"error: {one_line(str(error))}")
        except CaptureError as error:
            self.say(f"error: {one_line(str(error))}")

    def say(self, line: str) -> None:
        self._out.write(f"{line}\n".encode())
        self._out.flush()

    def _command(self, text: str) -> None:
        name, _, argument = text.rstrip(";").partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise OutputError(f"there is no command {name}: .help lists them")
        command(self, argument.strip())

    def _query(self, sql: str) -> None:
        started = time.monotonic()
        rows = self._rows if self.output is None and self.mode is Format.table else 0
        with self.session.run(sql, rows=rows) as reader:
            if self.output is not None:
                with opened(self.output) as file:
                    written = write(reader, format_of(self.output) or self.mode, file)
                self.say(f"{_rows(written)} written to {self.output}")
            else:
                width = shutil.get_terminal_size().columns if os.isatty(1) else None
                written = write(reader, self.mode, self._out, rows=rows, width=width)
        if written.more:
            self.say(f"first {written.rows:,} rows; the rest: --limit, or .output FILE")
        if self.timer:
            self.say(f"{_rows(written)} in {time.monotonic() - started:.3f} s")
        self._out.flush()

    def _say_where(self, sql: str, error: QueryError) -> None:
        """The line of the query that DuckDB points at, and a caret below."""
        if error.place is None:
            return
        line, column = error.place
        text = sql.split("\n")[line - 1]
        start = max(column - 60, 0)
        self.say(f"  {text[start : start + 78]}")
        self.say(f"  {' ' * (column - 1 - start)}^")

    def _prompt(self, history: Path) -> PromptSession[str]:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application.current import get_app
        from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.lexers import PygmentsLexer
        from pygments.lexers.sql import PostgresLexer

        return PromptSession(
            history=open_history(history),
            auto_suggest=AutoSuggestFromHistory(),
            completer=SqlCompleter(self.words, self._commands),
            complete_while_typing=False,
            lexer=PygmentsLexer(PostgresLexer),
            multiline=Condition(lambda: not is_complete(get_app().current_buffer.text)),
            prompt_continuation="      ...> ",
        )


def _rows(written: Written) -> str:
    return f"{written.rows:,} row{'' if written.rows == 1 else 's'}"
