"""The latency heat map as a figure: a pure function of aggregated cells.

Not for reading the lake (`dashboard.traces`) nor for the page around it (`dashboard.latency`).
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

MAX_CELLS = 100_000
"""More cells than pixels tell nothing and make the browser slow."""
SCALE = "Matter"
"""Perceptually uniform, pale to dark: a slow cell stands out on white, a blank one is no cell."""
GRID = "#E6E8EC"
INK = "#1F2933"
FONT = '"Source Sans", sans-serif'
LOSS = "rgba(217, 45, 32, 0.12)"
MARK = "#1D4ED8"
MARK_CHARS = 400


@dataclass(frozen=True)
class Cells:
    """Cells that hold tokens, as columns of the macro `latency_heatmap` (equal lengths).

    `time_bin` and `position_bin` int64 indices, `position_start` and `position_end` int64 output
    positions (both included), `latency_ms` float64, `tokens` int64.
    """

    time_bin: NDArray[np.int64]
    position_bin: NDArray[np.int64]
    position_start: NDArray[np.int64]
    position_end: NDArray[np.int64]
    latency_ms: NDArray[np.float64]
    tokens: NDArray[np.int64]


@dataclass(frozen=True)
class Loss:
    """An interval (UTC) in which the trace lost tokens before they were read."""

    start: datetime
    end: datetime
    tokens: int
    kind: str


@dataclass(frozen=True)
class Mark:
    """What an operator noted in the trace (UTC), as it was typed."""

    at: datetime
    text: str


def grid(cells: Cells, time_bins: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Latency in ms (NaN where nothing was) and token counts, both [position bin, time bin].

    Rows go up to the highest position bin in use. Raises ValueError past MAX_CELLS.
    """
    rows = int(cells.position_bin.max()) + 1 if cells.position_bin.size else 1
    if rows * time_bins > MAX_CELLS:
        raise ValueError(f"{rows} x {time_bins} cells are more than {MAX_CELLS}: use fewer bins")
    latency = np.full((rows, time_bins), np.nan)
    tokens = np.zeros((rows, time_bins), dtype=np.int64)
    latency[cells.position_bin, cells.time_bin] = cells.latency_ms
    tokens[cells.position_bin, cells.time_bin] = cells.tokens
    return latency, tokens


def heatmap_figure(
    cells: Cells,
    *,
    start: datetime,
    end: datetime,
    time_bins: int,
    quantile: float,
    log_scale: bool,
    losses: Sequence[Loss] = (),
    marks: Sequence[Mark] = (),
) -> go.Figure:
    """x: arrival of the request, y: token position, colour: quantile of the ITL in ms."""
    latency, tokens = grid(cells, time_bins)
    width = (end - start) / time_bins
    centres = [start + (index + 0.5) * width for index in range(time_bins)]
    height = _bin_height(cells)
    positions = np.arange(latency.shape[0]) * height + (height - 1) / 2
    name = f"p{100 * quantile:g}"
    with np.errstate(divide="ignore", invalid="ignore"):
        colour = np.log10(latency) if log_scale else latency
    colour[~np.isfinite(colour)] = np.nan
    figure = go.Figure(
        go.Heatmap(
            x=centres,
            y=positions,
            z=colour,
            customdata=np.dstack([latency, tokens.astype(np.float64)]),
            colorscale=SCALE,
            hoverongaps=False,
            colorbar=_colour_bar(colour, name, log_scale),
            hovertemplate=(
                "arrived %{x|%H:%M:%S}<br>position %{y:.0f}<br>"
                f"{name} <b>%{{customdata[0]:.2f}} ms</b><br>"
                "%{customdata[1]:,d} tokens<extra></extra>"
            ),
        )
    )
    _draw_losses(figure, losses, start, end, width)
    _draw_marks(figure, [mark for mark in marks if start <= mark.at < end], height * len(positions))
    _lay_out(figure, start, end)
    return figure


