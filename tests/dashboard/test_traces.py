"""The latency page's queries, on a real lake."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from capture.lake import NAME, open_lake
from dashboard import traces
from tests.dashboard.factory import START, make_lake

END = START + timedelta(seconds=40)


@pytest.fixture
def cursor(tmp_path: Path):
    with open_lake(make_lake(tmp_path, lost=123)) as lake, lake.cursor() as found:
        found.execute(f"USE {NAME}")
        yield found


def test_arrivals_and_overview(cursor) -> None:
    assert traces.arrivals(cursor) == (START, START + timedelta(seconds=39))
    found = traces.overview(cursor, START, END)
    assert (found.requests, found.failed, found.output_tokens) == (40, 0, 1200)
    assert found.ttft_ms == (10.0, 10.0)
    half = traces.overview(cursor, START, START + timedelta(seconds=20))
    assert half.requests == 20
    empty = traces.overview(cursor, END, END + timedelta(seconds=1))
    assert (empty.requests, empty.output_tokens, empty.ttft_ms) == (0, 0, None)


def test_cells_show_the_slow_fifth_and_leave_first_tokens_out(cursor) -> None:
    cells = traces.heatmap_cells(cursor, START, END, time_bins=5, position_bins=3, quantile=0.5)
    by_time = [set(cells.latency_ms[cells.time_bin == x]) for x in range(5)]
    assert by_time == [{10.0}, {10.0}, {100.0}, {10.0}, {10.0}]
    assert int(cells.tokens.sum()) == 40 * 29
    assert np.all(cells.position_end - cells.position_start == 9)


def test_losses_lie_before_they_were_noticed(cursor) -> None:
    (loss,) = traces.losses(cursor, START, END)
    assert loss.tokens == 123
    assert loss.start <= loss.end == START + timedelta(seconds=20)
    assert traces.losses(cursor, END, END + timedelta(hours=1)) == []


def test_an_empty_lake_has_no_arrivals(tmp_path: Path) -> None:
    with open_lake(make_lake(tmp_path, requests=0)) as lake:
        assert traces.arrivals(lake) is None
