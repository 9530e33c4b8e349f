"""From the ring to SQL: tokens/s into the lake while two processes query it in a loop.

`capacity`: the engine is always a little ahead of the collector and waits for it, so the rate is
the collector's; readers run at the niceness of `inferloop sql`, in `equal_readers` at the
collector's. `steady`: the engine writes at a fixed rate and waits for nobody: loss counts here, and
the delay until a token is visible to SQL.

    python -m benchmarks.bench_ingest [--seconds 20] [--rate 200000]
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import shutil
import tempfile
import threading
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from benchmarks.report import report
from capture.collecting.follower import Status
from capture.collector import Collector
from capture.frames import TraceWriter
from capture.lake import LakePlace, open_connection
from capture.ring import RingWriter
from capture.sql.query_process import NICENESS

if TYPE_CHECKING:
    import duckdb

BATCH = 128
OUTPUT_TOKENS = 300
RING_MIB = 128
AHEAD_TOKENS = 1_000_000
PATTERNS = 4096  # half a million tokens until values repeat: no dictionary covers that
QUERIES = (
    "SELECT tenant, count(*), quantile_cont(gap_ms, 0.99) FROM token_gaps "
    "WHERE emitted_at > now()::TIMESTAMP - INTERVAL 3 SECOND GROUP BY tenant",
    "SELECT count(*), sum(latency_us), max(step_id) FROM tokens",
)
DELAY = "SELECT epoch_us(now()::TIMESTAMP) - epoch_us(max(emitted_at)) FROM tokens"


class Engine:
    """Writes steps of 128 requests as an engine would: varied values, requests that come and go."""

    def __init__(self, trace: TraceWriter) -> None:
        chance = np.random.default_rng(1)
        self._trace = trace
        self._step = 0
        self._slots = np.arange(BATCH, dtype=np.uint32)
        self._next_slot = BATCH
        shape = (PATTERNS, BATCH)
        self._ids = (chance.zipf(1.3, shape) % 49152).astype(np.uint32)
        self._logprobs = -chance.gamma(0.5, 1, shape).astype(np.float32)
        self._margins = chance.gamma(1, 2, shape).astype(np.float32)
        forward_us = chance.gamma(60, 50, PATTERNS)
        late_us = chance.integers(0, 3, shape) + forward_us[:, None] + 90
        self._forward_us = forward_us.tolist()
        self._latency_us = late_us.astype(np.float32)
        self._positions = (np.arange(BATCH, dtype=np.uint32) * 7) % OUTPUT_TOKENS
        self._phases = (np.arange(OUTPUT_TOKENS) == 0).astype(np.uint8)
        self._kv_blocks = np.arange(OUTPUT_TOKENS, dtype=np.uint32) // 16 + 2
        for slot in range(BATCH):
            self._request(slot)

    def step(self) -> None:
        """One step: 128 tokens."""
        pick = self._step % PATTERNS
        self._trace.step(
            step_id=self._step,
            start_ns=time.monotonic_ns() - 3_000_000,
            schedule_us=20.0 + pick % 9,
            prepare_us=30.0,
            forward_us=self._forward_us[pick],
            sample_us=40.0,
            device_us=float("nan"),
            prefill_tokens=0,
            decode_tokens=BATCH,
            running=BATCH,
            waiting=0,
            kv_used=1000 + pick % 999,
            kv_total=4096,
            prefix_hit_tokens=0,
            graph_bucket=-1,
            slots=self._slots,
            positions=self._positions,
            token_ids=self._ids[pick],
            phases=self._phases[self._positions],
            latency_us=self._latency_us[pick],
            logprobs=self._logprobs[pick],
            margins=self._margins[pick],
            kv_blocks=self._kv_blocks[self._positions],
        )
        self._step += 1
        self._positions += 1
        for row in (self._positions == OUTPUT_TOKENS).nonzero()[0].tolist():
            self._finish(int(self._slots[row]))
            self._slots[row] = self._next_slot
            self._positions[row] = 0
            self._request(self._next_slot)
            self._next_slot += 1

    def _request(self, slot: int) -> None:
        tenant = f"tenant{slot % 3}"
        self._trace.request(
            request_id=uuid4().bytes,
            slot=slot,
            arrival_ns=time.monotonic_ns(),
            prompt_tokens=200,
            cached_tokens=64,
            max_tokens=OUTPUT_TOKENS,
            priority=50,
            adjustment=0,
            tenant=tenant,
            route="chat",
            class_key=f"{tenant}/chat/-",
        )

    def _finish(self, slot: int) -> None:
        now = time.monotonic_ns()
        self._trace.finish(
            slot=slot,
            reason="length",
            output_tokens=OUTPUT_TOKENS,
            admitted_ns=now - 900_000_000,
            first_token_ns=now - 890_000_000,
            last_token_ns=now,
            detokenized_ns=now,
            serialized_ns=now,
            flushed_ns=now,
        )


def write(ring_dir: Path, seconds: float, rate: float, committed: Synchronized[int]) -> None:
    """The engine's process; `rate` 0: always AHEAD_TOKENS ahead of what is committed."""
    engine_id = uuid4()
    ring = RingWriter.create(
        ring_dir / f"{engine_id}.ring", capacity_bytes=RING_MIB << 20, engine_id=engine_id
    )
    engine = Engine(TraceWriter(ring))
    start = time.monotonic()
    while (now := time.monotonic()) - start < seconds:
        allowed = rate * (now - start) if rate else committed.value + AHEAD_TOKENS
        while ring.counters.tokens < allowed:
            engine.step()
        time.sleep(0.001)
    ring.close()


