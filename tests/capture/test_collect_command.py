"""`inferloop collect` as a user meets it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli.collect
import cli.sql  # noqa: F401  these add their commands to the app
from cli.main import app
from tests.capture.rings import engine


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    rings = tmp_path / "rings"
    rings.mkdir()
    return {"INFERLOOP_HOME": str(tmp_path / "home"), "INFERLOOP_RING_DIR": str(rings)}


def test_once_drains_says_what_it_did_and_ends(environment: dict[str, str], tmp_path: Path) -> None:
    engine(tmp_path / "rings", requests=4, steps=25).close()
    result = CliRunner().invoke(app, ["collect", "--once"], env=environment)
    assert result.exit_code == 0, result.output
    assert "100 tokens in" in result.stderr
    counted = CliRunner().invoke(
        app, ["sql", "SELECT count(*) AS n FROM tokens", "-f", "csv"], env=environment
    )
    assert counted.stdout.split() == ["n", "100"]


def test_quiet_is_quiet(environment: dict[str, str]) -> None:
    result = CliRunner().invoke(app, ["collect", "--once", "--quiet"], env=environment)
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_cleanly(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    code = "import cli.collect, cli.sql; from cli.main import app; app(['collect'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    ring = engine(tmp_path / "rings", requests=4, steps=25)
    deadline = time.monotonic() + 30
    while "1 ring, 100 tokens" not in (line := (process.stderr or sys.stdin).readline()):
        assert time.monotonic() < deadline, line
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "stopped: 1 ring, 100 tokens" in errors
    ring.close()


def test_a_second_one_is_told_who_has_the_rings(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with (tmp_path / "rings" / ".collector.lock").open("w+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write("4711")
        other.flush()
        result = CliRunner().invoke(app, ["collect", "--once"], env=environment)
    assert "another collector (pid 4711)" in str(result.exception)
    assert getattr(result.exception, "exit_code", None) == 1
