"""`inferloop top` on rings alone: engines come and go, a fast one is sampled, Ctrl-C ends it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

import pytest
import zstandard
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from capture.errors import RingError
from capture.frames import TraceWriter
from capture.reader import RingReader, discover
from capture.rings.attendance import Attendance, attending, remove_ring
from capture.rings.ring_report import summaries
from capture.watch import Watch
from cli.main import app, load_commands
from cli.top_view import watch_view
from tests.capture.children import forked, kill, on_a_terminal
from tests.capture.rings import MIB, engine, new_ring, write_request, write_step
from tests.waiting import PATIENCE_S

load_commands()
LONG_S = 600.0
"""A window from which no frame falls out during a test."""


def inferloop(home: Path, *arguments: str) -> Result:
    environment = {"INFERLOOP_HOME": str(home), "INFERLOOP_RING_DIR": str(home / "r")}
    return CliRunner().invoke(app, arguments, env=environment)


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    directory = tmp_path / "r"
    directory.mkdir()
    return directory


def test_engines_that_start_run_and_end_while_watched(
    rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.watch.DISCOVER_S", 0.0)
    left = engine(rings, requests=1, steps=1)
    left.close()
    with Watch(rings, LONG_S) as watch:
        watch.poll(1)
        assert watch.view().engines == []
        assert watch.view().waiting_rings == 1
        ring = engine(rings, requests=2, steps=10)
        watch.poll(1)
        [view] = watch.view().engines
        assert view.ended_ago_s is None
        assert view.live.itl.count == 18
        assert view.live.ttft.count == 2
        assert [reader.name for reader in attending(ring.path)] == ["top"]
        assert view.readers == [], "of the others"
        ring.close()
        watch.poll(1)
        [view] = watch.view().engines
        assert view.ended_ago_s is not None
        assert view.writer == "closed by its writer"
        remove_ring(ring.path)
        watch.poll(1)
        assert len(watch.view().engines) == 1, "what it was doing can still be read"
        monkeypatch.setattr("capture.watch.ENDED_SHOWN_S", 0.0)
        watch.poll(1)
        assert watch.view().engines == []
    assert attending(ring.path) == []


@pytest.mark.kill
def test_a_crash_is_shown_as_one(rings: Path) -> None:
    told, tell = os.pipe()

    def work() -> None:
        engine(rings, requests=1, steps=3)
        os.write(tell, b"x")
        signal.pause()

    pid = forked(work)
    os.read(told, 1)
    with Watch(rings, LONG_S) as watch:
        watch.poll(1)
        kill(pid)
        watch.poll(1)
        [view] = watch.view().engines
    assert view.writer == "its process is gone: nobody holds the file's lock"
    assert view.live.itl.count == 2


def test_foreign_cut_and_incomplete_files_do_not_stop_the_view(
    rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.watch.DISCOVER_S", 0.0)
    (rings / "foreign.ring").write_bytes(b"hello" * 2000)
    (rings / "copied.ring").write_bytes(b"")
    ring = engine(rings, requests=1, steps=3)
    with Watch(rings) as watch:
        watch.poll(1)
        view = watch.view()
        assert len(view.engines) == 1
        assert len(view.problems) == 1
        assert "foreign.ring is no ring" in view.problems[0]
        os.truncate(ring.path, 100)
        watch.poll(1)
        assert watch.view().engines == []
        assert any("was cut" in problem for problem in watch.view().problems)


def test_rings_that_may_not_be_read_are_named_until_they_may(
    rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.watch.DISCOVER_S", 0.0)
    ring = engine(rings, requests=1, steps=3)
    really_open, really_list = os.open, os.listdir

    def refuse(path: object, *_: object, **__: object) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    def open_others(path: object, *rest: Any, **named: Any) -> int:
        return refuse(path) if path == ring.path else really_open(path, *rest, **named)

    with Watch(rings) as watch:
        monkeypatch.setattr("capture.reader.os.open", open_others)
        watch.poll(1)
        assert watch.view().problems == [f"cannot read the ring {ring.path}: Permission denied"]
        monkeypatch.setattr("capture.reader.os.open", really_open)
        watch.poll(1)
        assert watch.view().problems == []
        assert len(watch.view().engines) == 1
        monkeypatch.setattr("capture.reader.os.listdir", refuse)
        watch.poll(1)
        assert watch.view().problems == [f"cannot look for rings in {rings}: Permission denied"]
        with pytest.raises(RingError, match="cannot look for rings"):
            summaries(rings, rings)
        monkeypatch.setattr("capture.reader.os.listdir", really_list)


def test_what_is_too_fast_is_sampled_and_counted(
    rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.watch.KEEP_BYTES", 64 * 1024)
    ring = new_ring(rings, 16 * MIB)
    trace = TraceWriter(ring)
    trace.engine({"model": "tiny"})
    with Watch(rings, LONG_S) as watch:
        watch.poll(1)
        for step_id in range(600):
            write_step(trace, step_id, 256)
        watch.poll(0)  # one batch, then no time is left
        [view] = watch.view().engines
        live = view.live
        assert live.skipped_tokens > 0
        assert live.lost_tokens == 0
        assert view.lag_bytes <= 64 * 1024
        assert live.sampled_share == pytest.approx(1 - live.skipped_tokens / (600 * 256), abs=0.02)
        watch.poll(1)
        live = watch.view().engines[0].live
        total = live.itl.count + live.skipped_tokens
        assert total == 600 * 256
        assert live.tokens_per_s * live.window_s == pytest.approx(total)


def test_skipping_keeps_the_account_of_a_reader(rings: Path) -> None:
    ring = engine(rings, requests=1, steps=1000)
    reader = RingReader(ring.path)
    assert reader.skip(MIB) is None
    gap = reader.skip(10_000)
    assert gap is not None
    assert reader.lag_bytes <= 10_000
    delivered = len(reader.read())
    assert delivered + gap.frames == ring.counters.frames
    assert reader.cursor.lost_frames == gap.frames


def test_a_living_engine_is_followed_at_speed(rings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost or counted twice while it writes; a token costs what it does in writing."""
    monkeypatch.setattr("capture.watch.KEEP_BYTES", 32 * MIB)
    ring = new_ring(rings, 32 * MIB)
    trace = TraceWriter(ring)
    writing_s = reading_s = 0.0

    def write() -> None:
        nonlocal writing_s
        for step_id in range(1000):
            write_step(trace, step_id, 256)
            if step_id % 10 == 0:
                time.sleep(0.01)
        writing_s = time.thread_time()

    thread = threading.Thread(target=write)
    thread.start()
    with Watch(rings, LONG_S) as watch:
        while thread.is_alive():
            before_s = time.thread_time()
            watch.poll(0.2)
            reading_s += time.thread_time() - before_s
            watch.view()
            time.sleep(0.02)
        watch.poll(1)
        live = watch.view().engines[0].live
    assert live.lost_tokens == live.skipped_tokens == 0
    assert live.itl.count == ring.counters.tokens == 256_000
    assert reading_s < 5 * writing_s


