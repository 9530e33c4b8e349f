"""The heat maps: the wide one is the exact one within its stated error; both refuse nonsense."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from uuid import UUID

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture.lake import LakePlace, open_connection
from capture.rollup import ALL_STEPS, RELATIVE_ERROR, roll_up

START = datetime(2026, 3, 1, 12)
MINUTES, REQUESTS, OUTPUT = 10, 60, 16 * 12
WHOLE = (START, START + timedelta(minutes=MINUTES))
ENDED, HALF_ROLLED, NEW = (UUID(int=number) for number in (1, 2, 3))
COLUMNS = "time_bin, time_start, position_bin, position_start, position_end, tokens, latency_ms"


def latencies_us(rng: np.random.Generator) -> np.ndarray:
    """One request's: each of another shape, so that cells are narrow, wide, two-peaked or zero."""
    shapes = (
        rng.integers(0, 4, OUTPUT),
        rng.lognormal(9, 2, OUTPUT),
        np.where(rng.random(OUTPUT) < 0.5, 900, 5_000_000),
        rng.gamma(400, 50, OUTPUT),
        10 ** rng.uniform(0, 12, OUTPUT),
    )
    return shapes[rng.integers(len(shapes))].astype(np.int64)


def write_engine(lake: duckdb.DuckDBPyConnection, engine: UUID, rng: np.random.Generator) -> None:
    slots = np.arange(REQUESTS)
    arrived_s = np.sort(rng.uniform(0, 60 * MINUTES, REQUESTS))
    rows = {
        "slot": np.repeat(slots, OUTPUT),
        "position": np.tile(np.arange(OUTPUT), REQUESTS),
        "latency_us": np.concatenate([latencies_us(rng) for _ in slots]),
        "arrived_s": np.repeat(arrived_s, OUTPUT),
    }
    lake.register("made", rows)
    lake.execute(
        """
        INSERT INTO requests SELECT DISTINCT $engine::UUID, slot, printf('%032x', slot),
            $start::TIMESTAMP + to_microseconds((1e6 * arrived_s)::BIGINT), 1, 0, 9, 50, 0, 'acme',
            'chat', 'class' || slot % 3 FROM made;
        """,
        {"engine": str(engine), "start": START},
    )
    lake.execute(
        """
        INSERT INTO tokens SELECT $engine::UUID, slot, (20 * arrived_s)::BIGINT + position,
            position, 1, position = 0,
            $start::TIMESTAMP + to_microseconds((1e6 * arrived_s)::BIGINT + 50000 * position),
            latency_us, -0.5, 0.5, 1
        FROM made ORDER BY 3, slot
        """,
        {"engine": str(engine), "start": START},
    )
    lake.unregister("made")


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    home = tmp_path_factory.mktemp("lake")
    place = LakePlace(str(home / "catalog.sqlite"), str(home / "data"))
    with open_connection(place, read_only=False) as writer:
        for number, engine in enumerate((ENDED, HALF_ROLLED, NEW)):
            write_engine(writer, engine, np.random.default_rng(number))
        roll_up(writer, ENDED, ALL_STEPS)
        for step in (1000, 2500, 7000):
            roll_up(writer, HALF_ROLLED, step)
    with open_connection(place) as reader:
        yield reader


def cells(
    lake: duckdb.DuckDBPyConnection, macro: str, bins: tuple[int, int], quantile: float
) -> list[tuple[object, ...]]:
    query = f"SELECT {COLUMNS} FROM {macro}(?, ?, ?, ?, ?)"
    return lake.execute(query, [*WHOLE, *bins, quantile]).fetchall()


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    bins=st.tuples(st.sampled_from([1, 2, 5, 10]), st.sampled_from([1, 3, 4, 12])),
    quantile=st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]) | st.floats(0, 1),
)
def test_cells_are_the_exact_ones_within_the_stated_error(
    lake: duckdb.DuckDBPyConnection, bins: tuple[int, int], quantile: float
) -> None:
    exact = cells(lake, "latency_heatmap", bins, quantile)
    found = cells(lake, "latency_overview", bins, quantile)
    assert [cell[:6] for cell in found] == [cell[:6] for cell in exact]
    assert sum(cell[5] for cell in found) == 3 * REQUESTS * (OUTPUT - 1)
    wanted = np.array([cell[6] for cell in exact])
    error = np.abs(np.array([cell[6] for cell in found]) - wanted)
    assert (error <= RELATIVE_ERROR * wanted + 1e-9).all()
    assert RELATIVE_ERROR < 0.022


