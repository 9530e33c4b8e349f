"""The latency page's queries, on a real lake."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from capture.lake import NAME, open_connection
from capture.settings import Settings
from dashboard import traces
from tests.dashboard.factory import START, make_lake

END = START + timedelta(seconds=40)


@pytest.fixture(scope="module")
def cursor(read_home: Path):
    with open_connection(Settings(home=read_home)) as lake, lake.cursor() as found:
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
    found = traces.heat_map(
        cursor, START, END, time_bins=5, position_bins=3, quantile=0.5, tokens=1200
    )
    cells = found.cells
    assert (found.exact, found.time_bins) == (True, 5)
    by_time = [set(cells.latency_ms[cells.time_bin == x]) for x in range(5)]
    assert by_time == [{10.0}, {10.0}, {100.0}, {10.0}, {10.0}]
    assert int(cells.tokens.sum()) == 40 * 29
    assert np.all(cells.position_end - cells.position_start == 9)


def test_losses_lie_before_they_were_noticed(cursor) -> None:
    (loss,) = traces.losses(cursor, START, END)
    assert loss.tokens == 123
    assert loss.start <= loss.end == START + timedelta(seconds=20)
    assert traces.losses(cursor, END, END + timedelta(hours=1)) == []


def test_marks_of_the_period_once_each(tmp_path: Path) -> None:
    place = make_lake(tmp_path)
    with open_connection(place, read_only=False) as lake:
        lake.execute(f"USE {NAME}")
        for number in range(3):
            lake.execute(
                "INSERT INTO marks (engine_id, marked_at, text) VALUES (uuid(), ?, 'deploy 7')",
                [(START + timedelta(seconds=5, milliseconds=number)).replace(tzinfo=None)],
            )
        found = traces.marks(lake, START, END)
        assert [(mark.at, mark.text) for mark in found] == [
            (START + timedelta(seconds=5), "deploy 7")
        ]
        assert traces.marks(lake, END, END + timedelta(hours=1)) == []


def test_an_empty_lake_has_no_arrivals(tmp_path: Path) -> None:
    with open_connection(make_lake(tmp_path, requests=0)) as lake:
        assert traces.arrivals(lake) is None


@pytest.mark.parametrize(
    ("minutes", "seconds", "wanted", "bins", "width"),
    [(40, 0, 160, 41, 1), (160, 30, 160, 81, 2), (0, 30, 60, 1, 1), (1441, 0, 160, 145, 10)],
)
def test_a_wide_map_has_equal_bins_of_whole_minutes(
    minutes: int, seconds: int, wanted: int, bins: int, width: int
) -> None:
    start = START + timedelta(seconds=10)
    end = start + timedelta(minutes=minutes, seconds=seconds)
    first, last, found = traces.whole_minutes(start, end, wanted)
    assert first == START
    assert (found, last - first) == (bins, bins * width * traces.MINUTE)
    assert end <= last < end + width * traces.MINUTE


def test_many_tokens_are_drawn_from_the_rollup(cursor) -> None:
    found = traces.heat_map(
        cursor,
        START + timedelta(seconds=5),
        END,
        time_bins=5,
        position_bins=3,
        quantile=0.5,
        tokens=traces.EXACT_TOKENS + 1,
    )
    assert (found.exact, found.start, found.end) == (False, START, START + traces.MINUTE)
    assert found.time_bins == 1
    assert int(found.cells.tokens.sum()) == 40 * 29, "whole minutes, first tokens left out"
    assert found.cells.position_end.tolist() == [15, 31]
    assert found.cells.latency_ms == pytest.approx([10, 10], rel=0.022)
