"""Builds of the fake engine, traffic for it and a database of one's own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.orm import Session, sessionmaker

import migrations
from replay.builds import BuildSpec, free_port
from replay.database import open_sessions
from replay.source import make_records, write_records

ROOT = Path(__file__).parents[2]


def toy(*faults: str, name: str = "toy", token_ms: float = 1.0, **fields: Any) -> BuildSpec:
    """A build of the fake engine with planted faults."""
    flags = " ".join(f"--fault {fault}" for fault in faults)
    command = (
        f"{sys.executable} -m tests.replay.fake_engine --port {{port}} "
        f"--token-ms {token_ms} {flags}"
    )
    return BuildSpec.model_validate(
        {"name": name, "command": command, "workdir": ROOT, "health_timeout_s": 60} | fields
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
    port = free_port()
    command = [sys.executable, "-m", "tests.replay.fake_engine", "--port", str(port), "--all"]
    process = subprocess.Popen([*command, "--token-ms", "2"], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield lambda fault: BuildSpec(name=fault, endpoint=f"http://127.0.0.1:{port}/{fault}/v1")
    finally:
        process.terminate()
        process.wait(timeout=20)


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
