"""A user's SQL, read-only by construction: its own process, which this module starts and watches.

The process (`query_process`) attaches the lake READ_ONLY, shuts itself in, and only then looks at a
query. Here: one statement at a time, time limit, result as Arrow; a session keeps the
process for the next query. Not for our own queries: those use `capture.lake.open_connection`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from capture.errors import QueryError
from capture.lake import LakePlace, require_catalog

if TYPE_CHECKING:
    import pyarrow as pa

START_S = 60.0


@dataclass(frozen=True)
class QueryLimits:
    """`timeout_s` counts from the start of a query; `rows` 0: all."""

    timeout_s: float = 30.0
    memory_mib: int = 1024
    threads: int = 2
    rows: int = 0


class QuerySession:
    """A warm query process: started at once, again after a query that had to be stopped.

    A context manager. Not for several threads, but for `cancel`.
    """

    def __init__(self, place: LakePlace, limits: QueryLimits | None = None) -> None:
        """Raises LakeMissingError when there is no lake."""
        require_catalog(place)
        self.limits = limits or QueryLimits()
        self._place = place
        self._process = _start(place, self.limits)
        self._opened = False
        self._spoiled = False  # by a query that was not answered to its end
        self._cancelled = False

    def __enter__(self) -> QuerySession:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process)

    def cancel(self) -> None:
        """Stop the running query, if any: its reader raises QueryError. From any thread."""
        self._cancelled = True
        self._process.kill()

    @contextmanager
    def run(self, sql: str, *, rows: int | None = None) -> Iterator[pa.RecordBatchReader]:
        """Run one SELECT and yield its result as a stream of record batches.

        `rows`: a limit other than the session's. With one, a row more than it is sent, so that
        the caller can tell. Raises QueryError when the query is refused, fails, or runs out of
        time or memory. A result that was not read to its end costs the process.
        """
        import pyarrow as pa

        rows = self.limits.rows if rows is None else rows
        checked_text(sql)
        watchdog = self._ready()
        self._spoiled = True
        reusable = False

        def batches() -> Iterator[pa.RecordBatch]:
            """The stream's batches; then, instead of an end, the error if there was one."""
            nonlocal reusable
            try:
                yield from stream
            except (pa.ArrowInvalid, OSError):
                raise self._failure(watchdog) from None
            reusable = True
            self._expect("done", watchdog)

        try:
            self._ask({"sql": sql, "rows": rows, "timeout_s": watchdog.timeout_s})
            self._expect("result", watchdog)
            stream = pa.ipc.open_stream(self._process.stdout)
            yield pa.RecordBatchReader.from_batches(stream.schema, batches())
        except QueryError:
            reusable = True  # it refused, and waits for the next query
            raise
        finally:
            watchdog.cancel()
            self._spoiled = not reusable or watchdog.fired
            if self._spoiled:
                self._process.kill()
                self._process.wait()

    def warm(self) -> None:
        """Start the process again, after a query that cost it, without waiting for it.

        May be interrupted anywhere: the next query finds out that it is still to be done.
        """
        if self._spoiled or (self._opened and self._process.poll() is not None):
            self._spoiled = True
            _end(self._process)
            self._opened = False
            self._process = _start(self._place, self.limits)
            self._spoiled = False

    def _ready(self) -> _Watchdog:
        """A watchdog for the next query, whose time starts once the process has the lake open."""
        self.warm()
        watchdog = _Watchdog(self._process, self.limits.timeout_s)
        try:
            if not self._opened:
                self._expect("ready", watchdog)
                self._opened = True
        except BaseException:
            watchdog.cancel()
            self._spoiled = True
            self._process.kill()
            self._process.wait()
            raise
        self._cancelled = False
        watchdog.query_started()
        return watchdog

    def _ask(self, request: dict[str, Any]) -> None:
        stream = self._process.stdin
        try:
            if stream is not None:
                stream.write(json.dumps(request).encode() + b"\n")
                stream.flush()
        except BrokenPipeError:
            pass  # it died; the answer that does not come says so

    def _expect(self, word: str, watchdog: _Watchdog) -> None:
        """Read the process's next line, which says `word`, or an error."""
        stream = self._process.stdout
        line = stream.readline() if stream is not None else b""
        if not line.endswith(b"\n") or watchdog.fired:
            raise self._failure(watchdog)
        said = json.loads(line)
        if "error" in said:
            place = said.get("place")
            raise QueryError(said["error"], (place[0], place[1]) if place else None)
        if word not in said:
            raise self._failure(watchdog)

    def _failure(self, watchdog: _Watchdog) -> QueryError:
        process = self._process
        process.kill()
        process.wait()
        if self._cancelled:
            return QueryError("the query was stopped")
        if watchdog.fired and not self._opened:
            return QueryError(f"the query process did not start within {START_S:g} s")
        if watchdog.fired:
            return QueryError(
                f"the query was stopped after {watchdog.timeout_s:g} s: narrow it (a time range, "
                "LIMIT) or give it more with --timeout"
            )
        text = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
        if text:
            return QueryError(f"the query process died: {text.splitlines()[-1]}")
        return QueryError(
            f"the query process died with exit code {process.returncode}: its memory limit may be "
            "too high"
        )


@contextmanager
def run_query(
    place: LakePlace, sql: str, limits: QueryLimits | None = None
) -> Iterator[pa.RecordBatchReader]:
    """Run one SELECT in a process of its own; as `QuerySession.run`."""
    checked_text(sql)
    with QuerySession(place, limits) as session, session.run(sql) as reader:
        yield reader


def checked_text(sql: str) -> str:
    """`sql`; raises QueryError when it holds halves of characters or NUL, where parsers end."""
    if "\0" in sql:
        raise QueryError(f"the query holds a NUL at character {sql.index(chr(0)) + 1}")
    try:
        sql.encode()
    except UnicodeEncodeError as error:
        raise QueryError(f"the query is not UTF-8 at character {error.start + 1}") from None
    return sql


class _Watchdog:
    """Kills the process when its time is up; once it is cancelled, never."""

    def __init__(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.fired = False
        self._process = process
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._arm(START_S)

    def query_started(self) -> None:
        self._arm(self.timeout_s)

    def cancel(self) -> None:
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _arm(self, seconds: float) -> None:
        self.cancel()
        timer = threading.Timer(seconds, self._fire)
        timer.daemon = True
        self._timer = timer
        timer.start()

    def _fire(self) -> None:
        with self._lock:
            if self._timer is not None:
                self.fired = True
                self._process.kill()


def _start(place: LakePlace, limits: QueryLimits) -> subprocess.Popen[bytes]:
    """The process, told where the lake is; it opens it while the caller goes on."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("INFERLOOP_") or name == "INFERLOOP_HOME"
    }
    if place.password is not None:
        environment["PGPASSWORD"] = place.password  # SQL can see the URL, and no environment
    process = subprocess.Popen(
        # -P: not what lies in the working directory under the same name
        [sys.executable, "-P", "-m", "capture.sql.query_process"],
        process_group=0,  # Ctrl-C is for whoever starts it, also while it imports
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    request = {
        "place": asdict(place.without_password()),
        "memory_mib": limits.memory_mib,
        "threads": limits.threads,
    }
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it died at once; its message is on stderr
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what was not yet written to it
                pipe.close()
