"""The SQL shell, watching a query, and output formats, as their users see them."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import os
import re
import select
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from capture.console.commands import COMMANDS
from capture.console.completion import SqlCompleter, Vocabulary, read_vocabulary
from capture.console.output import Format, write
from capture.console.shell import Shell, is_complete, open_history
from capture.console.watch import watch
from capture.sql.query import QuerySession
from tests.capture.children import on_a_terminal
from tests.proc import children, cpu_s
from tests.waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def words(shared_session: QuerySession) -> Vocabulary:
    return read_vocabulary(shared_session)


class Screen:
    """A shell and what it has shown."""

    def __init__(self, session: QuerySession, rows: int = 100) -> None:
        self._out = io.BytesIO()
        self.shell = Shell(session, rows=rows, out=self._out)

    def shown(self, *inputs: str) -> list[str]:
        self._out.seek(0)
        self._out.truncate()
        for text in inputs:
            self.shell.execute(text)
        return self._out.getvalue().decode().splitlines()


def offered(words: Vocabulary, text: str) -> list[str]:
    completer = SqlCompleter(words, COMMANDS)
    return [found.text for found in completer.get_completions(Document(text), CompleteEvent())]


def written(table: pa.Table, form: Format, rows: int = 0) -> str:
    stream = io.BytesIO()
    write(table.to_reader(), form, stream, rows=rows)
    return stream.getvalue().decode()


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("SELECT 1", False),
        ("SELECT 1;", True),
        ("SELECT 1; -- the end", True),
        ("SELECT ';", False),
        ("SELECT 'it''s;' ;", True),
        ("SELECT 1 /* ;", False),
        ("SELECT 1 -- ;", False),
        ('SELECT "a;', False),
        (".tables", True),
        ("", True),
    ],
)
def test_a_statement_is_complete_at_its_semicolon(text: str, complete: bool) -> None:
    assert is_complete(text) is complete


def test_a_query_shows_its_rows_and_the_cut(session: QuerySession) -> None:
    screen = Screen(session, rows=3)
    lines = screen.shown("SELECT slot FROM tokens ORDER BY slot;")
    assert [line.strip() for line in lines[:4]] == ["slot", "0", "0", "0"]
    assert lines[4].startswith("first 3 rows")


def test_an_error_is_a_line_below_a_caret_and_the_shell_goes_on(session: QuerySession) -> None:
    screen = Screen(session)
    lines = screen.shown("SELECT slot,\n  nothing FROM tokens;")
    assert lines[:2] == ["    nothing FROM tokens;", "    ^"]
    assert len(lines) == 3
    absent = 'error: Referenced column "nothing" not found in FROM clause! (line 2, column 3)'
    assert lines[2].startswith(f"{absent}; there are ")
    assert "refused" in screen.shown("DROP TABLE tokens;")[-1]
    assert screen.shown("SELECT 42 AS answer;")[-1].strip() == "42"


def test_dot_commands(session: QuerySession, tmp_path: Path) -> None:
    screen = Screen(session)
    tables = screen.shown(".tables")
    assert any(line.startswith("tokens ") for line in tables)
    assert any(line.startswith("slow_tokens(wanted) ") for line in tables)
    assert any("latency_us" in line and "BIGINT" in line for line in screen.shown(".schema tokens"))
    assert "there is no table" in screen.shown(".schema nothing")[0]
    assert ".mode takes table" in screen.shown(".mode xml")[0]
    assert "there is no command .x" in screen.shown(".x")[0]
    assert screen.shown(".mode line", "SELECT 1 AS a, 'x' AS long;") == ["   a = 1", "long = x"]
    assert screen.shown(".mode json", "SELECT true AS a;") == ['{"a": true}']
    assert re.fullmatch(r"1 row in \d+\.\d+ s", screen.shown(".timer on", "SELECT 1;")[-1])
    target = tmp_path / "tokens.parquet"
    assert screen.shown(f".output {target}", "FROM tokens;")[0].startswith("200 rows written to")
    assert pq.read_table(target).num_rows == 200
    assert screen.shown(".timer off", ".output", "SELECT 1 AS a;") == ['{"a": 1}']
    assert all(name in "\n".join(screen.shown(".help")) for name in COMMANDS)
    table = tmp_path / "one.csv"
    screen.shown(f".output {table}", "SELECT 1 AS a;", ".output")
    assert table.read_text().splitlines() == ["a", "1"]
    assert screen.shown("help") == screen.shown(".help")
    for end in (".quit", "exit", "quit;", "\\q"):
        assert is_complete(end)
        with pytest.raises(EOFError):
            screen.shown(end)


def test_a_table_too_wide_for_the_terminal_is_shown_as_lines() -> None:
    table = pa.table({"engine_id": ["a" * 36], "request_id": ["b" * 32], "text": ["word " * 20]})
    shown = {}
    for width in (60, 100):
        stream = io.BytesIO()
        write(table.to_reader(), Format.table, stream, width=width)
        shown[width] = stream.getvalue().decode()
    assert shown[60].splitlines()[1] == f"request_id = {'b' * 32}"
    assert len(shown[100].splitlines()) > 2, "the text is folded"
    assert "a" * 36 in shown[100]


@pytest.mark.parametrize(
    ("query", "hint"),
    [
        ("FROM tokenz", "; did you mean tokens"),
        ("SELECT gap FROM token_gaps", "; there are gap_ms"),
        ("FROM why()", "; it is why(wanted_request_id)"),
        ("FROM latency_heatmap", "; it is a macro: latency_heatmap(from_ts, to_ts, "),
    ],
)
def test_a_wrong_name_is_answered_with_a_near_one(
    session: QuerySession, query: str, hint: str
) -> None:
    assert hint in Screen(session).shown(f"{query};")[-1]


def test_names_are_completed_where_they_can_stand(words: Vocabulary) -> None:
    assert "tokens" in offered(words, "SELECT count(*) FROM tok")
    assert "slow_tokens(" in offered(words, "FROM slow")
    assert "latency_us" not in offered(words, "FROM lat")
    assert "latency_us" in offered(words, "SELECT tokens.lat")
    assert "SELECT" in offered(words, "SEL")
    assert "select" in offered(words, "sel")
    assert "quantile_cont" in offered(words, "SELECT quantile_c")
    assert ".tables" in offered(words, ".t")
    assert "requests" in offered(words, ".schema req")
    assert offered(words, "SELECT 'x' ") == []


def test_columns_of_an_alias_are_completed(words: Vocabulary) -> None:
    text = "SELECT t.pos FROM tokens AS t"
    document = Document(text, cursor_position=len("SELECT t.pos"))
    found = SqlCompleter(words, COMMANDS).get_completions(document, CompleteEvent())
    assert [completion.text for completion in found] == ["position"]


TABLE = pa.table(
    [pa.array([1]), pa.array([True]), pa.array([2]), pa.array([[1, None]]), pa.array(["a|b\nc"])],
    names=["a", "b", "a", "a_2", "text"],
)


def test_equal_column_names_are_told_apart_where_they_must(tmp_path: Path) -> None:
    assert json.loads(written(TABLE, Format.json)) == {
        "a": 1,
        "b": True,
        "a_3": 2,
        "a_2": [1, None],
        "text": "a|b\nc",
    }
    (row,) = csv.DictReader(io.StringIO(written(TABLE, Format.csv)))
    assert row == {"a": "1", "b": "true", "a_3": "2", "a_2": "[1, null]", "text": "a|b\nc"}
    with (tmp_path / "x.parquet").open("wb") as file:
        write(TABLE.to_reader(), Format.parquet, file)
    assert pq.read_table(tmp_path / "x.parquet").column_names == ["a", "b", "a_3", "a_2", "text"]
    assert written(TABLE.select([0, 1]), Format.table).split() == ["a", "b", "1", "true"]


def test_markdown_keeps_its_table_whatever_the_text() -> None:
    assert written(TABLE, Format.markdown).splitlines() == [
        "| a | b | a | a_2 | text |",
        "| ---: | --- | ---: | --- | --- |",
        "| 1 | true | 2 | [1, None] | a\\|b<br>c |",
    ]


@contextmanager
def command(home: Path, *arguments: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "cli", "sql", *arguments],
        env={**os.environ, "INFERLOOP_HOME": str(home)},
        text=True,
        **options,  # type: ignore[call-overload]
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_watching_without_a_terminal_prints_each_result_with_its_time(home: Path) -> None:
    with command(
        home, "--watch", "0.1", "SELECT 7 AS seven", "-f", "csv", stdout=subprocess.PIPE
    ) as watched:
        assert watched.stdout is not None
        lines = [watched.stdout.readline().rstrip() for _ in range(8)]
        watched.send_signal(signal.SIGINT)
        assert watched.wait(PATIENCE_S) == 0
    for start in (0, 4):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  every 0.1 s", lines[start])
        assert lines[start + 1 : start + 4] == ["seven", "7", ""]


def test_a_watched_result_stays_on_a_small_screen(
    session: QuerySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(io.BytesIO):
        def flush(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 8)))
    for form in (Format.table, Format.line, Format.json):
        screen = Watched()
        with pytest.raises(KeyboardInterrupt):
            watch(session, "FROM tokens", screen, every_s=1, form=form, rows=100, screen=True)
        shown = screen.getvalue()
        assert shown.startswith(b"\x1b[?7l\x1b[H"), "long lines are cut, not wrapped"
        assert shown.endswith(b"\x1b[?7h")
        assert shown.count(b"\n") < 8


def test_a_history_that_cannot_be_kept_ends_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = open_history(tmp_path / "sql_history")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("prompt_toolkit.history.FileHistory.store_string", full)
    history.append_string("SELECT 1")
    assert history.get_strings() == ["SELECT 1"]
    open_history(tmp_path / "nowhere" / "sql_history").append_string("SELECT 1")


def test_without_a_terminal_the_query_is_read_from_standard_input(home: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with command(home, "-f", "csv", **pipes) as process:
        assert process.communicate("SELECT 5 AS five", PATIENCE_S) == ("five\n5\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_below_standard_output_is_one_line(home: Path) -> None:
    with (
        Path("/dev/full").open("w") as full,
        command(home, "FROM tokens", stdout=full, stderr=subprocess.PIPE) as process,
    ):
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert errors.splitlines()[0] == "inferloop: cannot write the result: No space left on device"


class Terminal:
    """`inferloop sql` on a terminal of its own, as a person uses it; ends with its block."""

    def __init__(self, home: Path) -> None:
        variables = {"INFERLOOP_HOME": str(home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.pid, self._handle = on_a_terminal("-m", "cli", "sql", **variables)
        fcntl.ioctl(self._handle, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self._seen = b""
        self._status: int | None = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._handle)

    def computed_s(self) -> float:
        """CPU seconds of the query process."""
        return sum(cpu_s(pid) for pid in children(self.pid))

    def type(self, keys: str) -> None:
        os.write(self._handle, keys.encode())

    def wait_for(self, pattern: str) -> None:
        """Until the screen has shown `pattern` since the last time."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern.encode(), self._seen, re.DOTALL)):
            assert time.monotonic() < deadline, self._seen[-2000:]
            if select.select([self._handle], [], [], 1.0)[0]:
                self._seen += os.read(self._handle, 65536)
        self._seen = self._seen[found.end() :]

    def exit_code(self) -> int:
        def ended() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
            return bool(pid)

        until(ended, "the shell's end")
        assert self._status is not None
        return os.waitstatus_to_exitcode(self._status)


def test_the_shell_on_a_terminal(home: Path) -> None:
    with Terminal(home) as terminal:
        terminal.wait_for("read-only")
        terminal.wait_for("inferloop>")
        terminal.type("SELECT 1234 * 56\rAS answer;\r")
        terminal.wait_for("69104.*inferloop>")
        before_s = terminal.computed_s()
        terminal.type("SELECT sum(a.slot) FROM tokens a, tokens b, tokens c, tokens d, tokens e;\r")
        until(lambda: terminal.computed_s() > before_s + 0.1, "a query that runs")
        terminal.wait_for(r"\x1b\[\?2004l")  # it left the line
        terminal.type("\x03\x03\x03")  # impatient
        terminal.wait_for("inferloop>")
        terminal.type("SELECT 1234 * 57 AS next;\r")
        terminal.wait_for("70338.*inferloop>")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    history = home / "sql_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+AS answer;" in history.read_text()
