from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.capture.children import kill_children


@pytest.fixture(autouse=True)
def no_process_outlives_its_test() -> Iterator[None]:
    """One that a failed test left would take the processor from all tests after it."""
    yield
    kill_children()
