"""The process that runs a user's query: started by `capture.query`, never imported by others.

Reads one JSON request from stdin, writes `ready` and an Arrow stream to stdout, or one JSON error
to stderr. Closed before the query is looked at: files and network (external access off but for the
lake's own files, which DuckDB could then also write: so only statements that read are run),
settings (locked), extensions (none can be loaded), temporary files, files of any size.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from typing import TYPE_CHECKING, Any

from capture.errors import CaptureError, QueryError
from capture.lake import LakePlace, attach, check_version, connect, escaped, first_line

if TYPE_CHECKING:
    import duckdb

BATCH_ROWS = 65536
FILE_BYTES = 1 << 20
START_CPU_S = 10
# The scanner extensions open their files and servers without asking DuckDB, and DuckLake's upkeep
# deletes files; functions that run text could be given their names in pieces.
_FOREIGN = re.compile(
    r"\b(?:(?:sqlite|postgres)_(?:scan|query|attach|execute)"
    r"|ducklake_(?:add|cleanup|commit|delete|expire|flush|merge|rewrite|set))\w*",
    re.IGNORECASE,
)
_TEXT_RUNNERS = re.compile(
    r"\b(?:query(?:_table)?|json_execute_serialized_sql)\"?(?:\s|/\*.*?\*/|--[^\n]*\n)*\(",
    re.IGNORECASE | re.DOTALL,
)
_PRAGMA = re.compile(r"(?:\s|/\*.*?\*/|--[^\n]*\n)*pragma\b", re.IGNORECASE | re.DOTALL)


def main() -> None:
    request = json.load(sys.stdin.buffer)
    # Whoever started this process watches its time; should he be killed, the kernel ends it.
    seconds = int(START_CPU_S + request["limits"]["timeout_s"] * request["limits"]["threads"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        _run(request)
    except (CaptureError, OSError) as error:
        print(json.dumps({"error": str(error)}), file=sys.stderr)
        sys.exit(1)


def _run(request: dict[str, Any]) -> None:
    import duckdb
    import pyarrow as pa

    place, limits, sql = LakePlace(**request["place"]), request["limits"], request["sql"]
    connection = sealed(place, limits["memory_mib"], limits["threads"])
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    try:
        check_statement(connection, sql)
        reader = connection.execute(sql).to_arrow_reader(BATCH_ROWS)
        left = limits["rows"] + 1 if limits["rows"] else None
        with pa.ipc.new_stream(sys.stdout.buffer, reader.schema) as stream:
            for batch in reader:
                stream.write_batch(batch if left is None else batch.slice(0, left))
                if left is not None:
                    left -= min(left, batch.num_rows)
                    if left == 0:
                        break
    except duckdb.OutOfMemoryException as error:
        raise QueryError(
            f"the query needs more than its {limits['memory_mib']} MiB of memory: narrow it, or "
            "give it more with --memory-mib"
        ) from error
    except duckdb.Error as error:
        raise QueryError(first_line(error)) from error


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
    # Reading a SQLite catalog takes its small index file of shared memory; nothing else is written.
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    return connection


def check_statement(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise QueryError unless `sql` is one statement that reads."""
    import duckdb

    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise QueryError(f"one statement at a time, not {len(statements)}")
    kind = statements[0].type
    if kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise QueryError(f"the trace lake is read-only here: {kind.name} is refused, use SELECT")
    if _PRAGMA.match(sql):
        raise QueryError("PRAGMA is refused: use DESCRIBE, SHOW TABLES or SELECT")
    foreign = _FOREIGN.search(sql)
    if foreign is not None:
        raise QueryError(f"{foreign[0]} is refused: the trace lake can be read here, no more")
    if _TEXT_RUNNERS.search(sql):
        raise QueryError("query() and others that run text are refused: write the query itself")


if __name__ == "__main__":
    main()
