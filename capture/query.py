"""A user's SQL, read-only by construction: its own process, which this module starts and watches.

The process (`capture.query_process`) attaches the lake READ_ONLY, closes DuckDB's access to files
and the network, locks its settings, and only then looks at the query. Here: one statement, time
limit, result as Arrow. Not for our own queries: those use `capture.lake.open_lake`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote

from capture.errors import LakeMissingError, QueryError
from capture.lake import LakePlace, missing

if TYPE_CHECKING:
    import pyarrow as pa

GRACE_S = 0.5
START_S = 20.0


@dataclass(frozen=True)
class QueryLimits:
    """`timeout_s` counts from the start of the query; `rows` 0: all."""

    timeout_s: float = 30.0
    memory_mib: int = 1024
    threads: int = 2
    rows: int = 0


@contextmanager
def run_query(
    place: LakePlace, sql: str, limits: QueryLimits | None = None
) -> Iterator[pa.RecordBatchReader]:
    """Run one SELECT and yield its result as a stream of record batches.

    With a row limit one row more than it is sent, so that the caller can tell. Raises QueryError
    when the query is refused, fails or runs out of time or memory, LakeMissingError when there is
    no lake.
    """
    import pyarrow as pa

    limits = limits or QueryLimits()
    try:
        sql.encode()
    except UnicodeEncodeError as error:
        raise QueryError(f"the query is not UTF-8 at character {error.start + 1}") from None
    if place.catalog_file is not None and not place.catalog_file.exists():
        raise LakeMissingError(missing(place))
    process = _start(place)
    watchdog = _Watchdog(process, limits.timeout_s)
    try:
        _ask(
            process,
            {"place": asdict(place.without_password()), "sql": sql, "limits": asdict(limits)},
        )
        _await_start(process, watchdog)
        try:
            with pa.ipc.open_stream(process.stdout) as reader:
                yield reader
        except (pa.ArrowInvalid, OSError) as error:
            if _finished(process) == 0 and not watchdog.fired:
                raise  # it is the caller who failed, writing the rows somewhere
            raise _failure(process, watchdog) from error
        if _finished(process) != 0 or watchdog.fired:
            raise _failure(process, watchdog)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


class _Watchdog:
    """Kills the process when its time is up."""

    def __init__(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.fired = False
        self._process = process
        self._timer: threading.Timer | None = None
        self._arm(START_S)

    def query_started(self) -> None:
        self._arm(self.timeout_s)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, seconds: float) -> None:
        self.cancel()
        self._timer = threading.Timer(seconds, self._fire)
        self._timer.daemon = True
        self._timer.start()

    def _fire(self) -> None:
        self.fired = True
        self._process.kill()


def _start(place: LakePlace) -> subprocess.Popen[bytes]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("INFERLOOP_") or name == "INFERLOOP_HOME"
    }
    if place.password is not None:
        environment["PGPASSWORD"] = unquote(place.password)  # SQL can see the URL
    return subprocess.Popen(
        [sys.executable, "-m", "capture.query_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


def _ask(process: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died at once; its message is on stderr


def _await_start(process: subprocess.Popen[bytes], watchdog: _Watchdog) -> None:
    """The process says `ready` once the lake is attached: the query's time starts there."""
    stream: IO[bytes] | None = process.stdout
    if stream is None or stream.readline() != b"ready\n":
        raise _failure(process, watchdog)
    watchdog.query_started()


def _finished(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        return 0  # all batches have arrived; `finally` ends it


def _failure(process: subprocess.Popen[bytes], watchdog: _Watchdog) -> QueryError:
    process.kill()
    text = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
    process.wait()
    if watchdog.fired:
        return QueryError(
            f"the query was stopped after {watchdog.timeout_s:g} s: narrow it (a time range, "
            "LIMIT) or give it more with --timeout"
        )
    if text.startswith("{"):
        return QueryError(str(json.loads(text.splitlines()[0])["error"]))
    last = text.splitlines()[-1] if text else f"exit code {process.returncode}"
    return QueryError(f"the query process died ({last}): its memory limit may be too high")
