"""A user's SQL can read the lake and do nothing else, also without the first of three walls."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest
from typer.testing import CliRunner

import cli.collect
import cli.sql  # noqa: F401  these add their commands to the app
from capture.errors import QueryError
from capture.sql.query import QueryLimits, QuerySession, _Watchdog
from capture.sql.query_process import NICENESS
from capture.sql.sandbox import landlock_version
from capture.sql.statement import check_statement, error_place
from cli.main import app
from tests.capture.lakes import commit_rings, place_of
from tests.capture.rings import engine
from tests.capture.sql.conftest import LIMITS
from tests.proc import cpu_s
from tests.waiting import PATIENCE_S, until

RUNAWAY = "SELECT sum(a.latency_us + b.slot) FROM tokens a, tokens b, tokens c, tokens d, tokens e"
HUNGRY = "SELECT a.*, b.*, c.slot FROM tokens a, tokens b, tokens c ORDER BY a.slot + c.slot"
COUNTED = ("engines", "requests", "finishes", "steps", "tokens", "events", "marks")


def rows(session: QuerySession, query: str) -> list[dict[str, object]]:
    with session.run(query) as reader:
        return reader.read_all().to_pylist()


def state(home: Path, session: QuerySession) -> tuple[object, ...]:
    """Every file with its content's digest, and the rows of the tables."""
    counts = ", ".join(f"(SELECT count(*) FROM {name}) AS {name}" for name in COUNTED)
    files = [
        (str(path), hashlib.blake2s(path.read_bytes()).hexdigest() if path.is_file() else "")
        for path in sorted(home.rglob("*"))
        if path.suffix not in (".sqlite-shm", ".sqlite-wal")  # SQLite's, while it is being read
    ]
    return (files, rows(session, f"SELECT {counts}"))


