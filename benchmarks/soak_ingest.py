"""Ten minutes of ingest at a fixed rate: loss, memory, lag, commit times, files, open descriptors.

An engine's process, a collector's process as `inferloop collect` runs it (rollup and upkeep on),
one reader as `inferloop sql` runs it. Nobody waits for anybody: what the collector does not read in
time is lost and counted.

    python -m benchmarks.soak_ingest [--minutes 10] [--rate 200000]
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_ingest import live_bytes, read, write
from benchmarks.report import report
from capture.collecting.follower import Status
from capture.collector import Collector
from capture.lake import LakePlace, open_connection
from capture.sql.query_process import NICENESS

SAMPLE_S = 1.0
SETTLED_SHARE = 0.3  # of the run: caches and arenas have filled, a leak would go on
PAGE = os.sysconf("SC_PAGE_SIZE")


def collect(
    place: LakePlace, ring_dir: Path, home: Path, results: mp.Queue[dict[str, Any]]
) -> None:
    """The collector's process, until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    commits: list[float] = []
    seen = 0

    def watch(status: Status) -> None:
        nonlocal seen
        if status.commits > seen:
            seen = status.commits
            commits.append(status.last_commit_s * 1000)

    collector = Collector(place, ring_dir=ring_dir, crash_dir=home, stop=stop, on_status=watch)
    status = collector.run()
    results.put({"status": status, "commits_ms": commits})


def sample(pid: int, stop: threading.Event) -> list[tuple[float, float, int]]:
    """Seconds, private resident MiB (the ring is shared) and open descriptors of a process."""
    samples, start = [], time.monotonic()
    while not stop.wait(SAMPLE_S):
        try:
            _, resident_pages, shared_pages, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            resident = (int(resident_pages) - int(shared_pages)) * PAGE / 2**20
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            break
        samples.append((time.monotonic() - start, resident, descriptors))
    return samples


def soak(minutes: float, rate: float, home: Path, ring_dir: Path) -> dict[str, Any]:
    context = mp.get_context("spawn")
    place = LakePlace(str(home / "catalog.sqlite"), str(home / "data"))
    open_connection(place, read_only=False).close()
    committed, stop_reader = context.Value("q", 0), context.Event()
    read_results, collect_results = context.Queue(), context.Queue()
    reader = context.Process(target=read, args=(place, NICENESS, stop_reader, read_results))
    collector = context.Process(target=collect, args=(place, ring_dir, home, collect_results))
    writer = context.Process(target=write, args=(ring_dir, minutes * 60, rate, committed))
    for process in (reader, collector, writer):
        process.start()
    stop_sampling, samples = threading.Event(), []
    sampler = threading.Thread(
        target=lambda: samples.extend(sample(collector.pid or 0, stop_sampling))
    )
    sampler.start()
    writer.join()
    stop_reader.set()
    found = read_results.get(timeout=120)
    stop_sampling.set()
    sampler.join()
    os.kill(collector.pid or 0, signal.SIGTERM)
    collected = collect_results.get(timeout=300)
    for process in (reader, collector):
        process.join()
    return _row(place, collected, found, samples)


def _row(
    place: LakePlace,
    collected: dict[str, Any],
    found: dict[str, Any],
    samples: list[tuple[float, float, int]],
) -> dict[str, Any]:
    status: Status = collected["status"]
    commits = np.array(collected["commits_ms"])
    times, resident, descriptors = map(np.array, zip(*samples, strict=True))
    settled = times >= SETTLED_SHARE * times[-1]
    slope = np.polyfit(times[settled] / 60, resident[settled], 1)[0] if settled.sum() > 2 else 0.0
    delays = np.array(found["delays_ms"] or [float("nan")])
    with open_connection(place) as lake:
        (stored,) = lake.execute("SELECT count(*) FROM tokens").fetchone() or (0,)
        (rolled,) = lake.execute("SELECT sum(tokens) FROM latency_rollup").fetchone() or (0,)
        live = live_bytes(lake)
    return {
        "tokens": status.tokens,
        "lost_tokens": status.lost_tokens,
        "rows_in_lake_exact": stored == status.tokens,
        "rolled_up_tokens": rolled,
        "largest_ring_lag_percent": status.largest_lag_share * 100,
        "commits": status.commits,
        "commit_p50_ms": float(np.median(commits)),
        "commit_p99_ms": float(np.quantile(commits, 0.99)),
        "commit_max_ms": float(commits.max()),
        "visible_after_p50_ms": float(np.median(delays)),
        "visible_after_max_ms": float(delays.max()),
        "reader_queries": found["queries"],
        "reader_errors": len(found["errors"]),
        "collector_rss_settled_mib": float(np.median(resident[settled])),
        "collector_rss_max_mib": float(resident.max()),
        "collector_rss_slope_mib_per_minute": float(slope),
        "collector_descriptors_max": int(descriptors.max()),
        "upkeep_runs": status.upkeep_runs,
        "upkeep_failures": status.upkeep_failures,
        "live_bytes_per_token": live / max(stored, 1),
        "disk_bytes_per_token": _disk(place) / max(stored, 1),
    }


def _disk(place: LakePlace) -> int:
    return sum(path.stat().st_size for path in Path(place.data).rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=200_000.0, help="tokens/s")
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="soak-lake-"))
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    ring_dir = Path(tempfile.mkdtemp(prefix="soak-ring-", dir=shared))
    try:
        row = soak(arguments.minutes, arguments.rate, home, ring_dir)
    finally:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(ring_dir, ignore_errors=True)
    rows = [{"figure": name, "value": value} for name, value in row.items()]
    details = {"minutes": arguments.minutes, "rate_tokens_per_s": arguments.rate, "readers": 1}
    report("soak_ingest", rows, title="Soak of ring, collector and lake", details=details)


if __name__ == "__main__":
    main()
