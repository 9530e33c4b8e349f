from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.orm import Session, sessionmaker

from tests.evaluation.factory import fresh_sessions


@pytest.fixture
def sessions(tmp_path: Path) -> sessionmaker[Session]:
    return fresh_sessions(tmp_path)
