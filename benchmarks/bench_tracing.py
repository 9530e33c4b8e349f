"""What tracing costs the engine on the CPU: throughput traced over untraced, in many short pairs.

One engine, whose tracer is put in and taken out between two runs of the same work; which of the two
comes first changes from pair to pair, so that neither the memory a model happens to lie in nor a
slow drift of the machine favours one. The interval is a bootstrap over the pairs' ratios; the share
of a step is the time inside the tracer's calls, measured in runs of their own.

    python -m benchmarks.bench_tracing [--pairs 40]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from benchmarks.bench_engine_cpu import make_requests, make_tracer, memory_directory
from benchmarks.report import report
from engine.admission import QueueLimits
from engine.core import Engine
from engine.gguf import find_default_model
from engine.metrics import EngineMetrics
from engine.runner import load_model
from engine.step import Limits
from engine.tracer import StepTracer

PROMPT, TOKENS = 64, 96
BATCHES = (1, 4, 8)
CONFIDENCE = 0.95


class Subject:
    """An engine that runs one batch at a time, traced or not."""

    def __init__(self, model: Path, weights: Any, ring: Path) -> None:
        loaded = load_model(model, weights=weights, kv_tokens=8192, threads=_threads())
        self.tracer = make_tracer(ring, loaded.info)
        self._seed = 0
        self._engine = Engine(
            loaded.runner,
            loaded.tokenizer,
            limits=Limits(max_running=16, token_budget=1024),
            queue_limits=QueueLimits(requests=64, prompt_tokens=65536),
            metrics=EngineMetrics("bench"),
            tracer=self.tracer,
        )
        self._engine.start()

    def decode_s(self, batch: int, *, traced: bool) -> float:
        """Seconds from the first token of a batch to its last."""
        self._engine._tracer = self.tracer if traced else None  # idle: nobody looks at it now
        self._seed += 1
        requests = make_requests(batch, PROMPT, TOKENS, self._seed)
        for handle in [self._engine.submit(request) for request in requests]:
            for _ in handle:
                pass
            handle.close()
        first = max(request.first_token_ns for request in requests)
        return (max(request.last_token_ns for request in requests) - first) / 1e9

    def stop(self) -> None:
        self._engine.stop(drain=False)


def ratios(subject: Subject, batch: int, pairs: int) -> list[float]:
    """Throughput traced over untraced, of each pair."""
    found = []
    for pair in range(pairs + 1):
        seconds = dict.fromkeys((True, False), 0.0)
        for traced in (True, False) if pair % 2 else (False, True):
            seconds[traced] = subject.decode_s(batch, traced=traced)
        if pair:  # the first warms up
            found.append(seconds[False] / seconds[True])
    return found


def tracer_us(subject: Subject, batch: int) -> float:
    """Microseconds a step inside the tracer's call."""
    spent: list[float] = []
    real = StepTracer.step

    def timed(*arguments: Any) -> None:
        began = time.perf_counter()
        real(*arguments)
        spent.append((time.perf_counter() - began) * 1e6)

    StepTracer.step = timed  # type: ignore[method-assign]
    try:
        subject.decode_s(batch, traced=True)
    finally:
        StepTracer.step = real  # type: ignore[method-assign]
    return median(spent)


def measure(subject: Subject, weights: str, batch: int, pairs: int) -> dict[str, Any]:
    found = ratios(subject, batch, pairs)
    interval = bootstrap(
        (np.array(found),), np.median, confidence_level=CONFIDENCE, rng=np.random.default_rng(0)
    ).confidence_interval
    step_us = median(subject.decode_s(batch, traced=True) / TOKENS * 1e6 for _ in range(3))
    inside_us = tracer_us(subject, batch)
    return {
        "weights": weights,
        "batch": batch,
        "traced / untraced": round(median(found), 4),
        "low": round(float(interval.low), 4),
        "high": round(float(interval.high), 4),
        "step_us": round(step_us),
        "tracer_us": round(inside_us, 1),
        "share_of_step_percent": round(inside_us / step_us * 100, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="throughput of the engine traced over untraced")
    parser.add_argument("--pairs", type=int, default=40, help="of runs, for each batch size")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=memory_directory()) as scratch:
        for weights in ("int8", "int4"):
            subject = Subject(find_default_model(), weights, Path(scratch) / f"{weights}.ring")
            try:
                rows += [measure(subject, weights, batch, arguments.pairs) for batch in BATCHES]
            finally:
                subject.stop()
    report(
        "bench_tracing",
        rows,
        title="Decode throughput, traced over untraced",
        details={
            "pairs": arguments.pairs,
            "tokens_a_run": TOKENS,
            "interval": f"{CONFIDENCE:.0%} bootstrap of the median over pairs",
            "threads": _threads(),
        },
    )


def _threads() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
