"""The same lake with a PostgreSQL catalog: several collectors write to it at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote
from uuid import UUID

import duckdb
import pytest

from capture.collecting.follower import Status
from capture.collecting.lake_writer import LakeWriter
from capture.collector import Collector
from capture.errors import LakeError, LakeMissingError, first_line
from capture.frames import TraceWriter
from capture.lake import LakePlace, open_connection
from capture.rollup import ALL_STEPS, roll_up
from capture.sql.query import run_query
from tests.capture import children
from tests.capture.rings import MIB, engine, new_ring, write_request, write_step
from tests.migrations.postgres import postgres_server
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LakePlace]:
    with postgres_server() as url:
        yield LakePlace(url, str(tmp_path_factory.mktemp("lake") / "data"))


def test_an_empty_database_is_no_lake_yet(place: LakePlace) -> None:
    with pytest.raises(LakeMissingError, match="inferloop collect"):
        open_connection(place)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@localhost:1/x",
        "postgresql://me@localhost:1/x?password=secret",
        "postgresql://me@localhost:1/x?connect_timeout=3&password=secret&sslmode=disable",
    ],
)
def test_a_server_that_is_not_there_is_a_clear_error_without_the_password(url: str) -> None:
    with pytest.raises(LakeError, match="cannot open the lake at postgresql://localhost:1/x") as e:
        open_connection(LakePlace(url, "/tmp"))
    assert "secret" not in str(e.value)
    assert "secret" not in LakePlace(url, "/tmp").described


def test_a_password_may_hold_any_character(place: LakePlace) -> None:
    open_connection(place, read_only=False).close()
    password = quote("p@ss:w/o?r#d 'x' 100%", safe="")
    named = LakePlace(place.catalog.replace("inferloop@", f"inferloop:{password}@"), place.data)
    with open_connection(named) as lake:
        assert lake.execute("SELECT count(*) FROM schema_versions").fetchone() == (1,)


@pytest.mark.parametrize(
    "url",
    ["postgresql://me:secret@db/x", "postgresql://me:sec@ret@/x?host=/a", "postgresql://db/x?"],
)
def test_no_error_on_an_open_lake_shows_the_password(url: str) -> None:
    """A database that went away: DuckDB then quotes the whole URL, as often as it likes."""
    url += "" if "@" in url else "sslmode=disable&password=secret"
    said = first_line(duckdb.IOException(f'IO Error: Unable to connect to "{url}" ("{url}"): gone'))
    assert said.startswith("Unable to connect to")
    assert said.endswith("gone")
    assert "***" in said
    assert "sec" not in said


def test_user_sql_does_not_see_the_password(place: LakePlace) -> None:
    open_connection(place, read_only=False).close()
    named = LakePlace(place.catalog.replace("inferloop@", "inferloop:secret@"), place.data)
    with run_query(named, "SELECT * FROM duckdb_databases()") as reader:
        assert "secret" not in str(reader.read_all().to_pylist())


def test_three_collectors_write_to_one_lake_at_once(place: LakePlace, tmp_path: Path) -> None:
    open_connection(place, read_only=False).close()
    failures: list[Exception] = []

    def collect(rings: Path) -> None:
        try:
            for steps in (50, 60):
                engine(rings, requests=10, steps=steps).close()
                Collector(place, ring_dir=rings, crash_dir=tmp_path, stop=threading.Event()).run(
                    once=True
                )
        except Exception as error:  # noqa: BLE001  handed to the test's thread
            failures.append(error)

    threads = [threading.Thread(target=collect, args=(tmp_path / str(n),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    query = "SELECT count(*) AS tokens, count(DISTINCT engine_id) AS engines FROM tokens"
    with run_query(place, query) as reader:
        assert reader.read_all().to_pylist() == [{"tokens": 3 * 10 * 110, "engines": 6}]


def test_a_commit_that_meets_anothers_clean_up_is_repeated_and_alarms_nobody(
    place: LakePlace, caplog: pytest.LogCaptureFixture
) -> None:
    """DuckLake does not repeat it: the rows deleted might have been the ones added."""
    told: list[str | None] = []
    status = Status()
    writer = LakeWriter(
        place, status, threading.Event(), lambda status: told.append(status.waiting_for)
    )
    mark = "INSERT INTO marks SELECT uuid(), TIMESTAMP '2026-01-01', 'race'"
    with open_connection(place, read_only=False) as other:
        other.execute(mark)
        racing = [other]

        def commit() -> None:
            connection = writer.connection()
            connection.execute(f"BEGIN; {mark}")
            if racing:
                racing.pop().execute("DELETE FROM marks WHERE text = 'race'")
            connection.execute("COMMIT")

        writer.patiently(commit)
        writer.close()
        assert other.execute("SELECT count(*) FROM marks WHERE text = 'race'").fetchone() == (1,)
    assert status.failed_commits == 1, "it did meet"
    assert told == []
    assert caplog.text == ""


ROWS = 40


class Host:
    """A host with one engine and one collector, which is a process of its own."""

    def __init__(self, place: LakePlace, home: Path, number: int) -> None:
        self.engine_id = UUID(int=1000 + number)
        self._place = place
        self._home = home
        self._log = home.with_suffix(".log")
        self._ring = new_ring(home / "rings", 16 * MIB, self.engine_id)
        self._trace = TraceWriter(self._ring)
        self._trace.engine({"model": "tiny"})
        for slot in range(ROWS):
            write_request(self._trace, slot)
        self.steps = 0
        self.launch()

    def launch(self) -> None:
        """Start the collector; `ready` waits until it is at work."""
        data = Path(self._place.data).parent
        with self._log.open("ab") as log:
            self.collector = children.started(
                [sys.executable, "-m", "tests.capture.collect_process", data,
                 self._home / "rings", self._place.catalog],
                stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def ready(self) -> None:
        assert self.collector.stdout is not None
        assert self.collector.stdout.readline() == "ready\n", self.log

    def write(self) -> None:
        """One step of all its requests."""
        write_step(self._trace, self.steps, ROWS, phase=1 if self.steps == 0 else 0)
        self.steps += 1

    def kill(self) -> None:
        self.collector.kill()
        self.collector.wait()

    def close(self) -> None:
        """The engine ends, and its collector is told to."""
        self._ring.close()
        self.collector.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Until the collector has drained the ring and ended."""
        assert self.collector.wait(PATIENCE_S) == 0, self.log

    @property
    def log(self) -> str:
        return self._log.read_text()