def read(place: LakePlace, niceness: int, stop: Any, results: mp.Queue[dict[str, Any]]) -> None:
    """A reader's process: queries in a loop, one connection, one thread."""
    os.nice(niceness)
    found: dict[str, Any] = {"queries": 0, "errors": [], "slowest_s": 0.0, "delays_ms": []}
    connection = open_connection(place, threads=1)
    while not stop.is_set():
        for query in (*QUERIES, DELAY):
            start = time.monotonic()
            try:
                row = connection.execute(query).fetchone()
            except Exception as error:  # noqa: BLE001  every kind of error is a result here
                found["errors"].append(str(error))
                continue
            found["queries"] += 1
            found["slowest_s"] = max(found["slowest_s"], time.monotonic() - start)
            if query is DELAY and row and row[0] is not None:
                found["delays_ms"].append(row[0] / 1000)
    results.put(found)


def measure(
    name: str, rate: float, niceness: int, seconds: float, home: Path, ring_dir: Path
) -> dict[str, Any]:
    context = mp.get_context("spawn")
    place = LakePlace(str(home / "catalog.sqlite"), str(home / "data"))
    open_connection(place, read_only=False).close()
    committed: Synchronized[int] = context.Value("q", 0)
    stop_readers, results = context.Event(), context.Queue()
    readers = [
        context.Process(target=read, args=(place, niceness, stop_readers, results))
        for _ in range(2)
    ]
    writer = context.Process(target=write, args=(ring_dir, seconds, rate, committed))
    stop = threading.Event()

    def watch(status: Status) -> None:
        committed.value = status.tokens

    collector = Collector(place, ring_dir=ring_dir, crash_dir=home, stop=stop, on_status=watch)
    thread = threading.Thread(target=collector.run)
    for process in readers:
        process.start()
    thread.start()
    time.sleep(2)
    writer.start()
    while collector.status.rings == 0:
        time.sleep(0.005)
    start = time.monotonic()
    writer.join()
    stop_readers.set()
    found = [_result(results) for _ in readers]
    stop.set()
    thread.join()
    spent = time.monotonic() - start
    for process in readers:
        process.join()
    return _row(name, collector.status, spent, found, home)


def _result(results: mp.Queue[dict[str, Any]]) -> dict[str, Any]:
    try:
        return results.get(timeout=60)
    except Empty:
        raise SystemExit("a reader died; see its message above") from None


def _row(
    name: str, status: Status, spent: float, found: list[dict[str, Any]], home: Path
) -> dict[str, Any]:
    place = LakePlace(str(home / "catalog.sqlite"), str(home / "data"))
    with open_connection(place) as lake:
        (stored,) = lake.execute("SELECT count(*) FROM tokens").fetchone() or (0,)
        live = live_bytes(lake)
    size = sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
    delays = sorted(delay for result in found for delay in result["delays_ms"])
    return {
        "phase": name,
        "tokens": status.tokens,
        "tokens_per_s": status.tokens / spent,
        "lost_tokens": status.lost_tokens,
        "rows_in_lake_exact": stored == status.tokens,
        "commits": status.commits,
        "longest_commit_ms": status.longest_commit_s * 1000,
        "largest_ring_lag_percent": status.largest_lag_share * 100,
        "visible_after_p50_ms": delays[len(delays) // 2] if delays else None,
        "visible_after_max_ms": delays[-1] if delays else None,
        "reader_queries": sum(result["queries"] for result in found),
        "reader_errors": sum(len(result["errors"]) for result in found),
        "slowest_query_ms": max(result["slowest_s"] for result in found) * 1000,
        "live_bytes_per_token": live / max(status.tokens, 1),
        "disk_bytes_per_token": size / max(status.tokens, 1),
    }


def live_bytes(lake: duckdb.DuckDBPyConnection) -> int:
    """Bytes of the files that the lake's rows are in; not those that merges have replaced, which
    stay on disk for the readers of the last minutes."""
    query = "SELECT sum(file_size_bytes)::BIGINT FROM ducklake_table_info('lake')"
    (size,) = lake.execute(query).fetchone() or (0,)
    return int(size or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--rate", type=float, default=200_000.0, help="tokens/s of `steady`")
    arguments = parser.parse_args()
    rows = []
    for name, rate, niceness in (
        ("capacity", 0.0, NICENESS),
        ("equal_readers", 0.0, 0),
        ("steady", arguments.rate, NICENESS),
    ):
        home = Path(tempfile.mkdtemp(prefix="bench-lake-"))
        shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
        ring_dir = Path(tempfile.mkdtemp(prefix="bench-ring-", dir=shared))
        try:
            rows.append(measure(name, rate, niceness, arguments.seconds, home, ring_dir))
        finally:
            shutil.rmtree(home, ignore_errors=True)
            shutil.rmtree(ring_dir, ignore_errors=True)
    turned = [
        {"figure": key, **{row["phase"]: row[key] for row in rows}}
        for key in rows[0]
        if key != "phase"
    ]
    details = {
        "batch": BATCH,
        "output_tokens_per_request": OUTPUT_TOKENS,
        "ring_mib": RING_MIB,
        "steady_rate": arguments.rate,
        "seconds": arguments.seconds,
        "readers": 2,
    }
    report("bench_ingest", turned, title="Ring to lake with two readers", details=details)


if __name__ == "__main__":
    main()
