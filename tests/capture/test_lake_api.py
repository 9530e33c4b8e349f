"""The lake for Python programs, as the documentation shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import capture
from capture import open_lake
from capture.errors import LakeError, LakeMissingError, QueryError
from capture.lake import open_connection
from capture.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a lake of 100 marks."""
    directory = tmp_path_factory.mktemp("home")
    with open_connection(Settings(home=directory), read_only=False) as lake:
        lake.execute(
            "INSERT INTO marks SELECT uuid(), TIMESTAMP '2026-03-01', 'deploy ' || i "
            "FROM range(100) AS r(i)"
        )
    return directory


@pytest.fixture
def home(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, named by the settings."""
    monkeypatch.setenv("INFERLOOP_HOME", str(made))
    return made


def test_the_lake_is_named_by_settings_home_or_catalog(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = home / "lake" / "catalog.sqlite"
    for named in ({}, {"home": home}, {"home": str(home)}, {"catalog": str(catalog)}):
        with open_lake(**named) as lake:
            assert len(lake.sql("FROM marks")) == 100
    monkeypatch.setenv("INFERLOOP_LAKE_CATALOG", "/nowhere/catalog.sqlite")
    with open_lake(home) as lake:
        assert len(lake.sql("FROM marks")) == 100, "a home that is named wins"
    with pytest.raises(LakeMissingError, match="inferloop collect"):
        open_lake()
    with pytest.raises(LakeError, match="give its catalog too"):
        open_lake(data="/somewhere")


def test_rows_come_as_arrow_pandas_and_polars(home: Path) -> None:
    with open_lake() as lake:
        rows = lake.sql("SELECT engine_id, marked_at, text FROM marks WHERE text = ?", ["deploy 7"])
    assert len(rows) == 1
    assert repr(rows) == "<1 rows of engine_id, marked_at, text>"
    arrow, pandas, polars = rows.arrow(), rows.df(), rows.pl()
    assert isinstance(arrow, pa.Table)
    assert isinstance(pandas, pd.DataFrame)
    assert isinstance(polars, pl.DataFrame)
    assert arrow["text"].to_pylist() == pandas["text"].tolist() == polars["text"].to_list()
    assert pandas["marked_at"].iloc[0] == pd.Timestamp("2026-03-01")


def test_parameters_have_places_or_names(home: Path) -> None:
    with open_lake() as lake:
        found = lake.sql("SELECT $a + $b AS sum", {"a": 1, "b": 2}).arrow()
        assert found.to_pylist() == [{"sum": 3}]


def test_one_lake_serves_many_threads_and_sees_new_rows(home: Path) -> None:
    with open_lake() as lake, ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: len(lake.sql("FROM marks")), range(64)))
        assert found == [100] * 64
        before = len(lake.sql("FROM losses"))
        with open_connection(Settings(), read_only=False) as writer:
            writer.execute("INSERT INTO losses SELECT uuid(), 1, now()::TIMESTAMP, '', 1, 1, 1, ''")
        assert len(lake.sql("FROM losses")) == before + 1


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("SELECT x FROM marks", "x"),
        ("INSERT INTO marks FROM marks", "read-only"),
        ("DROP TABLE marks", "read-only"),
        ("SELEC", "syntax error"),
    ],
)
def test_a_query_that_is_wrong_or_writes_is_a_clear_error(
    home: Path, query: str, reason: str
) -> None:
    with open_lake() as lake, pytest.raises(QueryError, match=reason) as caught:
        lake.sql(query)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("query", ["", " ; ", "-- only a comment"])
def test_an_empty_query_is_a_clear_error(home: Path, query: str) -> None:
    with open_lake() as lake, pytest.raises(QueryError, match="the query is empty"):
        lake.sql(query)


def test_a_closed_lake_says_so(home: Path) -> None:
    lake = open_lake()
    lake.close()
    lake.close()
    with pytest.raises(QueryError, match="was closed: open it again"):
        lake.sql("FROM marks")


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"catalog": "mysql://me:secret@db/lake"}, "is a mysql:// URL: it must be a SQLite file"),
        ({"catalog": "/"}, "catalog / is a directory"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_what_cannot_be_opened_is_named(home: Path, named: dict[str, Any], reason: str) -> None:
    with pytest.raises(LakeError, match=reason) as caught:
        open_lake(**named)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ['it\'s "here"; 100% #1', "ünï 日本"])
def test_a_home_may_have_any_name(tmp_path: Path, name: str) -> None:
    open_connection(Settings(home=tmp_path / name), read_only=False).close()
    with open_lake(tmp_path / name) as lake:
        assert len(lake.sql("FROM requests")) == 0


@pytest.mark.parametrize(("library", "method"), [("pandas", "df"), ("polars", "pl")])
def test_a_library_that_is_not_installed_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, library: str, method: str
) -> None:
    with open_lake() as lake:
        rows = lake.sql("SELECT 1")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(QueryError, match=rf"pip install {library}, or take .arrow"):
        getattr(rows, method)()


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, capture; print([m for m in ('duckdb', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        capture.nothing  # noqa: B018


@pytest.mark.parametrize("page", ["sql.md", "heatmap.md"])
def test_the_python_examples_of_the_documentation_run(home: Path, page: str) -> None:
    examples = re.findall(r"```python\n(.*?)\n```", (DOCS / page).read_text(), re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, page, "exec"), {})


def test_the_documentation_shows_every_form() -> None:
    text = (DOCS / "sql.md").read_text()
    assert all(form in text for form in (".arrow()", ".df()", ".pl()"))
