"""Processes that tests start: none of them outlives its test, however that ends."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

_started: list[int] = []


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a forked process that exits without cleaning up, 1 when it raised; its pid."""
    pid = os.fork()
    if pid:
        _started.append(pid)
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001  it must not go on as a second pytest
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def started(command: Sequence[object], **options: Any) -> subprocess.Popen[str]:
    """A program in a process of its own."""
    process = subprocess.Popen([str(word) for word in command], text=True, **options)
    _started.append(process.pid)
    return process


def on_a_terminal(*arguments: str, **variables: str) -> tuple[int, int]:
    """Python on a terminal of its own, with the signals of a job in the foreground: those in the
    background, pytest perhaps, ignore Ctrl-C. Its pid and the terminal."""
    pid, terminal = pty.fork()
    if pid:
        _started.append(pid)
        return pid, terminal
    try:
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        command = [sys.executable, *arguments]
        os.execve(sys.executable, command, {**os.environ, **variables})
    finally:
        os._exit(127)


def until_told(work: Callable[[], None]) -> None:
    """In a forked process: `work()` again and again, until `end` tells it to stop."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    while not told:
        work()


def end(pid: int) -> None:
    """Tell a forked process that is in `until_told` to stop, and wait for what it does then."""
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def kill_children() -> None:
    """End what is left. A child that was waited for is not touched: another may have its number."""
    while _started:
        pid = _started.pop()
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            kill(pid)
