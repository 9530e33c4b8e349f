"""The collector: every row exactly once, whoever is killed, locked or full."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest
import zstandard

from capture.collecting import lake_writer
from capture.collecting.follower import Status
from capture.collecting.ingest import RingRows
from capture.collector import Collector
from capture.errors import CollectorError
from capture.frames import TraceWriter
from capture.lake import LakePlace, new_cursor, open_connection
from capture.reader import RingReader, discover
from capture.ring import MIN_CAPACITY, RingWriter
from tests.capture.children import end, forked, kill, until_told
from tests.capture.lakes import foreign_lock, start_collector
from tests.capture.rings import MIB, engine, new_ring, write_finish, write_request, write_step
from tests.waiting import PATIENCE_S, until

_readers: dict[LakePlace, duckdb.DuckDBPyConnection] = {}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[LakePlace]:
    place = LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))
    yield place
    if place in _readers:
        _readers.pop(place).close()


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    return tmp_path / "rings"


def collector(place: LakePlace, rings: Path, **changed: object) -> Collector:
    arguments: dict[str, object] = {"stop": threading.Event(), **changed}
    crash_dir = Path(place.data).parent / "crashes"
    return Collector(place, ring_dir=rings, crash_dir=crash_dir, **arguments)  # type: ignore[arg-type]


def collect_once(place: LakePlace, rings: Path) -> Status:
    return collector(place, rings).run(once=True)


def rows(place: LakePlace, sql: str) -> list[tuple[object, ...]]:
    """Through one reader that stays attached while collectors come and go."""
    if place not in _readers:
        _readers[place] = open_connection(place)
    return _readers[place].execute(sql).fetchall()


def test_a_whole_engine_reaches_the_lake_once(place: LakePlace, rings: Path) -> None:
    ring = engine(rings, requests=7, steps=50)
    for _ in range(3):
        collect_once(place, rings)
    assert ring.path.exists(), "the ring of a living engine stays"
    write_request(TraceWriter(ring), 99)
    collect_once(place, rings)
    outcome = "SELECT outcome FROM request_latency WHERE slot = 99"
    assert rows(place, outcome) == [("unfinished",)]
    ring.close()
    collect_once(place, rings)
    assert not ring.path.exists(), "a closed and drained one goes"
    assert rows(place, outcome) == [("engine_gone",)]
    assert rows(place, "SELECT count(*), count(DISTINCT (slot, position)) FROM tokens") == [
        (350, 350)
    ]
    counts = [
        rows(place, f"SELECT count(*) FROM {table}")[0][0]
        for table in ("engines", "requests", "finishes", "steps", "losses")
    ]
    assert counts == [1, 8, 7, 50, 0]
    assert rows(place, "SELECT kind FROM events") == [("engine_closed",)]
    assert rows(place, "SELECT model, info->>'weights' FROM engines") == [("tiny", "int8")]
    (step,) = rows(place, "SELECT device_us, graph_bucket, forward_us FROM steps LIMIT 1")
    assert step == (None, None, 3000.0)


def test_values_arrive_as_they_were_written(place: LakePlace, rings: Path) -> None:
    ring = new_ring(rings)
    trace = TraceWriter(ring)
    before = time.time()
    request_id = write_request(trace, 5)
    write_step(trace, 3, 2, slot=5, phase=2, position=11, prefill_tokens=24)
    write_step(trace, 4, 1, slot=5, phase=1, position=0, latency_us=1234.4)
    write_finish(trace, 5, reason="abort", first_token_ns=0)
    collect_once(place, rings)
    token = "slot, step_id, position, token_id, is_first, latency_us, logprob, margin, kv_blocks"
    assert rows(place, f"SELECT {token} FROM tokens") == [(5, 4, 0, 4, True, 1234, -0.5, 0.5, 1)]
    chunks = rows(place, "SELECT slot, step_id, position FROM prefill_chunks ORDER BY slot")
    assert chunks == [(5, 3, 11), (6, 3, 11)]
    (request,) = rows(place, "SELECT request_id, epoch_us(arrived_at) / 1e6 FROM requests")
    assert request[0] == request_id
    assert before - 60 <= float(str(request[1])) <= time.time() + 60, "UTC, in any time zone"
    finish = "SELECT reason, first_token_at, admitted_at IS NOT NULL FROM finishes"
    assert rows(place, finish) == [("abort", None, True)]
    ring.close()


def test_two_engines_and_a_foreign_file_beside_them(place: LakePlace, rings: Path) -> None:
    first, second = engine(rings, requests=2, steps=10), engine(rings, requests=3, steps=20)
    (rings / "x.ring").write_text("not a ring")
    status = collect_once(place, rings)
    per_engine = "SELECT count(*) AS n FROM tokens GROUP BY engine_id ORDER BY n"
    assert rows(place, per_engine) == [(20,), (60,)]
    assert status.rings == 2
    first.close()
    second.close()


def test_loss_is_exact_in_the_lake_and_told(
    place: LakePlace, rings: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = engine(rings, requests=4, steps=3000, capacity=MIN_CAPACITY)
    ring.close()
    collect_once(place, rings)
    ((tokens,),) = rows(place, "SELECT count(*) FROM tokens")
    (loss,) = rows(place, "SELECT kind, sum(frames), sum(tokens) FROM losses GROUP BY kind")
    assert loss[0] == "overwritten"
    assert int(str(tokens)) + int(str(loss[2])) == 12000
    assert f"lost {loss[2]:,} tokens in {loss[1]:,} frames so far" in caplog.text
    assert rows(place, "SELECT fingerprint FROM engines") == [(None,)]


def test_undecodable_frames_are_counted_and_the_rest_goes_on(place: LakePlace, rings: Path) -> None:
    ring = new_ring(rings)
    trace = TraceWriter(ring)
    ring.append(77, 1, b"what")
    ring.append(3, 1, bytes(100), 9)
    write_step(trace, 0, 3)
    ring.close()
    collect_once(place, rings)
    assert rows(place, "SELECT count(*) FROM tokens") == [(3,)]
    losses = rows(place, "SELECT kind, frames, detail FROM losses ORDER BY first_sequence")
    assert [loss[:2] for loss in losses] == [("undecodable", 1)] * 2
    assert "unknown type 77" in str(losses[0][2])


POISON: tuple[Callable[[TraceWriter, RingWriter], object], ...] = (
    lambda trace, ring: write_request(trace, 9, max_tokens=2**32 - 2),
    lambda trace, ring: write_request(trace, 9, arrival_ns=0),
    lambda trace, ring: trace.engine({"model": "half \ud800"}),
    lambda trace, ring: trace.engine({"model": "m", "note": "half \ud800"}),
    lambda trace, ring: ring.append(1, 1, b"[" * 100_000),
    lambda trace, ring: trace.gpu(index=2**32 - 1, values=[math.inf] * 9, unavailable=""),
    lambda trace, ring: trace.kernels(
        step_id=1, names=[{}], start_ns=[1], layer=[0], kernel=[0], duration_us=[1.0]
    ),
)


def test_one_value_that_the_lake_cannot_hold_costs_one_frame(place: LakePlace, rings: Path) -> None:
    """It used to end every collector that came across it, or keep it waiting for ever."""
    ring = new_ring(rings)
    trace = TraceWriter(ring)
    for step_id, write in enumerate(POISON):
        write(trace, ring)
        write_step(trace, step_id, 3)
    ring.close()
    collect_once(place, rings)
    assert rows(place, "SELECT count(*) FROM tokens") == [(3 * len(POISON),)]
    losses = rows(place, "SELECT first_sequence, frames, kind FROM losses ORDER BY ALL")
    assert losses == [(2 * index, 1, "undecodable") for index in range(len(POISON))]


def test_a_ring_cut_under_the_collector_does_not_stop_the_others(
    place: LakePlace, rings: Path
) -> None:
    cut, other = engine(rings, requests=2, steps=5), engine(rings, requests=3, steps=5)
    stop = threading.Event()

    def look(status: Status) -> None:
        """In the collector's own thread: a page that goes while it is read would end them all."""
        if status.tokens == 10 + 15 and cut.path.stat().st_size:
            os.truncate(cut.path, 0)
            write_step(TraceWriter(other), 5, 3)
        elif status.tokens == 10 + 18:
            stop.set()

    collector(place, rings, stop=stop, on_status=look).run()
    assert rows(place, "SELECT count(*) FROM tokens") == [(10 + 18,)]
    assert rows(place, "SELECT count(*) FROM losses WHERE detail LIKE '%was cut%'") == [(1,)]
    other.close()


