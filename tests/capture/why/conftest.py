"""One lake with an engine for every play, for all tests of `why`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from capture.frames import TraceWriter
from capture.lake import open_connection
from tests.capture.lakes import commit_rings, place_of
from tests.capture.rings import new_ring
from tests.capture.stage import Clock, Stage
from tests.capture.why.plays import PLAYS


@pytest.fixture(scope="session")
def stages() -> dict[str, Stage]:
    return {}


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory, stages: dict[str, Stage]) -> Path:
    """INFERLOOP_HOME; its rings are in `rings`."""
    home = tmp_path_factory.mktemp("why")
    for name, play in PLAYS.items():
        with pytest.MonkeyPatch.context() as patch:
            clock = Clock()
            patch.setattr("capture.ring.time", clock)
            ring = new_ring(home / "rings")
            trace = TraceWriter(ring)
            trace.engine({"model": "tiny", "kind": "proxy" if name == "proxy" else "engine"})
            stages[name] = Stage(trace, clock)
            play(stages[name])
            ring.close()
    commit_rings(home)
    return home


@pytest.fixture(scope="session")
def lake(home: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with open_connection(place_of(home)) as connection:
        yield connection
