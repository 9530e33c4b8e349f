"""Which frames `inferloop ring inspect` shows: an idle engine's samples do not hide the rest."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capture.frames import TraceWriter
from capture.rings.ring_report import inspect
from cli.main import app, load_commands
from tests.capture.rings import new_ring, write_finish, write_request, write_step

load_commands()

SAMPLE = {"index": -1, "values": [1e9, *[math.nan] * 5], "unavailable": ""}


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    """One request, three steps, its end; then nothing but 200 samples of memory."""
    ring = new_ring(tmp_path / "rings")
    trace = TraceWriter(ring)
    trace.engine({"model": "tiny"})
    write_request(trace, 0)
    for step in range(3):
        write_step(trace, step, 1)
    write_finish(trace, 0)
    for _ in range(200):
        trace.memory(**SAMPLE)
    ring.close()
    return ring.path


def shown(path: Path, last: int, *, raw: bool = False) -> list[str]:
    return [line.type for line in inspect(path, window_s=0, last=last, raw=raw).scan.last]


def test_the_last_frames_that_matter_are_shown_with_the_newest_of_each_kind(ring: Path) -> None:
    assert shown(ring, 10) == ["ENGINE", "REQUEST", *["STEP"] * 3, "FINISH", "MEMORY"]
    assert shown(ring, 2) == ["ENGINE", "REQUEST", "STEP", "FINISH", "MEMORY"]
    lines = inspect(ring, window_s=0, last=2).scan.last
    assert [line.sequence for line in lines] == sorted(line.sequence for line in lines)
    assert lines[-1].sequence == 205, "the newest sample"
    assert lines[2].text.startswith("step 2:"), "the newest step"


def test_raw_shows_the_last_frames_whatever_they_are(ring: Path) -> None:
    assert shown(ring, 10, raw=True) == ["MEMORY"] * 10
    assert shown(ring, 0) == shown(ring, 0, raw=True) == []


def test_the_command_has_both(ring: Path, tmp_path: Path) -> None:
    def types(*options: str) -> list[str]:
        result = CliRunner().invoke(
            app,
            ["ring", "inspect", str(ring), "--json", *options],
            env={"INFERLOOP_HOME": str(tmp_path), "INFERLOOP_RING_DIR": str(tmp_path)},
        )
        assert result.exit_code == 0, result.output
        return [line["type"] for line in json.loads(result.stdout)["scan"]["last"]]

    assert "FINISH" in types()
    assert types("--raw", "--last", "3") == ["MEMORY"] * 3
