"""Is the writer alive? Asked of stopped, killed, contained and forking engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from capture.reader import RingReader, discover
from capture.ring import STATE, RingWriter
from capture.rings.liveness import ProcessIdentity, liveness, pid_namespace
from tests.capture.children import forked, kill, started
from tests.capture.rings import new_ring, numbered, read_all
from tests.waiting import until

MARK = 8
ENGINE = """
import os, sys, time
from pathlib import Path
from uuid import uuid4
from capture.ring import RingWriter
ring = RingWriter.create(Path(sys.argv[1]), capacity_bytes=1 << 20, engine_id=uuid4())
ring.append(8, 1, b"contained")
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_an_own_ring_is_alive_and_a_closed_one_is_not(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    reader = RingReader(ring.path)
    state = reader.writer_state()
    assert (state.alive, state.reason) == (True, "running, holds the file's lock")
    ring.close()
    assert reader.writer_state().reason == "closed by its writer"
    assert not reader.writer_alive()


def test_a_copy_of_a_living_ring_has_no_writer(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    copy = tmp_path / "copy.ring"
    copy.write_bytes(ring.path.read_bytes())
    state = RingReader(copy).writer_state()
    assert not state.alive
    assert "nobody holds the file's lock" in state.reason


def test_a_writer_in_another_container_is_alive_until_it_dies(tmp_path: Path) -> None:
    """Its pid means another process here, or none: the lock decides."""
    path = tmp_path / "x.ring"
    engine = started(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child",
         sys.executable, "-c", ENGINE, path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert engine.stdout is not None
    if engine.stdout.readline() != "1\n":
        engine.kill()
        engine.communicate()
        pytest.skip("cannot make a pid namespace here")
    reader = RingReader(path)
    assert reader.header.pid == 1
    assert reader.header.pid_namespace != pid_namespace()
    state = reader.writer_state()
    assert state.alive
    assert "not visible from here" in state.reason
    engine.kill()
    engine.communicate()
    until(lambda: not reader.writer_alive(), "the end of what ran in the container")
    assert reader.writer_state().reason == "its process is gone: nobody holds the file's lock"
    assert reader.read().tokens == 0


def test_a_ring_of_a_version_without_namespaces_is_judged_by_its_lock(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    reader = RingReader(ring.path)
    gone = ProcessIdentity(4_100_000, 1, reader.header.boot_id, 0)
    assert liveness(gone, reader._descriptor, closed=False).alive
    ring._let_go()
    assert not liveness(gone, reader._descriptor, closed=False).alive


def test_an_earlier_boot_is_dead_whoever_has_its_pid_now(tmp_path: Path) -> None:
    reader = RingReader(new_ring(tmp_path).path)
    object.__setattr__(reader.header, "boot_id", bytes(16))
    assert not reader.writer_alive()


@pytest.mark.kill
def test_a_forked_child_lets_the_engine_die(tmp_path: Path) -> None:
    """A worker that outlives its engine must not make the ring look alive for ever."""
    told, tell = os.pipe()

    def work() -> None:
        ring = new_ring(tmp_path)
        ring.append(MARK, 1, numbered(0, 64))
        forked(outlive)
        signal.pause()

    def outlive() -> None:
        """The worker, which tells that it runs: it has let the ring go by then."""
        os.write(tell, os.getpid().to_bytes(4, "little"))
        time.sleep(600)

    engine = forked(work)
    worker = int.from_bytes(os.read(told, 4), "little")
    try:
        reader = RingReader(discover(tmp_path)[0])
        assert reader.writer_alive()
        kill(engine)
        os.kill(worker, 0)
        assert reader.writer_state().reason == "its process is gone: nobody holds the file's lock"
        assert read_all(reader) == 1
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.kill
def test_a_child_that_still_holds_the_lock_does_not_count_as_the_engine(tmp_path: Path) -> None:
    """Such as one forked by a C library, past Python's hooks."""
    told, tell = os.pipe()

    def work() -> None:
        ring = new_ring(tmp_path)
        inherited = os.dup(ring._descriptor)
        worker = forked(lambda: time.sleep(600))
        os.write(tell, worker.to_bytes(4, "little"))
        signal.pause()
        os.close(inherited)

    engine = forked(work)
    worker = int.from_bytes(os.read(told, 4), "little")
    try:
        reader = RingReader(discover(tmp_path)[0])
        kill(engine)
        state = reader.writer_state()
        assert not state.alive
        assert state.reason == ("its process is gone: only children it forked hold the file's lock")
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_child_can_neither_write_nor_close_its_parents_ring(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    ring.append(MARK, 1, numbered(0, 64))

    def child() -> None:
        try:
            ring.append(MARK, 1, numbered(1, 64))
        except ValueError:
            ring.close()
            os._exit(7)

    with ring.lock:  # another thread's, as the child sees it
        pid = forked(child)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    ring.append(MARK, 1, numbered(1, 64))
    reader = RingReader(ring.path)
    assert not reader.closed_by_writer
    assert read_all(reader) == 2


def test_a_child_forked_while_a_frame_is_filled_does_not_close_the_ring_either(
    tmp_path: Path,
) -> None:
    ring = new_ring(tmp_path)
    filling, done = threading.Event(), threading.Event()

    def fill() -> None:
        part = ring.data[64:128]
        filling.set()
        done.wait()
        part.release()

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    filling.wait()
    pid = forked(ring.close)
    os.waitpid(pid, 0)
    done.set()
    thread.join()
    assert not RingReader(ring.path).closed_by_writer
    assert ring._counters[STATE] == 0


@pytest.mark.kill
@pytest.mark.parametrize("linked", [False, True])
def test_what_an_engine_killed_at_its_start_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    def work() -> None:
        real = os.link

        def link(*names: Path) -> None:
            if linked:
                real(*names)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(os, "link", link)
        new_ring(tmp_path)

    monkeypatch.setattr("capture.reader.LEFTOVER_S", 3600.0)
    os.waitpid(forked(work), 0)
    [leftover] = tmp_path.glob(".*.tmp")
    assert len(discover(tmp_path)) == linked
    assert leftover.exists(), "perhaps just made by an engine that starts at this moment"
    os.utime(leftover, (1, 1))
    [*rings] = discover(tmp_path)
    assert not leftover.exists()
    assert len(rings) == linked
    assert all(read_all(RingReader(ring)) == 0 for ring in rings)


def test_a_temporary_file_that_is_in_use_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = os.link, []

    def link(temporary: Path, path: Path) -> None:
        os.utime(temporary, (1, 1))
        discover(tmp_path)
        seen.append(temporary.exists())
        real(temporary, path)

    monkeypatch.setattr(os, "link", link)
    ring: RingWriter = new_ring(tmp_path)
    assert seen == [True]
    assert [path.name for path in tmp_path.iterdir()] == [ring.path.name]
