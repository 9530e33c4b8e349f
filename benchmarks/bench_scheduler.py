"""Times the scheduler with a full batch and a long queue; no model.

    python -m benchmarks.bench_scheduler

Budget: 100 us a step with 256 running and 10,000 waiting. Requests come from 50 tenants, at three
priorities, in both service classes; each that ends is replaced, so both numbers stay what they are.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from benchmarks.report import report
from engine.blocks import BlockPool
from engine.request import Request, SamplingParams, State
from engine.scheduler import Scheduler
from engine.step import Limits

WARM_UP, STEPS = 300, 3000
CASES = [(8, 0), (64, 1000), (256, 10_000)]
STEP_NS = 10_000_000


class Load:
    """Keeps a scheduler at so many running and waiting requests."""

    def __init__(self, running: int, waiting: int) -> None:
        self._rng = random.Random(1)
        self._slots = 0
        pool = BlockPool(running * 64, 16)
        limits = Limits(running, running + 768)
        self.scheduler = Scheduler(pool, limits, max_model_len=1024)
        self.now_ns = 0
        self.admitted = 0
        for _ in range(running + waiting):
            self._add()

    def step(self) -> tuple[float, float]:
        """One step; returns the microseconds of planning it and of retiring it."""
        self.now_ns += STEP_NS
        began = time.perf_counter_ns()
        step = self.scheduler.schedule(self.now_ns)
        planned = time.perf_counter_ns()
        if step is None:
            raise RuntimeError("the load ran dry")
        self.scheduler.commit(step, [7] * step.rows)
        retired = time.perf_counter_ns()
        self.admitted += len(step.admitted)
        for request in list(self.scheduler.decoding.values()):
            if request.output_len >= request.params.max_tokens:
                self.scheduler.end(request, State.FINISHED)
                self._add()
        return (planned - began) / 1000, (retired - planned) / 1000

    def _add(self) -> None:
        rng = self._rng
        request = Request(
            bytes(16),
            [rng.randrange(50_000) for _ in range(rng.randrange(20, 200))],
            SamplingParams(rng.randrange(100, 500)),
            tenant=f"tenant-{rng.randrange(50)}",
            priority=rng.choice([20, 50, 50, 50, 80]),
            arrival_ns=self.now_ns,
        )
        request.slot = self._slots
        self._slots += 1
        self.scheduler.add(request)


def measure(running: int, waiting: int) -> dict[str, Any]:
    load = Load(running, waiting)
    for _ in range(WARM_UP):
        load.step()
    load.admitted = 0
    times = [load.step() for _ in range(STEPS)]
    planned = sorted(plan for plan, _ in times)
    return {
        "running": load.scheduler.running,
        "waiting": len(load.scheduler.waiting),
        "admitted_per_step": round(load.admitted / STEPS, 2),
        "schedule_us_p50": round(statistics.median(planned), 1),
        "schedule_us_p99": round(planned[STEPS * 99 // 100], 1),
        "commit_us_p50": round(statistics.median(commit for _, commit in times), 1),
    }


if __name__ == "__main__":
    report("bench_scheduler", [measure(*case) for case in CASES], title="scheduler, us a step")
