"""Traffic on the disk: whole lines, compressed without loss, within bounds, whatever happens."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

import capture.mirroring.traffic_store
import capture.mirroring.traffic_writer
from capture.mirror import Mirror, MirrorCounters
from capture.mirroring.traffic_files import numbered_lines, traffic_files
from capture.mirroring.traffic_store import TrafficStore
from capture.mirroring.traffic_writer import FilePolicy, Fsync, TrafficWriter
from tests.capture.children import started
from tests.capture.lakes import said
from tests.capture.test_mirror import KEY, record
from tests.waiting import PATIENCE_S, until

PLAIN = FilePolicy(compress=False)


def numbers(directory: Path) -> list[int]:
    """The numbers of the records under a directory."""
    lines = (line for file in traffic_files(directory) for _, line in numbered_lines(file))
    return [int(json.loads(line)["request_id"], 16) for line in lines]


def line(number: int) -> bytes:
    return json.dumps({"request_id": f"{number:032x}"}).encode() + b"\n"


def finished(directory: Path, *counts: int) -> list[Path]:
    """Finished files of so many lines each, oldest first."""
    paths, number = [], 0
    for index, count in enumerate(counts):
        path = directory / f"traffic-2026010{index}T000000.000000Z-1.jsonl"
        path.write_bytes(b"".join(line(n) for n in range(number, number + count)))
        paths.append(path)
        number += count
    return paths


def test_a_file_under_two_names_counts_once(tmp_path: Path) -> None:
    """As a kill leaves it between the compressed file's rename and the end of its original."""
    first, _ = finished(tmp_path, 3, 2)
    packed = first.with_name(first.name + ".zst")
    packed.write_bytes(zstandard.compress(first.read_bytes()))
    first.with_name(first.name + ".zst.tmp").write_bytes(b"half of it")
    assert numbers(tmp_path) == [0, 1, 2, 3, 4]
    TrafficStore(tmp_path, FilePolicy()).close(PATIENCE_S)
    assert numbers(tmp_path) == [0, 1, 2, 3, 4]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".zst", ".zst"]


@pytest.mark.kill
@pytest.mark.parametrize("point", ["rename", "unlink", "fsync"])
def test_a_kill_while_compressing_neither_loses_nor_doubles(tmp_path: Path, point: str) -> None:
    program = f"""
import os, signal, sys
from pathlib import Path
import capture.mirroring.traffic_store as store
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
place = os if "{point}" == "fsync" else Path
setattr(place, "{point}", die)
path = Path(sys.argv[1])
with path.open("rb") as file:
    store.compress(file, path)
"""
    (path,) = finished(tmp_path, 2000)
    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert numbers(tmp_path) == list(range(2000))
    TrafficStore(tmp_path, FilePolicy()).close(PATIENCE_S)
    assert numbers(tmp_path) == list(range(2000))
    assert [file.suffix for file in tmp_path.iterdir()] == [".zst"]


@pytest.mark.kill
@pytest.mark.parametrize("fsync", ["always", "second", "rotate"])
def test_a_killed_server_loses_no_written_record(tmp_path: Path, fsync: Fsync) -> None:
    program = """
import sys, time
from pathlib import Path
from capture.mirror import Mirror
from capture.mirroring.traffic_writer import FilePolicy
from tests.capture.test_mirror import KEY, record
files = FilePolicy(fsync=sys.argv[2], rotate_bytes=20_000)
mirror = Mirror(Path(sys.argv[1]), share=1.0, key=KEY, files=files)
for number in range(10**6):
    mirror.offer(record(number))
    while mirror.counters.queued > 50:
        time.sleep(0.0001)
    print(mirror.counters.written, flush=True)
"""
    command = [sys.executable, "-c", program, str(tmp_path), fsync]
    process = started(command, stdout=subprocess.PIPE)
    while (written := int(said(process))) < 150:
        pass
    process.kill()
    rest, _ = process.communicate()
    written = int([str(written), *rest.split()][-1])
    TrafficStore(tmp_path, FilePolicy()).close(PATIENCE_S)  # the next start tidies up
    found = numbers(tmp_path)
    assert found == list(range(len(found)))
    assert len(found) >= written
    assert all(path.name.endswith(".jsonl.zst") for path in tmp_path.iterdir())


