"""`inferloop sql`: reads the lake in every format, and cannot do anything else."""

from __future__ import annotations

import csv
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

import cli.collect
import cli.sql  # noqa: F401  these add their commands to the app
from capture.errors import LakeMissingError, QueryError
from capture.lake import LakePlace, require_catalog
from capture.sql.query import QueryLimits, QuerySession, run_query
from cli.main import app
from tests.capture.lakes import place_of
from tests.capture.sql.conftest import LIMITS
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def _in_the_warm_process(session: QuerySession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes the tests' query process instead of starting one."""

    @contextmanager
    def taken(place: LakePlace, limits: QueryLimits | None = None) -> Iterator[QuerySession]:
        require_catalog(place)
        session.limits = replace(limits or LIMITS, timeout_s=PATIENCE_S)
        yield session

    monkeypatch.setattr("capture.sql.query.QuerySession", taken)


def sql(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["sql", *arguments], env={"INFERLOOP_HOME": str(home)})


def rows(home: Path, query: str, limits: QueryLimits | None = None) -> list[dict[str, object]]:
    with run_query(place_of(home), query, limits) as reader:
        return reader.read_all().to_pylist()


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
    named = tmp_path / "named.parquet"
    assert sql(home, query, "-o", str(named)).exit_code == 0
    assert pq.read_table(named).num_rows == 200
    named.unlink()
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
