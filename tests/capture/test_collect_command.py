"""`inferloop collect` as a user meets it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

import cli.collect
import cli.sql  # noqa: F401  these add their commands to the app
from cli.main import app
from tests.capture import children
from tests.capture.rings import engine
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    rings = tmp_path / "rings"
    rings.mkdir()
    return {"INFERLOOP_HOME": str(tmp_path / "home"), "INFERLOOP_RING_DIR": str(rings)}


def started(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """`inferloop collect` as a process of its own."""
    code = f"import cli.collect, cli.sql; from cli.main import app; app({['collect', *arguments]})"
    return children.started(
        [sys.executable, "-c", code], env={**os.environ, **environment}, stderr=subprocess.PIPE
    )


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Read what the process says until a line with `text`."""
    assert process.stderr is not None
    lines: list[str] = []
    while text not in "".join(lines[-1:]):
        lines.append(process.stderr.readline())
        assert lines[-1], f"it ended and said {lines}"


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
    ring = engine(tmp_path / "rings", requests=4, steps=25)
    process = started(environment)
    wait_for_line(process, "1 ring, 100 tokens")
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
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
    assert "collecting from" not in result.output
    assert getattr(result.exception, "exit_code", None) == 1


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port to listen on that no other program is given meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def test_metrics_and_health_are_served_while_it_runs(
    environment: dict[str, str], tmp_path: Path
) -> None:
    ring = engine(tmp_path / "rings", requests=4, steps=25)
    with reserved_port() as port:
        process = started(environment, "--metrics-port", str(port))
        wait_for_line(process, "1 ring, 100 tokens")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:

            def committed() -> dict[str, str]:
                text = client.get("/metrics").text
                found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
                return found if float(found["inferloop:collector_commit_seconds_count"]) else {}

            values = until(committed, "a commit in the metrics")
            health = client.get("/health")
            nothing = client.get("/")
            with_parameter = client.get("/health?from=probe")
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert float(values["inferloop:collector_tokens_total"]) == 100
    assert float(values["inferloop:collector_lost_tokens_total"]) == 0
    assert float(values["inferloop:collector_waiting"]) == 0
    engine_id = ring.path.stem
    assert float(values[f'inferloop:collector_lag_bytes{{engine_id="{engine_id}"}}']) == 0
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert with_parameter.status_code == 200
    assert nothing.status_code == 404
    ring.close()


def test_a_taken_metrics_port_is_a_clear_error_at_the_start(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        result = CliRunner().invoke(
            app, ["collect", "--once", "--metrics-port", port], env=environment
        )
    assert f"127.0.0.1:{port}: Address already in use" in str(result.exception)
    assert "--metrics-port" in str(result.exception)
    assert getattr(result.exception, "exit_code", None) == 1


def test_systemd_is_told_ready_alive_and_stopping(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE_S)
        ring = engine(tmp_path / "rings", requests=4, steps=25)
        process = started({**environment, "NOTIFY_SOCKET": str(tmp_path / "notify")})
        told = [systemd.recv(4096).decode()]
        while "1 ring, 100 tokens" not in told[-1]:
            told.append(systemd.recv(4096).decode())
        process.terminate()
        while "STOPPING=1" not in told:
            told.append(systemd.recv(4096).decode())
        process.communicate(timeout=PATIENCE_S)
    assert told[0] == "READY=1"
    assert "WATCHDOG=1\nSTATUS=1 ring, 100 tokens" in "\n".join(told)
    assert process.returncode == 0
    ring.close()
