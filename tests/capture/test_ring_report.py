"""`inferloop ring`: what it says of living, dead, archived, damaged and foreign rings."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
from pathlib import Path
from uuid import UUID

import pytest
import zstandard
from click.testing import Result
from typer.testing import CliRunner
from xxhash import xxh3_64_intdigest

import capture.rings.ring_report
from capture.errors import RingError, RingFormatError, RingIncompleteError
from capture.frames import TraceWriter
from capture.reader import Cursor, RingReader
from capture.ring import HEADER_BYTES, MIN_CAPACITY, RingWriter
from capture.rings.attendance import Attendance
from capture.rings.ring_files import find_ring, opened_ring
from capture.rings.ring_label import unpack_label
from capture.rings.ring_report import inspect, summaries
from cli.main import app, load_commands
from tests.capture.children import forked, kill, on_a_terminal
from tests.capture.rings import engine, new_ring, write_request, write_step

load_commands()


def archived(path: Path, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    target = directory / f"{path.stem}.ring.zst"
    target.write_bytes(zstandard.ZstdCompressor(level=1).compress(path.read_bytes()))
    return target


def inferloop(home: Path, *arguments: str) -> Result:
    environment = {"INFERLOOP_HOME": str(home), "INFERLOOP_RING_DIR": str(home / "r")}
    return CliRunner().invoke(app, arguments, env=environment)


@pytest.mark.kill
def test_a_ring_that_is_cut_while_it_is_measured_is_an_error_and_no_crash(tmp_path: Path) -> None:
    """Touching pages that are gone ends a process with SIGBUS: it happens in a forked one here."""
    ring = new_ring(tmp_path)

    def look() -> None:
        capture.rings.ring_report.time.sleep = lambda _: os.truncate(ring.path, 0)
        try:
            inspect(ring.path, window_s=1, last=1)
        except RingError as error:
            os._exit(7 if "was cut" in str(error) else 8)

    _, status = os.waitpid(forked(look), 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_living_ring_is_described_and_its_scan_adds_up(tmp_path: Path) -> None:
    ring = engine(tmp_path, requests=4, steps=50)
    report = inspect(ring.path, window_s=0.05, last=3)
    assert report.alive
    assert report.scan.exact
    assert (report.written_frames, report.written_tokens) == (59, 200)
    assert report.scan.frames_by_type == {"ENGINE": 1, "REQUEST": 4, "STEP": 50, "FINISH": 4}
    newest_of_others = ["ENGINE", "REQUEST", "STEP"]
    assert [line.type for line in report.scan.last] == [*newest_of_others, *["FINISH"] * 3]
    assert report.scan.engine is not None
    assert report.scan.engine["model"] == "tiny"
    assert report.rates is not None
    assert report.rates.tokens_per_s == 0
    assert 0 < report.fill < 1
    assert report.oldest_age_s is not None
    assert report.history_s is not None
    assert report.oldest_age_s >= report.history_s


def test_what_was_overwritten_is_counted_exactly(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, MIN_CAPACITY)
    trace = TraceWriter(ring)
    for step_id in range(700):
        write_step(trace, step_id, 1 + step_id % 9)
    ring.close()
    report = inspect(ring.path, window_s=0, last=1)
    assert report.scan.exact
    assert report.scan.lost_frames > 0
    assert report.scan.written_tokens == report.written_tokens == sum(1 + i % 9 for i in range(700))
    assert report.fill == 1
    assert report.writer == "closed by its writer"
    assert report.scan.last[0].text.startswith("step 699: 7 rows")


def test_damage_that_does_not_add_up_is_shown(tmp_path: Path) -> None:
    ring = engine(tmp_path, requests=1, steps=5)
    ring.close()
    with ring.path.open("r+b") as file:
        file.seek(1168)
        file.write(struct.pack("<Q", 77))
    scan = inspect(ring.path, window_s=0, last=0).scan
    assert not scan.exact
    assert (scan.delivered_tokens, scan.written_tokens) == (5, 77)


@pytest.mark.kill
def test_a_ring_whose_engine_was_killed_inside_a_frame(tmp_path: Path) -> None:
    def work() -> None:
        ring = engine(tmp_path, requests=2, steps=3)
        ring.begin(1000)
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(forked(work), 0)
    path = find_ring(None, tmp_path, tmp_path)
    report = inspect(archived(path, tmp_path / "crashes"), window_s=1, last=2)
    assert (report.alive, report.rates) == (False, None)
    assert (report.scan.torn_frames, report.scan.exact) == (1, True)
    assert report.scan.written_tokens == 6


def test_readers_and_their_lag_are_shown(tmp_path: Path) -> None:
    ring = engine(tmp_path, requests=1, steps=100)
    reader = RingReader(ring.path)
    reader.read(4096)
    Attendance(ring.path, "collector").report(reader.cursor, reader.lag_bytes)
    trace = TraceWriter(ring)
    for step_id in range(100, 110):
        write_step(trace, step_id, 1)
    [lag] = inspect(ring.path, window_s=0, last=0).readers
    assert (lag.name, lag.lag_bytes) == ("collector", reader.lag_bytes)
    assert lag.lag_frames == 113 - reader.cursor.sequence
    assert lag.lag_tokens == 110 - reader.cursor.tokens
    assert lag.share == reader.lag_bytes / reader.header.capacity


def test_rings_are_found_by_their_first_characters(tmp_path: Path) -> None:
    first, second = (new_ring(tmp_path, engine_id=UUID(int=number)) for number in (1, 2))
    first.close()
    assert find_ring(None, tmp_path, tmp_path) == second.path
    assert find_ring(first.path.stem, tmp_path, tmp_path) == first.path
    assert find_ring(str(first.path), tmp_path, tmp_path) == first.path
    second.close()
    with pytest.raises(RingError, match=r"name one of the 2 rings in .*, for example"):
        find_ring(None, tmp_path, tmp_path)
    with pytest.raises(RingError, match="starts with 'zz'; there are"):
        find_ring("zz", tmp_path, tmp_path)
    with pytest.raises(RingError, match="starts with"):
        find_ring("z" * 5000, tmp_path, tmp_path)
    with pytest.raises(RingError, match="'00' is the start of 2 engine ids"):
        find_ring("00", tmp_path, tmp_path)
    archive = archived(first.path, tmp_path / "crashes")
    assert find_ring(first.path.stem, tmp_path, tmp_path / "crashes") == first.path
    first.path.unlink()
    second.path.unlink()
    assert find_ring(None, tmp_path, tmp_path / "crashes") == archive
    with pytest.raises(RingError, match=r"there is no ring in .*inferloop serve"):
        find_ring("zz", tmp_path / "none", tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"no zstd at all", RingFormatError, "is no archived ring"),
        (zstandard.compress(b"x" * 9000), RingFormatError, "is no ring"),
        (zstandard.compress(b"short"), RingIncompleteError, r"no header yet \(5 bytes\)"),
        (b"", RingIncompleteError, r"no header yet \(0 bytes\)"),
    ],
)
def test_foreign_archives_are_refused(
    tmp_path: Path, content: bytes, error: type[RingError], message: str
) -> None:
    path = tmp_path / "x.ring.zst"
    path.write_bytes(content)
    with pytest.raises(error, match=message), opened_ring(path):
        pass


def test_an_archive_gives_no_more_than_its_ring_holds(tmp_path: Path) -> None:
    ring = engine(tmp_path, requests=1, steps=5)
    ring.close()
    whole = ring.path.read_bytes()
    path = tmp_path / "x.ring.zst"
    path.write_bytes(zstandard.compress(whole + bytes(1 << 24)))
    assert inspect(path, window_s=0, last=0).scan.exact
    path.write_bytes(zstandard.compress(whole[:-4096]))
    with pytest.raises(RingIncompleteError, match="4096 bytes of the ring are missing"):
        inspect(path, window_s=0, last=0)


def test_the_list_shows_every_file_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    rings, crashes = tmp_path / "r", tmp_path / "crashes"
    rings.mkdir()
    assert summaries(rings, crashes) == []
    alive, dead = engine(rings, requests=1, steps=5), engine(rings, requests=1, steps=5)
    dead.close()
    archived(dead.path, crashes)
    (rings / "foreign.ring").write_bytes(b"hello" * 2000)
    (rings / "short.ring").write_bytes(b"")
    found = {Path(summary.path).name: summary for summary in summaries(rings, crashes)}
    assert len(found) == 5
    assert found[alive.path.name].alive
    assert found[alive.path.name].model == "tiny"
    assert found[dead.path.name].writer == "closed by its writer"
    assert found[f"{dead.path.stem}.ring.zst"].writer == "crashed, archived"
    assert "is no ring" in (found["foreign.ring"].problem or "")
    assert "still being copied" in (found["short.ring"].problem or "")


def hostile_ring(directory: Path) -> RingWriter:
    directory.mkdir(parents=True, exist_ok=True)
    ring = new_ring(directory)
    trace = TraceWriter(ring)
    trace.engine({"model": "\x1b]0;owned\x07[red]", "fingerprint": "\u202e\x9b2J"})
    write_request(trace, 0, tenant="\x1b[2J\r\n[bold]acme[/bold]", class_key="\x9b31m")
    trace.mark("new\nline\x00\u202egnihton")
    ring.close()
    return ring


def test_an_archive_of_several_frames_is_read_as_one(tmp_path: Path) -> None:
    ring = engine(tmp_path, requests=1, steps=5)
    whole = ring.path.read_bytes()
    path = tmp_path / "x.ring.zst"
    path.write_bytes(b"".join(zstandard.compress(part) for part in (whole[:5000], whole[5000:])))
    assert inspect(path, window_s=0, last=1).scan.exact


def test_an_archive_is_unpacked_without_a_name_that_could_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    ring = engine(tmp_path, requests=1, steps=5)
    with opened_ring(archived(ring.path, tmp_path / "crashes")) as reader:
        assert len(reader.read())
        assert list(place.iterdir()) == []


@pytest.mark.parametrize("text", [b"[]", b"{}", b"[" * 1500, b"\xff"])
def test_a_label_of_another_program_is_no_label(text: bytes) -> None:
    data = struct.pack("<QI", xxh3_64_intdigest(text), len(text)) + text
    assert unpack_label(data) is None


def test_the_command_shows_a_ring_and_no_control_characters(tmp_path: Path) -> None:
    ring = hostile_ring(tmp_path / "r")
    for arguments in (("list",), ("inspect", ring.path.stem[:8])):
        result = inferloop(tmp_path, "ring", *arguments)
        assert result.exit_code == 0, result.exception
        shown = result.stdout.replace("\n", "")
        assert shown.isprintable()
        assert "[red]" in shown
        assert "\u202e" not in shown
    assert "[bold]acme[/bold]" in shown
    assert "3 delivered + 0 lost = 3 written frames" in shown


def test_the_command_speaks_json(tmp_path: Path) -> None:
    ring = hostile_ring(tmp_path / "r")
    result = inferloop(tmp_path, "ring", "inspect", "--json", "--last", "3")
    document = json.loads(result.stdout)
    assert document["header"]["engine_id"] == ring.path.stem
    assert document["scan"]["exact"] is True
    request = document["scan"]["last"][1]["fields"]
    assert request["tenant"] == "\x1b[2J\r\n[bold]acme[/bold]"
    assert result.stdout.isascii()
    [summary] = json.loads(inferloop(tmp_path, "ring", "list", "--json").stdout)
    assert summary["frames"] == 3


def test_on_a_terminal_long_texts_are_folded(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    ring = new_ring(tmp_path / "r")
    TraceWriter(ring).mark("word " * 100 + "\x1b[5m")
    ring.close()
    places = {"INFERLOOP_HOME": str(tmp_path), "INFERLOOP_RING_DIR": str(tmp_path / "r")}
    looks = {"COLUMNS": "70", "TERM": "xterm", "NO_COLOR": "1"}
    pid, terminal = on_a_terminal("-m", "cli", "ring", "inspect", **places, **looks)
    shown = b""
    try:
        while data := os.read(terminal, 65536):
            shown += data
    except OSError:  # the other end was closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"\x1b[5m" not in shown
    lines = re.sub(r"\x1b\[[0-9;]*m|\r", "", shown.decode()).split("\n")
    assert sum("word" in line for line in lines) > 5
    assert max(len(line) for line in lines) <= 70


@pytest.mark.parametrize(
    ("version", "way_out"), [(0, "read it with the version"), (9, "upgrade inferloop here")]
)
def test_another_format_version_is_named_with_a_way_out(
    tmp_path: Path, version: int, way_out: str
) -> None:
    ring = hostile_ring(tmp_path / "r")
    with ring.path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", version))
    result = inferloop(tmp_path, "ring", "inspect", ring.path.stem)
    message = str(result.exception)
    assert isinstance(result.exception, RingFormatError)
    assert f"has ring format {version}, this version reads format 1" in message
    assert way_out in message
    assert "\n" not in message


def test_a_frame_of_a_newer_schema_is_shown_as_not_decodable(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    ring.append(3, 99, b"from the future")
    ring.append(42, 1, b"unknown kind")
    ring.close()
    first, second = inspect(ring.path, window_s=0, last=5).scan.last
    assert "cannot be decoded" in first.text
    assert "99" in first.text
    assert second.type == "type 42"


def test_a_foreign_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "x.ring"
    path.write_bytes(b"A" * (HEADER_BYTES + 100))
    result = inferloop(tmp_path, "ring", "inspect", str(path))
    assert "is no ring: it starts with b'AAAAAAAA'" in str(result.exception)
    missing = inferloop(tmp_path, "ring", "inspect", str(tmp_path / "no.ring"))
    assert isinstance(missing.exception, RingError)
    assert "cannot read the ring" in str(missing.exception)


@pytest.mark.kill
def test_a_stopped_engine_is_alive_and_its_ring_can_be_inspected(tmp_path: Path) -> None:
    def work() -> None:
        ring = engine(tmp_path, requests=1, steps=5)
        ring.begin(1000)
        os.kill(os.getpid(), signal.SIGSTOP)

    pid = forked(work)
    try:
        os.waitpid(pid, os.WUNTRACED)
        report = inspect(find_ring(None, tmp_path, tmp_path), window_s=0.01, last=1)
        assert report.alive
        assert report.scan.exact
        assert (report.scan.torn_frames, report.scan.corrupt_frames) == (0, 0)
    finally:
        kill(pid)


def test_a_cursor_from_the_future_is_no_negative_lag(tmp_path: Path) -> None:
    ring = engine(tmp_path, requests=1, steps=5)
    Attendance(ring.path, "x").report(Cursor(10**6, 10**6, 10**9), 0)
    [lag] = inspect(ring.path, window_s=0, last=0).readers
    assert (lag.lag_bytes, lag.lag_frames, lag.lag_tokens) == (0, 0, 0)


def test_the_label_outlives_the_engine_frame(tmp_path: Path) -> None:
    ring = new_ring(tmp_path, MIN_CAPACITY)
    reader = RingReader(ring.path)
    assert reader.label is None
    trace = TraceWriter(ring)
    trace.engine({"model": "\x00" * 500, "fingerprint": "\u00e4" * 500})
    assert reader.label == {"model": "\x00" * 128, "fingerprint": "\u00e4" * 128}
    for step_id in range(2000):
        write_step(trace, step_id, 1)
    report = inspect(ring.path, window_s=0, last=0)
    assert report.scan.engine is None
    assert report.label == reader.label
    TraceWriter(ring).engine({"model": "m", "kind": "proxy", "upstream": "http://10.0.0.1:8000"})
    model = "m through the proxy for http://10.0.0.1:8000"
    assert reader.label == {"model": model, "fingerprint": "unknown"}
    TraceWriter(ring).engine({"model": None, "kind": "proxy", "upstream": "http://10.0.0.1:8000"})
    assert reader.label is not None
    assert reader.label["model"] == "unknown through the proxy for http://10.0.0.1:8000"
    ring.close()
    with ring.path.open("r+b") as file:
        file.seek(2048 + 20)
        file.write(b"\xff")
    assert RingReader(ring.path).label is None
