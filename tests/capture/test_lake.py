"""The lake: its schema, what its views mean, and its documentation."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from capture.collecting.upkeep import SmallFiles, expire, merge
from capture.collector import Collector
from capture.errors import LakeError, LakeMissingError, LakeVersionError
from capture.frames import TraceWriter
from capture.lake import LakePlace, extension_path, open_connection
from capture.schema import TABLES
from capture.schema_docs import render
from capture.settings import Settings
from capture.views import VIEWS
from tests.capture.rings import new_ring, write_finish, write_request, write_step
from tests.capture.stage import Clock

MS = 1_000_000
BORDERS = [
    (93, 1716191, 54),
    (123, 536977, 15),
    (88, 303376, 55),
    (126, 1117172, 99),
]  # bins, span in us, border
DOCS = Path(__file__).parents[2] / "docs" / "sql.md"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lake")


@pytest.fixture(scope="module")
def ids() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def lake(home: Path, ids: dict[str, str]) -> Iterator[duckdb.DuckDBPyConnection]:
    """One engine with a request for each thing that can happen."""
    place = LakePlace(str(home / "catalog.sqlite"), str(home / "data"))
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr("capture.ring.time", clock)
        ring = new_ring(home / "rings")
        trace = TraceWriter(ring)
        trace.engine({"model": "tiny", "fingerprint": "f00d"})
        write_latencies(trace, ids, clock)
        for slot, cause in enumerate(CAUSES, start=10):
            ids[cause] = write_gap(trace, slot, cause, clock)
        trace.mark("deploy 7")
        ring.close()
    Collector(
        place, ring_dir=home / "rings", crash_dir=home / "crashes", stop=threading.Event()
    ).run(once=True)
    connection = open_connection(place)
    yield connection
    connection.close()


def write_latencies(trace: TraceWriter, ids: dict[str, str], clock: Clock) -> None:
    """Requests without steps: one that went well, one failed, one queued, one still running."""
    start = clock.ns

    def finish(slot: int, reason: str, tokens: int, times_ms: tuple[int, int, int, int]) -> None:
        names = ("admitted_ns", "first_token_ns", "last_token_ns", "flushed_ns")
        times = {name: start + ms * MS for name, ms in zip(names, times_ms, strict=True)}
        write_finish(trace, slot, reason=reason, output_tokens=tokens, **times)

    ids["plain"] = write_request(trace, 0, arrival_ns=start)
    ids["failed"] = write_request(trace, 1, arrival_ns=start)
    ids["queued"] = write_request(trace, 2, arrival_ns=start, tenant="late")
    ids["running"] = write_request(trace, 3, arrival_ns=start)
    finish(0, "length", 6, (100, 200, 300, 310))
    finish(1, "error", 2, (1, 2, 3, 50))
    finish(2, "stop", 1, (800, 900, 900, 900))
    late = clock.ns + 899 * MS
    write_step(trace, 0, 1, slot=2, phase=1, position=0, latency_us=900_000, start_ns=late)


CAUSES = (
    "preempted",
    "not scheduled",
    "shared a step with a prefill",
    "host slow",
    "device slow",
    "engine idle",
)
GAPS = 19 * len(CAUSES)


def write_gap(trace: TraceWriter, slot: int, cause: str, clock: Clock, **changed: object) -> str:
    """A request of 20 tokens, 3 ms each, but the tenth takes 30 ms because of `cause`."""
    start = clock.ns
    request_id = write_request(trace, slot, arrival_ns=start, **changed)
    first_step = slot * 100
    for position in range(20):
        slow = position == 10
        spent_us = 30_000.0 if slow else 3_000.0
        fields: dict[str, object] = {"forward_us": 2900.0}
        step_id = first_step + position
        if slow and cause == "preempted":
            trace.event(kind="preempted", request_id=None, slot=slot, detail="no blocks")
        elif slow and cause == "not scheduled":
            write_step(trace, step_id, 1, slot=9, position=1, start_ns=clock.ns)
        elif slow and cause == "shared a step with a prefill":
            fields = {"forward_us": 29_900.0, "prefill_tokens": 512}
        elif slow and cause == "host slow":
            fields = {"schedule_us": 27_050.0, "forward_us": 2900.0}
        elif slow and cause == "device slow":
            fields = {"forward_us": 30_000.0}
        late = position > 10 or (slow and cause == "not scheduled")
        write_step(
            trace,
            step_id + late,
            1,
            slot=slot,
            position=position,
            phase=1 if position == 0 else 0,
            latency_us=spent_us,
            start_ns=clock.ns + int(spent_us - 3_000) * 1000,
            **fields,  # type: ignore[arg-type]
        )
        clock.ns += int(spent_us) * 1000
    times = {"admitted_ns": start + 1 * MS, "first_token_ns": start + 3 * MS}
    write_finish(trace, slot, output_tokens=20, last_token_ns=clock.ns, **times)
    return request_id


def only(lake: duckdb.DuckDBPyConnection, sql: str) -> tuple[object, ...]:
    (row,) = lake.execute(sql).fetchall()
    return row


def test_latencies_mean_what_the_field_means_by_them(
    lake: duckdb.DuckDBPyConnection, ids: dict[str, str]
) -> None:
    figures = "queue_ms, ttft_ms, tpot_ms, sending_ms, duration_ms, outcome"
    one = f"SELECT {figures} FROM request_latency WHERE request_id = "
    assert only(lake, f"{one}'{ids['plain']}'") == (100, 200, 20, 10, 310, "length")
    assert only(lake, f"{one}'{ids['failed']}'") == (1, None, None, 47, 50, "error")
    assert only(lake, f"{one}'{ids['queued']}'")[1:3] == (900, None), "one token has no TPOT"
    gone = (None, None, None, None, None, "engine_gone")
    assert only(lake, f"{one}'{ids['running']}'") == gone


def test_gaps_are_per_token_and_leave_the_first_out(lake: duckdb.DuckDBPyConnection) -> None:
    gaps = "SELECT count(*), min(position), max(gap_ms) FROM token_gaps"
    assert only(lake, gaps) == (GAPS, 1, 30)
    assert only(lake, "SELECT count(*) FROM token_gaps WHERE tenant = 'late'") == (0,)
    slow = lake.execute("SELECT position, gap_ms, prefill_tokens FROM slow_tokens(6)").fetchall()
    assert {row[:2] for row in slow} == {(10, 30)}
    assert {row[2] for row in slow} == {0, 512}


def test_the_heat_map_counts_every_gap_once(lake: duckdb.DuckDBPyConnection) -> None:
    span = "(SELECT min(arrived_at) FROM requests), (SELECT max(finished_at) FROM finishes)"
    cells = lake.execute(f"SELECT * FROM latency_heatmap({span}, 6, 10, 0.5)").fetchall()
    assert sum(row[6] for row in cells) == GAPS
    assert {row[0] for row in cells} == set(range(6)), "x is the arrival of the request"
    assert {row[2:5] for row in cells} == {(y, 2 * y, 2 * y + 1) for y in range(10)}
    starts = [row[1] for row in cells]
    assert starts == sorted(starts)
    highest = f"SELECT max(latency_ms) FROM latency_heatmap({span}, 6, 10, 1.0)"
    assert only(lake, highest) == (30,)
    nothing = "SELECT * FROM latency_heatmap('2001-01-01', '2001-01-02', 5, 10, 0.5)"
    assert lake.execute(nothing).fetchall() == []


def test_a_request_on_the_border_of_a_time_bin_is_in_the_later_one(
    lake: duckdb.DuckDBPyConnection,
) -> None:
    """A quotient of floats puts some of them one bin too early."""
    arrival = only(lake, "SELECT min(arrived_at) FROM token_gaps")[0]
    for bins, span_us, border in BORDERS:
        assert border * span_us / bins // (span_us / bins) < border, "floats err here"
        start = f"TIMESTAMP '{arrival}' - to_microseconds({border * span_us // bins})"
        ends = f"{start}, {start} + to_microseconds({span_us})"
        first = (
            f"SELECT min(time_bin), min(time_start) FROM latency_heatmap({ends}, {bins}, 4, 0.5)"
        )
        assert only(lake, first) == (border, arrival)


def test_every_example_of_the_documentation_runs(lake: duckdb.DuckDBPyConnection) -> None:
    examples = re.findall(r"```sql\n(.*?)\n```", DOCS.read_text(), re.DOTALL)
    assert len(examples) == len(TABLES) + len(VIEWS)
    for example in examples:
        lake.execute(example).fetchall()


def test_plain_duckdb_reads_the_lake_as_the_documentation_says(
    lake: duckdb.DuckDBPyConnection, home: Path
) -> None:
    block = re.search(r"((?:^    .*\n)*    ATTACH (?:.*\n)*?    USE lake;)", DOCS.read_text(), re.M)
    assert block is not None
    script = block[1].replace(
        "/var/lib/inferloop/lake/catalog.sqlite", str(home / "catalog.sqlite")
    )
    with duckdb.connect() as plain:
        for name in ("ducklake", "sqlite_scanner"):
            plain.execute(f"LOAD '{extension_path(name, duckdb.__version__)}'")
        plain.execute(re.sub(r"(INSTALL|LOAD) \w+;", "", script))
        setting = "SELECT current_setting('sqlite_disable_multithreaded_scans')"
        assert only(plain, setting) == (True,), "else rows vanish while files are merged"
        assert only(plain, "SELECT count(*) FROM token_gaps") == (GAPS,)
        with pytest.raises(duckdb.Error, match="read-only"):
            plain.execute("DELETE FROM marks")


def test_the_documentation_is_current() -> None:
    assert DOCS.read_text() == render(), "run: python -m capture.schema_docs > docs/sql.md"


def test_views_document_the_columns_they_have(lake: duckdb.DuckDBPyConnection) -> None:
    for view in VIEWS:
        documented = [n for column in view.columns for n in column.name.split(", ")]
        sample = view.name if view.parameters is None else view.example.split("FROM ", 1)[1]
        actual = [row[0] for row in lake.execute(f"DESCRIBE SELECT * FROM {sample}").fetchall()]
        assert sorted(actual) == sorted(documented), view.name


def test_tables_and_columns_carry_their_meaning(lake: duckdb.DuckDBPyConnection) -> None:
    unexplained = lake.execute(
        "SELECT table_name, column_name FROM duckdb_columns() "
        "WHERE database_name = 'lake' AND comment IS NULL AND table_name IN "
        "(SELECT table_name FROM duckdb_tables() WHERE database_name = 'lake')"
    ).fetchall()
    assert unexplained == []


def test_upkeep_merges_files_and_changes_no_answer(tmp_path: Path) -> None:
    place = LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))
    with open_connection(place, read_only=False) as lake:
        for part in range(12):
            lake.execute(
                "INSERT INTO marks SELECT uuid(), '2026-01-01'::TIMESTAMP, i::VARCHAR "
                f"FROM range({part * 1000}, {part * 1000 + 1000}) AS r(i)"
            )
        before = len(list(tmp_path.glob("data/main/marks/*.parquet")))
        merge(lake, SmallFiles("marks", 1 << 30, 1 << 30))
        expire(lake, 0, 0)
        expire(lake, 0, 0)
        after = len(list(tmp_path.glob("data/main/marks/*.parquet")))
        assert only(lake, "SELECT count(*), count(DISTINCT text) FROM marks") == (12_000, 12_000)
    assert (before, after) == (12, 1)


def test_a_reader_between_snapshot_and_file_list_loses_no_rows_to_a_merge(tmp_path: Path) -> None:
    place = LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))
    count = "SELECT count(*), sum(length(text)) FROM marks"
    with open_connection(place, read_only=False) as lake, open_connection(place) as reader:
        lake.execute("SET ducklake_default_data_inlining_row_limit = 0")
        for _ in range(3):
            lake.execute(
                "INSERT INTO marks SELECT uuid(), '2026-01-01'::TIMESTAMP, 'x' FROM range(100)"
            )
        # The newest file stays as it is, so the merged one comes after it in the catalog.
        lake.execute(
            "INSERT INTO prefill_chunks SELECT uuid(), 0, 0, 0, '2026-01-01'::TIMESTAMP, 0"
        )
        reader.execute("BEGIN")
        assert only(reader, "SELECT count(*) FROM prefill_chunks") == (1,), "takes the snapshot"
        merge(lake, SmallFiles("marks", 1 << 30, 1 << 30))
        assert only(reader, count) == (300, 300)
        lake.execute("INSERT INTO marks SELECT uuid(), '2026-01-01'::TIMESTAMP, 'late'")
        merge(lake, SmallFiles("marks", 1 << 30, 1 << 30))
        assert only(reader, count) == (300, 300), "what came later is left out"
        reader.execute("COMMIT")
        assert only(reader, count) == (301, 304)


def test_a_missing_lake_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(LakeMissingError, match=r"start `inferloop collect`"):
        open_connection(LakePlace(str(tmp_path / "none.sqlite"), str(tmp_path)))


def test_a_newer_lake_is_refused_and_an_older_one_names_the_way_out(tmp_path: Path) -> None:
    place = LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))
    with open_connection(place, read_only=False) as lake:
        stamp = "INSERT INTO schema_versions VALUES (?, 'x', now()::TIMESTAMP + INTERVAL 1 HOUR)"
        lake.execute(stamp, [99])
    for read_only in (True, False):
        with pytest.raises(LakeVersionError, match="upgrade inferloop"):
            open_connection(place, read_only=read_only)


def test_a_catalog_without_wal_is_refused(tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.sqlite"
    foreign = sqlite3.connect(catalog)
    foreign.execute("CREATE TABLE x (y)")
    foreign.close()
    with pytest.raises(LakeError, match="journal_mode=WAL"):
        open_connection(LakePlace(str(catalog), str(tmp_path / "data")), read_only=False)


def test_a_file_that_is_no_catalog_is_a_clear_error(tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.sqlite"
    catalog.write_text("hello")
    with pytest.raises(LakeError, match="cannot open the lake"):
        open_connection(LakePlace(str(catalog), str(tmp_path)))


def test_a_missing_extension_names_its_package() -> None:
    with pytest.raises(LakeError, match=r"pip install duckdb-extension-nothing-here==1\.5\.5"):
        extension_path("nothing_here", "1.5.5")


def test_places_come_from_the_settings(tmp_path: Path) -> None:
    place = LakePlace.from_settings(Settings(home=tmp_path))
    assert place.catalog_file == tmp_path / "lake" / "catalog.sqlite"
    team = Settings(
        home=tmp_path, lake_catalog="postgresql://me:secret@db/lake", lake_data="s3://bucket/lake"
    )
    assert LakePlace.from_settings(team).data == "s3://bucket/lake"
    assert LakePlace.from_settings(team).catalog_file is None
    assert LakePlace.from_settings(team).described == "postgresql://db/lake"
