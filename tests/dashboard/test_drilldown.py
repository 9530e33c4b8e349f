"""A box drawn on the heat map leads to the rows behind it."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from capture.lake import open_connection
from capture.settings import Settings
from dashboard.drilldown import selected_region
from dashboard.traces import Region, slowest_requests, slowest_tokens
from tests.dashboard.browser import (
    dashboard,
    needs_chromium,
    new_page,
    settled_box,
    until_idle,
)
from tests.dashboard.factory import START, make_lake


def test_a_box_becomes_a_region_of_whole_positions() -> None:
    box = {"x": ["2026-11-29 12:00:09.5", "2026-11-29 12:00:01.123456789"], "y": [9.6, -0.4]}
    assert selected_region({"selection": {"box": [box], "points": []}}) == Region(
        START + timedelta(seconds=1.123456), START + timedelta(seconds=9.5), 0, 9
    )


@pytest.mark.parametrize("state", [None, {}, {"selection": {}}, {"selection": {"box": []}}])
def test_without_a_box_there_is_no_region(state: dict | None) -> None:
    assert selected_region(state) is None


@pytest.fixture(scope="module")
def lake(read_home: Path):
    with open_connection(Settings(home=read_home)) as found:
        yield found


def test_the_slowest_tokens_and_requests_of_a_region(lake) -> None:
    slow_from, slow_to = START + timedelta(seconds=14), START + timedelta(seconds=18)
    region = Region(slow_from, slow_to, 3, 7)
    tokens = slowest_tokens(lake, region, 5)
    assert len(tokens["request_id"]) == 5
    assert set(tokens["waited_ms"]) == {100.0}
    assert set(tokens["position"]) <= set(range(3, 8))
    requests = slowest_requests(lake, region, 20)
    assert requests["tokens"].tolist() == [5] * 4, "5 positions of the 4 requests that arrived"
    assert requests["mean_ms"].tolist() == [100, 100, 10, 10]
    first = slowest_requests(lake, Region(slow_from, slow_to, 0, 0), 20)
    assert len(first["tokens"]) == 0, "first tokens are no gaps"


def test_a_request_that_still_runs_is_found(lake, tmp_path: Path) -> None:
    region = Region(START, START + timedelta(seconds=1), 0, 99)
    with open_connection(make_lake(tmp_path), read_only=False) as other:
        other.execute("DELETE FROM finishes WHERE slot = 0")
        assert slowest_requests(other, region, 20)["tokens"].tolist() == [29]
    assert slowest_requests(lake, region, 20)["tokens"].tolist() == [29]


@needs_chromium
def test_drawing_a_box_on_the_page_shows_its_rows(tmp_path: Path) -> None:
    from playwright.sync_api import expect

    make_lake(tmp_path)
    with dashboard(tmp_path) as address, new_page() as page:
        page.goto(f"{address}/")
        plot = page.locator(".js-plotly-plot .nsewdrag").first
        plot.wait_for()
        until_idle(page)
        area = settled_box(plot)
        left, top = area["x"], area["y"]
        page.mouse.move(left + 0.41 * area["width"], top + 0.2 * area["height"])
        page.mouse.down()
        page.mouse.move(left + 0.5 * area["width"], top + 0.5 * area["height"], steps=8)
        page.mouse.move(left + 0.58 * area["width"], top + 0.9 * area["height"], steps=8)
        page.mouse.up()
        page.get_by_text(re.compile(r"Arrived 29 Nov .* positions 2 to 24")).wait_for()
        page.get_by_test_id("stDataFrame").first.wait_for()
        page.get_by_role("tab", name="Slowest requests").click()
        expect(page.get_by_test_id("stDataFrame").last).to_be_visible()