def test_when_lines_are_synced_is_the_policys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.fsync, []

    def noted(descriptor: int) -> None:
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            synced.append(descriptor)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(capture.mirroring.traffic_writer, "CHECK_SECONDS", 3600.0)
    counts = {}
    for fsync in ("always", "second", "rotate"):
        synced.clear()
        writer = TrafficWriter(tmp_path, FilePolicy(fsync=fsync))
        for number in range(5):
            writer.append(line(number))
            writer.tick()
        before = len(synced)
        monkeypatch.setattr(capture.mirroring.traffic_writer, "CHECK_SECONDS", 0.0)
        writer.tick()
        monkeypatch.setattr(capture.mirroring.traffic_writer, "CHECK_SECONDS", 3600.0)
        due = len(synced)
        writer.finish()
        counts[fsync] = (before, due - before, len(synced) - due)
    assert counts == {"always": (5, 0, 1), "second": (0, 1, 1), "rotate": (0, 0, 1)}


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from capture.mirror import Mirror
from capture.mirroring.traffic_writer import FilePolicy
from tests.capture.test_mirror import KEY, record
from tests.capture.test_traffic_files import settled
from tests.waiting import PATIENCE_S
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
mirror = Mirror(Path(sys.argv[1]), share=1.0, key=KEY, files=FilePolicy(compress=False))
limit(2000)
for number in range(20):
    mirror.offer(record(number))
settled(mirror)
limit(resource.RLIM_INFINITY)
for number in range(20, 30):
    mirror.offer(record(number))
mirror.close(PATIENCE_S)
print(mirror.counters.written, mirror.counters.skipped)
"""


def settled(mirror: Mirror) -> MirrorCounters:
    return until(
        lambda: None if (counters := mirror.counters).queued else counters, "an empty queue"
    )


def test_a_full_disk_costs_records_that_are_counted_and_no_line_is_torn(tmp_path: Path) -> None:
    """The system itself refuses to write on, as it does for want of space, and later does not."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = numbers(tmp_path)
    assert found[-10:] == list(range(20, 30))
    assert 0 < len(found) < 30
    assert told.split(" ", 1) == [str(len(found)), f"{{'write_failed': {30 - len(found)}}}\n"]


def test_half_a_line_that_cannot_be_cut_off_ends_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TrafficWriter(tmp_path, PLAIN)
    writer.append(line(0))
    real = os.write
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
        broken.setattr(os, "ftruncate", lambda *_: os.stat("/nowhere"))
        with pytest.raises(OSError, match="space"):
            writer.append(line(1))
    writer.append(line(2))
    writer.finish()
    first, second = traffic_files(tmp_path)
    assert first.read_bytes() == line(0) + line(1)[:10]
    assert second.read_bytes() == line(2)


def test_a_directory_that_is_not_there_for_a_while_costs_what_comes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = Mirror(tmp_path, share=1.0, key=KEY, files=PLAIN)
    with monkeypatch.context() as broken:
        broken.setattr(
            capture.mirroring.traffic_writer, "sync_directory", lambda _: os.stat("/nowhere")
        )
        for number in range(3):
            mirror.offer(record(number))
        settled(mirror)
    for number in range(3, 5):
        mirror.offer(record(number))
    mirror.close(PATIENCE_S)
    assert mirror.counters.skipped == {"write_failed": 3}
    assert numbers(tmp_path) == [3, 4]
    assert len(list(tmp_path.iterdir())) == 1
    messages = [entry.message for entry in caplog.records]
    assert [message[:20] for message in messages] == [
        "cannot write traffic",
        "traffic is written a",
    ]