ATTACKS = {
    # writing files
    "COPY tokens TO '{data}/evil.csv'": "COPY is refused",
    "COPY (FROM tokens) TO '{home}/evil.parquet'": "COPY is refused",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{data}/evil.csv'": "COPY is refused",
    "explain (analyze, format json) COPY tokens TO '{data}/evil.csv'": "COPY is refused",
    "EXPORT DATABASE '{data}/evil'": "EXPORT is refused",
    "FROM enable_logging(storage := 'file', storage_path := '{data}')": "enable_logging is refused",
    # other databases and extensions
    "ATTACH '{data}/evil.db'": "ATTACH is refused",
    "ATTACH ':memory:' AS evil": "ATTACH is refused",
    "DETACH lake": "DETACH is refused",
    "INSTALL httpfs": "LOAD is refused",
    "LOAD httpfs": "LOAD is refused",
    "USE memory": "SET is refused",
    # reading files and the network
    "FROM read_csv('/etc/passwd')": "read_csv is refused",
    "FROM \"READ_TEXT\"('{home}/secret')": "read_text is refused",
    "WITH x AS (FROM read_blob('{home}/secret')) FROM x": "read_blob is refused",
    "SELECT (SELECT content FROM read_text('{home}/secret'))": "read_text is refused",
    "SUMMARIZE FROM read_parquet('{home}/lake/data/**/*.parquet')": "read_parquet is refused",
    "FROM glob('/etc/*')": "glob is refused",
    "FROM sniff_csv('/etc/passwd')": "sniff_csv is refused",
    "FROM '/etc/passwd'": "does not exist",
    "FROM '/etc/passwd.csv'": "disabled by configuration",
    "FROM read_json('http://127.0.0.1:{port}/x')": "read_json is refused",
    "FROM 'http://127.0.0.1:{port}/x.csv'": "disabled by configuration",
    "FROM 'https://127.0.0.1:{port}/x.parquet'": "disabled by configuration",
    "FROM sqlite_scan('{home}/lake/catalog.sqlite', 'x')": "sqlite_scan is refused",
    "FROM sqlite_query('lake', 'DELETE FROM ducklake_snapshot')": "sqlite_query is refused",
    "SELECT getenv('HOME')": r"getenv\(\) is refused",
    # text that becomes a query
    "FROM query('FROM read_text' || '(1)')": "query is refused",
    'SELECT * FROM "query" /* x */ (1)': "query is refused",
    "FROM query_table('tokens')": "query_table is refused",
    "FROM json_execute_serialized_sql(json_serialize_sql('SELECT 1'))": "is refused",
    # what is run is what was judged: comments nest
    "EXPLAIN /* /* */ SELECT 1 -- */ ANALYZE FROM glob('*')": "write EXPLAIN or EXPLAIN ANALYZE",
    "/* /* */ EXPLAIN SELECT 1 -- */ EXPLAIN FROM glob('*')": "write EXPLAIN or EXPLAIN ANALYZE",
    "SELECT 1 \0 FROM glob('*')": "NUL at character 10",
    # tables named by text
    "FROM histogram(__ducklake_metadata_lake.ducklake_metadata, key)": "histogram is refused",
    "FROM histogram_values('tokens', 'slot')": "histogram_values is refused",
    "FROM pragma_table_info('__ducklake_metadata_lake.ducklake_metadata')": "is refused",
    # memory addresses as tables
    "FROM arrow_scan(1, 2, 3)": "arrow_scan is refused",
    "FROM pandas_scan(1)": "pandas_scan is refused",
    # changing the lake
    "WITH d AS (DELETE FROM tokens RETURNING *) SELECT * FROM d": "needs a SELECT",
    "EXPLAIN ANALYZE DELETE FROM tokens": "DELETE is refused",
    "BEGIN": "TRANSACTION is refused",
    "SELECT 1; COMMIT; INSERT INTO marks VALUES (uuid(), now(), 'x')": "one statement at a time",
    "DELETE FROM tokens": "DELETE is refused",
    "UPDATE tokens SET token_id = 0": "UPDATE is refused",
    "TRUNCATE tokens": "DELETE is refused",
    "DROP TABLE tokens": "DROP is refused",
    "CREATE TEMP TABLE x AS SELECT 1": "CREATE is refused",
    "CREATE OR REPLACE MACRO why(x) AS TABLE SELECT 1": "CREATE is refused",
    "COMMENT ON TABLE tokens IS 'x'": "ALTER is refused",
    "VACUUM": "VACUUM is refused",
    "CHECKPOINT": "CALL is refused",
    "CALL ducklake_expire_snapshots('lake', older_than => now())": "CALL is refused",
    "FROM ducklake_cleanup_old_files('lake', cleanup_all => true)": "is refused",
    "CALL lake.set_option('parquet_compression', 'none')": "CALL is refused",
    "FROM __ducklake_metadata_lake.ducklake_metadata": "catalog's own tables are refused",
    'FROM "__DUCKLAKE_METADATA_lake".main.ducklake_table': "catalog's own tables are refused",
    # lifting the limits
    "SET lock_configuration = false": "SET is refused",
    "SET enable_external_access = true": "SET is refused",
    "RESET memory_limit": "SET is refused",
    "PRAGMA database_list": "PRAGMA is refused",
    "/* x */ -- y\n pragma memory_limit = '9GB'": "PRAGMA is refused",
    "IMPORT DATABASE '{data}'": "IMPORT is refused",
    "PREPARE p AS DELETE FROM tokens": "PREPARE is refused",
    "EXECUTE p": "EXECUTE is refused",
    # no query
    "": "there is no query",
    " ; -- nothing": "there is no query",
    "SELEC 1": r"syntax error at or near .SELEC. \(line 1, column 1\)",
    "SELECT slot,\n nothing FROM tokens": r"nothing.* \(line 2, column 2\)",
    # an error steers no terminal and fills none
    "SELECT error(chr(27) || '[2J')": r"^ \[2J",
    "SELECT error(repeat('x', 100000))": r"^x{500}\.\.\.$",
}


def test_everything_but_reading_the_lake_is_refused(home: Path, session: QuerySession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        names = {"home": home, "data": home / "lake" / "data", "port": server.getsockname()[1]}
        before = state(home, session)
        for attack, message in ATTACKS.items():
            query = attack
            for name, value in names.items():
                query = query.replace(f"{{{name}}}", str(value))
            with pytest.raises(QueryError, match=message):
                rows(session, query)
        assert state(home, session) == before
        with pytest.raises(TimeoutError):  # nobody called
            server.accept()


def test_a_refusal_ends_the_command_with_an_error(home: Path) -> None:
    command = [sys.executable, "-m", "cli", "sql", "COPY tokens TO '/tmp/evil.csv'"]
    environment = {**os.environ, "INFERLOOP_HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "inferloop: the trace lake is read-only here: COPY is refused, use SELECT"
    ]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT 1",
        "FROM tokens",
        "SHOW TABLES",
        "DESCRIBE tokens",
        "SUMMARIZE tokens",
        "EXPLAIN SELECT 1",
        "EXPLAIN ANALYZE SELECT count(*) FROM tokens",
        "explain\n(format json, analyze)(FROM tokens)",
        "VALUES (1)",
        "WITH x AS (FROM tokens) SELECT count(*) FROM x, range(3)",
        "FROM slow_tokens(3)",
        "FROM why('0')",
        "FROM lake.main.slow_tokens(3)",
        "FROM ducklake_snapshots('lake')",
        "SELECT * FROM tokens AT (VERSION => 1)",
        "PIVOT tokens ON slot IN (0, 1) USING count(*)",
        "SELECT 'read_csv(1); DROP TABLE tokens' AS text",
    ],
)
def test_statements_that_read_are_run(session: QuerySession, query: str) -> None:
    rows(session, query)


