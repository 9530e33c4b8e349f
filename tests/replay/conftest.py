"""Builds of the fake engine, traffic for it and a database of one's own."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.orm import Session, sessionmaker

import migrations
from replay.builds import BuildSpec
from replay.database import open_sessions
from replay.source import make_records, write_records
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]


def toy(*faults: str, name: str = "toy", token_ms: float = 1.0, **fields: Any) -> BuildSpec:
    """A build of the fake engine with planted faults."""
    flags = " ".join(f"--fault {fault}" for fault in faults)
    command = (
        f"{sys.executable} -m tests.replay.fake_engine --port {{port}} "
        f"--token-ms {token_ms} {flags}"
    )
    return BuildSpec.model_validate(
        {"name": name, "command": command, "workdir": ROOT, "health_timeout_s": PATIENCE_S} | fields
    )


def prompts(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"Question {n}, 第{n}问 🙂"}], "tenant": "t"}
        for n in range(count)
    ]


def traffic(
    path: Path, items: list[dict[str, Any]], *, interval_s: float = 0.01, unset: str = ""
) -> Path:
    """A traffic file; `unset` names a sampling parameter that the client left to the server."""
    records = make_records(items, model="toy", interval_s=interval_s)
    for record in records:
        record.sampling_set = [name for name in record.sampling_set or [] if name != unset]
    write_records(path, records)
    return path


@pytest.fixture(scope="session")
def toys() -> Iterator[Callable[[str], BuildSpec]]:
    """Endpoint builds of one running fake engine, by fault (`plain`: none): they start at once."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        command = [sys.executable, "-m", "tests.replay.fake_engine", "--fd", str(fd), "--all"]
        process = subprocess.Popen([*command, "--token-ms", "2"], cwd=ROOT, pass_fds=[fd])
    try:
        until(lambda: process.poll() is not None or _answers(port), "the fake engine answers")
        assert process.poll() is None
        yield lambda fault: BuildSpec(name=fault, endpoint=f"http://127.0.0.1:{port}/{fault}/v1")
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.HTTPError:
        return False


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[sessionmaker[Session]]:
    url = f"sqlite:///{tmp_path / 'replay.sqlite'}"
    migrations.upgrade(url)
    factory = open_sessions(url)
    yield factory
    factory.kw["bind"].dispose()
