"""Reading goes on while the lake is worked on, within a bound, and in order."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from capture import collector
from capture.collecting import lake_writer
from capture.collecting.ingest import RingRows
from capture.collecting.lake_thread import LakeThread
from capture.collecting.lake_writer import LakeWriter
from capture.collector import Collector
from capture.errors import LakeError
from capture.frames import TraceWriter
from capture.lake import LakePlace, open_connection
from capture.reader import discover
from capture.ring import MIN_CAPACITY
from tests.capture.children import forked
from tests.capture.rings import engine, new_ring, write_step
from tests.waiting import PATIENCE_S, until

STEP_TOKENS = 100
COMMIT_TOKENS = 4000
RING_BYTES = 1 << 18
RING_TOKENS = RING_BYTES // 36  # at most: the bytes of a token's row


@pytest.fixture
def thread() -> Iterator[LakeThread]:
    thread = LakeThread()
    yield thread
    thread.close()


def test_work_is_done_in_order_and_its_error_comes_with_the_next_call(thread: LakeThread) -> None:
    done: list[str] = []
    gate = threading.Event()

    def fail() -> None:
        raise ValueError("no")

    thread.begin(gate.wait, PATIENCE_S)
    assert thread.busy
    assert not thread.done
    gate.set()
    thread.begin(done.append, "a")
    assert thread.do(lambda: [*done, "b"]) == ["a", "b"]
    assert not thread.busy
    thread.begin(fail)
    with pytest.raises(ValueError, match="no"):
        thread.begin(done.append, "never")
    thread.begin(done.append, "c")
    thread.settle()
    assert done == ["a", "c"]


class Gate(threading.Event):
    """Commits wait until it is set; `reached`: one does."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    real = LakeWriter.write

    def write(lake: LakeWriter, rings: list[RingRows]) -> None:
        gate.reached.set()
        assert gate.wait(PATIENCE_S)
        real(lake, rings)

    monkeypatch.setattr(LakeWriter, "write", write)
    yield gate
    gate.set()


def test_a_slow_commit_stops_no_reading_until_much_waits_for_it(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the ring holds is written meanwhile, and nothing is lost; then memory is full, and
    what does not fit into the ring is lost and counted."""
    monkeypatch.setattr(collector, "COMMIT_TOKENS", COMMIT_TOKENS)
    monkeypatch.setattr(collector, "COMMIT_S", float("inf"))
    place = LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))
    ring = new_ring(tmp_path / "rings", RING_BYTES)
    trace, stop = TraceWriter(ring), threading.Event()
    subject = Collector(
        place, ring_dir=tmp_path / "rings", crash_dir=tmp_path / "crashes", stop=stop
    )
    running = threading.Thread(target=subject.run)
    running.start()
    status = subject.status
    bound = COMMIT_TOKENS * (1 + collector.MOST_COMMITS)
    try:
        for step in range(int(bound) // STEP_TOKENS):
            write_step(trace, step, STEP_TOKENS)
            if step % 10 == 9:
                until(lambda: status.tokens == ring.counters.tokens, "all to be read")
        assert ring.counters.bytes > RING_BYTES
        assert status.lost_tokens == 0
        for more in range(10 * RING_TOKENS // STEP_TOKENS):
            write_step(trace, step + 1 + more, STEP_TOKENS)
        assert status.tokens <= bound + RING_TOKENS, "one reading takes what the ring holds at most"
        gate.set()
        until(lambda: status.tokens + status.lost_tokens == ring.counters.tokens, "the rest")
    finally:
        gate.set()
        stop.set()
        running.join(PATIENCE_S)
        ring.close()
    assert not running.is_alive()
    assert status.lost_tokens > 0
    with open_connection(place) as lake:
        rows = lake.execute("SELECT count(*), count(DISTINCT (step_id, slot)) FROM tokens")
        assert rows.fetchall() == [(status.tokens, status.tokens)]
        assert lake.execute("SELECT sum(tokens) FROM losses").fetchall() == [(status.lost_tokens,)]


def test_engines_that_come_and_go_during_a_slow_commit_stop_no_reading(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both need the lake's answer: asked at once, all rings went unread until it came."""
    monkeypatch.setattr(collector, "COMMIT_S", 0.0)
    monkeypatch.setattr(collector, "DISCOVER_S", 0.0)
    place = LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))
    rings = tmp_path / "rings"
    stays, goes = new_ring(rings), new_ring(rings)
    trace, stop = TraceWriter(stays), threading.Event()
    subject = Collector(place, ring_dir=rings, crash_dir=tmp_path / "crashes", stop=stop)
    running = threading.Thread(target=subject.run)
    running.start()
    status = subject.status
    try:
        write_step(TraceWriter(goes), 0, 10)
        assert gate.reached.wait(PATIENCE_S)
        goes.close()
        comes = new_ring(rings)
        write_step(TraceWriter(comes), 0, 10)
        for step in range(20):
            write_step(trace, step, 10)
            until(lambda: status.tokens >= stays.counters.tokens + 10, "what is written meanwhile")
        gate.set()
        until(lambda: status.tokens == 220 and not goes.path.exists(), "the newcomer and the end")
    finally:
        gate.set()
        stop.set()
        running.join(PATIENCE_S)
        stays.close()
        comes.close()
    assert not running.is_alive()
    with open_connection(place) as lake:
        counted = "SELECT count(*), count(DISTINCT (engine_id, step_id, slot)) FROM tokens"
        assert lake.execute(counted).fetchall() == [(220, 220)]
        assert lake.execute("SELECT kind FROM events").fetchall() == [("engine_closed",)]