def test_a_crash_report_that_cannot_be_written_does_not_keep_the_rows(
    place: LakePlace, rings: Path, tmp_path: Path
) -> None:
    (tmp_path / "crashes").write_text("in the way")
    os.waitpid(forked(lambda: engine(rings, requests=2, steps=5)), 0)
    collect_once(place, rings)
    assert discover(rings) == []
    ((detail,),) = rows(place, "SELECT detail FROM events WHERE kind = 'engine_crashed'")
    assert "no report" in str(detail)


def assert_iso_times(value: object) -> None:
    """Every time in a crash report is written in the same way."""
    if isinstance(value, list):
        for item in value:
            assert_iso_times(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            assert not name.endswith("_ns")
            if name == "at" or name.endswith("_at"):
                assert item is None or re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{6}Z", item)
            assert_iso_times(item)


def test_a_dead_engine_is_drained_and_reported(
    place: LakePlace, rings: Path, tmp_path: Path
) -> None:
    ids: dict[str, str] = {}

    def work() -> None:
        ring = engine(rings, requests=2, steps=5)
        trace = TraceWriter(ring)
        for slot in (2, 3, 4):
            write_request(trace, slot, request_id=bytes([slot]) * 16)
        write_step(trace, 5, 2, slot=2)
        trace.event(kind="degraded", request_id=None, slot=None, detail="no blocks")
        trace.memory(index=0, values=[9e9, 8e9, 7e9, 7e9, 1e8, math.nan], unavailable="why")
        ring.begin(1000)
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(forked(work), 0)
    ring_path = discover(rings)[0]
    status = collect_once(place, rings)
    assert (status.crashes, status.torn_frames) == (1, 1)
    assert not ring_path.exists()
    (event,) = rows(place, "SELECT kind, detail FROM events WHERE kind = 'engine_crashed'")
    report = json.loads(Path(str(event[1])).read_text())
    ids["open"] = ",".join(request["request_id"][:2] for request in report["open_step"])
    ids["waiting"] = ",".join(request["request_id"][:2] for request in report["waiting"])
    assert ids == {"open": "02,03", "waiting": "04"}
    assert [request["kv_blocks"] for request in report["open_step"]] == [1, 1]
    assert (report["memory"]["kv_used"], report["memory"]["kv_total"]) == (10, 100)
    assert report["memory"]["process"][0]["allocated_bytes"] == 7e9
    assert report["committed"]["frames_torn"] == 1
    assert report["committed"]["tokens"] == report["committed"]["tokens_written"] == 12
    assert report["last_events"][0]["kind"] == "degraded"
    frames = report["last_frames"]
    assert [frame["type"] for frame in frames[-3:]] == ["STEP", "EVENT", "MEMORY"]
    assert [frame["sequence"] for frame in frames] == list(range(16))
    assert frames[-3]["step_id"] == 5
    assert frames[-1]["fragmentation"] is None
    assert_iso_times(report)
    assert report["died_after"] == frames[-1]["at"] < report["noticed_at"]
    kept = zstandard.ZstdDecompressor().decompress(
        (tmp_path / "crashes" / f"{report['engine_id']}.ring.zst").read_bytes()
    )
    copy = tmp_path / "copy.ring"
    copy.write_bytes(kept)
    assert RingReader(copy).written == (16, 12)
    assert rows(place, "SELECT kind, frames FROM losses") == [("torn", 1)]
    assert rows(place, "SELECT count(*) FROM tokens") == [(12,)]


def test_a_ring_that_was_finished_but_not_removed_is_not_read_again(
    place: LakePlace, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = engine(rings, requests=2, steps=5)
    ring.close()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        collect_once(place, rings)
    assert ring.path.exists()
    collect_once(place, rings)
    assert not ring.path.exists()
    assert rows(place, "SELECT count(*) FROM tokens") == [(10,)]
    assert rows(place, "SELECT count(*) FROM events") == [(1,)]


def test_a_second_collector_is_refused(place: LakePlace, rings: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    ready = threading.Event()
    first = collector(place, rings, stop=stop, on_status=lambda _: ready.set())
    thread = threading.Thread(target=first.run, daemon=True)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        with pytest.raises(CollectorError, match=rf"another collector \(pid {os.getpid()}\)"):
            collect_once(place, rings)
        with pytest.raises(CollectorError, match="another collector"):
            collect_once(place, tmp_path / "other-rings")
    finally:
        stop.set()
        thread.join()
    collect_once(place, rings)


def test_a_lost_answer_to_a_commit_is_not_repeated(
    place: LakePlace, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit went through, the connection died before saying so."""
    ring = engine(rings, requests=2, steps=5)
    subject = collector(place, rings)
    real = subject._lake._transaction
    failures = iter([True])

    def failing(rings: list[object]) -> None:
        real(rings)  # type: ignore[arg-type]
        if next(failures, False):
            raise duckdb.IOException("connection lost")

    monkeypatch.setattr(subject._lake, "_transaction", failing)
    subject.run(once=True)
    assert rows(place, "SELECT count(*) FROM tokens") == [(10,)]
    ring.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("catalog_too", [False, True])
def test_a_full_disk_is_waited_out(
    place: LakePlace, small_disk: Path, rings: Path, catalog_too: bool
) -> None:
    catalog = str(small_disk / "catalog.sqlite") if catalog_too else place.catalog
    place = LakePlace(catalog, str(small_disk / "data"))
    collect_once(place, rings)
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk)
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize))
    ring = engine(rings, requests=20, steps=500)
    waiting = threading.Event()
    subject = collector(place, rings, on_status=lambda s: s.waiting_for and waiting.set())
    thread = threading.Thread(target=subject.run, kwargs={"once": True}, daemon=True)
    thread.start()
    assert waiting.wait(PATIENCE_S)
    ballast.unlink()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert rows(place, "SELECT count(*) FROM tokens") == [(10_000,)]
    assert rows(place, "SELECT count(*) FROM losses") == [(0,)]
    ring.close()


def test_told_to_stop_while_the_lake_is_locked_it_says_where_the_rest_is(
    place: LakePlace, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.lake.WRITER_BUSY_MS", 50)
    monkeypatch.setattr(lake_writer, "STOP_PATIENCE_S", 0.1)
    collect_once(place, rings)
    ring = engine(rings, requests=2, steps=5)
    stop = threading.Event()
    subject = collector(place, rings, stop=stop, on_status=lambda s: s.waiting_for and stop.set())
    with foreign_lock(place), pytest.raises(CollectorError, match="still in the rings"):
        subject.run()
    collect_once(place, rings)
    assert rows(place, "SELECT count(*) FROM tokens") == [(10,)]
    ring.close()


def live_engine(rings: Path) -> int:
    """A forked engine that writes steps of 8 tokens, slowly enough that its ring lasts for minutes,
    and closes it at its `end`; its pid."""

    def work() -> None:
        ring = new_ring(rings, 64 * MIB)
        trace = TraceWriter(ring)
        trace.engine({"model": "tiny"})
        for slot in range(8):
            write_request(trace, slot)
        step_ids = itertools.count()

        def step() -> None:
            write_step(trace, next(step_ids), 8)
            time.sleep(0.001)

        until_told(step)
        ring.close()

    pid = forked(work)
    until(lambda: discover(rings), "the engine's ring")
    return pid


@pytest.mark.kill
def test_collectors_killed_again_and_again_neither_lose_nor_double_a_row(
    place: LakePlace, rings: Path, tmp_path: Path
) -> None:
    rings.mkdir()
    pid = live_engine(rings)
    command = [sys.executable, "-m", "tests.capture.collect_process", tmp_path, rings, "12"]
    try:
        subprocess.run([str(word) for word in command], check=True)
    finally:
        kill(pid)
    written = RingReader(discover(rings)[0]).written
    status = collect_once(place, rings)
    ((tokens, distinct, steps),) = rows(
        place,
        "SELECT count(*), count(DISTINCT (slot, position)), count(DISTINCT step_id) FROM tokens",
    )
    assert tokens == distinct
    assert int(str(tokens)) - written[1] in (0, 8), "8: the step whose tail was not stored"
    assert rows(place, "SELECT count(*) FROM steps") == [(steps,)]
    assert rows(place, "SELECT count(*) FROM losses WHERE kind <> 'torn'") == [(0,)]
    assert status.crashes == 1
    commits = rows(place, "SELECT count(*) FROM ingest_cursor")[0][0]
    assert int(str(commits)) > 12, "the kills fell between commits"


def test_readers_query_during_ingest_without_a_lock_error(
    place: LakePlace, rings: Path, tmp_path: Path
) -> None:
    rings.mkdir()
    pid = live_engine(rings)
    process = start_collector(tmp_path, rings)
    connection = open_connection(place)
    errors: list[Exception] = []
    commits = "SELECT count(*) FROM ingest_cursor"

    def query(cursor: duckdb.DuckDBPyConnection) -> None:
        """While the collector commits 25 times, and merges what it has committed."""
        last, deadline = 0, time.monotonic() + PATIENCE_S
        try:
            while cursor.execute(commits).fetchall()[0][0] < 25:
                row = cursor.execute("SELECT count(*) FROM token_gaps").fetchone()
                assert row is not None
                assert row[0] >= last, "nothing that was visible vanishes, not even while merging"
                assert time.monotonic() < deadline, "the collector does not commit"
                last = row[0]
        except (duckdb.Error, AssertionError) as error:
            errors.append(error)

    threads = [threading.Thread(target=query, args=(new_cursor(connection),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end(pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    connection.close()
    assert errors == []
    collect_once(place, rings)
    tokens, steps = rows(place, "SELECT (SELECT count(*) FROM tokens), count(*) FROM steps")[0]
    assert tokens == 8 * int(str(steps))


def test_once_ends_though_the_engine_goes_on(place: LakePlace, rings: Path) -> None:
    rings.mkdir()
    live_engine(rings)
    thread = threading.Thread(target=collect_once, args=(place, rings), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_sigterm_drains(place: LakePlace, rings: Path, tmp_path: Path) -> None:
    rings.mkdir()
    process = start_collector(tmp_path, rings)
    ring = engine(rings, requests=10, steps=1000)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    collect_once(place, rings)
    assert rows(place, "SELECT count(*) FROM tokens") == [(10_000,)]
    ring.close()


def test_what_a_cut_ring_lost_reaches_a_lake_that_fails_just_then(
    place: LakePlace, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cursor is that of the commit before, which was taken for this one."""
    ring = engine(rings, requests=2, steps=5)
    subject = collector(place, rings)
    failures = iter([True])
    real = lake_writer.insert_rows

    def failing(connection: duckdb.DuckDBPyConnection, taken: list[RingRows]) -> None:
        if any(rows.has("losses") for rows in taken) and next(failures, False):
            raise duckdb.IOException("database is locked")
        real(connection, taken)

    def cut(status: Status) -> None:
        if status.tokens == 10 and ring.path.stat().st_size:
            os.truncate(ring.path, 0)
        elif not subject._roster.followers:
            subject._stop.set()

    monkeypatch.setattr(lake_writer, "insert_rows", failing)
    monkeypatch.setattr(subject, "_on_status", cut)
    subject.run()
    assert next(failures, None) is None, "it failed"
    assert rows(place, "SELECT count(*) FROM tokens") == [(10,)]
    assert rows(place, "SELECT count(*) FROM losses WHERE detail LIKE '%was cut%'") == [(1,)]
