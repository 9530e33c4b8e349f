"""Readers leave notes beside a ring: who follows it, how far, and none of the dead."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capture.reader import Cursor, discover
from capture.rings.attendance import Attendance, attending, readers_directory, remove_ring
from tests.capture.children import forked, kill
from tests.capture.rings import new_ring

CURSOR = Cursor(sequence=10, tokens=300, position=640, lost_frames=2, lost_tokens=30)


def test_a_reader_is_known_until_it_leaves(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    collector, top = Attendance(ring.path, "collector"), Attendance(ring.path, "top")
    assert attending(ring.path) == []
    before_s = time.monotonic()
    top.report(Cursor(), 5)
    collector.report(CURSOR, 128)
    first, second = attending(ring.path)
    assert (first.name, first.pid, first.cursor, first.lag_bytes) == (
        "collector",
        os.getpid(),
        CURSOR,
        128,
    )
    assert 0 <= first.seen_ago_s <= time.monotonic() - before_s
    assert second.name == "top"
    collector.leave()
    top.leave()
    assert attending(ring.path) == []
    assert not readers_directory(ring.path).exists()
    assert discover(tmp_path) == [ring.path]


def test_reports_are_written_once_a_second_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("capture.rings.attendance.time.monotonic", lambda: now)
    ring = new_ring(tmp_path)
    reader = Attendance(ring.path, "collector")
    reader.report(CURSOR, 1)
    reader.report(CURSOR, 2)
    assert attending(ring.path)[0].lag_bytes == 1
    now = 101.0
    reader.report(CURSOR, 3)
    assert attending(ring.path)[0].lag_bytes == 3


@pytest.mark.kill
def test_a_killed_reader_is_dropped_and_its_note_removed(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    ready, told = os.pipe()

    def follow() -> None:
        Attendance(ring.path, "top").report(CURSOR, 0)
        os.write(told, b"x")
        signal.pause()

    pid = forked(follow)
    os.read(ready, 1)
    assert [reader.pid for reader in attending(ring.path)] == [pid]
    kill(pid)
    assert attending(ring.path) == []
    assert list(readers_directory(ring.path).iterdir()) == []


def test_a_reader_of_an_earlier_boot_is_dropped(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    Attendance(ring.path, "top").report(CURSOR, 0)
    [path] = readers_directory(ring.path).iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"boot_id": "11" * 16}))
    assert attending(ring.path) == []


def test_a_reader_in_another_container_is_known_while_it_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid says nothing here: only that it was heard of lately does."""
    now_ns = 1000 * 10**9
    monkeypatch.setattr("capture.rings.attendance.time.monotonic_ns", lambda: now_ns)
    ring = new_ring(tmp_path)
    Attendance(ring.path, "top").report(CURSOR, 0)
    [path] = readers_directory(ring.path).iterdir()
    note = json.loads(path.read_text()) | {"namespace": 7, "pid": 4_000_000}
    path.write_text(json.dumps(note))
    now_ns += 29 * 10**9
    assert len(attending(ring.path)) == 1
    now_ns += 2 * 10**9
    assert attending(ring.path) == []
    assert path.exists(), "it may only be stopped: its note is its own"


def test_a_step_of_the_wall_clock_does_not_change_when_a_reader_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = new_ring(tmp_path)
    before_s, now_ns = time.monotonic(), time.time_ns()
    Attendance(ring.path, "top").report(CURSOR, 0)
    for step_s in (-240, 240):
        stepped_ns = now_ns + step_s * 10**9
        monkeypatch.setattr("capture.rings.attendance.time.time_ns", lambda at=stepped_ns: at)
        [reader] = attending(ring.path)
        assert 0 <= reader.seen_ago_s <= time.monotonic() - before_s


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"cursor": {"x": 1}}', "\x00" * 9000, "[" * 4000, '{"cursor": 1e999}'],
)
def test_foreign_notes_are_passed_over(tmp_path: Path, text: str) -> None:
    ring = new_ring(tmp_path)
    readers_directory(ring.path).mkdir()
    (readers_directory(ring.path) / "1-x.json").write_text(text)
    assert attending(ring.path) == []


@pytest.mark.parametrize("field", ["pid", "start", "namespace", "lag_bytes", "seen_ns"])
@pytest.mark.parametrize("value", [10**30, 1e999, -1, "1"])
def test_notes_with_impossible_numbers_are_passed_over(
    tmp_path: Path, field: str, value: object
) -> None:
    ring = new_ring(tmp_path)
    Attendance(ring.path, "top").report(CURSOR, 0)
    [path] = readers_directory(ring.path).iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert attending(ring.path) == []


@pytest.mark.timeout(60)
def test_a_named_pipe_among_the_notes_makes_nobody_wait(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    readers_directory(ring.path).mkdir()
    os.mkfifo(readers_directory(ring.path) / "1-x.json")
    assert attending(ring.path) == []


def test_an_unwritable_place_is_said_once_and_hurts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr("capture.rings.attendance.time.monotonic", lambda: now)
    ring = new_ring(tmp_path)
    readers_directory(ring.path).write_text("in the way")
    reader = Attendance(ring.path, "collector")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            now += 10.0
            reader.report(CURSOR, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "inferloop ring" in caplog.text
    assert attending(ring.path) == []
    reader.leave()


def test_another_users_ring_is_followed_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    ring = new_ring(tmp_path)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with caplog.at_level(logging.WARNING):
        Attendance(ring.path, "top").report(CURSOR, 0)
    assert caplog.records == []


def test_a_removed_ring_takes_its_notes_along_and_they_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("capture.rings.attendance.time.monotonic", lambda: now)
    ring = new_ring(tmp_path)
    reader, late = Attendance(ring.path, "collector"), Attendance(ring.path, "top")
    reader.report(CURSOR, 0)
    remove_ring(ring.path)
    remove_ring(ring.path)
    now = 10.0
    reader.report(CURSOR, 0)
    late.report(CURSOR, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_comes_while_the_last_one_leaves_is_known_soon_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that leaves takes the folder away when the other has made sure that it is there."""
    now = 0.0
    monkeypatch.setattr("capture.rings.attendance.time.monotonic", lambda: now)
    ring = new_ring(tmp_path)
    leaving, coming = Attendance(ring.path, "top"), Attendance(ring.path, "collector")
    leaving.report(CURSOR, 0)
    write = coming._write

    def write_late(cursor: Cursor, lag_bytes: int) -> None:
        leaving.leave()
        write(cursor, lag_bytes)

    monkeypatch.setattr(coming, "_write", write_late)
    coming.report(CURSOR, 0)
    assert attending(ring.path) == []
    now = 1.0
    monkeypatch.setattr(coming, "_write", write)
    coming.report(CURSOR, 0)
    assert [reader.name for reader in attending(ring.path)] == ["collector"]


def test_attendance_needs_no_heavy_library() -> None:
    heavy = ("duckdb", "pyarrow", "torch", "rich")
    probe = (
        f"import sys, capture.rings.attendance; sys.exit(any(m in sys.modules for m in {heavy!r}))"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