def test_without_the_first_wall_the_others_hold(home: Path) -> None:
    """The same process without `check_statement`: DuckDB's settings, then the kernel, say no."""
    code = (
        "import json, sys\n"
        "from capture.lake import LakePlace\n"
        "from capture.sql.query_process import keep_catalog_open, sealed, shut\n"
        "from capture.sql.statement import check_statement\n"
        "place = LakePlace(*sys.argv[1:3])\n"
        "keep_catalog_open(place)\n"
        "shut(place)\n"
        "lake = sealed(place, 128, 2)\n"
        "check_statement(lake, 'FROM slow_tokens(1)')\n"
        "assert 'pandas' not in sys.modules, 'the first query waits for nothing'\n"
        "for query in json.loads(sys.argv[3]):\n"
        "    try:\n"
        "        answer = lake.execute(query).fetchall()\n"
        "    except Exception as error:\n"
        "        answer = str(error)\n"
        "    print(json.dumps(answer, default=str))\n"
    )
    place = place_of(home)
    attempts = {
        "SELECT count(*) FROM tokens": "200",
        "FROM read_text('/etc/passwd')": "disabled by configuration",
        f"COPY (SELECT 1) TO '{home}/evil.csv'": "disabled by configuration",
        f"COPY (SELECT 1) TO '{place.data}/evil.csv'": "Permission denied",
        f"ATTACH '{place.data}/evil.db' AS evil": "Permission denied",
        f"FROM sqlite_scan('{home}/other.sqlite', 'labels')": "unable to open database",
        "INSERT INTO marks VALUES (uuid(), now()::TIMESTAMP, 'x')": "read-only",
        "DELETE FROM tokens": "read-only",
        "SET lock_configuration = false": "locked",
        "LOAD httpfs": "is disabled",
        "SELECT count(*) AS n FROM tokens": "200",
    }
    if landlock_version() < 1:
        pytest.skip("this kernel has no Landlock")
    (home / "other.sqlite").write_bytes(b"")
    command = [sys.executable, "-c", code, place.catalog, place.data, json.dumps(list(attempts))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = done.stdout.splitlines()
    assert len(answers) == len(attempts), done.stderr
    for attempt, answer in zip(attempts, answers, strict=True):
        assert attempts[attempt] in answer, attempt
    assert not list(home.rglob("evil*"))


def computed_s(session: QuerySession) -> float:
    """CPU seconds of query processes: the one there is, and those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    is_there = session._process.poll() is None
    return ended.ru_utime + ended.ru_stime + (cpu_s(session._process.pid) if is_there else 0)


@pytest.mark.parametrize("query", [RUNAWAY, HUNGRY], ids=["time", "memory"])
def test_a_runaway_query_is_stopped_within_two_seconds(session: QuerySession, query: str) -> None:
    """Of computing on each of its two threads: how long that takes is the machine's affair."""
    rows(session, "SELECT 1")  # the process is warm
    session.limits = replace(LIMITS, timeout_s=1.0)
    before_s = computed_s(session)
    with pytest.raises(QueryError, match=r"stopped after 1 s|more than its 128 MiB"):
        rows(session, query)
    assert computed_s(session) - before_s < 2 * LIMITS.threads
    session.limits = LIMITS
    assert rows(session, "SELECT 1 AS a") == [{"a": 1}], "the next query gets a new process"


def test_a_query_that_ends_in_time_does_not_lose_its_process(session: QuerySession) -> None:
    """The watchdog wakes up at the moment in which it is told that all is well."""
    rows(session, "SELECT 1")
    watchdog = _Watchdog(session._process, PATIENCE_S)
    watchdog.cancel()
    watchdog._fire()
    assert not watchdog.fired
    assert session._process.poll() is None


def test_memory_that_the_database_does_not_count_is_bounded_too(home: Path) -> None:
    limits = QueryLimits(timeout_s=PATIENCE_S, memory_mib=128)
    with (
        QuerySession(place_of(home), limits) as session,
        pytest.raises(QueryError, match="more than its 128 MiB"),
    ):
        rows(session, "SELECT length(repeat('x', 3000000000))")


def once_it_computes(session: QuerySession, act: Callable[[], None]) -> threading.Thread:
    """A thread that does something in the middle of the next query."""
    pid = session._process.pid
    before_s = cpu_s(pid)

    def work() -> None:
        until(lambda: cpu_s(pid) > before_s + 0.1, "a query that takes time")
        act()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_query_is_stopped_from_another_thread(session: QuerySession) -> None:
    rows(session, "SELECT 1")
    thread = once_it_computes(session, session.cancel)
    with pytest.raises(QueryError, match=r"the query was stopped$"):
        rows(session, RUNAWAY)
    thread.join()
    assert rows(session, "SELECT 1 AS a") == [{"a": 1}]


def test_an_interrupted_query_is_not_left_running(session: QuerySession) -> None:
    rows(session, "SELECT 1")
    thread = once_it_computes(session, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        rows(session, RUNAWAY)
    thread.join()
    assert rows(session, "SELECT 1 AS a") == [{"a": 1}]


def test_an_interrupted_restart_is_done_by_the_next_query(
    session: QuerySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(ZeroDivisionError), session.run("FROM range(1000000000)"):
        _ = 1 / 0
    with monkeypatch.context() as patch:
        patch.setattr("capture.sql.query._start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.warm()
    assert rows(session, "SELECT 1 AS a") == [{"a": 1}]


def test_nothing_of_the_working_directory_is_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the process among those that the terminal interrupts while it imports."""
    for name in ("json.py", "duckdb.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    with QuerySession(place_of(home)) as session:
        assert os.getpgid(session._process.pid) != os.getpgrp()
        assert rows(session, "SELECT 1 AS a") == [{"a": 1}]
    assert not (tmp_path / "run").exists()


def test_an_early_leaver_does_not_spoil_the_next_query(session: QuerySession) -> None:
    with session.run("FROM range(1000000000)") as reader:
        assert reader.read_next_batch().num_rows > 0
    assert rows(session, "SELECT 2 AS b") == [{"b": 2}]


def test_a_session_sees_rows_that_come_later(tmp_path: Path) -> None:
    def collect() -> None:
        engine(tmp_path / "rings", requests=2, steps=10).close()
        commit_rings(tmp_path)

    collect()
    query = "SELECT count(*) AS n FROM tokens"
    with QuerySession(place_of(tmp_path)) as session:
        assert rows(session, query) == [{"n": 20}]
        collect()
        assert rows(session, query) == [{"n": 40}]


def test_a_long_line_s_error_is_placed_in_the_whole_line() -> None:
    query = "SELECT " + ", ".join(f"{number} AS c{number}" for number in range(60)) + " FORM x"
    with duckdb.connect() as connection, pytest.raises(duckdb.Error) as caught:
        connection.execute(query)
    place = error_place(str(caught.value), query)
    assert place is not None
    assert query[place.column - 1 :].startswith("FORM x")


def test_a_refused_statement_is_named_without_a_lake() -> None:
    with duckdb.connect() as connection, pytest.raises(QueryError, match="INSERT is refused"):
        check_statement(connection, "INSERT INTO x VALUES (1)")


@pytest.mark.parametrize(
    "arguments",
    [("--timeout", "inf"), ("--watch", "inf"), ("--limit", "9" * 20), ("--memory-mib", "9" * 20)],
)
def test_limits_are_numbers_that_a_machine_can_hold(arguments: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["sql", "SELECT 1", *arguments])
    assert result.exit_code == 2
    assert "Invalid value" in result.stderr


def test_a_query_gives_way_to_the_engine_and_the_collector(session: QuerySession) -> None:
    assert rows(session, "SELECT 1 AS one") == [{"one": 1}]
    here = os.getpriority(os.PRIO_PROCESS, 0)
    there = os.getpriority(os.PRIO_PROCESS, session._process.pid)
    assert there == min(here + NICENESS, 19)
