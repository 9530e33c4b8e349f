"""Both pages run without an exception and say what is missing."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from sqlalchemy import select
from streamlit.testing.v1 import AppTest

import migrations
from capture.lake import open_connection
from capture.settings import Settings
from evaluation.models import Label, Presentation
from replay.database import create_database_engine, open_sessions
from tests.dashboard.factory import make_lake
from tests.evaluation.factory import CLASS, add_run, label
from tests.waiting import PATIENCE_S


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return used(tmp_path, monkeypatch)


@pytest.fixture
def lake_home(read_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a lake that the test only reads."""
    used(tmp_path, monkeypatch)
    monkeypatch.setenv("INFERLOOP_HOME", str(read_home))
    return read_home


def used(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import streamlit as st

    st.cache_resource.clear()
    monkeypatch.setenv("INFERLOOP_HOME", str(home))
    monkeypatch.chdir(home)
    return home


def latency_page() -> None:
    from dashboard import latency

    latency.page()


def labelling_page() -> None:
    from dashboard import labelling

    labelling.page()


def run(page) -> AppTest:
    app = AppTest.from_function(page, default_timeout=PATIENCE_S).run()
    assert not app.exception
    return app


def database():
    url = Settings().database
    migrations.upgrade(url)
    return open_sessions(url)


def texts(elements) -> str:
    return " ".join(element.value for element in elements)


def test_navigation_opens_the_latency_page(home: Path) -> None:
    script = Path(__file__).parents[2] / "dashboard" / "app.py"
    app = AppTest.from_file(str(script), default_timeout=PATIENCE_S).run()
    assert not app.exception
    assert app.title[0].value == "Latency heat map"


def test_latency_page_without_lake_or_requests_says_how_to_get_some(home: Path) -> None:
    assert "There is no trace lake yet" in texts(run(latency_page).info)
    make_lake(home, requests=0)
    assert "holds no request yet" in texts(run(latency_page).info)


def test_latency_page_shows_figures_and_the_map(lake_home: Path) -> None:
    app = run(latency_page)
    metrics = {metric.label: metric.value for metric in app.metric}
    assert metrics["Requests"] == "40"
    assert metrics["Output tokens"] == "1,200"
    assert metrics["TTFT p50 / p99"] == "10 / 10 ms"
    assert len(app.get("plotly_chart")) == 1
    assert "123 tokens never reached the lake" in texts(app.caption)


def test_latency_page_sees_what_is_written_while_it_is_open(home: Path) -> None:
    place = make_lake(home)
    app = run(latency_page)
    with open_connection(place, read_only=False) as lake:
        lake.execute("INSERT INTO requests SELECT * REPLACE (99 AS slot) FROM requests LIMIT 1")
    app.run()
    assert app.metric[0].value == "41"


@pytest.mark.parametrize(
    ("key", "value"), [("period", "5 min"), ("period", "Custom"), ("quantile", "p50")]
)
def test_latency_page_controls(lake_home: Path, key: str, value: str) -> None:
    app = run(latency_page)
    next(control for control in app.button_group if control.key == key).set_value([value]).run()
    assert not app.exception
    assert not app.error
    assert len(app.get("plotly_chart")) == 1


def test_latency_page_says_whether_its_figures_are_exact(
    lake_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Exact, from every token" in texts(run(latency_page).caption)
    monkeypatch.setattr("dashboard.traces.EXACT_TOKENS", 1000)
    app = run(latency_page)
    assert "within 2.2 % of the exact figures" in texts(app.caption)
    assert len(app.get("plotly_chart")) == 1


def test_latency_page_of_a_damaged_catalog_is_a_clear_line(home: Path) -> None:
    catalog = home / "lake" / "catalog.sqlite"
    catalog.parent.mkdir()
    catalog.write_text("not a database, but long enough to be read as one" * 40)
    assert "lake" in texts(run(latency_page).error)


def test_latency_page_of_a_catalog_of_another_kind_is_a_clear_line(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERLOOP_LAKE_CATALOG", "mysql://me:secret@db/lake")
    assert "is a mysql:// URL" in texts(run(latency_page).error)


def test_latency_page_whose_database_goes_away_says_so_in_a_line_without_the_password(
    lake_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise duckdb.IOException('IO Error: no "postgresql://me:secret@db/x"\n\tIs it running?')

    monkeypatch.setattr("dashboard.latency.arrivals", gone)
    app = run(latency_page)
    assert texts(app.error) == 'cannot read the trace lake: no "postgresql://me:***@db/x"'


def test_judging_page_without_database_or_runs(home: Path) -> None:
    assert "no replay to judge yet" in texts(run(labelling_page).info)


def test_judging_page_of_a_foreign_schema_is_a_clear_line(home: Path) -> None:
    engine = create_database_engine(Settings().database)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.exec_driver_sql("INSERT INTO alembic_version VALUES ('0000')")
    assert "this version" in texts(run(labelling_page).error)


def test_judging_page_of_a_database_that_was_replaced_uses_the_new_one(home: Path) -> None:
    add_run(database())
    app = run(labelling_page)
    assert not app.info or "no replay" not in texts(app.info)
    for file in home.glob("inferloop.sqlite*"):
        file.unlink()
    app.run()
    assert "no replay to judge yet" in texts(app.info)


def test_judging_page_of_a_failing_database_is_a_clear_line(home: Path) -> None:
    sessions = database()
    add_run(sessions)
    app = run(labelling_page)
    with sessions.kw["bind"].begin() as connection:
        connection.exec_driver_sql("ALTER TABLE labels RENAME TO gone")
    app.text_input(key="expert").set_value("ann").run()
    assert not app.exception
    assert "no such table" in texts(app.error)


def test_judging_undoing_and_skipping(home: Path) -> None:
    sessions = database()
    run_id = add_run(sessions, classes=[CLASS] * 3)
    label(sessions, run_id, [-1, 1, 0], expert="machine:ref", kind="machine")
    app = run(labelling_page)
    assert "Enter your name" in texts(app.info)
    app.text_input(key="expert").set_value("Ann").run()
    button(app, "Left is better").click().run()
    assert len(stored(sessions)) == 1
    app.button(key="undo").click().run()
    assert stored(sessions) == []
    comment = next(box for box in app.text_input if box.label.startswith("Comment"))
    comment.set_value("clearer")
    button(app, "No difference").click().run()
    assert [(found.value, found.comment) for found in stored(sessions)] == [(0, "clearer")]
    button(app, "Skip").click().run()
    with sessions() as session:
        reasons = session.scalars(select(Presentation.skip_reason)).all()
    assert reasons.count("outside my field") == 1
    assert not app.exception


def test_machine_labels_appear_only_once_all_verdicts_are_final(home: Path) -> None:
    sessions = database()
    run_id = add_run(sessions, classes=[CLASS] * 4)
    label(sessions, run_id, [-1] * 4, expert="machine:ref", kind="machine")
    app = run(labelling_page)
    app.text_input(key="expert").set_value("Ann").run()
    for _ in range(5):  # four changes and a hidden check, which has no machine label
        assert not app.table, "what is missing in it would give the check away"
        button(app, "Left is better").click().run()
    assert "Nothing left to judge" in texts(app.success)
    (table,) = app.table
    assert list(table.value.columns) == ["You", "Machine label (likelihood, no expert)"]
    assert 3 <= len(table.value) <= 4, "the newest verdict can still be undone"


def test_a_finished_replay_says_so(home: Path) -> None:
    add_run(database(), classes=[])
    app = run(labelling_page)
    app.text_input(key="expert").set_value("Ann").run()
    assert "Nothing left to judge" in texts(app.success)


def button(app: AppTest, text: str):
    return next(found for found in app.button if found.label == text)


def stored(sessions) -> list[Label]:
    with sessions() as session:
        return list(session.scalars(select(Label).where(Label.expert.has(kind="expert"))))
