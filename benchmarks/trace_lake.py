"""A lake of any size from recorded arrivals, written straight into its tables.

Real: when requests came and how long prompts and answers were. Made up: the pace of the engine's
steps, token ids, log-probabilities and margins. Not for measuring the way from ring to lake.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from capture.collecting.ingest import LOGPROB_BITS, MARGIN_BITS, rounded
from capture.collecting.retention import lake_files
from capture.collecting.rollup_schedule import ROLLUP_S, ROLLUP_TOKENS
from capture.collecting.upkeep import merge, worth_merging
from capture.rollup import ALL_STEPS, roll_up

if TYPE_CHECKING:
    import duckdb

START = np.datetime64("2026-01-01T00:00:00", "us")
CHUNK_TOKENS = 4_000_000
BASE_MS, PER_REQUEST_MS, PREFILL_MS = 12.0, 0.15, 0.05
"""Of a step: alone, for each running request, for each prompt token."""
VALUES = 1 << 20
VOCABULARY = 49152
LOGPROBS = (
    *(0.0, 0.0007, 0.0025, 0.0063, 0.0127, 0.0224, 0.0379, 0.0614, 0.0939, 0.1343, 0.189),
    *(0.2646, 0.3494, 0.4444, 0.5459, 0.6626, 0.7856, 0.9532, 1.1489, 1.4385, 3.3965),
)
MARGINS = (
    *(0.0, 0.148, 0.318, 0.484, 0.69, 0.906, 1.153, 1.416, 1.704, 2.02, 2.362, 2.73, 3.154),
    *(3.629, 4.117, 4.641, 5.27, 6.012, 6.928, 8.35, 14.969),
)
"""Of 11,000 tokens of SmolLM2-135M on real prompts, every twentieth part; logprobs negated."""

_SOURCES = {
    "conv": 'SELECT epoch_us("TIMESTAMP"::TIMESTAMP) / 1e6 AS at_s, ContextTokens AS prompt, '
    "GeneratedTokens AS output FROM read_csv('{}/azure_2023_conv.csv')",
    "code": 'SELECT epoch_us("TIMESTAMP"::TIMESTAMP) / 1e6 AS at_s, ContextTokens AS prompt, '
    "GeneratedTokens AS output FROM read_csv('{}/azure_2023_code.csv')",
    "chat": "SELECT timestamp / 1e3 AS at_s, input_length AS prompt, output_length AS output "
    "FROM read_json('{}/mooncake_conversation.jsonl')",
}

# A request's token at each step from its first one on; inside a step all waited equally long.
# Sorted as commits of a second are.
_TOKENS = f"""
INSERT INTO tokens SELECT $engine::UUID, r.slot, s.step, p, v.token_id, p = 0,
    make_timestamp(s.ended_us), if(p = 0, s.ended_us - r.arrived_us, s.spent_us),
    v.logprob, v.margin, (r.prompt + p) // 16 + 1
FROM made_requests AS r,
    unnest(range(greatest(0, $from - r.first_step), least(r.output, $to - r.first_step))) AS u(p)
JOIN made_steps AS s ON s.step = r.first_step + p
JOIN made_values AS v ON v.number = (r.slot * 7919 + p) % {VALUES}
WHERE r.first_step < $to AND r.first_step + r.output > $from
ORDER BY s.ended_us // 1000000, r.slot, p
"""
_REQUESTS = """
INSERT INTO requests SELECT $engine::UUID, slot, md5($name || slot), make_timestamp(arrived_us),
    prompt, 0, output, 50, 0, $name, 'chat', $name || '/chat/-'
FROM made_requests ORDER BY slot
"""
_FINISHES = """
INSERT INTO finishes SELECT $engine::UUID, slot, 'length', output, make_timestamp(arrived_us),
    make_timestamp(f.ended_us), make_timestamp(l.ended_us), make_timestamp(l.ended_us),
    make_timestamp(l.ended_us), make_timestamp(l.ended_us), make_timestamp(l.ended_us)
FROM made_requests AS r JOIN made_steps AS f ON f.step = first_step
JOIN made_steps AS l ON l.step = first_step + output - 1 ORDER BY slot
"""
_STEPS = """
INSERT INTO steps SELECT $engine::UUID, step, make_timestamp(ended_us - spent_us),
    20 + (160 * random())::INTEGER / 8, 30 + (160 * random())::INTEGER / 8,
    greatest(spent_us - 130, 0) + (7 * random())::INTEGER / 8, 40 + (160 * random())::INTEGER / 8,
    NULL, 0, running, running, 0, 64 * running, 65536, 0, NULL
