"""What `lake.sql` returns, row by row, and as notebooks show it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from capture import open_lake
from capture.lake import open_connection
from capture.lake_api import SHOWN_ROWS, Lake
from capture.settings import Settings

GUIDE = Path(__file__).parents[2] / "docs" / "sql-guide.md"


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    home = tmp_path_factory.mktemp("home")
    open_connection(Settings(home=home), read_only=False).close()
    with open_lake(home) as lake:
        yield lake


def test_rows_are_dicts_by_column_as_often_as_wanted(lake: Lake) -> None:
    rows = lake.sql("SELECT i AS n, TIMESTAMP '2026-03-01' AS at FROM range(3) AS r(i)")
    assert rows.columns == ["n", "at"]
    expected = [{"n": n, "at": datetime(2026, 3, 1)} for n in range(3)]
    assert list(rows) == expected
    assert list(rows) == expected, "a second time"
    assert rows.fetchall() == [(n, datetime(2026, 3, 1)) for n in range(3)]
    assert (rows[0], rows[-1]) == (expected[0], expected[2])
    for index in (3, -4):
        with pytest.raises(IndexError, match="the query found 3"):
            rows[index]
    for other in ("n", slice(0, 1)):
        with pytest.raises(TypeError, match="by its number, not by"):
            rows[other]  # type: ignore[index]


def test_no_rows_are_an_empty_result_that_is_false(lake: Lake) -> None:
    rows = lake.sql("FROM requests")
    assert not rows
    assert (list(rows), rows.fetchall(), len(rows)) == ([], [], 0)
    assert "request_id" in rows.columns


def test_columns_of_one_name_are_kept_apart(lake: Lake) -> None:
    rows = lake.sql("SELECT 1 AS a, 2 AS a, NULL AS b")
    assert rows.columns == ["a", "a_2", "b"]
    assert rows[0] == {"a": 1, "a_2": 2, "b": None}


def test_notebooks_show_the_first_rows_and_no_markup_of_clients(lake: Lake) -> None:
    rows = lake.sql("SELECT '<script>' || i AS \"t<\", NULL AS nothing FROM range(50) AS r(i)")
    page = rows._repr_html_()
    assert page.count("<tr>") == SHOWN_ROWS + 1
    assert "<th>t&lt;</th>" in page
    assert "<td>&lt;script&gt;0</td><td></td>" in page
    assert "<script" not in page
    assert "50 rows, 30 more than shown" in page
    assert "more than shown" not in lake.sql("SELECT 1")._repr_html_()


def test_the_guide_s_example_runs(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_connection(Settings(home=tmp_path), read_only=False).close()
    monkeypatch.setenv("INFERLOOP_HOME", str(tmp_path))
    (example,) = re.findall(r"```python\n(.*?)\n```", GUIDE.read_text(), re.DOTALL)
    exec(compile(example, "sql-guide.md", "exec"), {})
    assert capsys.readouterr().out == ("0 tenants, 0 tokens; columns ['tenant', 'requests']\n")
