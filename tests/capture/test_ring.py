"""The ring: nothing corrupt is delivered, and delivered + lost == written, whatever happens."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import signal
import struct
import subprocess
import time
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.errors import (
    FrameTooLargeError,
    RingError,
    RingFormatError,
    RingInUseError,
    RingSpaceError,
)
from capture.frames import TraceWriter
from capture.reader import RingReader, discover
from capture.ring import HEADER_BYTES, INTENT, MIN_CAPACITY, TAIL, RingWriter
from tests.capture.children import end, forked, kill, until_told
from tests.capture.rings import MIB, check_numbered, new_ring, numbered, read_all, write_step
from tests.waiting import until

MARK = 8


def append(ring: RingWriter, size: int) -> None:
    ring.append(MARK, 1, numbered(ring.counters.frames, size))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(8, MIN_CAPACITY // 8 - 64), min_size=1, max_size=120),
    read_after=st.sets(st.integers(0, 119)),
)
def test_delivered_and_lost_add_up_under_any_sizes_and_laps(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], read_after: set[int]
) -> None:
    ring = new_ring(tmp_path_factory.mktemp("ring"), MIN_CAPACITY)
    reader = RingReader(ring.path)
    delivered = 0
    for index, size in enumerate(sizes):
        append(ring, size)
        if index in read_after:
            delivered += read_all(reader)
            assert delivered + reader.cursor.lost_frames == index + 1
    delivered += read_all(reader)
    assert delivered + reader.cursor.lost_frames == len(sizes)
    assert reader.cursor.corrupt_frames == reader.cursor.torn_frames == 0
    reader.close()
    ring.close()


@pytest.mark.parametrize("extra", [0, 1, 2, 511, 512, 513, 1024, 5000])
def test_a_reader_lapped_by_n_frames_loses_exactly_n(tmp_path: Path, extra: int) -> None:
    ring = new_ring(tmp_path, MIN_CAPACITY)
    reader = RingReader(ring.path)
    fit = MIN_CAPACITY // 128
    for _ in range(fit + extra):
        append(ring, 64)
    batch = reader.read()
    check_numbered(batch)
    assert int(batch.headers["sequence"][0]) == extra
    assert reader.cursor.lost_frames == extra
    assert len(batch) + read_all(reader) == fit


def test_loss_is_exact_in_tokens_too(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, MIN_CAPACITY)
    trace = TraceWriter(ring)
    reader = RingReader(ring.path)
    for step_id in range(500):
        write_step(trace, step_id, 1 + step_id % 40, phase=2 if step_id % 7 == 0 else 0)
    tokens = 0
    while len(batch := reader.read()):
        tokens += batch.tokens
    assert reader.cursor.lost_tokens > 0
    assert tokens + reader.cursor.lost_tokens == reader.written[1] == ring.counters.tokens


def test_two_readers_are_independent_and_both_exact(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, MIN_CAPACITY)
    eager, lazy = RingReader(ring.path), RingReader(ring.path)
    seen = 0
    for round_ in range(30):
        for _ in range(100):
            append(ring, 40 + round_)
        seen += read_all(eager)
    late = read_all(lazy)
    assert seen == 3000
    assert eager.cursor.lost_frames == 0
    assert late + lazy.cursor.lost_frames == 3000
    assert lazy.cursor.lost_frames > 0


def test_a_reader_goes_on_from_its_stored_cursor(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    for _ in range(10):
        append(ring, 100)
    first = RingReader(ring.path)
    read_all(first)
    for _ in range(5):
        append(ring, 100)
    assert read_all(RingReader(ring.path, first.cursor)) == 5


def test_readers_come_before_the_writer_and_after_it(tmp_path: Path) -> None:
    assert discover(tmp_path / "nowhere") == []
    path = tmp_path / "x.ring"
    with pytest.raises(RingError, match="cannot read the ring"):
        RingReader(path)
    ring = new_ring(tmp_path)
    append(ring, 64)
    ring.close()
    assert discover(tmp_path) == [ring.path]
    reader = RingReader(ring.path)
    assert reader.closed_by_writer
    assert read_all(reader) == 1


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"NOTARING", "no ring"),
        (8, struct.pack("<I", 2), "format 2"),
        (12, struct.pack("<I", 7), "damaged header"),
        (24, struct.pack("<Q", 1 << 30), "damaged header"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    ring = new_ring(tmp_path)
    ring.close()
    with ring.path.open("r+b") as file:
        file.seek(offset)
        file.write(value)
    with pytest.raises(RingFormatError, match=message):
        RingReader(ring.path)


@pytest.mark.parametrize("size", [0, 100, HEADER_BYTES, HEADER_BYTES + 4096])
def test_a_cut_file_is_refused(tmp_path: Path, size: int) -> None:
    ring = new_ring(tmp_path)
    ring.close()
    os.truncate(ring.path, size)
    with pytest.raises(RingFormatError, match=f"{size} bytes"):
        RingReader(ring.path)


@pytest.mark.parametrize("kind", ["pipe", "directory", "link to itself", "device"])
def test_what_is_no_file_neither_blocks_nor_breaks_the_reader(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.ring"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "link to itself" else "/dev/zero")
    for found in discover(tmp_path):
        with pytest.raises(RingError):
            RingReader(found)


@pytest.mark.parametrize("where", ["counters", "frames"])
def test_flipped_bits_are_never_accepted_and_never_hang(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RingReader, "writer_alive", lambda _: False)
    chance = random.Random(3)
    ring = new_ring(tmp_path, MIN_CAPACITY)
    for _ in range(300):
        append(ring, chance.randrange(8, 900))
    good = ring.path.read_bytes()
    for _ in range(150):
        damaged = bytearray(good)
        for _ in range(chance.choice([1, 1, 3, 50])):
            counter = chance.choice([INTENT, TAIL]) * 8 + chance.randrange(8)
            at = counter if where == "counters" else chance.randrange(HEADER_BYTES, len(good))
            damaged[at] ^= 1 << chance.randrange(8)
        path = tmp_path / "damaged"
        path.write_bytes(damaged)
        reader = RingReader(path)
        delivered = read_all(reader)
        open_frame = reader.read_open_frame()
        check_numbered(open_frame)
        assert delivered + len(open_frame) + reader.cursor.lost_frames == 300
        reader.close()


def test_a_file_that_was_cut_is_noticed_before_its_pages_are_touched(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    reader = RingReader(ring.path)
    reader.check_size()
    os.truncate(ring.path, 100)
    with pytest.raises(RingError, match="was cut"):
        reader.check_size()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    engine_id = uuid4()
    ring = new_ring(tmp_path, engine_id=engine_id)
    append(ring, 64)
    with pytest.raises(RingInUseError, match="being written by another process"):
        new_ring(tmp_path, engine_id=engine_id)
    ring.close()
    with pytest.raises(RingInUseError, match="its writer is gone"):
        new_ring(tmp_path, engine_id=engine_id)
    assert read_all(RingReader(ring.path)) == 1


def test_the_lock_of_a_living_writer_is_exclusive(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    with ring.path.open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_ring_is_not_for_everybody(tmp_path: Path) -> None:
    assert new_ring(tmp_path).path.stat().st_mode & 0o7 == 0


def test_no_room_is_an_error_at_the_start(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(RingSpaceError, match=r"no room for a ring of 4 MiB.*RING_MIB"):
            new_ring(tmp_path, 4 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_full_tmpfs_is_an_error_and_no_bus_error(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        with pytest.raises(RingSpaceError, match="No space left"):
            new_ring(tmp_path, MIB)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_sizes_and_places_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="too small"):
        new_ring(tmp_path, 1000)
    (tmp_path / "file").write_text("")
    with pytest.raises(RingError, match="cannot create a ring"):
        new_ring(tmp_path / "file" / "below")


def test_a_frame_over_the_limit_is_refused_counted_and_harmless(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, MIN_CAPACITY)
    append(ring, 64)
    with pytest.raises(FrameTooLargeError, match="INFERLOOP_RING_MIB"):
        append(ring, MIN_CAPACITY)
    append(ring, 64)
    assert ring.counters.refused == 1
    assert read_all(RingReader(ring.path)) == 2


def test_a_frame_given_up_half_way_costs_no_other_frame(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, MIN_CAPACITY)
    reader = RingReader(ring.path)
    for _ in range(400):
        append(ring, 64)
    ring.begin(7000)  # an exception in the caller: never committed
    append(ring, 64)
    delivered = read_all(reader)
    assert delivered + reader.cursor.lost_frames == 401
    assert reader.cursor.corrupt_frames == 0


def test_a_damaged_frame_is_never_delivered_and_counts_as_lost(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    for _ in range(10):
        append(ring, 64)
    ring.close()
    with ring.path.open("r+b") as file:
        file.seek(HEADER_BYTES + 4 * 128 + 100)
        file.write(b"\xff")
    reader = RingReader(ring.path)
    assert read_all(reader) == 9
    assert (reader.cursor.lost_frames, reader.cursor.corrupt_frames) == (1, 1)


def test_a_damaged_last_frame_of_a_dead_writer_counts_as_lost(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    for _ in range(10):
        append(ring, 64)
    ring.close()
    with ring.path.open("r+b") as file:
        file.seek(HEADER_BYTES + 9 * 128 + 100)
        file.write(b"\xff")
    reader = RingReader(ring.path)
    assert read_all(reader) == 9
    assert reader.cursor.lost_frames == 1
    assert reader.cursor.sequence == 10


def test_death_inside_a_frame_is_torn_once(tmp_path: Path) -> None:
    def work() -> None:
        ring = new_ring(tmp_path)
        append(ring, 64)
        ring.begin(1000)
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(forked(work), 0)
    reader = RingReader(discover(tmp_path)[0])
    assert not reader.writer_alive()
    assert read_all(reader) == 1
    for _ in range(2):
        assert len(reader.read_open_frame()) == 0
        assert reader.cursor.torn_frames == 1
    assert reader.cursor.lost_frames == 0


def test_a_whole_frame_whose_tail_was_not_stored_is_recovered(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    for _ in range(3):
        append(ring, 64)
    ring.close()
    with ring.path.open("r+b") as file:
        file.seek(TAIL * 8)
        file.write(struct.pack("<Q", 2 * 128))
    reader = RingReader(ring.path)
    assert read_all(reader) == 2
    batch = reader.read_open_frame()
    check_numbered(batch)
    assert len(batch) == 1
    assert len(reader.read_open_frame()) == 0
    assert reader.cursor.torn_frames == 0


def test_a_stopped_writer_is_waited_for(tmp_path: Path) -> None:
    def work() -> None:
        ring = new_ring(tmp_path)
        append(ring, 64)
        ring.begin(1000)
        os.kill(os.getpid(), signal.SIGSTOP)

    pid = forked(work)
    try:
        os.waitpid(pid, os.WUNTRACED)
        reader = RingReader(discover(tmp_path)[0])
        assert read_all(reader) == 1
        assert reader.writer_alive()
        assert reader.cursor.torn_frames == 0
    finally:
        kill(pid)
    assert not reader.writer_alive()


def test_a_zombie_and_a_reused_pid_are_dead_writers(tmp_path: Path) -> None:
    def work() -> None:
        new_ring(tmp_path)

    pid = forked(work)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    reader = RingReader(discover(tmp_path)[0])
    assert not reader.writer_alive()
    os.waitpid(pid, 0)
    own = RingReader(new_ring(tmp_path / "own").path)
    assert own.writer_alive()
    object.__setattr__(own.header, "pid_start", own.header.pid_start - 1)
    assert not own.writer_alive()


def test_a_reader_at_the_heels_of_a_fast_writer_on_a_tiny_ring(tmp_path: Path) -> None:
    """Now and then the readers wait until they are lapped, else they are as close as they can."""

    def work() -> None:
        ring = new_ring(tmp_path, MIN_CAPACITY)
        rng = random.Random(5)
        sizes = [rng.randrange(8, 3000) for _ in range(997)]
        until_told(lambda: append(ring, sizes[ring.counters.frames % 997]))
        ring.close()

    pid = forked(work)
    path = until(lambda: discover(tmp_path), "the ring")[0]
    readers = [RingReader(path) for _ in range(2)]
    delivered = [0, 0]
    for round_ in range(800):
        if round_ % 100 == 50:
            lapped = readers[0].cursor.position + 2 * MIN_CAPACITY
            until(lambda at=lapped: readers[0].written_bytes > at, "two laps of the writer")
        for index, reader in enumerate(readers):
            batch = reader.read(64 * 1024)
            check_numbered(batch)
            delivered[index] += len(batch)
        time.sleep(0.0005)
    end(pid)
    for index, reader in enumerate(readers):
        delivered[index] += read_all(reader)
        assert delivered[index] + reader.cursor.lost_frames == reader.written[0]
        assert reader.cursor.corrupt_frames == 0
        assert reader.cursor.lost_frames > 0


@pytest.mark.kill
def test_a_hundred_killed_writers(tmp_path: Path) -> None:
    """SIGKILL at random moments: no corrupt frame, one torn at most, the rest adds up."""
    chance = random.Random(7)
    torn = 0
    for number in range(100):
        directory = tmp_path / str(number)
        directory.mkdir()
        seed = chance.random()

        def work(directory: Path = directory, seed: float = seed) -> None:
            rng = random.Random(seed)
            sizes = [rng.randrange(8, 7000) for _ in range(251)]
            ring = new_ring(directory, MIN_CAPACITY)
            while True:
                append(ring, sizes[ring.counters.frames % 251])

        pid = forked(work)
        path = until(lambda at=directory: discover(at), "the ring", poll_s=0.0005)[0]
        reader = RingReader(path)
        until(lambda of=reader: of.written[0], "its first frame", poll_s=0.0005)
        time.sleep(chance.random() * 0.01)
        delivered = read_all(reader) if number % 2 else 0
        kill(pid)
        delivered += read_all(reader)
        batch = reader.read_open_frame()
        check_numbered(batch)
        delivered += len(batch)
        assert not reader.writer_alive()
        assert delivered + reader.cursor.lost_frames == reader.cursor.sequence
        assert reader.cursor.sequence - reader.written[0] in (0, 1)
        assert reader.cursor.corrupt_frames == 0
        assert reader.cursor.torn_frames + len(batch) <= 1
        torn += reader.cursor.torn_frames
        reader.close()
        path.unlink()
    assert torn > 0, "no kill fell inside a frame: the test shows nothing"
