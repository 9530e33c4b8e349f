"""The process that runs a user's queries: started by `capture.sql.query`, never imported by others.

Reads JSON lines from stdin: first where the lake is, then a query each. Answers on stdout: a JSON
line, for a result followed by an Arrow stream and a JSON line that says how it ended. Closed
before the first query is looked at: files but for reading the lake, the network, settings,
extensions. When stdin ends it ends.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from capture.errors import CaptureError, QueryError
from capture.lake import LakePlace, attach, check_version, connect, escaped
from capture.sql.sandbox import confine, limit_cpu, limit_files_and_memory
from capture.sql.statement import check_statement, query_error

if TYPE_CHECKING:
    import duckdb

BATCH_ROWS = 65536
START_CPU_S = 10
UNCOUNTED_MIB = 512  # what DuckDB's own memory limit does not count
POSTGRES_PORT = 5432
NICENESS = 5  # a third of the processor that an engine or a collector gets where all want it


def main() -> None:
    requests = map(json.loads, sys.stdin.buffer)
    output = sys.stdout.buffer
    try:
        request = next(requests, None)
        if request is not None:
            serve(LakePlace(**request["place"]), request, requests, output)
    except (CaptureError, OSError) as error:
        _say(output, {"error": str(error)})
        sys.exit(1)


def serve(
    place: LakePlace, limits: dict[str, Any], requests: Iterator[dict[str, Any]], output: IO[bytes]
) -> None:
    """Open the lake, then answer one query after the other until there are no more."""
    import pyarrow  # noqa: F401  not in the time of the first query

    keep_catalog_open(place)
    shut(place)
    connection = sealed(place, limits["memory_mib"], limits["threads"])
    limit_files_and_memory((limits["memory_mib"] + UNCOUNTED_MIB) << 20)
    _say(output, {"ready": True})
    for request in requests:
        # Whoever started this process watches its time; should he be killed, the kernel ends it.
        limit_cpu(int(START_CPU_S + request["timeout_s"] * limits["threads"]))
        try:
            answer(connection, request["sql"], request["rows"], limits["memory_mib"], output)
        except QueryError as error:
            _say(output, {"error": str(error), "place": error.place})


def answer(
    connection: duckdb.DuckDBPyConnection, sql: str, rows: int, memory_mib: int, output: IO[bytes]
) -> None:
    """Send the result, at most `rows` + 1 rows (0: all). Raises QueryError; see `_stream`."""
    import duckdb

    try:
        check_statement(connection, sql)
        reader = connection.execute(sql).to_arrow_reader(BATCH_ROWS)
        _say(output, {"result": True})
        _stream(reader, rows, output)
    except (duckdb.OutOfMemoryException, MemoryError):
        raise QueryError(
            f"the query needs more than its {memory_mib} MiB of memory: narrow it, or give it "
            "more with --memory-mib"
        ) from None
    except duckdb.Error as error:
        raise query_error(error, sql) from None
    finally:
        connection.execute("SELECT 1").fetchall()  # lets go of a result that was left early
    _say(output, {"done": True})


def _stream(reader: Any, rows: int, output: IO[bytes]) -> None:
    """An Arrow stream that is ended also when the query fails on the way: the error follows it."""
    import pyarrow as pa

    left = rows + 1 if rows else None
    with pa.ipc.new_stream(output, reader.schema) as stream:
        for batch in reader:
            stream.write_batch(batch if left is None else batch.slice(0, left))
            if left is not None:
                left -= min(left, batch.num_rows)
                if left == 0:
                    break


def sealed(place: LakePlace, memory_mib: int, threads: int) -> duckdb.DuckDBPyConnection:
    """A connection that can read the lake and do nothing else."""
    connection = connect(place, threads=threads)
    attach(connection, place, read_only=True)
    check_version(connection, place)
    for setting in (
        f"memory_limit = '{memory_mib}MiB'",
        "temp_directory = ''",
        "python_enable_replacements = false",
        f"allowed_directories = ['{escaped(place.data)}']",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")
    return connection


def shut(place: LakePlace) -> None:
    """Let the kernel refuse all but reading the lake, where it can: see `capture.sql.sandbox`."""
    if place.catalog_file is None:
        port: int | None = urlsplit(place.catalog).port or POSTGRES_PORT
        home = Path(os.path.expanduser("~"))  # without one it stays as it is
        readable, written = [home / ".postgresql", home / ".pgpass"], []
    else:
        port = None
        readable = [place.catalog_file.parent]
        # Readers of a SQLite catalog lock by writing to its small index of shared memory.
        written = [place.catalog_file.with_name(f"{place.catalog_file.name}-shm")]
    if "://" not in place.data:
        readable.append(Path(place.data))
    confine(readable, written, port)


def keep_catalog_open(place: LakePlace) -> None:
    """Have a process hold a SQLite catalog open for as long as this one lives.

    SQLite removes a catalog's index of shared memory with the last process that has it open, and
    the next reader makes it anew, which this process may not. It must be another process: closing
    a second handle would drop the locks that DuckDB's handle holds here.
    """
    import sqlite3

    if place.catalog_file is None or not place.catalog_file.exists():
        return
    alive, end = os.pipe()
    ready, opened = os.pipe()
    if os.fork() == 0:
        try:
            os.close(end)
            for stream in (0, 1, 2):
                os.close(stream)
            catalog = sqlite3.connect(f"{place.catalog_file.as_uri()}?mode=ro", uri=True)
            catalog.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            os.close(opened)
            os.read(alive, 1)  # ends when the other end is closed, however that comes about
        except (sqlite3.Error, OSError):
            pass  # attaching it says clearly what is wrong
        finally:
            os._exit(0)
    os.close(alive)
    os.close(opened)
    os.read(ready, 1)
    os.close(ready)
    _kept.append(end)


_kept: list[int] = []


def _say(output: IO[bytes], line: dict[str, Any]) -> None:
    output.write(json.dumps(line).encode() + b"\n")
    output.flush()


if __name__ == "__main__":
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
