"""`inferloop collect` on a terminal, in the foreground and behind the user's back; and a ring
directory that may not be listed."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

import cli.collect  # noqa: F401  adds its command to the app
from capture.collecting.roster import Roster
from capture.collector import Collector
from capture.errors import RingError
from cli.main import app
from tests.capture.children import on_a_terminal
from tests.capture.lakes import place_of
from tests.capture.rings import engine
from tests.proc import state
from tests.waiting import PATIENCE_S, until

COLLECT = (
    "import cli.collect; from cli.main import app; app(['collect', *__import__('sys').argv[1:]])"
)
BEHIND = "import subprocess, sys; subprocess.run(sys.argv[1:], process_group=0, check=True)"
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
"""What a line that moves begins and ends with."""


class Terminal:
    """A terminal, and a process that is its session's first and in its foreground."""

    def __init__(self, home: Path, *command: str) -> None:
        self.seen = b""
        places = {"INFERLOOP_HOME": str(home / "home"), "INFERLOOP_RING_DIR": str(home / "rings")}
        self.pid, self._terminal = on_a_terminal(*command, TERM="xterm", **places)

    def read(self) -> bool:
        """Take what has been written; False at the end."""
        ready, _, _ = select.select([self._terminal], [], [], 0.05)
        if not ready:
            return True
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # the last process of the session is gone
            return False
        self.seen += data
        return bool(data)

    def until(self, text: bytes) -> None:
        until(lambda: self.read() and text in self.seen, f"{text!r} on the terminal")

    def until_end(self) -> int:
        """The exit code of the first process."""
        until(lambda: not self.read(), "the end")
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def press(self, key: bytes) -> None:
        os.write(self._terminal, key)

    def close(self) -> None:
        os.close(self._terminal)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "rings").mkdir()
    engine(tmp_path / "rings", requests=4, steps=25).close()
    return tmp_path


def test_a_line_moves_in_the_foreground(home: Path) -> None:
    terminal = Terminal(home, "-c", COLLECT, "--once")
    assert terminal.until_end() == 0
    terminal.close()
    assert HIDE_CURSOR in terminal.seen
    assert terminal.seen.rindex(SHOW_CURSOR) > terminal.seen.rindex(HIDE_CURSOR)
    assert b"100 tokens in" in terminal.seen


def test_nothing_moves_when_a_shell_s_job_runs_in_the_background(home: Path) -> None:
    terminal = Terminal(home, "-c", BEHIND, sys.executable, "-c", COLLECT, "--once")
    assert terminal.until_end() == 0
    terminal.close()
    assert HIDE_CURSOR not in terminal.seen
    assert b"stopped: 1 ring, 100 tokens in" in terminal.seen


def test_nothing_moves_when_a_script_puts_it_in_the_background(home: Path) -> None:
    """Without job control it is in the script's process group, its standard input taken away."""
    script = f'"{sys.executable}" -c "$1" --once & wait'
    terminal = Terminal(
        home, "-c", "import os, sys; os.execv('/bin/sh', sys.argv[1:])", "sh", "-c", script, "sh",
        COLLECT,
    )  # fmt: skip
    assert terminal.until_end() == 0
    terminal.close()
    assert HIDE_CURSOR not in terminal.seen
    assert b"stopped: 1 ring, 100 tokens in" in terminal.seen


def test_ctrl_z_takes_the_line_away_before_it_stops(home: Path) -> None:
    terminal = Terminal(home, "-c", COLLECT)
    terminal.until(b"100 tokens in")
    terminal.press(b"\x1a")
    until(lambda: terminal.read() and state(terminal.pid) == "T", "it is stopped")
    terminal.read()
    assert terminal.seen.rindex(SHOW_CURSOR) > terminal.seen.rindex(HIDE_CURSOR)
    os.kill(terminal.pid, signal.SIGCONT)
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.until_end() == 0
    terminal.close()


def refused(path: object, *_: object, **__: object) -> NoReturn:
    raise PermissionError(13, "Permission denied", str(path))


def test_a_ring_directory_that_may_not_be_listed_is_an_error_at_the_start(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.reader.os.listdir", refused)
    environment = {"INFERLOOP_HOME": str(home / "h"), "INFERLOOP_RING_DIR": str(home / "rings")}
    result = CliRunner().invoke(app, ["collect", "--once"], env=environment)
    assert str(result.exception) == f"cannot look for rings in {home / 'rings'}: Permission denied"
    assert getattr(result.exception, "exit_code", None) == 1
    assert "collecting from" not in result.output


def test_one_that_may_not_be_listed_any_more_is_said_once_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rings = tmp_path / "rings"
    rings.mkdir()
    monkeypatch.setattr("capture.collector.DISCOVER_S", 0.0)
    stop = threading.Event()
    collector = Collector(place_of(tmp_path), ring_dir=rings, crash_dir=tmp_path, stop=stop)
    thread = threading.Thread(target=collector.run, daemon=True)
    thread.start()
    first = engine(rings, requests=2, steps=10)
    try:
        until(lambda: collector.status.tokens == 20, "the first engine is followed")
        with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
            broken.setattr("capture.reader.os.listdir", refused)
            until(lambda: "new engines are not followed" in caplog.text, "a warning")
            second = engine(rings, requests=2, steps=10)
            shown_ns = time.monotonic_ns()
            until(lambda: time.monotonic_ns() - shown_ns > 10**8, "some looks later")
            assert caplog.text.count("new engines are not followed: cannot look for rings") == 1
            assert collector.status.tokens == 20
        until(lambda: collector.status.tokens == 40, "the second engine is followed")
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    first.close()
    second.close()


def test_a_ring_directory_that_is_not_there_yet_is_no_error(tmp_path: Path) -> None:
    Roster(tmp_path / "later").discover(lambda reader: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(RingError, match="Not a directory"):
        Roster(tmp_path / "file")
