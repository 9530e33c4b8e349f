"""The traffic mirror in a process of its own, so that redaction never holds up the server.

Searching a long text holds the interpreter's lock for milliseconds, in which no stream of the same
process gets its chunk and no step begins. Offers are handed over by a thread, through a bounded
queue. The process ends with the server or proxy, however that ends, and writes what it was given
before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from capture.mirror import QUEUE_BYTES, Mirror, MirrorCounters
from capture.mirroring.sampling import MirrorError, is_sampled, load_key, opening_id
from capture.mirroring.truncation import approximate_bytes
from capture.settings import Settings

START_S = 30.0
CLOSE_S = 15.0
REPORT_S = 0.5
"""How often the process tells its counters."""

NICENESS = 10
"""The process waits for a core when the server wants it."""

QUEUE_RECORDS = 1024
GONE = "mirror_gone"
"""Why records are skipped that the process had when it died, or that came before its successor."""

RESTART_S = 10.0

log = logging.getLogger("inferloop.mirror")


class MirrorProcess:
    """What `capture.mirror.Mirror` is to a server, with the work done elsewhere. For one thread.

    `settings` must be those that a process with this environment reads. Raises MirrorError when
    the mirror cannot start. A process that has died is replaced when the next record comes, but no
    sooner than `RESTART_S` after it was started.
    """

    def __init__(self, settings: Settings, share: float) -> None:
        configured = settings.mirror_key
        self._key = load_key(settings.home, configured.get_secret_value() if configured else None)
        self._share = share
        self._offered = 0
        self._skipped: Counter[str] = Counter()
        self._buried = MirrorCounters()
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[dict[str, Any], int] | None] = queue.Queue(QUEUE_RECORDS)
        self._queued_bytes = 0
        self._is_closing = False
        self._tried_s = time.monotonic()
        self._child = _Child(share, self._bury)
        self._sender = threading.Thread(target=self._send_all, name="mirror-out", daemon=True)
        self._sender.start()

    @property
    def counters(self) -> MirrorCounters:
        with self._lock:
            told = self._buried if self._child.is_gone else _sum(self._buried, self._child.told)
            skipped = self._skipped + Counter(told.skipped)
            queued = max(0, self._offered - told.written - skipped.total())
            return replace(told, offered=self._offered, queued=queued, skipped=dict(skipped))

    def keeps(self, conversation_id: str) -> bool:
        """Whether the records of this conversation are kept."""
        return is_sampled(conversation_id, self._share, self._key)

    def opening_id(self, tenant: str, messages: Iterable[dict[str, Any]]) -> str | None:
        """The id of a conversation without a name of its own, the same for all its turns."""
        return opening_id(self._key, tenant, messages)

    def offer(self, record: dict[str, Any]) -> None:
        """Hand over a finished request of a conversation that is kept; never blocks."""
        size = approximate_bytes(record)
        with self._lock:
            self._offered += 1
            if self._queued_bytes and self._queued_bytes + size > QUEUE_BYTES:
                self._skipped["queue_full"] += 1
                return
            self._queued_bytes += size
        try:
            self._queue.put_nowait((record, size))
        except queue.Full:
            with self._lock:
                self._queued_bytes -= size
                self._skipped["queue_full"] += 1

    def skip(self, reason: str) -> None:
        """Count a request that there is no record of."""
        with self._lock:
            self._offered += 1
            self._skipped[reason] += 1

    def close(self) -> None:
        """Let the process write what it was given, and end it; `CLOSE_S` at most."""
        self._is_closing = True
        until_s = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._sender.join(max(0.0, until_s - time.monotonic()))
        self._child.end(max(0.0, until_s - time.monotonic()))

    def _send_all(self) -> None:
        while (item := self._queue.get()) is not None:
            record, size = item
            if self._child.is_gone:
                self._restart()
            with self._lock:
                is_gone = self._child.is_gone
                self._child.sent += not is_gone
                self._skipped[GONE] += is_gone
            if not is_gone:
                self._child.send(record)
            with self._lock:
                self._queued_bytes -= size
        self._child.say_last()

    def _restart(self) -> None:
        now_s = time.monotonic()
        if self._is_closing or now_s - self._tried_s < RESTART_S:
            return
        self._tried_s = now_s
        try:
            child = _Child(self._share, self._bury)
        except (MirrorError, OSError) as error:
            log.error("the mirror's process does not start again: %s", error)
            return
        with self._lock:
            self._child = child
        log.warning("the mirror's process was started again")

    def _bury(self, child: _Child) -> None:
        """A process has ended: take over its counts. What it wrote since it told them last counts
        as lost."""
        with self._lock:
            child.is_gone = True
            lost = max(0, child.sent - child.told.written - sum(child.told.skipped.values()))
            self._skipped[GONE] += lost
            self._buried = _sum(self._buried, child.told)
        if not self._is_closing:
            log.error("the mirror's process has died, and %d records with it", lost)
        elif lost:
            log.error("the mirror did not end within %g s: %d records are lost", CLOSE_S, lost)


class _Child:
    """One life of the process: it was `sent` so many records, and has `told` what became of them.
    `on_end` is called by a thread of its own when it has ended. Raises MirrorError."""

    def __init__(self, share: float, on_end: Callable[[_Child], None]) -> None:
        self.sent = 0
        self.told = MirrorCounters()
        self.is_gone = False
        self._on_end = on_end
        self._connection, self._process = _start(share)
        self._hearer = threading.Thread(target=self._hear, name="mirror-in", daemon=True)
        self._hearer.start()

    def send(self, record: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has died, which `_hear` learns, too
            self._connection.send(record)

    def say_last(self) -> None:
        """Say that nothing more will come."""
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._connection.fileno())) as endpoint,
        ):
            endpoint.shutdown(socket.SHUT_WR)

    def end(self, timeout_s: float) -> None:
        """Wait until it has written all, or kill it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._hearer.join(1.0)

    def _hear(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.told = self._connection.recv()
        self._on_end(self)
        self._process.wait()


def _sum(one: MirrorCounters, other: MirrorCounters) -> MirrorCounters:
    """What two processes have told, together."""
    return MirrorCounters(
        written=one.written + other.written,
        bytes=one.bytes + other.bytes,
        truncated=one.truncated + other.truncated,
        dropped=one.dropped + other.dropped,
        files_deleted=one.files_deleted + other.files_deleted,
        skipped=dict(Counter(one.skipped) + Counter(other.skipped)),
        redactions=dict(Counter(one.redactions) + Counter(other.redactions)),
    )


def _start(share: float) -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        module = "capture.mirroring.mirror_process"
        command = [sys.executable, "-P", "-m", module, str(number), repr(share)]
        process = subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)
    connection = Connection(ours.detach())
    try:
        said = connection.recv() if connection.poll(START_S) else "it did not start in time"
    except (EOFError, OSError):
        said = "its process ended at once"
    if said is not None:
        process.kill()
        process.wait()
        connection.close()
        raise MirrorError(said)
    return connection, process