def test_times_are_cut_to_minutes_and_positions_to_sixteens(
    lake: duckdb.DuckDBPyConnection,
) -> None:
    query = "SELECT * FROM latency_overview(?, ?, 100, 100, 0.5)"
    inside = [START + timedelta(seconds=90), START + timedelta(seconds=241)]
    found = lake.execute(query, inside).fetchall()
    assert {row[1] for row in found} == {START + timedelta(minutes=n) for n in (1, 2, 3, 4)}
    assert {row[0] for row in found} == {0, 1, 2, 3}, "a bin is no shorter than a minute"
    assert {row[3:5] for row in found} == {(16 * n, 16 * n + 15) for n in range(12)}


def test_bins_are_whole_minutes_of_equal_length(lake: duckdb.DuckDBPyConnection) -> None:
    found = cells(lake, "latency_overview", (4, 1), 0.5)
    assert [row[:2] for row in found] == [
        (n, START + timedelta(minutes=3 * n)) for n in range(4)
    ], "ten minutes in four bins are three minutes each"


def test_a_time_without_tokens_has_no_cells(lake: duckdb.DuckDBPyConnection) -> None:
    nothing = "SELECT * FROM latency_overview('2001-01-01', '2001-01-02', 5, 10, 0.5)"
    assert lake.execute(nothing).fetchall() == []


MACROS = pytest.mark.parametrize("macro", ["latency_heatmap", "latency_overview"])


@MACROS
@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0, datetime.max, "from_ts .* is later than to_ts"),
        (1, datetime.min, "from_ts .* is later than to_ts"),
        (1, "infinity", "must be finite"),
        (2, 0, "time_bins must be a whole number from 1 to 1000000, it is 0"),
        (2, -3, "time_bins .* it is -3"),
        (2, 2.5, "time_bins .* it is 2.5"),
        (2, None, "time_bins .* it is NULL"),
        (2, 1_000_001, "time_bins .* it is 1000001"),
        (3, 0, "position_bins must be a whole number from 1 to 1000000, it is 0"),
        (3, None, "position_bins .* it is NULL"),
        (4, -0.5, "quantile must be a number from 0 to 1, it is -0.5"),
        (4, 99, "(?i)quantile"),
        (4, None, "(?i)quantile .*NULL"),
    ],
)
def test_arguments_that_make_no_map_are_refused_by_name(
    lake: duckdb.DuckDBPyConnection, macro: str, place: int, value: object, reason: str
) -> None:
    asked: list[object] = [*WHOLE, 10, 10, 0.5]
    asked[place] = value
    with pytest.raises(duckdb.Error, match=reason):
        lake.execute(f"SELECT * FROM {macro}(?, ?, ?, ?, ?)", asked).fetchall()


@MACROS
def test_a_period_too_long_for_its_bins_is_refused_and_a_long_one_drawn(
    lake: duckdb.DuckDBPyConnection, macro: str
) -> None:
    long = f"SELECT sum(tokens) FROM {macro}('0001-01-01', '9999-12-31', ?, 10, 0.5)"
    with pytest.raises(duckdb.Error, match="too long for 1000000 time_bins"):
        lake.execute(long, [1_000_000]).fetchall()
    assert lake.execute(long, [10]).fetchall() == [(3 * REQUESTS * (OUTPUT - 1),)]


@MACROS
@pytest.mark.parametrize("period", ["NULL, NULL", "NULL, now()", "'2026-03-01', '2026-03-01'"])
def test_no_period_holds_nothing(lake: duckdb.DuckDBPyConnection, macro: str, period: str) -> None:
    assert lake.execute(f"SELECT * FROM {macro}({period}, 10, 10, 0.5)").fetchall() == []