def merge(losses: Sequence[Loss], gap: timedelta) -> list[Loss]:
    """Losses closer than `gap` as one, so that there are never more bands than bins."""
    merged: list[Loss] = []
    for loss in sorted(losses, key=lambda item: item.start):
        last = merged[-1] if merged else None
        if last is not None and loss.start - last.end <= gap:
            kind = last.kind if last.kind == loss.kind else "several kinds"
            merged[-1] = Loss(last.start, max(last.end, loss.end), last.tokens + loss.tokens, kind)
        else:
            merged.append(loss)
    return merged


def _lay_out(figure: go.Figure, start: datetime, end: datetime) -> None:
    ink = {"color": INK, "family": FONT}
    figure.update_layout(
        height=520,
        margin={"l": 64, "r": 8, "t": 28, "b": 52},
        plot_bgcolor="white",
        paper_bgcolor="white",
        font=ink | {"size": 13},
        uirevision="latency",
        hoverlabel={"bgcolor": "white", "bordercolor": GRID, "font": ink},
    )
    axis = {"gridcolor": GRID, "linecolor": GRID, "ticks": "outside", "tickcolor": GRID}
    figure.update_xaxes(title="arrival of the request (UTC)", range=[start, end], **axis)
    figure.update_yaxes(title="token position in the output", zeroline=False, **axis)


def _bin_height(cells: Cells) -> int:
    if not cells.position_bin.size:
        return 1
    return int(cells.position_end[0] - cells.position_start[0]) + 1


def _colour_bar(colour: NDArray[np.float64], name: str, log_scale: bool) -> dict[str, object]:
    bar: dict[str, object] = {
        "title": {"text": f"{name} ITL, ms", "side": "right"},
        "thickness": 14,
        "outlinewidth": 0,
    }
    known = colour[np.isfinite(colour)]
    if log_scale and known.size:
        ticks = _log_ticks(10 ** float(known.min()), 10 ** float(known.max()))
        bar["tickvals"] = [float(np.log10(tick)) for tick in ticks]
        bar["ticktext"] = [f"{tick:g}" for tick in ticks]
    return bar


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten within the range; its two ends when none is."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    return inside if len(inside) >= 2 else [float(f"{low:.3g}"), float(f"{high:.3g}")]


def _draw_losses(
    figure: go.Figure, losses: Sequence[Loss], start: datetime, end: datetime, width: timedelta
) -> None:
    for loss in merge(losses, width):
        left, right = max(loss.start, start), min(max(loss.end, loss.start + width), end)
        if left < right:
            figure.add_vrect(
                x0=left,
                x1=right,
                fillcolor=LOSS,
                line_width=0,
                layer="below",
                annotation={
                    "text": f"lost {loss.tokens:,} tokens",
                    "font": {"size": 11, "color": "#B42318"},
                    "yref": "paper",
                    "yanchor": "bottom",
                    "y": 1.0,
                },
            )


def _draw_marks(figure: go.Figure, marks: Sequence[Mark], top: int) -> None:
    """Thin lines, as one trace; points along each of them answer the pointer with its text."""
    if not marks:
        return
    heights = np.linspace(0, top, 33).tolist()
    figure.add_trace(
        go.Scatter(
            x=[at for mark in marks for at in [mark.at] * len(heights) + [None]],
            y=[*heights, None] * len(marks),
            text=[text for mark in marks for text in [_hover(mark.text)] * (len(heights) + 1)],
            mode="lines",
            line={"color": MARK, "width": 1, "dash": "dot"},
            hovertemplate="%{x|%H:%M:%S}<br>%{text}<extra></extra>",
            showlegend=False,
        )
    )


def _hover(text: str) -> str:
    """A mark's text in lines, with nothing that plotly would take for its own."""
    lines = textwrap.wrap(textwrap.shorten(text, MARK_CHARS, placeholder=" \u2026"), 60)
    return "<br>".join(map(html.escape, lines))