def main(connection: Connection, share: float) -> None:
    """The process: a mirror that writes what it is sent until nothing more can come."""
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends when the server has ended
        signal.signal(number, signal.SIG_IGN)
    try:
        mirror = Mirror.from_settings(Settings(), share)
    except Exception as error:  # noqa: BLE001 - whatever it is, the server says it
        connection.send(str(error))
        return
    connection.send(None)
    reported_s = time.monotonic()
    with contextlib.suppress(EOFError, OSError):
        while True:
            if connection.poll(REPORT_S):
                mirror.offer(_written_out(connection.recv()))
            if time.monotonic() - reported_s >= REPORT_S:
                connection.send(mirror.counters)
                reported_s = time.monotonic()
    mirror.close()
    with contextlib.suppress(OSError):
        connection.send(mirror.counters)


def _written_out(record: dict[str, Any]) -> dict[str, Any]:
    """A record as the mirror takes it: the proxy hands its chunks over as columns, and long lists
    of token ids as text."""
    chunks, ids = record.get("chunks"), record.get("prompt_token_ids")
    written: dict[str, Any] = {}
    if chunks is not None and not isinstance(chunks, list):
        written["chunks"] = chunks.written(record["arrival_ns"])
    if ids is not None and not isinstance(ids, list):
        written["prompt_token_ids"] = ids.written()
    return record | written


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    main(Connection(int(sys.argv[1])), float(sys.argv[2]))