def test_nothing_runs_and_the_user_is_told_what_to_do(tmp_path: Path) -> None:
    result = inferloop(tmp_path, "top", "--once")
    assert result.exit_code == 0
    assert "no engine is running" in result.stdout
    assert "inferloop serve" in result.stdout
    document = json.loads(inferloop(tmp_path, "top", "--once", "--json").stdout)
    assert document["engines"] == []
    assert "add --once" in str(inferloop(tmp_path, "top", "--json").exception)


def test_one_picture_for_scripts(
    tmp_path: Path, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.watch.Watch", partial(Watch, window_s=LONG_S))
    ring = engine(rings, requests=4, steps=20)
    trace = TraceWriter(ring)
    write_request(trace, 9, tenant="\x1b[2J[bold]evil")
    write_step(trace, 20, 1, slot=9, phase=1, latency_us=77_000)
    trace.event(kind="preempted", request_id=None, slot=9, detail="\x9b31m for another")
    reader = RingReader(ring.path)
    reader.read(4096)
    Attendance(ring.path, "collector").report(reader.cursor, reader.lag_bytes)
    document = json.loads(inferloop(tmp_path, "top", "--once", "--json").stdout)
    [shown] = document["engines"]
    assert shown["live"]["itl"]["count"] == 76
    assert (shown["model"], shown["build"]) == ("tiny", "f00d")
    assert shown["readers"][0]["lag_bytes"] == reader.lag_bytes
    assert abs(shown["live"]["events"][0]["at_ns"] - time.time_ns()) < 60e9
    result = inferloop(tmp_path, "top")  # not on a terminal: the same as --once
    assert result.exit_code == 0
    for text in ("tiny", "TTFT", "77.0         77.0", "1 preemption", "[2J[bold]evil", "behind ("):
        assert text in result.stdout, text
    assert result.stdout.replace("\n", "").isprintable()


@pytest.mark.kill
def test_an_engine_that_stands_still_is_shown_as_such(
    tmp_path: Path, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.top_view.STUCK_S", 0.0)

    def work() -> None:
        ring = engine(rings, requests=1, steps=3)
        write_request(TraceWriter(ring), 7)
        ring.begin(1000)
        os.kill(os.getpid(), signal.SIGSTOP)

    pid = forked(work)
    try:
        os.waitpid(pid, os.WUNTRACED)
        shown = inferloop(tmp_path, "top", "--once").stdout
        assert "1 running, 0 waiting; no step for" in shown
        assert "losses     none" in shown
    finally:
        kill(pid)


def test_ctrl_c_ends_the_live_view_and_gives_the_screen_back(tmp_path: Path, rings: Path) -> None:
    ring = engine(rings, requests=4, steps=20)
    places = {"INFERLOOP_HOME": str(tmp_path), "INFERLOOP_RING_DIR": str(rings)}
    looks = {"COLUMNS": "90", "LINES": "40", "TERM": "xterm"}
    pid, terminal = on_a_terminal("-m", "cli", "top", "--interval", "0.2", **places, **looks)
    shown = b""
    try:
        deadline = time.monotonic() + PATIENCE_S
        while b"tiny" not in shown and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 65536)
        assert [reader.pid for reader in attending(ring.path)] == [pid]
        os.write(terminal, b"\x03")
        while data := os.read(terminal, 65536):
            shown += data
    except OSError:  # the other end was closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"TTFT" in shown
    assert b"Traceback" not in shown
    assert shown.rstrip().endswith((b"\x1b[?1049l\x1b[?25h", b"\x1b[?25h\x1b[?1049l"))
    assert attending(ring.path) == []
    assert discover(rings) == [ring.path]


def screen(rings: Path, rows: int, columns: int = 80) -> list[str]:
    """The lines that `top` draws on a terminal of that size."""
    with Watch(rings) as watch:
        watch.poll(1)
        console = Console(width=columns, height=rows, color_system=None)
        with console.capture() as captured:
            console.print(watch_view(watch.view(), rows=rows))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_many_engines_share_a_small_terminal(rings: Path) -> None:
    written = [engine(rings, requests=2, steps=3, capacity=MIB) for _ in range(20)]
    lines = screen(rings, rows=24)
    assert len(lines) <= 24
    for ring in written:
        assert any(line.startswith(ring.path.name[:8]) for line in lines)
    lines = screen(rings, rows=10)
    assert len(lines) <= 10
    assert sum("tiny" in line for line in lines) == 7
    assert "13 more" in lines
    assert sum(line.startswith("TTFT ") for line in screen(rings, rows=400)) == 20
    assert sum(line.startswith("TTFT ") for line in screen(rings, rows=40)) == 1


def test_a_small_terminal_shows_the_newest_events(rings: Path) -> None:
    trace = TraceWriter(engine(rings, requests=1, steps=3))
    for tenant in range(30):
        write_request(trace, 10 + tenant, tenant=f"tenant-{tenant}")
    for number in range(8):
        trace.mark(f"mark {number} {'x' * 200}")
    lines = screen(rings, rows=24)
    assert len(lines) <= 24
    assert re.match(r"\d\d:\d\d:\d\d  mark: mark 7 x+", lines[-1]), "cut at its end"


def test_a_terminal_that_cannot_move_its_cursor_gets_one_picture(
    tmp_path: Path, rings: Path
) -> None:
    engine(rings, requests=1, steps=3)
    places = {"INFERLOOP_HOME": str(tmp_path), "INFERLOOP_RING_DIR": str(rings)}
    pid, terminal = on_a_terminal("-m", "cli", "top", TERM="dumb", **places)
    shown = b""
    try:
        while data := os.read(terminal, 65536):
            shown += data
    except OSError:  # the other end was closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"tiny" in shown
    assert b"\x1b[" not in shown


def shown_commands() -> list[list[str]]:
    """Every `inferloop top` and `inferloop ring` line of the page's code blocks."""
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL))
    lines = re.findall(r"^inferloop ((?:top|ring)[^|\n]*)", blocks, re.MULTILINE)
    return [line.split() for line in lines]


@pytest.mark.parametrize("arguments", shown_commands(), ids=" ".join)
def test_the_commands_of_the_page_work(
    tmp_path: Path, rings: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_id = UUID("9d774749-4cb2-4a3d-8bde-128b9c84f123")
    ring = new_ring(rings, engine_id=engine_id)
    TraceWriter(ring).engine({"model": "tiny"})
    archive = tmp_path / ".inferloop" / "crashes" / f"{engine_id}.ring.zst"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(zstandard.compress(ring.path.read_bytes()))
    monkeypatch.chdir(tmp_path)
    result = inferloop(tmp_path, *arguments)
    assert result.exit_code == 0, result.exception
    assert "tiny" in result.stdout
