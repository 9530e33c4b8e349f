"""The traffic mirror in a process of its own, so that redaction never holds up the wire.

Searching a long text holds the interpreter's lock for milliseconds, in which no stream of the same
process gets its chunk. Offers are handed over by a thread, through a bounded queue. The process
ends with the proxy, however that ends, and writes what it was given before.
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
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from capture.mirror import QUEUE_BYTES, Mirror, MirrorCounters
from capture.sampling import MirrorError, is_sampled, load_key, opening_id
from capture.settings import Settings
from capture.truncation import approximate_bytes

START_S = 30.0
CLOSE_S = 15.0
REPORT_S = 0.5
"""How often the process tells its counters."""

QUEUE_RECORDS = 1024
GONE = "mirror_gone"
"""Why records are skipped after the process has died."""

log = logging.getLogger("inferloop.mirror")


class MirrorProcess:
    """What `capture.mirror.Mirror` is to a server, with the work done elsewhere. For one thread.

    `settings` must be those that a process with this environment reads. Raises MirrorError when
    the mirror cannot start.
    """

    def __init__(self, settings: Settings, share: float) -> None:
        configured = settings.mirror_key
        self._key = load_key(settings.home, configured.get_secret_value() if configured else None)
        self._share = share
        self._offered = 0
        self._skipped: Counter[str] = Counter()
        self._told = MirrorCounters()
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[dict[str, Any], int] | None] = queue.Queue(QUEUE_RECORDS)
        self._queued_bytes = 0
        self._is_gone = False
        self._connection, self._process = _start(share)
        self._sender = threading.Thread(target=self._send_all, name="mirror-out", daemon=True)
        self._hearer = threading.Thread(target=self._hear_all, name="mirror-in", daemon=True)
        self._sender.start()
        self._hearer.start()

    @property
    def counters(self) -> MirrorCounters:
        with self._lock:
            skipped = self._skipped + Counter(self._told.skipped)
            queued = max(0, self._offered - self._told.written - skipped.total())
            return replace(self._told, offered=self._offered, queued=queued, skipped=dict(skipped))

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
            if self._is_gone:
                self._skipped[GONE] += 1
                return
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
        """Let the process write what it was given, and end it."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._sender.join(CLOSE_S)
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            log.error("the mirror did not end within %g s: its last records are lost", CLOSE_S)
            self._process.kill()
            self._process.wait()
        self._hearer.join(CLOSE_S)
        self._connection.close()

    def _send_all(self) -> None:
        while (item := self._queue.get()) is not None:
            record, size = item
            try:
                self._connection.send(record)
                failed = False
            except OSError:
                failed = True
            with self._lock:
                self._queued_bytes -= size
                self._skipped[GONE] += failed
        with contextlib.suppress(OSError):
            _half_close(self._connection)

    def _hear_all(self) -> None:
        try:
            while True:
                told = self._connection.recv()
                with self._lock:
                    self._told = told
        except (EOFError, OSError):
            pass
        with self._lock:
            self._is_gone = True
        if self._sender.is_alive():
            log.error("the mirror's process has died: no traffic is written until a restart")


def _start(share: float) -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        command = [sys.executable, "-m", "capture.proxy.mirror_process", str(number), repr(share)]
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


def _half_close(connection: Connection) -> None:
    """Say that nothing more will come."""
    with socket.socket(fileno=os.dup(connection.fileno())) as endpoint:
        endpoint.shutdown(socket.SHUT_WR)


def main(connection: Connection, share: float) -> None:
    """The process: a mirror that writes what it is sent until nothing more can come."""
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends when the proxy has ended
        signal.signal(number, signal.SIG_IGN)
    try:
        mirror = Mirror.from_settings(Settings(), share)
    except Exception as error:  # noqa: BLE001 - whatever it is, the proxy says it
        connection.send(str(error))
        return
    connection.send(None)
    reported_s = time.monotonic()
    with contextlib.suppress(EOFError, OSError):
        while True:
            if connection.poll(REPORT_S):
                mirror.offer(connection.recv())
            if time.monotonic() - reported_s >= REPORT_S:
                connection.send(mirror.counters)
                reported_s = time.monotonic()
    mirror.close()
    with contextlib.suppress(OSError):
        connection.send(mirror.counters)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    main(Connection(int(sys.argv[1])), float(sys.argv[2]))
