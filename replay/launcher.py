"""Runs a build's command so that nothing of it outlives the replay, however the replay ends.

Started as a script of its own (it imports nothing of ours): `python launcher.py COMMAND...`, with
a pipe from the replay as its standard input. When the pipe closes (the replay stopped, crashed or
was killed), when it is told to terminate, or when the command ends, it stops every process that
descends from it, also those that moved to another session: as a sub-reaper it inherits them.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL: an engine's graceful drain."""


def main(command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeups, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    while child.poll() is None:
        ready, _, _ = select.select([0, wakeups], [], [])
        if 0 in ready:
            break
        if any(number != signal.SIGCHLD for number in os.read(wakeups, 512)):
            break
    _stop_all(child)
    return child.returncode if child.returncode is not None else 1


def _stop_all(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.02)
    while left := _descendants():
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        child.poll()
        _reap(child.pid)
        time.sleep(0.01)
    child.wait()


def _reap(child: int) -> None:
    """Collect dead processes that were inherited; the child's own status is left to Popen."""
    for process in _children().get(os.getpid(), []):
        if process != child:
            with suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)


def _descendants() -> list[int]:
    children = _children()
    found, waiting = [], [os.getpid()]
    while waiting:
        born = children.get(waiting.pop(), [])
        found += born
        waiting += born
    return found


def _children() -> dict[int, list[int]]:
    """Process ids by the id of their parent, from /proc."""
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                status = Path(f"/proc/{entry}/stat").read_text(errors="replace")
                parent = int(status.rpartition(")")[2].split()[1])
                found.setdefault(parent, []).append(int(entry))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
