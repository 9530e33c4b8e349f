"""A lake that the dashboard's tests only read, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.factory import make_lake

LOST = 123


@pytest.fixture(scope="session")
def read_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with the factory's lake and one loss; not to be changed."""
    home = tmp_path_factory.mktemp("read")
    make_lake(home, lost=LOST)
    return home
