"""How fast `inferloop top` reads: tokens/s of its one process, and how long a full ring takes.

The writer stands still meanwhile, so that the figure is the view's own.

    python -m benchmarks.bench_watch [--tokens 2000000]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from benchmarks.bench_ring import RING_MIB, ring_step
from benchmarks.report import report
from capture.frames import TraceWriter
from capture.ring import RingWriter
from capture.watch import Watch

BATCHES = (1, 8, 64, 256)
FRAME_BYTES = 192  # a step's header and fields
TOKEN_BYTES = 32
POLLED = 0.25  # of a ring between two polls


def measured(directory: Path, batch: int, tokens: int) -> dict[str, float]:
    """Fill a part of the ring, read it, and again; the reading alone is timed."""
    ring = RingWriter.create(
        directory / f"{batch}.ring", capacity_bytes=RING_MIB << 20, engine_id=uuid4()
    )
    step = ring_step(TraceWriter(ring), batch)
    per_poll = int(POLLED * (RING_MIB << 20) / (FRAME_BYTES + batch * TOKEN_BYTES))
    spent_s = view_s = 0.0
    steps = 0
    with Watch(directory) as watch:
        watch.poll(1.0)
        while steps * batch < tokens:
            for _ in range(min(per_poll, tokens // batch + 1)):
                step(steps)
                steps += 1
            began = time.perf_counter()
            watch.poll(60.0)
            read = time.perf_counter()
            [engine] = watch.view().engines
            spent_s += read - began
            view_s = max(view_s, time.perf_counter() - read)
    ring.close()
    return {
        "batch": batch,
        "tokens": steps * batch,
        "tokens_per_s": steps * batch / spent_s,
        "cpu_share_at_200k_tokens_per_s": 200_000 * spent_s / (steps * batch),
        "longest_view_ms": view_s * 1000,
        "skipped_tokens": engine.live.skipped_tokens,
        "lost_tokens": engine.live.lost_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="per batch size")
    tokens = parser.parse_args().tokens
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    rows = []
    for batch in BATCHES:
        with TemporaryDirectory(dir=place) as folder:
            rows.append(measured(Path(folder), batch, tokens))
    report("bench_watch", rows, title="Reading and summing up for top", details={"window_s": 10})


if __name__ == "__main__":
    main()
