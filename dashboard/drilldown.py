"""From a box drawn on the heat map to the rows behind it: its slowest tokens and requests.

Not for the map itself: `dashboard.heatmap` draws it, `dashboard.latency` shows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
import streamlit as st

from dashboard.traces import HeatMap, Region, slowest_requests, slowest_tokens

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

ROWS = 20
TIME = "DD MMM HH:mm:ss.SSS"


def make_selectable(figure: go.Figure, shown: HeatMap) -> None:
    """Let boxes be drawn on the map: plotly refuses them where no trace has points, so it gets two
    that nobody sees."""
    top = int(shown.cells.position_end.max()) if shown.cells.position_end.size else 1
    figure.add_trace(
        go.Scatter(
            x=[shown.start, shown.end],
            y=[0, top],
            mode="markers",
            marker={"opacity": 0},
            hoverinfo="skip",
            showlegend=False,
        )
    )
    figure.update_layout(dragmode="select")


def selected_region(state: Mapping[str, Any] | None) -> Region | None:
    """The box that the chart's state holds, drawn over time (x) and position (y); None: no box.

    The browser sends times as local texts without zone; the map's are UTC.
    """
    boxes = ((state or {}).get("selection") or {}).get("box") or []
    if not boxes:
        return None
    start, end = sorted(map(_moment, boxes[0]["x"]))
    low, high = sorted(map(float, boxes[0]["y"]))
    return Region(start, end, max(0, math.ceil(low)), max(0, math.floor(high)))


def show_region(cursor: DuckDBPyConnection, region: Region) -> None:
    """The slowest tokens and requests of a region, read from the rows."""
    st.subheader(
        f"Arrived {region.start:%d %b %H:%M:%S} to {region.end:%H:%M:%S}, "
        f"positions {region.first_position} to {region.last_position}"
    )
    tokens = slowest_tokens(cursor, region, ROWS)
    if not len(tokens["request_id"]):
        st.info("No token lies in this box.")
        return
    st.caption(
        "Read from the rows, exactly. `inferloop why REQUEST` names the cause of each wait of a "
        "request."
    )
    requests = slowest_requests(cursor, region, ROWS)
    for tab, rows, key in zip(
        st.tabs(["Slowest tokens", "Slowest requests"]),
        (tokens, requests),
        ("slow_tokens", "slow_requests"),
        strict=True,
    ):
        tab.dataframe(rows, hide_index=True, key=key, column_config=_columns())


def _columns() -> dict[str, Any]:
    moment, number = st.column_config.DatetimeColumn, st.column_config.NumberColumn
    return {
        "request_id": st.column_config.TextColumn("request"),
        "position": number("position"),
        "waited_ms": number("waited, ms", format="%.2f"),
        "mean_ms": number("mean wait, ms", format="%.2f"),
        "longest_ms": number("longest, ms", format="%.2f"),
        "emitted_at": moment("emitted (UTC)", format=TIME),
        "arrived_at": moment("arrived (UTC)", format=TIME),
    }


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text.strip()[:26]).replace(tzinfo=UTC)