FROM made_steps WHERE running > 0 ORDER BY step
"""


@dataclass(frozen=True)
class Arrivals:
    """Requests in order of arrival: seconds since the first, tokens of prompt and answer."""

    at_s: NDArray[np.float64]
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return int(self.output.sum())

    def repeated(self, tokens: int) -> Arrivals:
        """The recording over and over until it makes `tokens`."""
        rounds = -(-tokens // self.tokens)
        length_s = self.at_s[-1] + 1
        at_s = (self.at_s + length_s * np.arange(rounds)[:, None]).ravel()
        keep = 1 + int(np.searchsorted(np.cumsum(np.tile(self.output, rounds)), tokens))
        return Arrivals(
            at_s[:keep],
            np.tile(self.prompt, rounds)[:keep],
            np.tile(self.output, rounds)[:keep],
        )


def read_arrivals(data: Path) -> dict[str, Arrivals]:
    """The recordings in `data` by name: azure_2023_{conv,code}.csv, mooncake_conversation.jsonl."""
    import duckdb

    found = {}
    for name, query in _SOURCES.items():
        rows = duckdb.sql(f"{query.format(data)} WHERE output > 0 ORDER BY at_s").fetchnumpy()
        at_s = rows["at_s"].astype(np.float64)
        found[name] = Arrivals(
            at_s - at_s[0], rows["prompt"].astype(np.int64), rows["output"].astype(np.int64)
        )
    return found


def write_lake(lake: duckdb.DuckDBPyConnection, data: Path, tokens: int) -> None:
    """Fill the lake with about `tokens` tokens, an engine and a class for each recording, and merge
    its files as the collector's upkeep does."""
    lake.execute("SET ducklake_default_data_inlining_row_limit = 0")  # as the collector
    recordings = read_arrivals(data)
    lake.register("made_values", _values())
    total = sum(found.tokens for found in recordings.values())
    for number, (name, found) in enumerate(recordings.items(), start=1):
        share = max(1, tokens * found.tokens // total)
        _write_engine(lake, str(UUID(int=number)), name, found.repeated(share))
    lake.unregister("made_values")
    merge_all(lake)


def merge_all(lake: duckdb.DuckDBPyConnection) -> None:
    """The collector's merges, one after the other until there is nothing left for them."""
    while any(merge(lake, small) for small in worth_merging(lake_files(lake))):
        pass


def _values() -> dict[str, NDArray[Any]]:
    """Token ids by Zipf's law, log-probabilities and margins, in the precision of the lake."""
    rng = np.random.default_rng(0)
    parts = np.linspace(0, 1, len(LOGPROBS))
    logprobs = -np.interp(rng.random(VALUES), parts, LOGPROBS).astype(np.float32)
    margins = np.interp(rng.random(VALUES), parts, MARGINS).astype(np.float32)
    return {
        "number": np.arange(VALUES),
        "token_id": (VOCABULARY ** rng.random(VALUES)).astype(np.int32),
        "logprob": rounded(logprobs, LOGPROB_BITS),
        "margin": rounded(margins, MARGIN_BITS),
    }


def _write_engine(
    lake: duckdb.DuckDBPyConnection, engine: str, name: str, arrivals: Arrivals
) -> None:
    rng = np.random.default_rng(len(name))
    ended_us, running = _steps(arrivals, rng)
    first_step = np.searchsorted(ended_us, 1e6 * arrivals.at_s + 1e3 * PREFILL_MS * arrivals.prompt)
    start_us = START.astype(np.int64)
    steps = {
        "step": np.arange(len(ended_us)),
        "ended_us": start_us + ended_us,
        "spent_us": np.diff(ended_us, prepend=0),
        "running": running,
    }
    requests = {
        "slot": np.arange(len(first_step)),
        "arrived_us": start_us + (1e6 * arrivals.at_s).astype(np.int64),
        "first_step": first_step,
        "prompt": arrivals.prompt,
        "output": arrivals.output,
    }
    lake.register("made_steps", steps)
    lake.register("made_requests", requests)
    for statement in (_REQUESTS, _STEPS, _FINISHES):
        named = {"engine": engine} | ({"name": name} if "$name" in statement else {})
        lake.execute(statement, named)
    _write_tokens(lake, engine, ended_us, first_step, arrivals.output)
    lake.unregister("made_steps")
    lake.unregister("made_requests")


def _steps(
    arrivals: Arrivals, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """When each step ended (us since the first arrival) and about how many requests ran in it."""
    token_s = (BASE_MS + 8 * PER_REQUEST_MS) / 1e3
    left_s = np.sort(arrivals.at_s + token_s * arrivals.output)
    grid_s = np.arange(0, left_s[-1] + 60 + token_s * 2 * arrivals.output.max(), 0.1)
    running = np.searchsorted(arrivals.at_s, grid_s) - np.searchsorted(left_s, grid_s)
    pace_s = (BASE_MS + PER_REQUEST_MS * running) / 1e3
    done = np.cumsum(0.1 / pace_s)
    at = np.interp(np.arange(int(done[-1])), done, np.arange(len(grid_s))).astype(np.int64)
    spent_s = pace_s[at] * rng.gamma(400, 1 / 400, len(at))
    slow = rng.random(len(at)) < 0.01  # shared with somebody's prefill
    spent_s[slow] += PREFILL_MS / 1e3 * rng.choice(arrivals.prompt, int(slow.sum()))
    return np.cumsum(np.rint(1e6 * spent_s).astype(np.int64)), running[at]


def _write_tokens(
    lake: duckdb.DuckDBPyConnection,
    engine: str,
    ended_us: NDArray[np.int64],
    first_step: NDArray[np.int64],
    output: NDArray[np.int64],
) -> None:
    """In chunks of whole steps, each rolled up as often as the collector does."""
    last = int((first_step + output).max())
    per_step = np.bincount(first_step, minlength=last + 1) - np.bincount(
        first_step + output, minlength=last + 1
    )
    made = np.cumsum(np.cumsum(per_step))
    chunks = np.searchsorted(made, np.arange(CHUNK_TOKENS, made[-1], CHUNK_TOKENS)).tolist()
    ticks_us = 1e6 * ROLLUP_S * np.arange(1, ended_us[-1] / 1e6 / ROLLUP_S)
    due = np.union1d(
        np.searchsorted(ended_us, ticks_us),
        np.searchsorted(made, np.arange(ROLLUP_TOKENS, made[-1], ROLLUP_TOKENS)),
    )
    before = 0
    for end in [*chunks, last]:
        lake.execute(_TOKENS, {"engine": engine, "from": before, "to": end})
        for step in due[(due > before) & (due < end)].tolist():
            roll_up(lake, engine, step)
        before = end
    roll_up(lake, engine, ALL_STEPS)
