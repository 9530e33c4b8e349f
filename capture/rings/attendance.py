"""Who follows a ring: each reader leaves a small note beside it, for `ring inspect` and `top`.

Readers never write to the ring, so its lag is told here: `<ring>.readers/<pid>-<name>.json`. Not
needed for reading: a note that cannot be written changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capture.reader import Cursor
from capture.rings.liveness import ProcessIdentity, boot_id, pid_namespace

log = logging.getLogger("inferloop.attendance")

REPORT_S = 1.0
UNSEEN_S = 30.0
NOTE_BYTES = 4096


@dataclass(frozen=True)
class KnownReader:
    """A reader as it last described itself. `lag_bytes` was not yet read at `seen_ns`, which is
    monotonic: a step of the wall clock makes nobody dead or alive."""

    name: str
    pid: int
    cursor: Cursor
    lag_bytes: int
    seen_ns: int

    @property
    def seen_ago_s(self) -> float:
        return max(0.0, (time.monotonic_ns() - self.seen_ns) / 1e9)


class Attendance:
    """One reader's note beside one ring. Call `report` as often as you like."""

    def __init__(self, ring_path: Path, name: str) -> None:
        """`name`: what the reader is ("collector", "top"), letters and dashes."""
        self._ring = ring_path
        self._directory = readers_directory(ring_path)
        self._note = self._directory / f"{os.getpid()}-{name}.json"
        self._name = name
        self._identity = ProcessIdentity.own()
        self._reported_s = float("-inf")
        self._made = self._said = False

    def is_own(self, name: str, pid: int) -> bool:
        """Whether a known reader is this one."""
        return (name, pid) == (self._name, self._identity.pid)

    def report(self, cursor: Cursor, lag_bytes: int) -> None:
        """Say where the reader stands; written once a second at most, never raises OSError."""
        now = time.monotonic()
        if now - self._reported_s < REPORT_S:
            return
        self._reported_s = now
        try:
            if not self._made:
                if not self._ring.exists():
                    return
                self._directory.mkdir(exist_ok=True)
                self._made = True
            self._write(cursor, lag_bytes)
        except FileNotFoundError:
            self._made = False  # the ring was removed, or the last reader before this one just left
        except OSError as error:
            if not self._said:
                self._said = True
                others = isinstance(error, PermissionError)  # another user's engine: may be meant
                level = logging.INFO if others else logging.WARNING
                log.log(level, "`inferloop ring` will not show this reader: %s", error)

    def leave(self) -> None:
        """Take the note away; the last reader takes the folder, too."""
        with contextlib.suppress(OSError):
            self._note.unlink(missing_ok=True)
            self._directory.rmdir()

    def _write(self, cursor: Cursor, lag_bytes: int) -> None:
        note = {
            "name": self._name,
            "pid": self._identity.pid,
            "start": self._identity.start,
            "boot_id": self._identity.boot_id.hex(),
            "namespace": self._identity.namespace,
            "cursor": asdict(cursor),
            "lag_bytes": lag_bytes,
            "seen_ns": time.monotonic_ns(),
        }
        temporary = self._note.with_suffix(".tmp")
        temporary.write_text(json.dumps(note))
        temporary.replace(self._note)


def attending(ring_path: Path) -> list[KnownReader]:
    """The readers known to follow a ring, by name; the notes of dead ones are removed.

    A reader in another pid namespace counts as dead when it has said nothing for 30 seconds.
    """
    readers = []
    for path in readers_directory(ring_path).glob("*.json"):
        note = _read_note(path)
        if note is None:
            continue
        reader, identity = note
        running = identity.running()
        if running is None:
            running = reader.seen_ago_s < UNSEEN_S
        if running:
            readers.append(reader)
        elif identity.boot_id != boot_id() or identity.namespace == pid_namespace():
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(readers, key=lambda reader: (reader.name, reader.pid))


def remove_ring(ring_path: Path) -> None:
    """Remove a ring's file and the notes of its readers. Raises OSError when the file stays."""
    ring_path.unlink(missing_ok=True)
    shutil.rmtree(readers_directory(ring_path), ignore_errors=True)


def readers_directory(ring_path: Path) -> Path:
    return ring_path.with_name(f"{ring_path.name}.readers")


def _read_note(path: Path) -> tuple[KnownReader, ProcessIdentity] | None:
    """A note's content; None when it is gone or none of ours."""
    try:
        note: dict[str, Any] = json.loads(_read_start(path))
        cursor = Cursor(**{key: _count(value) for key, value in note["cursor"].items()})
        pid, start, namespace, lag, seen_ns = (
            _count(note[key]) for key in ("pid", "start", "namespace", "lag_bytes", "seen_ns")
        )
        identity = ProcessIdentity(pid, start, bytes.fromhex(note["boot_id"]), namespace)
        return KnownReader(str(note["name"]), pid, cursor, lag, seen_ns), identity
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _read_start(path: Path) -> bytes:
    """The first bytes of a regular file. A named pipe would wait for its writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        return os.read(descriptor, NOTE_BYTES)
    finally:
        os.close(descriptor)


def _count(value: Any) -> int:
    """A whole number as the system's calls can take it."""
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no count")
    return value