@pytest.mark.parametrize("how", ["deleted", "moved", "with its directory"])
def test_a_file_taken_from_under_the_writer_is_replaced_within_a_second(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "traffic"
    mirror = Mirror(directory, share=1.0, key=KEY, files=PLAIN)
    mirror.offer(record(1))
    settled(mirror)
    (part,) = directory.iterdir()
    if how == "moved":
        part.rename(tmp_path / "elsewhere")
    else:
        part.unlink()
    if how == "with its directory":
        directory.rmdir()
    until(lambda: "was deleted or moved" in caplog.text, "its notice")
    mirror.offer(record(2))
    mirror.close(PATIENCE_S)
    assert numbers(directory) == [2]
    assert "with 1 records" in caplog.text


def test_the_oldest_files_go_when_all_take_too_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = finished(tmp_path, 100, 100, 100, 100)
    (tmp_path / "mine.jsonl").write_bytes(line(1000))
    size = paths[0].stat().st_size
    store = TrafficStore(tmp_path, FilePolicy(compress=False, max_bytes=4 * size))
    store.close(PATIENCE_S)
    left = [path for path in paths if path.exists()]
    assert left == paths[1:]  # a quarter of the room is for the file being written
    assert (store.deleted, store.deleted_bytes) == (1, size)
    assert f"deleted {paths[0]}" in caplog.text
    assert (tmp_path / "mine.jsonl").exists()


def test_traffic_stays_within_its_bound_while_it_is_written(tmp_path: Path) -> None:
    files = FilePolicy(max_bytes=60_000, compress=False)
    mirror = Mirror(tmp_path, share=1.0, key=KEY, files=files)
    largest = 0
    for number in range(600):
        mirror.offer(record(number))
        if number % 20 == 0:
            settled(mirror)
            largest = max(largest, total_bytes(tmp_path))
    mirror.close(PATIENCE_S)
    counters = mirror.counters
    assert counters.written == 600
    assert counters.files_deleted > 5
    assert largest <= 60_000 + 1000  # the line that ends a file
    assert numbers(tmp_path)[-1] == 599


def total_bytes(directory: Path) -> int:
    """Of all files; one that is just deleted or gets its finished name may be counted or not."""
    total = 0
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def test_what_a_dead_writer_left_is_finished_without_its_broken_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "traffic-20260101T000000.000000Z-{}.jsonl.part"
    (tmp_path / name.format(1)).write_bytes(line(0) + line(1) + line(2)[:9])
    (tmp_path / name.format(2)).write_bytes(line(3)[:9])
    (tmp_path / name.format(3)).write_bytes(b"")
    TrafficStore(tmp_path, PLAIN).close(PATIENCE_S)
    (left,) = tmp_path.iterdir()
    assert left.read_bytes() == line(0) + line(1)
    assert caplog.text.count("in the middle of a record") == 2


def test_a_file_that_goes_takes_what_was_left_of_its_compression(tmp_path: Path) -> None:
    (path,) = finished(tmp_path, 100)
    path.with_name(f"{path.name}.zst.tmp").write_bytes(b"begun")
    TrafficStore(tmp_path, FilePolicy(compress=False, max_bytes=1)).close(PATIENCE_S)
    assert list(tmp_path.iterdir()) == []


def test_files_of_other_users_are_left_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ours = finished(tmp_path, 10, 10)
    part = tmp_path / "traffic-20260101T000000.000000Z-1.jsonl.part"
    part.write_bytes(line(99))
    allowed = Path.open

    def refuse(path: Path, *arguments: Any) -> Any:
        if path in (theirs, part):
            raise PermissionError(13, "Permission denied")
        return allowed(path, *arguments)

    with monkeypatch.context() as denied:
        denied.setattr(Path, "open", refuse)
        TrafficStore(tmp_path, FilePolicy(max_bytes=1)).close(PATIENCE_S)
    assert (theirs.exists(), part.exists(), ours.exists()) == (True, True, False)
    assert "cannot" not in caplog.text


def test_a_file_that_cannot_be_compressed_stays_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    finished(tmp_path, 10)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda _: os.stat("/nowhere"))
        store = TrafficStore(tmp_path, FilePolicy())
        until(lambda: "cannot compress" in caplog.text, "its failure")
    assert [path.suffix for path in tmp_path.iterdir()] == [".jsonl"]
    store.tidy()
    until(lambda: store.compressed == 1, "the second attempt")
    store.close(PATIENCE_S)
    assert numbers(tmp_path) == list(range(10))


def test_two_processes_keep_one_directory(tmp_path: Path) -> None:
    one, two = (Mirror(tmp_path, share=1.0, key=KEY) for _ in range(2))
    for number in range(100):
        (one, two)[number % 2].offer(record(number))
    one.close(PATIENCE_S)
    two.close(PATIENCE_S)
    assert sorted(numbers(tmp_path)) == list(range(100))
