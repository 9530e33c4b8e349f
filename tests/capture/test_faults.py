"""Faults of the trace path: what the user sees, and that no committed row is lost or doubled."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import duckdb
import pytest

from capture import ring
from capture.collecting import lake_check, lake_writer, roster
from capture.collecting.follower import Follower, Status
from capture.collecting.insert import insert_rows
from capture.collecting.retention import Limits
from capture.collecting.upkeep import SmallFiles, Upkeep, delete_orphans, expire, merge
from capture.collector import Collector
from capture.errors import CollectorError, LakeError, RingError
from capture.frames import TraceWriter
from capture.lake import LakePlace, open_connection
from capture.reader import RingReader, discover
from capture.ring import MIN_CAPACITY
from tests.capture.children import forked, kill
from tests.capture.lakes import foreign_lock, said, start_collector
from tests.capture.rings import MIB, engine, new_ring, write_finish, write_request, write_step
from tests.migrations.postgres import _running, postgres_server
from tests.waiting import PATIENCE_S, until

FRAME_BYTES = 320  # a step of four requests


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    return tmp_path / "rings"


@pytest.fixture
def place(tmp_path: Path) -> LakePlace:
    return LakePlace(str(tmp_path / "lake" / "catalog.sqlite"), str(tmp_path / "lake" / "data"))


class Running:
    """A collector in a thread of its own; `waiting` is set once it waits for the lake."""

    started_ones: ClassVar[list[Running]] = []

    def __init__(self, place: LakePlace, rings: Path, *, once: bool = False) -> None:
        self.stop, self.started = threading.Event(), threading.Event()
        self.waiting = threading.Event()
        self.reasons: list[str] = []
        self.error: Exception | None = None
        self.collector = Collector(
            place,
            ring_dir=rings,
            crash_dir=rings.parent / "crashes",
            stop=self.stop,
            on_status=self._see,
            on_start=self.started.set,
        )
        self._thread = threading.Thread(target=self._run, args=(once,), daemon=True)
        self._thread.start()
        self.started_ones.append(self)

    def _run(self, once: bool) -> None:
        try:
            self.collector.run(once=once)
        except Exception as error:  # noqa: BLE001  handed to the test's thread
            self.error = error

    def _see(self, status: Status) -> None:
        if status.waiting_for is not None:
            self.reasons.append(status.waiting_for)
            self.waiting.set()

    def committed(self, tokens: int) -> None:
        """Wait until so many tokens are in the lake."""
        until(lambda: self.status.commits and self.status.tokens >= tokens, f"{tokens} tokens")
        commits = self.status.commits
        until(lambda: self.status.commits > commits or not self.pending, "their commit")

    @property
    def pending(self) -> bool:
        waiting = any(follower.rows for follower in self.collector._roster.followers)
        return waiting or self.collector._lake_thread.busy

    @property
    def status(self) -> Status:
        return self.collector.status

    def end(self) -> Exception | None:
        self.stop.set()
        return self.join()

    def join(self) -> Exception | None:
        self._thread.join(2 * PATIENCE_S)
        assert not self._thread.is_alive()
        return self.error


@pytest.fixture(autouse=True)
def no_collector_outlives_its_test() -> Iterator[None]:
    yield
    while Running.started_ones:
        Running.started_ones.pop().stop.set()


def collect_once(place: LakePlace, rings: Path) -> Status:
    running = Running(place, rings, once=True)
    error = running.join()
    if error is not None:
        raise error
    return running.status


def rows(place: LakePlace, sql: str) -> list[tuple[object, ...]]:
    with open_connection(place) as lake:
        return lake.execute(sql).fetchall()


def assert_exact(place: LakePlace, tokens: int) -> None:
    """So many tokens are in the lake, each once, and nothing was lost."""
    counted = "SELECT count(*), count(DISTINCT (engine_id, slot, position)) FROM tokens"
    assert rows(place, counted) == [(tokens, tokens)]
    assert rows(place, "SELECT count(*) FROM losses WHERE kind <> 'torn'") == [(0,)]


def test_a_backlog_of_stale_rings_does_not_starve_a_living_one(
    place: LakePlace, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a stale ring is read, a living engine writes a third of its own ring."""
    for _ in range(6):
        engine(rings, requests=64, steps=100, capacity=MIB).close()
    live = new_ring(rings, MIN_CAPACITY)
    trace = TraceWriter(live)
    poll, step_ids = Follower.poll, iter(range(1_000_000))

    def slow(self: Follower, status: Status) -> bool:
        if self.abandoned:
            for _ in range(MIN_CAPACITY // 3 // FRAME_BYTES):
                write_step(trace, next(step_ids), 4)
        return poll(self, status)

    with monkeypatch.context() as patch:
        patch.setattr(Follower, "poll", slow)
        collect_once(place, rings)
    assert [path.name for path in discover(rings)] == [live.path.name]
    tokens = 6 * 64 * 100 + live.counters.tokens
    live.close()
    collect_once(place, rings)
    assert_exact(place, tokens)


def test_a_living_ring_that_stays_half_full_does_not_starve_the_stale_ones(
    place: LakePlace, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(rings, requests=64, steps=200, capacity=MIB).close()
    monkeypatch.setattr(roster.Roster, "pressed", True)
    collect_once(place, rings)
    assert discover(rings) == []
    assert_exact(place, 64 * 200)


def test_a_ring_that_cannot_be_opened_now_is_followed_later(
    place: LakePlace,
    rings: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trace_ring = engine(rings, requests=2, steps=5)
    attempts = iter(range(100))

    def opened(path: Path) -> RingReader:
        if next(attempts) < 2:
            raise RingError(f"cannot read the ring {path}: Too many open files")
        return RingReader(path)

    monkeypatch.setattr(roster, "RingReader", opened)
    running = Running(place, rings)
    running.committed(10)
    assert running.end() is None
    said = [record.message for record in caplog.records if "not yet followed" in record.message]
    assert len(said) == 1
    assert_exact(place, 10)
    trace_ring.close()


def test_many_stale_rings_take_a_bounded_number_of_open_files(
    place: LakePlace, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "OPEN_STALE_RINGS", 3)
    for _ in range(12):
        engine(rings, requests=1, steps=2, capacity=MIN_CAPACITY).close()
    most = 0
    poll = Follower.poll

    def counting(self: Follower, status: Status) -> bool:
        nonlocal most
        most = max(most, len(open_files(rings)))
        return poll(self, status)

    monkeypatch.setattr(Follower, "poll", counting)
    status = collect_once(place, rings)
    assert status.rings == 12
    assert discover(rings) == []
    assert 0 < most <= 2 * roster.OPEN_STALE_RINGS + 2
    assert open_files(rings.parent) == []
    assert_exact(place, 24)


def open_files(directory: Path) -> list[str]:
    """What this process has open below a directory, files that are deleted by now included."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return [link for link in links if link.startswith(f"{directory}/")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here: needs root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def remount(disk: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True)


def test_a_lake_that_turns_read_only_is_waited_for(small_disk: Path, rings: Path) -> None:
    place = LakePlace(str(small_disk / "catalog.sqlite"), str(small_disk / "data"))
    trace_ring = engine(rings, requests=2, steps=5)
    running = Running(place, rings)
    running.committed(10)
    # Files that are open for writing would keep it from turning read-only.
    subprocess.run(["mount", "--bind", str(small_disk), str(small_disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(small_disk)], check=True)
    try:
        write_step(TraceWriter(trace_ring), 5, 2)
        assert running.waiting.wait(PATIENCE_S)
    finally:
        subprocess.run(["umount", "--lazy", str(small_disk)], check=True)
    assert "has turned read-only" in running.reasons[0]
    running.committed(12)
    assert running.end() is None
    assert_exact(place, 12)
    trace_ring.close()


def test_a_lake_that_is_read_only_from_the_start_is_refused(small_disk: Path, rings: Path) -> None:
    remount(small_disk, "ro")
    place = LakePlace(str(small_disk / "lake" / "catalog.sqlite"), str(small_disk / "lake/data"))
    with pytest.raises(CollectorError, match=r"cannot lock .*Read-only file system"):
        collect_once(place, rings)


def test_a_catalog_locked_longer_than_any_timeout_is_waited_out(
    place: LakePlace, rings: Path
) -> None:
    collect_once(place, rings)
    trace_ring = engine(rings, requests=2, steps=5)
    with foreign_lock(place):
        running = Running(place, rings)
        until(lambda: len(running.reasons) >= 3, "attempts that waited as long as they may")
    running.committed(10)
    assert "locked" in running.reasons[0]
    assert running.status.waiting_for is None
    assert running.end() is None
    assert_exact(place, 10)
    trace_ring.close()


def keep_the_lake(place: LakePlace) -> None:
    """All upkeep, on a catalog that is no SQLite file."""
    subject = Upkeep(place, Limits(days=9, max_bytes=1 << 30))
    with open_connection(place, read_only=False) as lake:
        merge(lake, SmallFiles("tokens", 1 << 30, 1 << 30))
        expire(lake, 0, 0)
        delete_orphans(lake, 3600)
        for work in list(subject._due_s):
            work(lake)
    assert subject.lake_bytes > 0


def test_postgresql_restarted_between_the_rows_and_their_commit(
    rings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgres_server() as url:
        directory = Path(url.partition("host=")[2])
        user = "postgres" if os.geteuid() == 0 else None
        place = LakePlace(url, str(tmp_path / "data"))
        collect_once(place, rings)
        with pytest.MonkeyPatch.context() as patch:
            crashed: list[int] = []
            lock = directory / "data/postmaster.pid"

            def insert_then_crash(connection: duckdb.DuckDBPyConnection, pending: object) -> None:
                insert_rows(connection, pending)  # type: ignore[arg-type]
                if not crashed:
                    crashed.append(int(lock.read_text().split()[0]))
                    os.kill(crashed[0], signal.SIGQUIT)
                    until(lambda: not lock.exists(), "the end of the database")

            patch.setattr(lake_writer, "insert_rows", insert_then_crash)
            engine(rings, requests=2, steps=5).close()
            running = Running(place, rings, once=True)
            assert running.waiting.wait(PATIENCE_S)
        with _running(directory / "data", directory, user):
            assert running.join() is None
            assert_exact(place, 10)
            assert rows(place, "SELECT count(*) FROM events") == [(1,)]
            keep_the_lake(place)
            assert_exact(place, 10)


def test_a_lake_whose_files_were_deleted_says_so_and_goes_on_when_they_are_back(
    place: LakePlace, rings: Path, tmp_path: Path
) -> None:
    trace_ring = engine(rings, requests=2, steps=5)
    running = Running(place, rings)
    running.committed(10)
    Path(place.data).rename(tmp_path / "aside")
    write_step(TraceWriter(trace_ring), 5, 2)
    told = until(
        lambda: next((reason for reason in running.reasons if "files are gone" in reason), ""),
        "what it waits for",
    )
    assert "Bring" in told
    assert place.described in told
    (tmp_path / "aside").rename(place.data)
    running.committed(12)
    assert running.end() is None
    assert_exact(place, 12)
    shutil.rmtree(place.data)
    with pytest.raises(LakeError, match=r"files are gone.*move the catalog away"):
        collect_once(place, rings)
    trace_ring.close()


def test_a_deleted_catalog_is_not_replaced_by_an_empty_one(place: LakePlace, rings: Path) -> None:
    trace_ring = engine(rings, requests=2, steps=5)
    running = Running(place, rings)
    running.committed(10)
    files = sorted(Path(place.data).rglob("*.parquet"))
    for path in Path(place.catalog).parent.glob("catalog.sqlite*"):
        if not path.name.endswith(".lock"):
            path.unlink()
    write_step(TraceWriter(trace_ring), 5, 2)
    error = running.join()
    assert isinstance(error, LakeError)
    assert "catalog" in str(error)
    assert "removed or replaced" in str(error)
    with pytest.raises(LakeError, match="restore the catalog from a backup"):
        collect_once(place, rings)
    assert set(files) <= set(Path(place.data).rglob("*.parquet"))
    trace_ring.close()


def test_sigterm_while_a_commit_waits_still_commits(rings: Path, tmp_path: Path) -> None:
    place = LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))
    process = start_collector(tmp_path, rings)
    with foreign_lock(place):
        trace_ring = engine(rings, requests=10, steps=100)
        assert said(process) == "waiting"
        process.terminate()
        assert said(process) == "stopping", "it does not leave the rows behind"
    assert process.wait(PATIENCE_S) == 0
    assert_exact(place, 1000)
    trace_ring.close()


@pytest.mark.kill
def test_engines_and_collectors_killed_together_again_and_again(
    rings: Path, tmp_path: Path
) -> None:
    """Rows of a dead engine are there once, whoever else dies; only the frame in progress goes."""
    place = LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))
    rings.mkdir()
    chance = random.Random(5)
    written: dict[str, int] = {}
    for _ in range(3):
        pids = [forked(lambda: endless_engine(rings)) for _ in range(2)]
        until(lambda: len([p for p in discover(rings) if p.stem not in written]) >= 2, "two rings")
        readers = [RingReader(p) for p in discover(rings) if p.stem not in written]
        process = start_collector(tmp_path, rings)
        time.sleep(chance.random() * 0.4)
        process.kill()
        for pid in pids:
            kill(pid)
        process.wait()
        for reader in readers:
            written[reader.path.stem] = reader.written[1]
            reader.close()
    collect_once(place, rings)
    assert discover(rings) == []
    counted = rows(
        place,
        "SELECT engine_id::VARCHAR, count(*), count(DISTINCT (slot, position)) "
        "FROM tokens GROUP BY ALL",
    )
    assert len(counted) == len(written) == 6
    for engine_id, tokens, distinct in counted:
        assert tokens == distinct
        assert int(str(tokens)) - written[str(engine_id)] in (0, 8), "8: its tail was not stored"
    assert rows(place, "SELECT count(*) FROM losses WHERE kind <> 'torn'") == [(0,)]
    ended = "SELECT count(*), count(DISTINCT engine_id) FROM events WHERE kind = 'engine_crashed'"
    assert rows(place, ended) == [(6, 6)]
    assert len(list((tmp_path / "crashes").glob("*.json"))) == 6


def endless_engine(rings: Path) -> None:
    """Slow enough that its ring lasts for minutes, whatever a collector takes to start."""
    trace = TraceWriter(new_ring(rings, 16 * MIB))
    trace.engine({"model": "tiny"})
    for slot in range(8):
        write_request(trace, slot)
    step_id = 0
    while True:
        write_step(trace, step_id, 8)
        step_id += 1
        time.sleep(0.003)


def test_a_clock_set_back_four_minutes_makes_no_negative_latency(
    place: LakePlace, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine and its ring began while the clock was four minutes ahead of what it is now."""
    anchors = ring.clock_anchors
    with monkeypatch.context() as patch:
        patch.setattr(
            ring, "clock_anchors", lambda: (anchors()[0], anchors()[1] + 240 * 1_000_000_000)
        )
        trace_ring = new_ring(rings, MIN_CAPACITY)
    trace = TraceWriter(trace_ring)
    start = time.monotonic_ns()
    write_request(trace, 0, arrival_ns=start)
    for step_id in range(3000):
        write_step(trace, step_id, 1, phase=1 if step_id == 0 else 0)
    collect_once(place, rings)
    now = time.monotonic_ns()
    times = dict.fromkeys(("last_token_ns", "detokenized_ns", "flushed_ns"), now)
    write_finish(trace, 0, admitted_ns=start + 1, first_token_ns=start + 2, **times)
    trace_ring.close()
    collect_once(place, rings)
    latencies = (
        "SELECT count(*) FROM request_latency WHERE least(queue_ms, ttft_ms, duration_ms) < 0"
    )
    assert rows(place, latencies) == [(0,)]
    after = (
        "SELECT (SELECT min(noticed_at) FROM losses) > (SELECT min(started_at) FROM steps), "
        "(SELECT happened_at FROM events) > (SELECT max(emitted_at) FROM tokens), "
        "count(*) FILTER (committed_at < (SELECT max(emitted_at) FROM tokens)) FROM ingest_cursor"
    )
    ((noticed_after, ended_after, early),) = rows(place, after)
    assert (noticed_after, ended_after) == (True, True)
    assert int(str(early)) <= 1


def test_a_disk_that_went_away_is_waited_for(
    place: LakePlace, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a failing disk and a server's share the system says more than that a file is missing."""
    trace_ring = engine(rings, requests=2, steps=5)
    running = Running(place, rings)
    running.committed(10)

    def failing(path: object) -> os.statvfs_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(lake_check.os, "statvfs", failing)
        write_step(TraceWriter(trace_ring), 5, 2)
        assert running.waiting.wait(PATIENCE_S)
    assert os.strerror(errno.EIO) in running.reasons[0]
    running.committed(12)
    assert running.end() is None
    assert_exact(place, 12)
    trace_ring.close()
