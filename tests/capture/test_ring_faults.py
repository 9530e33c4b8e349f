"""Readers that pause, writers that stop in the middle: exact losses, nothing counted wrongly."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capture.errors import RingError, RingIncompleteError
from capture.frames import TraceWriter
from capture.reader import RingReader, discover
from capture.ring import FRAME_HEADER_BYTES, MIN_CAPACITY, RingWriter
from tests.capture.children import forked, kill
from tests.capture.rings import check_numbered, engine, new_ring, numbered, read_all, write_step

MARK = 8
FIT = MIN_CAPACITY // 128  # frames of 64 bytes of payload in the smallest ring


def append(ring: RingWriter, size: int = 64) -> None:
    ring.append(MARK, 1, numbered(ring.counters.frames, size))


@pytest.mark.parametrize("paused", [FIT - 1, FIT, FIT + 1, 3 * FIT - 1, 3 * FIT, 3 * FIT + 1])
@pytest.mark.parametrize("read_before", [0, 1, 100, FIT, FIT + 77])
def test_a_reader_that_paused_for_n_frames(tmp_path: Path, paused: int, read_before: int) -> None:
    """Paused for up to a ring full: nothing lost; for longer: exactly what is over."""
    ring = new_ring(tmp_path, MIN_CAPACITY)
    reader = RingReader(ring.path)
    before = 0
    for _ in range(read_before):
        append(ring)
        before += read_all(reader)
    for _ in range(paused):
        append(ring)
    first = reader.read()
    check_numbered(first)
    lost = max(0, paused - FIT)
    assert int(first.headers["sequence"][0]) == read_before + lost
    assert before == read_before
    assert len(first) + read_all(reader) == paused - lost
    assert (reader.cursor.lost_frames, reader.cursor.corrupt_frames) == (lost, 0)


def test_a_reader_three_laps_behind_knows_its_tokens(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, MIN_CAPACITY)
    trace = TraceWriter(ring)
    reader = RingReader(ring.path)
    step_id = 0
    while ring.counters.bytes < 4 * MIN_CAPACITY:
        write_step(trace, step_id, 1 + step_id % 30)
        step_id += 1
    batch = reader.read()
    [gap] = batch.gaps
    first = int(batch.headers["sequence"][0])
    assert gap.tokens == sum(1 + number % 30 for number in range(first))
    assert (gap.first_sequence, gap.frames) == (0, first)


def stopped_inside_a_frame(
    directory: Path, prepare: Callable[[RingWriter], None], size: int, *, spoil: bool
) -> int:
    """An engine that has stored `intent` for a frame, and perhaps part of it, and was stopped.

    Going on, it writes the frame, 20 more, and closes the ring.
    """

    def work() -> None:
        ring = new_ring(directory, MIN_CAPACITY)
        prepare(ring)
        start = ring.begin(size)
        sequence = ring.counters.frames
        if spoil:  # the new frame's first bytes lie over the oldest frame's
            at = start - FRAME_HEADER_BYTES
            ring.data[at : at + FRAME_HEADER_BYTES + 100] = b"\xee" * (FRAME_HEADER_BYTES + 100)
        os.kill(os.getpid(), signal.SIGSTOP)
        ring.data[start : start + size] = numbered(sequence, size)
        ring.commit(size, MARK, 1)
        for _ in range(20):
            append(ring)
        ring.close()

    pid = forked(work)
    os.waitpid(pid, os.WUNTRACED)
    return pid


def few(ring: RingWriter) -> None:
    for _ in range(10):
        append(ring)


def full(ring: RingWriter) -> None:
    for _ in range(2 * FIT):
        append(ring)


@pytest.mark.kill
@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("prepare", [few, full])
def test_an_engine_stopped_inside_a_frame_is_waited_for_and_followed_on(
    tmp_path: Path, prepare: Callable[[RingWriter], None], spoil: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("capture.reader.STALL_S", 0.0)
    pid = stopped_inside_a_frame(tmp_path, prepare, 1000, spoil=spoil)
    reader = RingReader(discover(tmp_path)[0])
    late = RingReader(reader.path)
    delivered = read_all(reader)
    counted = reader.cursor
    for _ in range(50):
        assert len(reader.read()) == 0
        assert reader.cursor == counted, "waiting changes no count"
    assert reader.writer_alive()
    assert delivered + counted.lost_frames == reader.written[0]
    assert (counted.corrupt_frames, counted.torn_frames) == (0, 0)
    assert (delivered == 10) == (prepare is few)
    os.kill(pid, signal.SIGCONT)
    os.waitpid(pid, 0)
    assert read_all(reader) == 21
    assert reader.cursor.lost_frames == counted.lost_frames
    for one in (reader, late):
        read_all(one)
        assert one.cursor.sequence == one.written[0]
        assert (one.cursor.corrupt_frames, one.cursor.torn_frames) == (0, 0)


@pytest.mark.kill
def test_an_engine_stopped_inside_a_frame_and_then_killed_leaves_one_torn(tmp_path: Path) -> None:
    pid = stopped_inside_a_frame(tmp_path, few, 1000, spoil=True)
    reader = RingReader(discover(tmp_path)[0])
    assert read_all(reader) == 10
    kill(pid)
    assert len(reader.read()) == len(reader.read_open_frame()) == 0
    assert (reader.cursor.torn_frames, reader.cursor.lost_frames) == (1, 0)


def test_a_ring_that_is_copied_into_the_directory_is_read_once_it_is_whole(tmp_path: Path) -> None:
    whole = engine(tmp_path / "elsewhere", requests=1, steps=20)
    whole.close()
    data = whole.path.read_bytes()
    path = tmp_path / "copy.ring"
    for size in (0, 100, 4096, 5000, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(RingIncompleteError, match="still being copied"):
            RingReader(path)
    path.write_bytes(bytes(len(data)))  # a copy that makes the room first
    with pytest.raises(RingIncompleteError, match="still being copied"):
        RingReader(path)
    path.write_bytes(data + b"x")
    with pytest.raises(RingError, match="something else was written behind it"):
        RingReader(path)
    path.write_bytes(data)
    assert len(RingReader(path).read()) == whole.counters.frames


def test_readers_attach_and_leave_while_the_engine_writes(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, 64 * MIN_CAPACITY)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            append(ring, 200)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        for _ in range(100):
            reader = RingReader(ring.path)
            batch = reader.read(64 * 1024)
            check_numbered(batch)
            reader.close()
            reader.close()
    finally:
        stop.set()
        thread.join()
    late = RingReader(ring.path)
    assert read_all(late) + late.cursor.lost_frames == ring.counters.frames


def test_several_engines_share_a_directory(tmp_path: Path) -> None:
    rings = [engine(tmp_path, requests=1, steps=number) for number in (5, 6, 7)]
    assert set(discover(tmp_path)) == {ring.path for ring in rings}
    for ring in rings:
        reader = RingReader(ring.path)
        assert reader.header.engine_id == ring.header.engine_id
        assert len(reader.read()) == ring.counters.frames


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_shared_memory_filled_after_the_start_hurts_no_ring(tmp_path: Path, tmpfs: Path) -> None:
    """All blocks are the ring's from the start: no SIGBUS when others take the rest."""
    ring = new_ring(tmpfs, MIN_CAPACITY)
    free = shutil.disk_usage(tmpfs).free
    (tmpfs / "other").write_bytes(bytes(free))
    reader = RingReader(ring.path)
    for _ in range(2 * FIT):
        append(ring)
    assert read_all(reader) + reader.cursor.lost_frames == 2 * FIT
    reader.close()
    ring.close()


def test_a_second_process_cannot_write_the_same_ring(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    program = (
        "import sys; from pathlib import Path; from uuid import uuid4\n"
        "from capture.errors import RingInUseError; from capture.ring import RingWriter\n"
        "try: RingWriter.create(Path(sys.argv[1]), capacity_bytes=1 << 20, engine_id=uuid4())\n"
        "except RingInUseError as error: print(error)"
    )
    command = [sys.executable, "-c", program, str(ring.path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "is being written by another process: every engine needs its own" in result.stdout
    append(ring)
    assert read_all(RingReader(ring.path)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [ring.path.name], "no leftovers"


def test_a_place_that_cannot_be_locked_or_linked_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(RingError, match=r"cannot create the ring .*: Operation not permitted"):
        new_ring(tmp_path)
    monkeypatch.setattr("fcntl.flock", refused)
    with pytest.raises(RingError, match="cannot allocate a ring in"):
        new_ring(tmp_path)
    assert list(tmp_path.iterdir()) == []
