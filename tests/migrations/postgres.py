"""A throw-away PostgreSQL 15 server for tests that must hold on both databases."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S, until

BINARIES = Path("/usr/lib/postgresql/15/bin")


@contextmanager
def postgres_server() -> Iterator[str]:
    """URL of an empty database on a new server that listens on a Unix socket only.

    Runs as user `postgres` when the tests run as root. Skips the test when PostgreSQL 15 is not
    installed.
    """
    if not (BINARIES / "initdb").exists():
        pytest.skip(f"PostgreSQL 15 is not installed: {BINARIES}/initdb is missing")
    directory = Path(tempfile.mkdtemp(prefix="inferloop-pg-", dir="/tmp"))
    user = "postgres" if os.geteuid() == 0 else None
    if user:
        shutil.chown(directory, user)
    data = directory / "data"
    try:
        subprocess.run(
            [BINARIES / "initdb", "-D", data, "-U", "inferloop", "-A", "trust", "--no-sync"],
            user=user, cwd=directory, check=True, capture_output=True,
        )  # fmt: skip
        with _running(data, directory, user):
            yield f"postgresql+psycopg://inferloop@/postgres?host={directory}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _running(data: Path, sockets: Path, user: str | None) -> Iterator[None]:
    command = [BINARIES / "postgres", "-D", data, "-k", sockets, "-h", "", "-F"]
    log = (sockets / "log").open("wb")
    server = subprocess.Popen(command, user=user, cwd=sockets, stdout=log, stderr=log)
    try:
        _wait_until_ready(sockets, server)
        yield
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(PATIENCE_S)
        finally:
            server.kill()
            log.close()


def _wait_until_ready(sockets: Path, server: subprocess.Popen[bytes]) -> None:
    command = [BINARIES / "pg_isready", "-h", sockets, "-q"]

    def is_ready() -> bool:
        ready = subprocess.run(command, capture_output=True, check=False)
        return ready.returncode == 0

    until(lambda: is_ready() or server.poll() is not None, "PostgreSQL is ready", poll_s=0.1)
    if server.poll() is not None:
        pytest.fail(f"PostgreSQL did not start: {(sockets / 'log').read_text()}")
