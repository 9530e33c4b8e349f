"""`inferloop sql`: reads the lake in every format, and cannot do anything else."""

from __future__ import annotations

import csv
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

import cli.collect
import cli.sql  # noqa: F401  these add their commands to the app
from capture.collector import Collector
from capture.errors import LakeMissingError, QueryError
from capture.lake import LakePlace
from capture.query import QueryLimits, run_query
from capture.query_process import check_statement
from cli.main import app
from tests.capture.rings import engine


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    engine(home / "rings", requests=5, steps=40).close()
    Collector(place_of(home), ring_dir=home / "rings", crash_dir=home, stop=threading.Event()).run(
        once=True
    )
    return home


def place_of(home: Path) -> LakePlace:
    return LakePlace(str(home / "lake" / "catalog.sqlite"), str(home / "lake" / "data"))


def sql(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["sql", *arguments], env={"INFERLOOP_HOME": str(home)})


def rows(home: Path, query: str, limits: QueryLimits | None = None) -> list[dict[str, object]]:
    with run_query(place_of(home), query, limits) as reader:
        return reader.read_all().to_pylist()


def files(home: Path) -> list[Path]:
    """All files but those that SQLite makes beside a catalog that is being read."""
    return sorted(
        path for path in home.rglob("*") if path.suffix not in (".sqlite-shm", ".sqlite-wal")
    )


def test_a_table_for_people(home: Path) -> None:
    result = sql(home, "SELECT slot, count(*) AS tokens FROM tokens GROUP BY slot ORDER BY slot")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["slot", "tokens"]
    assert [line.split() for line in lines[1:]] == [[str(slot), "40"] for slot in range(5)]


def test_a_long_table_is_cut_and_says_so(home: Path) -> None:
    result = sql(home, "FROM tokens")
    assert len(result.stdout.splitlines()) == 101
    assert "first 100 rows; --limit 0 shows all" in result.stderr
    assert len(sql(home, "FROM tokens", "--limit", "0").stdout.splitlines()) == 201


def test_csv_json_and_parquet_hold_all_rows(home: Path, tmp_path: Path) -> None:
    query = "SELECT * FROM tokens ORDER BY step_id, slot"
    table = list(csv.DictReader(sql(home, query, "-f", "csv").stdout.splitlines()))
    lines = [json.loads(line) for line in sql(home, query, "-f", "json").stdout.splitlines()]
    target = tmp_path / "tokens.parquet"
    assert sql(home, query, "-f", "parquet", "-o", str(target)).exit_code == 0
    parquet = pq.read_table(target).to_pylist()
    assert len(table) == len(lines) == len(parquet) == 200
    for text, parsed, exact in zip(table, lines, parquet, strict=True):
        assert int(text["token_id"]) == parsed["token_id"] == exact["token_id"]
        assert text["emitted_at"] == parsed["emitted_at"] == exact["emitted_at"].isoformat()
    assert list(tmp_path.iterdir()) == [target]


def test_options_that_do_not_fit_are_one_clear_line(home: Path, tmp_path: Path) -> None:
    assert "add --output" in str(sql(home, "FROM tokens", "-f", "parquet").exception)
    nowhere = str(tmp_path / "no" / "x.csv")
    failed = sql(home, "FROM tokens", "-f", "csv", "-o", nowhere)
    assert "cannot write" in str(failed.exception)
    assert getattr(failed.exception, "exit_code", None) == 1


def test_an_absent_lake_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(LakeMissingError, match="inferloop collect"):
        rows(tmp_path, "SELECT 1")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("COPY tokens TO '/tmp/evil.csv'", "COPY is refused"),
        ("EXPORT DATABASE '/tmp/evil'", "EXPORT is refused"),
        ("ATTACH '/tmp/evil.db'", "ATTACH is refused"),
        ("INSTALL httpfs", "LOAD is refused"),
        ("DELETE FROM tokens", "DELETE is refused"),
        ("DROP TABLE tokens", "DROP is refused"),
        ("CREATE TEMP TABLE x AS SELECT 1", "CREATE is refused"),
        ("SET threads = 64", "SET is refused"),
        ("CALL ducklake_expire_snapshots('lake')", "CALL is refused"),
        ("PRAGMA database_list", "PRAGMA is refused"),
        ("/* x */ -- y\n pragma version", "PRAGMA is refused"),
        ("SELECT 1; DELETE FROM tokens", "one statement at a time"),
        ("", "one statement at a time"),
        ("SELECT * FROM sqlite_scan('secret', 'x')", "sqlite_scan is refused"),
        ('SELECT * FROM "SQLITE_SCAN"(1)', "SQLITE_SCAN is refused"),
        ("SELECT * FROM query('SELECT * FROM sqlite' || '_scan(1)')", "query.* refused"),
        ('SELECT * FROM "query" /* x */ (1)', "query.* refused"),
        ("SELECT * FROM json_execute_serialized_sql(json_serialize_sql('x'))", "refused"),
        ("SELECT * FROM ducklake_cleanup_old_files('lake')", "is refused"),
    ],
)
def test_statements_that_do_more_than_read_are_refused(query: str, message: str) -> None:
    with duckdb.connect() as connection, pytest.raises(QueryError, match=message):
        check_statement(connection, query)


@pytest.mark.parametrize(
    "query",
    ["SELECT 1", "FROM tokens", "SHOW TABLES", "DESCRIBE tokens", "EXPLAIN SELECT 1", "VALUES (1)"],
)
def test_statements_that_read_are_not(query: str) -> None:
    with duckdb.connect() as connection:
        check_statement(connection, query)


