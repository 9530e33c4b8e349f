"""The mirror's process may stop or die: its server goes on, and every record is counted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from capture.mirror import MirrorCounters
from capture.mirroring import mirror_process
from capture.mirroring.mirror_process import MirrorProcess
from capture.proxy.record import Series
from capture.settings import Settings
from tests.capture.proxy.processes import records_in
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MirrorProcess]:
    monkeypatch.setenv("INFERLOOP_HOME", str(tmp_path))
    monkeypatch.setattr(mirror_process, "START_S", PATIENCE_S)
    monkeypatch.setattr(mirror_process, "RESTART_S", 0.0)
    monkeypatch.setattr(mirror_process, "CLOSE_S", PATIENCE_S)
    running = MirrorProcess(Settings(), 1.0)
    yield running
    running.close()


def child(mirror: MirrorProcess) -> int:
    """The mirror's process."""
    return mirror._child._process.pid


def record(number: int, text: str = "hi") -> dict[str, Any]:
    chunks = Series()
    chunks.add(7_500_000, 3)
    return {
        "schema": "inferloop.traffic/1",
        "request_id": uuid4().hex,
        "conversation_id": f"c{number}",
        "arrival": datetime.now(UTC).isoformat(timespec="microseconds"),
        "arrival_ns": 5_000_000,
        "endpoint": "/v1/chat/completions",
        "tenant": "acme",
        "route": "chat",
        "class_key": "acme/chat/-",
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 1},
        "output_text": "x",
        "chunks": chunks,
    }


def settled(mirror: MirrorProcess) -> MirrorCounters:
    """Its counters, once nothing waits."""
    return until(
        lambda: None if (counters := mirror.counters).queued else counters, "an empty queue"
    )


def test_records_arrive_whole(mirror: MirrorProcess, tmp_path: Path) -> None:
    mirror.offer(record(1))
    assert settled(mirror).written == 1
    mirror.close()
    (line,) = records_in(tmp_path)
    assert line["chunks"] == [{"at_ms": 2.5, "tokens": 3}]


@pytest.mark.kill
def test_process_that_died_is_replaced_and_its_records_are_counted(
    mirror: MirrorProcess, tmp_path: Path
) -> None:
    mirror.offer(record(1))
    assert settled(mirror).written == 1
    first = child(mirror)
    os.kill(first, signal.SIGSTOP)
    for number in range(2, 12):
        mirror.offer(record(number))
    until(lambda: mirror._child.sent == 11, "records on their way to it")
    os.kill(first, signal.SIGKILL)
    counters = settled(mirror)
    assert (counters.written, counters.skipped) == (1, {"mirror_gone": 10})
    mirror.offer(record(12))
    counters = settled(mirror)
    assert (counters.written, counters.skipped) == (2, {"mirror_gone": 10})
    assert child(mirror) != first
    mirror.close()
    assert {line["conversation_id"] for line in records_in(tmp_path)} == {"c1", "c12"}


@pytest.mark.kill
def test_process_that_stands_still_costs_records_and_no_time(
    mirror: MirrorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never goes on: an offer that waited for it would wait for ever."""
    monkeypatch.setattr(mirror_process, "CLOSE_S", 2.0)
    os.kill(child(mirror), signal.SIGSTOP)
    start = time.thread_time()
    for number in range(200):
        mirror.offer(record(number, "x" * 1_000_000))
    assert time.thread_time() - start < 2.0
    counters = mirror.counters
    assert counters.skipped["queue_full"] > 100
    assert counters.written == 0
    assert counters.queued + counters.skipped["queue_full"] == 200
    start = time.monotonic()
    mirror.close()
    assert time.monotonic() - start < 60.0
    settled(mirror)
