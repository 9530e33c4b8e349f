"""The heat map shows what the cells say: blanks stay blank, counts and losses are there."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.heatmap import MAX_CELLS, Cells, Loss, Mark, grid, heatmap_figure, merge

START = datetime(2026, 11, 29, 12, tzinfo=UTC)
END = START + timedelta(minutes=10)


def cells(*entries: tuple[int, int, float, int], height: int = 5) -> Cells:
    """Cells from (time bin, position bin, latency in ms, tokens)."""
    columns = list(zip(*entries, strict=True)) if entries else [(), (), (), ()]
    x, y, latency, tokens = (np.array(column) for column in columns)
    y = y.astype(np.int64)
    return Cells(
        x.astype(np.int64), y, y * height, (y + 1) * height - 1, latency.astype(float), tokens
    )


def figure(found: Cells, **kwargs):
    options = {"start": START, "end": END, "time_bins": 10, "quantile": 0.99, "log_scale": False}
    return heatmap_figure(found, **{**options, **kwargs})


def test_cells_without_tokens_are_blank_not_zero() -> None:
    latency, tokens = grid(cells((0, 0, 12.0, 3), (9, 2, 40.0, 1)), 10)
    assert latency.shape == tokens.shape == (3, 10)
    assert np.isnan(latency).sum() == 28
    assert (latency[0, 0], latency[2, 9]) == (12.0, 40.0)
    assert tokens.sum() == 4


def test_figure_has_centres_counts_and_the_quantiles_name() -> None:
    (trace,) = figure(cells((1, 0, 12.0, 3), (3, 2, 40.0, 1))).data
    assert trace.type == "heatmap"
    assert trace.x[1] == START + timedelta(seconds=90)
    assert list(trace.y) == [2.0, 7.0, 12.0]
    assert trace.z[2][3] == 40.0
    assert list(trace.customdata[0][1]) == [12.0, 3.0]
    assert "p99" in trace.hovertemplate
    assert trace.colorbar.title.text == "p99 ITL, ms"
    assert trace.hoverongaps is False


def test_log_colours_keep_milliseconds_on_the_bar_and_in_the_hover() -> None:
    (trace,) = figure(cells((0, 0, 1.0, 1), (1, 0, 1000.0, 1)), log_scale=True).data
    assert [trace.z[0][0], trace.z[0][1]] == [0.0, 3.0]
    assert trace.customdata[0][1][0] == 1000.0
    assert trace.colorbar.ticktext[0] == "1"
    assert trace.colorbar.ticktext[-1] == "1000"


@pytest.mark.parametrize("latency", [0.0, 7.3])
def test_log_colours_of_one_value_or_zero_do_not_fail(latency: float) -> None:
    (trace,) = figure(cells((0, 0, latency, 1)), log_scale=True).data
    assert np.isnan(trace.z[0][0]) == (latency == 0)


def test_an_empty_period_is_an_empty_map() -> None:
    (trace,) = figure(cells(), log_scale=True).data
    assert np.isnan(np.asarray(trace.z)).all()


def test_marks_are_lines_whose_text_is_text() -> None:
    at = START + timedelta(minutes=2)
    noted = [Mark(at, "deploy <b>7</b>"), Mark(END, "later"), Mark(at, "x" * 4096)]
    _, lines = figure(cells((0, 0, 12.0, 3)), marks=noted).data
    assert {moment for moment in lines.x if moment} == {at}
    assert {height for height in lines.y if height is not None} >= {0, 5}
    assert lines.text[0] == "deploy &lt;b&gt;7&lt;/b&gt;"
    assert lines.mode == "lines"
    assert max(map(len, lines.text)) < 600
    assert len(figure(cells(), marks=[]).data) == 1


def test_losses_are_bands_over_their_time() -> None:
    lost = Loss(START + timedelta(minutes=2), START + timedelta(minutes=4), 1840, "overwritten")
    found = figure(cells((0, 0, 12.0, 3)), losses=[lost])
    (band,) = found.layout.shapes
    assert (band.x0, band.x1) == (lost.start, lost.end)
    assert "1,840" in found.layout.annotations[0].text
    outside = Loss(END, END + timedelta(minutes=1), 5, "torn")
    assert not figure(cells((0, 0, 12.0, 3)), losses=[outside]).layout.shapes


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 60)), max_size=40))
def test_merged_losses_keep_every_token_and_stay_apart(spans: list[tuple[int, int]]) -> None:
    losses = [
        Loss(START + timedelta(seconds=at), START + timedelta(seconds=at + length), 7, "torn")
        for at, length in spans
    ]
    gap = timedelta(seconds=60)
    merged = merge(losses, gap)
    assert sum(loss.tokens for loss in merged) == 7 * len(losses)
    assert len(merged) <= 11
    assert all(b.start - a.end > gap for a, b in itertools.pairwise(merged))


def test_too_many_cells_are_refused_and_the_most_allowed_stay_small() -> None:
    with pytest.raises(ValueError, match="use fewer bins"):
        grid(cells((0, 400, 1.0, 1)), 400)
    rows, bins = 250, 400
    assert rows * bins == MAX_CELLS
    full = cells(*[(x, y, 10.0 + x, 5) for x in range(bins) for y in range(rows)])
    found = figure(full, time_bins=bins)
    assert len(found.to_json()) < 4_000_000
