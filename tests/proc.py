"""What Linux says of a process. For processes that a test did not start itself, too."""

from __future__ import annotations

import os
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process has not ended, be its end noticed or not."""
    return state(pid) not in ("", "Z")


def state(pid: int) -> str:
    """The letter of its state, "T" for stopped; "" when there is no such process."""
    return (_stat(pid) or [""])[0]


def parent(pid: int) -> int:
    """0: it has none, or there is no such process."""
    return int((_stat(pid) or ["", "0"])[1])


def children(pid: int) -> list[int]:
    """Processes that the main thread of a process has started."""
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_s(pid: int) -> float:
    """CPU seconds that a process that runs has computed: a busy machine does not make it more."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
