"""A shared server for the tests that leave no trace behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.live_server import LiveServer, live_server
from tests.waiting import until


@pytest.fixture(scope="package")
def shared_server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    tasks = shared_server.uvicorn.server_state.tasks
    until(lambda: not tasks, "the test before has left its traffic records")
    shared_server.records.clear()
    shared_server.runner.script.clear()
    yield shared_server
    assert shared_server.engine.pool.used == 0
