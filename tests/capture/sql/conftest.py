"""One lake and one warm query process for all tests of SQL: starting a process takes a second."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from capture.sql.query import QueryLimits, QuerySession
from tests.capture.lakes import commit_rings, place_of
from tests.capture.rings import engine
from tests.waiting import PATIENCE_S

LIMITS = QueryLimits(timeout_s=PATIENCE_S, memory_mib=128)


@pytest.fixture(scope="session", autouse=True)
def _can_be_interrupted() -> Iterator[None]:
    """A shell lets jobs in the background ignore Ctrl-C, and what they start inherits that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake of 5 requests with 40 tokens each, and a file that is not of it."""
    home = tmp_path_factory.mktemp("home")
    engine(home / "rings", requests=5, steps=40).close()
    commit_rings(home)
    (home / "secret").write_text("secret")
    return home


@pytest.fixture(scope="session")
def shared_session(home: Path) -> Iterator[QuerySession]:
    with QuerySession(place_of(home), LIMITS) as session:
        yield session


@pytest.fixture
def session(shared_session: QuerySession) -> QuerySession:
    """The query process, which was started anew if the test before cost it."""
    shared_session.limits = LIMITS
    shared_session.warm()
    return shared_session
