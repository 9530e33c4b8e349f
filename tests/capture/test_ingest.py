"""How a ring's columns become rows of the lake."""

from __future__ import annotations

import warnings
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from capture.collecting.ingest import BATCH_OTHERS, LOGPROB_BITS, MOST_US, RingRows, rounded
from capture.frames import TraceWriter
from capture.reader import RingReader
from tests.capture.rings import new_ring, write_step


@given(
    hnp.arrays(np.float32, 50, elements=st.floats(-4096, 4096, width=32)),
    st.integers(4, 12),
)
def test_rounding_is_off_by_half_a_unit_at_most(values: np.ndarray, bits: int) -> None:
    found = rounded(values, bits)
    assert (np.abs(found.astype(float) - values) <= 2.0**-bits / 2).all()
    assert (np.ldexp(found.astype(float), bits) % 1 == 0).all()


def test_rounding_keeps_what_is_no_number_and_makes_no_negative_zero() -> None:
    found = rounded(np.array([np.nan, -np.inf, -1e-9], np.float32), LOGPROB_BITS)
    assert np.isnan(found[0])
    assert found[1] == -np.inf
    assert not np.signbit(found[2])
    assert found.dtype == np.float32


def test_tokens_lie_request_by_request_in_the_order_of_their_steps(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    trace = TraceWriter(ring)
    for step in range(5):
        write_step(trace, step, 3, slot=7)
    with closing(RingReader(ring.path)) as reader:
        rows = RingRows(reader.header)
        rows.add(reader.read())
    ring.close()
    tokens = dict(rows.tables())["tokens"]
    assert tokens["slot"].tolist() == [7] * 5 + [8] * 5 + [9] * 5
    assert tokens["step_id"].tolist() == [*range(5)] * 3
    assert tokens["token_id"].tolist() == tokens["step_id"].tolist(), "columns stay together"


def test_all_that_takes_memory_is_counted(tmp_path: Path) -> None:
    """It bounds what waits for a lake that cannot be written: prompts give few tokens, and small
    batches fill memory with the columns themselves."""
    ring = new_ring(tmp_path)
    trace = TraceWriter(ring)
    with closing(RingReader(ring.path)) as reader:
        rows = RingRows(reader.header)
        for step in range(5):
            write_step(trace, step, 3, phase=2)
            rows.add(reader.read())
    ring.close()
    assert (rows.tokens, rows.in_columns, rows.others) == (0, 5 * (3 + 1), 5 * BATCH_OTHERS)
    rows.take()
    assert (rows.tokens, rows.in_columns, rows.others) == (0, 0, 0)


def test_absurd_durations_turn_no_latency_negative(tmp_path: Path) -> None:
    ring = new_ring(tmp_path)
    trace = TraceWriter(ring)
    absurd = (3e38, -3e38, float("inf"), float("nan"))
    for step, value in enumerate(absurd):
        write_step(trace, step, 1, latency_us=value, forward_us=value)
    with closing(RingReader(ring.path)) as reader, warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = RingRows(reader.header)
        rows.add(reader.read())
    ring.close()
    longest, *others = dict(rows.tables())["tokens"]["latency_us"].tolist()
    assert longest == pytest.approx(MOST_US)
    assert others == [0, 0, 0]