REFUSED = {
    "COPY tokens TO '{home}/lake/data/evil.csv'": "COPY is refused",
    "SELECT * FROM read_csv('/etc/passwd')": "disabled by configuration",
    "SELECT * FROM read_text('{home}/secret')": "disabled by configuration",
    "SELECT * FROM '/etc/passwd'": "/etc/passwd",
    "WITH d AS (DELETE FROM tokens RETURNING *) SELECT * FROM d": "needs a SELECT",
    "EXPLAIN ANALYZE DELETE FROM tokens": "read-only",
    "SELEC 1": "syntax error",
    "SELECT nothing FROM tokens": "nothing",
}


def test_everything_but_reading_the_lake_is_refused(home: Path) -> None:
    """In one process: starting one for each query would be most of the test's time."""
    (home / "secret").write_text("secret")
    before = files(home)
    queries = [query.replace("{home}", str(home)) for query in REFUSED]
    code = (
        "import json, sys\n"
        "from capture.lake import LakePlace\n"
        "from capture.query_process import check_statement, sealed\n"
        "lake = sealed(LakePlace(*sys.argv[1:3]), 256, 2)\n"
        "for query in json.loads(sys.argv[3]):\n"
        "    try:\n"
        "        check_statement(lake, query)\n"
        "        lake.execute(query).fetchall()\n"
        "    except Exception as error:\n"
        "        print(json.dumps(str(error)))\n"
        "    else:\n"
        "        print('null')\n"
    )
    place = place_of(home)
    command = [sys.executable, "-c", code, place.catalog, place.data, json.dumps(queries)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(REFUSED)
    for answer, message in zip(answers, REFUSED.values(), strict=True):
        assert answer is not None
        assert message in answer
    assert files(home) == before


def test_a_refusal_reaches_the_caller(home: Path) -> None:
    with pytest.raises(QueryError, match="disabled by configuration"):
        rows(home, "SELECT * FROM read_csv('/etc/passwd')")


def test_all_tokens_are_still_there(home: Path) -> None:
    assert rows(home, "SELECT count(*) AS n FROM tokens") == [{"n": 200}]


def test_a_runaway_query_is_stopped_in_time(home: Path) -> None:
    runaway = (
        "SELECT sum(a.latency_us + b.slot) FROM tokens a, tokens b, tokens c, tokens d, tokens e"
    )
    started = time.monotonic()
    with pytest.raises(QueryError, match=r"stopped after 0\.5 s"):
        rows(home, runaway, QueryLimits(timeout_s=0.5))
    assert time.monotonic() - started < 10, "generous: the process has to start first"


def test_a_hungry_query_is_stopped_and_says_what_it_needs(home: Path) -> None:
    hungry = "SELECT a.*, b.*, c.slot FROM tokens a, tokens b, tokens c ORDER BY a.slot + c.slot"
    with pytest.raises(QueryError, match="more than its 64 MiB"):
        rows(home, hungry, QueryLimits(memory_mib=64))


def test_a_result_is_a_stream_that_may_be_left_early(home: Path) -> None:
    endless = "SELECT a.slot FROM tokens a, tokens b, tokens c"
    with run_query(place_of(home), endless) as reader:
        assert reader.read_next_batch().num_rows > 0


def test_a_query_may_come_from_standard_input(home: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["sql", "-", "-f", "csv"],
        input="SELECT 41 + 1 AS answer",
        env={"INFERLOOP_HOME": str(home)},
    )
    assert result.stdout.splitlines() == ["answer", "42"]


def test_names_and_values_are_not_read_as_markup_or_terminal_codes(home: Path) -> None:
    lines = sql(
        home, "SELECT '[/x]' AS \"[/b]\", chr(27) || '[2J' AS c, 1 AS c"
    ).stdout.splitlines()
    assert [line.split() for line in lines] == [["[/b]", "c", "c"], ["[/x]", "\ufffd[2J", "1"]]


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_times_that_python_has_no_type_for_are_printed(home: Path, form: str) -> None:
    result = sql(
        home, "SELECT 'infinity'::TIMESTAMP, DATE '20000-01-01', [DATE '20000-01-01']", "-f", form
    )
    assert result.exit_code == 0, result.exception


def test_a_device_is_written_to_and_a_link_followed(home: Path, tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("cannot make a device here")
    link, target = tmp_path / "link.csv", tmp_path / "target.csv"
    link.symlink_to(target)
    for output in (device, link):
        assert sql(home, "SELECT 1", "-f", "csv", "-o", str(output)).exit_code == 0
    assert device.is_char_device()
    assert link.is_symlink()
    assert target.exists()


def test_a_reader_that_goes_away_is_no_error_of_the_query(home: Path) -> None:
    query = "SELECT a.slot FROM tokens a, tokens b, tokens c"
    with pytest.raises(BrokenPipeError), run_query(place_of(home), query):
        raise BrokenPipeError


def test_a_query_that_is_no_text_is_refused(home: Path) -> None:
    with pytest.raises(QueryError, match="not UTF-8 at character 8"):
        rows(home, "SELECT \udcff")


def test_odd_values_survive_every_format(home: Path) -> None:
    query = (
        "SELECT 'NaN'::FLOAT AS a, [1, NULL] AS b, 'é\n\"x\"' AS c, {'k': now()} AS d, NULL AS e"
    )
    (line,) = sql(home, query, "-f", "json").stdout.splitlines()
    parsed = json.loads(line)
    assert (parsed["a"], parsed["b"], parsed["c"], parsed["e"]) == (None, [1, None], 'é\n"x"', None)
    assert sql(home, query).exit_code == 0
    assert sql(home, query, "-f", "csv").exit_code == 0
