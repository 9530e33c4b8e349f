"""The lake's upkeep: what it deletes, what it keeps, and that readers never notice."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from uuid import UUID

import duckdb
import numpy as np
import pytest

from capture.collecting import upkeep
from capture.collecting.retention import METADATA, LakeFile, Limits, lake_files
from capture.collecting.upkeep import (
    FEW_FILES,
    SMALL_FILE_BYTES,
    SmallFiles,
    Upkeep,
    delete_orphans,
    expire,
    worth_merging,
)
from capture.collector import Collector
from capture.frames import TraceWriter
from capture.lake import LakePlace, open_connection
from tests.capture.rings import new_ring, write_step
from tests.waiting import PATIENCE_S, until

ENGINE = UUID(int=3)
NOON = datetime(2026, 1, 1, 12)
TOKENS = 128 * 500


@pytest.fixture
def place(tmp_path: Path) -> LakePlace:
    return LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))


@pytest.fixture
def lake(place: LakePlace) -> Iterator[duckdb.DuckDBPyConnection]:
    connection = open_connection(place, read_only=False)
    connection.execute("SET ducklake_default_data_inlining_row_limit = 0")
    yield connection
    connection.close()


def files(place: LakePlace, table: str) -> list[Path]:
    return sorted(Path(place.data).glob(f"main/{table}/*.parquet"))


def mark(lake: duckdb.DuckDBPyConnection, text: str) -> None:
    lake.execute("INSERT INTO marks VALUES ($1, $2, $3)", [ENGINE, NOON, text])


def test_files_of_dropped_rows_leave_the_disk_after_the_grace(
    lake: duckdb.DuckDBPyConnection, place: LakePlace
) -> None:
    mark(lake, "a")
    lake.execute("DELETE FROM marks")
    expire(lake, 3600, 3600)
    assert len(files(place, "marks")) == 1, "a reader of the last minutes may want it"
    assert len(lake.execute("SELECT snapshot_id FROM ducklake_snapshots('lake')").fetchall()) > 2
    expire(lake, 0, 3600)
    assert len(files(place, "marks")) == 1
    assert len(lake.execute("SELECT snapshot_id FROM ducklake_snapshots('lake')").fetchall()) == 1
    expire(lake, 0, 0)
    assert files(place, "marks") == []


def test_a_clock_set_back_does_not_keep_the_disk_full(
    lake: duckdb.DuckDBPyConnection, place: LakePlace
) -> None:
    mark(lake, "a")
    lake.execute("DELETE FROM marks")
    expire(lake, 0, 3600)
    scheduled = f"{METADATA}.ducklake_files_scheduled_for_deletion"
    lake.execute(f"UPDATE {scheduled} SET schedule_start = now() + INTERVAL 2 MINUTE")
    expire(lake, 3600, 3600)
    assert len(files(place, "marks")) == 1, "within the grace, as if it had just been replaced"
    lake.execute(f"UPDATE {scheduled} SET schedule_start = now() + INTERVAL 3 HOUR")
    expire(lake, 3600, 3600)
    assert files(place, "marks") == []


def lake_files_of(sizes: list[int]) -> list[LakeFile]:
    return [LakeFile("tokens", size, size // 6, None) for size in sizes]


def test_a_row_is_rewritten_a_few_times_however_small_the_commits() -> None:
    """Merging all small files each time would rewrite a row twenty times here."""
    sizes: list[int] = []
    written = 0
    for _ in range(1000):
        sizes += [12_000] * 20
        while found := worth_merging(lake_files_of(sizes)):
            (small,) = found
            merged = 0
            for size in [size for size in sizes if size < small.below_bytes]:
                if merged < 8 << 20:
                    merged += size
                    sizes.remove(size)
            sizes.append(merged)
            written += merged
        assert sum(size < SMALL_FILE_BYTES for size in sizes) <= FEW_FILES
    assert written < 8 * sum(sizes)


def test_few_files_are_left_alone_and_one_odd_file_stops_no_merge() -> None:
    assert worth_merging([]) == []
    assert worth_merging(lake_files_of([100] * FEW_FILES)) == []
    assert worth_merging(lake_files_of([1 << 30] * 50)) == []
    (small,) = worth_merging(lake_files_of([100, *[1 << 20] * 20]))
    assert small.below_bytes > 1 << 20


def test_one_merge_is_of_a_bounded_size_and_of_the_table_that_needs_it_most(
    lake: duckdb.DuckDBPyConnection,
) -> None:
    """Commits wait for it: a merge of all small files at once took seconds."""
    lake.execute(
        "INSERT INTO losses (engine_id, epoch, noticed_at, kind, first_sequence, frames, "
        "tokens) VALUES (uuid(), 0, now()::TIMESTAMP, 'torn', 0, 1, 0)"
    )
    for _ in range(FEW_FILES + 20):
        lake.execute("INSERT INTO marks SELECT uuid(), $1, uuid() FROM range(25_000)", [NOON])
    subject = Upkeep(LakePlace("", ""), Limits())
    subject.commits = upkeep.MERGE_COMMITS
    merged = []
    while subject.commits:
        assert subject.run_if_due(lake, calm=True)
        sizes = [file.size_bytes for file in lake_files(lake)]
        merged.append([size for size in sizes if size >= SMALL_FILE_BYTES])
    assert [len(sizes) for sizes in merged] == [1, 2, 2]
    assert max(merged[-1]) <= upkeep.MERGE_BYTES
    assert len(sizes) - 2 <= FEW_FILES + 2, "of marks; one of losses, one of the lake's versions"
    assert lake.execute("SELECT count(*) FROM marks").fetchall() == [(25_000 * (FEW_FILES + 20),)]


def test_files_with_deleted_rows_are_in_the_way_of_no_other_work(
    lake: duckdb.DuckDBPyConnection,
) -> None:
    """DuckLake merges none of them: the most numerous, they were tried for ever instead of others,
    and the rollup waited for that."""
    for _ in range(FEW_FILES + 5):
        lake.execute("INSERT INTO marks SELECT uuid(), $1, i::VARCHAR FROM range(3) r(i)", [NOON])
    lake.execute("DELETE FROM marks WHERE text = '1'")
    lost = "INSERT INTO losses VALUES ($1, 7, $2, 'torn', 0, 1, 1, NULL)"
    for _ in range(FEW_FILES + 1):
        lake.execute(lost, [ENGINE, NOON])
    subject = Upkeep(LakePlace("", ""), Limits())
    subject.commits = upkeep.MERGE_COMMITS
    assert subject.run_if_due(lake, calm=True)
    assert sum(file.table == "losses" for file in lake_files(lake)) == 1
    assert subject.run_if_due(lake, calm=True)
    assert not subject.run_if_due(lake, calm=True), "there is nothing left that a merge can do"


def test_a_merge_that_finds_nothing_stops_no_other_table_s(
    lake: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [SmallFiles("losses", 1, 1), SmallFiles("marks", 1 << 30, 1)]
    monkeypatch.setattr(upkeep, "worth_merging", lambda _: found)
    for text in "ab":
        mark(lake, text)
    subject = Upkeep(LakePlace("", ""), Limits())
    subject.commits = upkeep.MERGE_COMMITS
    assert subject.run_if_due(lake, calm=True)
    assert sum(file.table == "marks" for file in lake_files(lake)) == 1


def test_a_merge_that_finds_nothing_is_not_tried_again_at_once(
    lake: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "worth_merging", lambda _: [SmallFiles("marks", 1, 1)])
    subject = Upkeep(LakePlace("", ""), Limits())
    subject.commits = upkeep.MERGE_COMMITS
    assert subject.run_if_due(lake, calm=True)
    assert not subject.run_if_due(lake, calm=True)


def test_a_file_that_cannot_be_deleted_does_not_end_the_collector(
    lake: duckdb.DuckDBPyConnection, place: LakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(upkeep, "GRACE_S", 0.0)
    mark(lake, "a")
    lake.execute("DELETE FROM marks")
    subject = Upkeep(place, Limits())
    subject._due_s = {subject._expire: 0.0}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        assert subject.run_if_due(lake, calm=True)
    assert subject.failures == 1
    assert len(files(place, "marks")) == 1
    subject._due_s = {subject._expire: 0.0}
    assert subject.run_if_due(lake, calm=True)
    assert files(place, "marks") == []


def test_leftovers_of_a_killed_commit_are_deleted_and_nothing_else(
    lake: duckdb.DuckDBPyConnection, place: LakePlace
) -> None:
    mark(lake, "a")
    (known,) = files(place, "marks")
    old, new = known.with_name("old.parquet"), known.with_name("new.parquet")
    for path in (old, new):
        path.write_bytes(known.read_bytes())
    os.utime(old, (time.time() - 7200,) * 2)
    assert delete_orphans(lake, 3600) == 1
    assert files(place, "marks") == sorted([known, new])


def test_old_cursors_go_but_for_the_last_and_those_that_date_a_loss(
    lake: duckdb.DuckDBPyConnection, place: LakePlace
) -> None:
    for second in range(10):
        lake.execute(
            "INSERT INTO ingest_cursor VALUES ($1, 7, $2, 0, $2, 0, 0, 0, 0, false, $3)",
            [ENGINE, second, NOON + timedelta(seconds=second)],
        )
    lost = NOON + timedelta(seconds=4.5)
    lake.execute(
        "INSERT INTO losses VALUES ($1, 7, $2, 'overwritten', 0, 1, 1, NULL)", [ENGINE, lost]
    )
    lake.execute(
        "INSERT INTO rollup_marks SELECT $1, i, $2, $2 FROM range(4) AS r(i)", [ENGINE, NOON]
    )
    subject = Upkeep(place, Limits())
    subject._prune(lake)
    assert lake.execute("SELECT step_id FROM rollup_marks").fetchall() == [(3,)]
    left = lake.execute("SELECT sequence FROM ingest_cursor ORDER BY sequence").fetchall()
    assert left == [(4,), (9,)]


def test_a_failure_waits_and_is_counted(
    lake: duckdb.DuckDBPyConnection, place: LakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> bool:
        raise duckdb.TransactionException("conflict")

    monkeypatch.setattr(upkeep, "RETENTION_S", 3600.0)
    subject = Upkeep(place, Limits(days=1))
    monkeypatch.setattr(subject.retention, "run", failing)
    assert subject.run_if_due(lake, calm=True)
    assert (subject.runs, subject.failures) == (1, 1)
    assert not subject.run_if_due(lake, calm=True), "not again at once"


def varied_engine(directory: Path) -> None:
    """A closed ring of values that do not compress: about 8 bytes a token in the lake."""
    ring = new_ring(directory, 16 << 20)
    trace, chance = TraceWriter(ring), np.random.default_rng()
    for step_id in range(TOKENS // 128):
        write_step(
            trace,
            step_id,
            128,
            token_ids=chance.integers(0, 1 << 30, 128, np.uint32),
            logprobs=-chance.gamma(1.0, 1.0, 128).astype(np.float32),
        )
    ring.close()


def test_the_collector_holds_its_lake_under_the_limit(
    place: LakePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "RETENTION_S", 0.0)
    monkeypatch.setattr(upkeep, "HURRIED_GRACE_S", 0.2)
    monkeypatch.setattr("capture.collector.COMMIT_S", 0.05)
    limit = 2500 << 10
    stop = threading.Event()
    subject = Collector(
        place,
        ring_dir=tmp_path / "rings",
        crash_dir=tmp_path / "crashes",
        stop=stop,
        limits=Limits(max_bytes=limit),
    )
    thread = threading.Thread(target=subject.run, daemon=True)
    thread.start()
    try:
        for engines in range(1, 9):
            varied_engine(tmp_path / "rings")
            until(lambda read=engines * TOKENS: subject.status.tokens >= read, "its tokens")
        status = subject.status
        until(lambda: status.dropped_tokens and status.lake_bytes <= limit, "a lake in its limit")
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert subject.status.dropped_tokens > 0
    with open_connection(place) as lake:
        counted = "SELECT (SELECT count(*) FROM tokens), (SELECT sum(tokens) FROM losses)"
        ((tokens, dropped),) = lake.execute(counted).fetchall()
    assert tokens + dropped == 8 * TOKENS
    assert dropped == subject.status.dropped_tokens
