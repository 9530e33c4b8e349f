"""The latency heat map over a lake of 100 million tokens, from the rollup and from the rows.

    python -m benchmarks.bench_heatmap --data DIR [--tokens 100000000] [--home KEEP] [--threads 2]

DIR holds azure_2023_conv.csv, azure_2023_code.csv and mooncake_conversation.jsonl; their arrivals
are repeated until they make enough tokens. `overview` is the dashboard's map of wide periods, the
exact macro over the same period its peer, `drill-down` the rows behind a box on the map. A cold
figure is a new connection's first query (the files may be in the system's cache). The peer, which
takes most of a minute at 100 million tokens, runs once. `--home` keeps the lake, and measures the
one that is there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench_lake_bytes import live_bytes
from benchmarks.report import report
from benchmarks.trace_lake import write_lake
from capture.lake import LakePlace, open_connection
from dashboard.traces import EXACT_TOKENS, Region, heat_map, slowest_requests, slowest_tokens

if TYPE_CHECKING:
    import duckdb

BINS = {"time_bins": 160, "position_bins": 80, "quantile": 0.99}
REPEATS = 5
PEER = "exact, same period"
Query = Callable[["duckdb.DuckDBPyConnection"], Any]


def main() -> None:
    arguments = _arguments()
    with ExitStack() as cleanup:
        home = arguments.home or Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        place = LakePlace(str(home / "catalog.sqlite"), str(home / "data"))
        made_s = None if Path(place.catalog).exists() else _make(place, arguments)
        with open_connection(place, threads=arguments.threads) as lake:
            details = _details(lake, arguments, made_s)
            first, last = lake.execute(
                "SELECT min(arrived_at), max(arrived_at) FROM requests"
            ).fetchone() or (None, None)
        period = first.replace(tzinfo=UTC), last.replace(tzinfo=UTC) + timedelta(seconds=1)
        rows = [
            _timed(place, arguments.threads, name, query)
            for name, query in _queries(*period, details["tokens"]).items()
        ]
    report("bench_heatmap", rows, title="Heat map of a whole lake", details=details)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--home", type=Path, help="keep the lake here")
    return parser.parse_args()


def _make(place: LakePlace, arguments: argparse.Namespace) -> float:
    """Generate the lake; the seconds taken."""
    start = time.monotonic()
    with open_connection(place, read_only=False, threads=arguments.threads) as lake:
        write_lake(lake, arguments.data, arguments.tokens)
    return time.monotonic() - start


def _queries(start: datetime, end: datetime, tokens: int) -> dict[str, Query]:
    middle = start + (end - start) / 2
    box = Region(middle, middle + (end - start) / 160, 64, 95)
    hour = min(end, start + timedelta(hours=1))
    return {
        "overview": lambda lake: heat_map(lake, start, end, tokens=EXACT_TOKENS + 1, **BINS),
        PEER: lambda lake: heat_map(lake, start, end, tokens=0, **BINS),
        "overview, one hour": lambda lake: heat_map(
            lake, start, hour, tokens=EXACT_TOKENS + 1, **BINS
        ),
        "drill-down, tokens": lambda lake: slowest_tokens(lake, box, 20),
        "drill-down, requests": lambda lake: slowest_requests(lake, box, 20),
    }


def _timed(place: LakePlace, threads: int, name: str, query: Query) -> dict[str, Any]:
    """A new connection's first time and the median of those after it, if there are any."""
    with open_connection(place, threads=threads) as lake:
        seconds = []
        for _ in range(1 if name == PEER else 1 + REPEATS):
            start = time.monotonic()
            query(lake)
            seconds.append(time.monotonic() - start)
    return {
        "query": name,
        "cold_ms": 1000 * seconds[0],
        "warm_median_ms": 1000 * statistics.median(seconds[1:]) if seconds[1:] else None,
        "warm_max_ms": 1000 * max(seconds[1:]) if seconds[1:] else None,
    }


def _details(
    lake: duckdb.DuckDBPyConnection, arguments: argparse.Namespace, made_s: float | None
) -> dict[str, Any]:
    counts = {
        table: (lake.execute(f"SELECT count(*) FROM {table}").fetchone() or (0,))[0]
        for table in ("tokens", "requests", "steps", "latency_rollup")
    }
    size = sum(live_bytes(lake).values())
    return counts | {
        "tokens_per_rollup_row": counts["tokens"] / max(counts["latency_rollup"], 1),
        "lake_bytes": size,
        "bytes_per_token": size / max(counts["tokens"], 1),
        "made_s": made_s,
        "threads": arguments.threads,
        "cpus": os.cpu_count(),
        "bins": f"{BINS['time_bins']} x {BINS['position_bins']}",
    }


if __name__ == "__main__":
    main()
