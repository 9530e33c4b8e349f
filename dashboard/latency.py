"""The latency page: when and where in the answer tokens came late."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import duckdb
import streamlit as st

from capture.errors import CaptureError, LakeMissingError, first_line
from capture.lake import NAME, LakePlace, open_connection
from capture.settings import Settings
from dashboard.drilldown import make_selectable, selected_region, show_region
from dashboard.heatmap import heatmap_figure
from dashboard.traces import HeatMap, Overview, arrivals, heat_map, losses, marks, overview

PERIODS: dict[str, timedelta | None] = {
    "5 min": timedelta(minutes=5),
    "15 min": timedelta(minutes=15),
    "1 h": timedelta(hours=1),
    "6 h": timedelta(hours=6),
    "24 h": timedelta(hours=24),
    "All": None,
}
CUSTOM = "Custom"
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
DETAIL = {"Coarse": (60, 30), "Medium": (160, 80), "Fine": (320, 160)}
"""Time bins and position bins; the finest is half of what the figure accepts."""
REFRESH_S = 5
BOX = "Draw a box over cells to see the slowest tokens and requests in it."
EXACT = f"Exact, from every token. {BOX}"
APPROXIMATE = (
    "From histograms per minute and 16 positions, because the period holds many tokens: within "
    f"2.2 % of the exact figures, which a shorter period shows. {BOX}"
)


def page() -> None:
    """The whole page; everything that reads the lake is in the fragment below the controls."""
    st.title("Latency heat map")
    st.caption(
        "Each cell is the time between tokens for requests that arrived then, at that place in "
        "their answer. Blank: no token. A vertical streak is a bad moment; a horizontal one, a "
        "cost that grows with the answer."
    )
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        period = st.segmented_control(
            "Arrivals in the last", [*PERIODS, CUSTOM], default="All", required=True, key="period"
        )
        quantile = st.segmented_control(
            "Time between tokens", list(QUANTILES), default="p99", required=True, key="quantile"
        )
        detail = st.segmented_control(
            "Detail", list(DETAIL), default="Medium", required=True, key="detail"
        )
        logarithmic = st.toggle("Log colour", value=True, key="logarithmic")
        live = st.toggle("Live", key="live", help=f"look again every {REFRESH_S} s")
    fragment = st.fragment(_content, run_every=REFRESH_S if live else None)
    fragment(str(period), QUANTILES[str(quantile)], DETAIL[str(detail)], logarithmic)


def _content(period: str, quantile: float, bins: tuple[int, int], logarithmic: bool) -> None:
    try:
        place = LakePlace.from_settings(Settings())
        cursor = _connection(place, _stamp(place)).cursor()
    except LakeMissingError:
        _nothing_yet("There is no trace lake yet.")
        return
    except CaptureError as error:
        st.error(str(error), icon=":material/error:")
        return
    with cursor:
        try:
            cursor.execute(f"USE {NAME}")  # a cursor does not inherit the default schema
            _show_period(cursor, period, quantile, bins, logarithmic)
        except duckdb.Error as error:
            st.error(f"cannot read the trace lake: {first_line(error)}", icon=":material/error:")


def _show_period(
    cursor: duckdb.DuckDBPyConnection,
    period: str,
    quantile: float,
    bins: tuple[int, int],
    logarithmic: bool,
) -> None:
    known = arrivals(cursor)
    if known is None:
        _nothing_yet("The trace lake holds no request yet.")
        return
    window = _window(period, *known)
    if window is None:
        st.error("The start must lie before the end.", icon=":material/error:")
        return
    found = overview(cursor, *window)
    _show_overview(found)
    time_bins, position_bins = bins
    shown = heat_map(
        cursor,
        *window,
        time_bins=time_bins,
        position_bins=position_bins,
        quantile=quantile,
        tokens=found.output_tokens,
    )
    _show_heatmap(cursor, shown, quantile, logarithmic)


def _show_heatmap(
    cursor: duckdb.DuckDBPyConnection, shown: HeatMap, quantile: float, logarithmic: bool
) -> None:
    lost = losses(cursor, shown.start, shown.end)
    if not shown.cells.tokens.size:
        st.info("No request that arrived in this period has a second token yet.")
    figure = heatmap_figure(
        shown.cells,
        start=shown.start,
        end=shown.end,
        time_bins=shown.time_bins,
        quantile=quantile,
        log_scale=logarithmic,
        losses=lost,
        marks=marks(cursor, shown.start, shown.end),
    )
    make_selectable(figure, shown)
    chart = st.plotly_chart(
        figure,
        theme=None,
        key="heatmap",
        config={"displaylogo": False},
        on_select="rerun",
        selection_mode="box",
    )
    st.caption(EXACT if shown.exact else APPROXIMATE)
    if lost:
        total = sum(loss.tokens for loss in lost)
        st.caption(
            f"Red bands: the collector fell behind and {total:,} tokens never reached the lake. "
            "`inferloop sql 'FROM losses'` has the details."
        )
    region = selected_region(chart)
    if region is not None:
        show_region(cursor, region)


def _show_overview(found: Overview) -> None:
    columns = st.columns(5)
    columns[0].metric("Requests", f"{found.requests:,}")
    columns[1].metric("Failed or cancelled", f"{found.failed:,}")
    columns[2].metric("Output tokens", f"{found.output_tokens:,}")
    for column, name, pair, meaning in (
        (columns[3], "TTFT", found.ttft_ms, "time to first token"),
        (columns[4], "TPOT", found.tpot_ms, "time per output token, per request"),
    ):
        value = "-" if pair is None else f"{_ms(pair[0])} / {_ms(pair[1])} ms"
        column.metric(f"{name} p50 / p99", value, help=f"{meaning}, successful requests only")


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _window(period: str, first: datetime, last: datetime) -> tuple[datetime, datetime] | None:
    """The period to show, counted back from the newest arrival; None when it is empty."""
    end = last + timedelta(seconds=1)
    if period != CUSTOM:
        length = PERIODS[period]
        return (first if length is None else max(first, end - length), end)
    left, right = st.columns(2)
    start_value = left.datetime_input("From (UTC)", value=_naive(first), step=60, key="from")
    whole = _naive(end).replace(second=0, microsecond=0) + timedelta(minutes=1)
    end_value = right.datetime_input("To (UTC)", value=whole, step=60, key="to")
    if start_value is None or end_value is None or start_value >= end_value:
        return None
    return start_value.replace(tzinfo=UTC), end_value.replace(tzinfo=UTC)


def _nothing_yet(what: str) -> None:
    st.info(
        f"{what} Start `inferloop serve` and `inferloop collect`, send a request, and look again.",
        icon=":material/hourglass_empty:",
    )


def _naive(moment: datetime) -> datetime:
    return moment.replace(tzinfo=None)


@st.cache_resource(max_entries=2, on_release=lambda connection: connection.close())
def _connection(place: LakePlace, stamp: tuple[int, int] | None) -> duckdb.DuckDBPyConnection:
    """One connection a process; each thread takes its own cursor. `stamp` changes when the
    catalog file is another one."""
    return open_connection(place, read_only=True)


def _stamp(place: LakePlace) -> tuple[int, int] | None:
    if place.catalog_file is None:
        return None
    try:
        status = os.stat(place.catalog_file)
    except OSError:
        return None  # opening it will say why
    return status.st_dev, status.st_ino