def test_told_to_stop_it_leaves_a_backlog_to_the_next_even_with_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C did nothing until the last of a hundred rings was in the lake."""
    monkeypatch.setattr(collector, "BACKLOG_PATIENCE_S", 0.0)
    place = LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))
    rings, stop = tmp_path / "rings", threading.Event()
    for _ in range(20):
        engine(rings, requests=1, steps=2, capacity=MIN_CAPACITY).close()
    crashes = tmp_path / "crashes"
    first = Collector(
        place, ring_dir=rings, crash_dir=crashes, stop=stop, on_status=lambda _: stop.set()
    )
    first.run(once=True)
    assert discover(rings), "what is left is left in the rings"
    Collector(place, ring_dir=rings, crash_dir=crashes, stop=threading.Event()).run(once=True)
    assert discover(rings) == []
    with open_connection(place) as lake:
        counted = "SELECT count(*), count(DISTINCT (engine_id, slot, position)) FROM tokens"
        assert lake.execute(counted).fetchall() == [(40, 40)]


def test_a_crash_during_a_slow_commit_is_reported_with_all_its_rows(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "COMMIT_S", 0.0)
    place = LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data"))
    rings, stop = tmp_path / "rings", threading.Event()

    def dies() -> None:
        trace = TraceWriter(new_ring(rings))
        write_step(trace, 0, 10)
        assert gate_read.recv(1)
        write_step(trace, 1, 10)
        os.kill(os.getpid(), signal.SIGKILL)

    gate_read, gate_write = socket.socketpair()
    pid = forked(dies)
    subject = Collector(place, ring_dir=rings, crash_dir=tmp_path / "crashes", stop=stop)
    running = threading.Thread(target=subject.run)
    running.start()
    try:
        assert gate.reached.wait(PATIENCE_S)
        gate_write.send(b"1")
        os.waitpid(pid, 0)
        until(lambda: subject.status.tokens == 20, "what it wrote last")
        gate.set()
        until(lambda: not discover(rings), "its end")
    finally:
        gate.set()
        stop.set()
        running.join(PATIENCE_S)
        gate_read.close()
        gate_write.close()
    (path,) = (tmp_path / "crashes").glob("*.json")
    report = json.loads(path.read_text())
    assert report["last_step_id"] == 1
    assert [step["step_id"] for step in report["last_steps"]] == [1, 0]
    assert report["committed"]["tokens"] == 20


def test_an_error_that_no_waiting_cures_ends_it_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes up in the lake's thread while the other goes on reading."""

    def refused(*_: object) -> None:
        raise duckdb.ConversionException("Conversion Error: no such number")

    monkeypatch.setattr(lake_writer, "insert_rows", refused)
    ring = engine(tmp_path / "rings", requests=2, steps=5)
    subject = Collector(
        LakePlace(str(tmp_path / "catalog.sqlite"), str(tmp_path / "data")),
        ring_dir=tmp_path / "rings",
        crash_dir=tmp_path / "crashes",
        stop=threading.Event(),
    )
    with pytest.raises(LakeError, match=r"^the lake refuses the rows: no such number$"):
        subject.run()
    ring.close()
    assert not any(thread.name.startswith("lake") for thread in threading.enumerate())