@pytest.mark.kill
def test_three_hosts_share_a_lake_while_one_collector_is_killed_again_and_again(
    place: LakePlace, tmp_path: Path
) -> None:
    """They commit, merge, expire, prune and roll up the same tables at the same time."""
    hosts = [Host(place, tmp_path / f"host{number}", number) for number in range(3)]
    for host in hosts:
        host.ready()
    for moment in range(160):
        for host in hosts:
            host.write()
        if moment in (50, 110):
            hosts[0].kill()
            hosts[0].launch()
        time.sleep(0.02)
    hosts[0].ready()
    for host in hosts:
        host.close()
    for host in hosts:
        host.wait()
        assert "Traceback" not in host.log
    ids = ", ".join(f"'{host.engine_id}'" for host in hosts)
    with open_connection(place, read_only=False) as lake:
        for host in hosts:  # what they had not come to
            roll_up(lake, host.engine_id, ALL_STEPS)
        query = f"""
            SELECT count(*), count(DISTINCT (slot, step_id)), min(step_id), max(step_id)
            FROM tokens WHERE engine_id IN ({ids}) GROUP BY engine_id
        """
        steps = hosts[0].steps
        assert lake.execute(query).fetchall() == [(ROWS * steps, ROWS * steps, 0, steps - 1)] * 3
        lost = f"SELECT count(*) FROM losses WHERE engine_id IN ({ids})"
        assert lake.execute(lost).fetchone() == (0,)
        rolled = f"""
            SELECT engine_id, sum(tokens)::BIGINT FROM latency_rollup WHERE engine_id IN ({ids})
            GROUP BY engine_id ORDER BY engine_id
        """
        assert lake.execute(rolled).fetchall() == [
            (host.engine_id, ROWS * (steps - 1)) for host in hosts
        ], "first tokens are left out"
        files = "SELECT count(*) FROM ducklake_list_files('lake', 'tokens')"
        assert (lake.execute(files).fetchone() or (0,))[0] < 60, "they were merged"
