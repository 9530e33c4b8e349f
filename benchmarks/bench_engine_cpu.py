"""Tokens per second of the embedded engine on the CPU, tracing on and off, beside llama.cpp.

    python -m benchmarks.bench_engine_cpu --llama-python PATH

Each round runs every variant once, in turn, so that a busy moment hits all alike; a figure is the
median of the rounds, and traced over untraced the median of the rounds' ratios. Decode: `batch`
requests with 64-token prompts generate together; prefill: one 512-token prompt. Our side goes
through `engine.core.Engine.submit` (scheduling, detokenization and delivery included), llama.cpp's
through its batch interface alone: it gets the same file, threads, prompts and greedy choice. PATH
is the Python of an environment with llama-cpp-python, built with CMAKE_ARGS=-DGGML_NATIVE=ON;
without it that column is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import numpy as np

from benchmarks.report import report
from engine.gguf import find_default_model

PROMPT, TOKENS, PREFILL = 64, 128, 512
BATCHES = (1, 4, 8)

Measure = Callable[[int, int, int, int], dict[str, float]]
"""(batch, prompt tokens, decoded tokens, seed) -> prefill_s, decode_s."""

Samples = dict[str, dict[str, list[float]]]
LLAMA, TRACED = "llama.cpp", " traced"


def main() -> None:
    """Measure, print, write the result file."""
    arguments = _arguments()
    model = Path(arguments.model) if arguments.model else find_default_model()
    threads = arguments.threads or len(os.sched_getaffinity(0))
    with _peers(arguments, model, threads) as (variants, versions):
        samples = _rounds(variants, arguments.rounds)
    report(
        "bench_engine_cpu",
        [_row(workload, samples) for workload in next(iter(samples.values()))],
        title=f"tokens/s on {threads} threads, median of {arguments.rounds} rounds",
        details={"model": model.name, "threads": threads, **versions, **_tracing_ratios(samples)},
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="engine tokens/s on the CPU, beside llama.cpp")
    parser.add_argument("--llama-python", help="Python with llama-cpp-python")
    parser.add_argument("--model", help="GGUF file; default: the installed SmolLM2")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights", nargs="+", default=["int8", "int4"])
    return parser.parse_args()


@contextmanager
def _peers(
    arguments: argparse.Namespace, model: Path, threads: int
) -> Iterator[tuple[dict[str, Measure], dict[str, Any]]]:
    """The variants to measure by name, and what to note of them; all are shut down after."""
    with tempfile.TemporaryDirectory(dir=memory_directory()) as scratch:
        variants: dict[str, Measure] = {}
        closers: list[Callable[[], None]] = []
        for weights in arguments.weights:
            for traced in (False, True):
                name = f"{weights}{TRACED if traced else ''}"
                ring = Path(scratch) / f"{weights}.ring" if traced else None
                variants[name], close = _engine(model, weights, threads, ring)
                closers.append(close)
        versions: dict[str, Any] = {}
        if arguments.llama_python:
            peer, close, version = _llama(arguments.llama_python, model, threads)
            variants[LLAMA] = peer
            versions["llama_cpp_python"] = version
            closers.append(close)
        try:
            yield variants, versions
        finally:
            for close in closers:
                close()


def memory_directory() -> str | None:
    """Rings live in shared memory where there is any, as in the product."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _engine(
    model: Path, weights: Any, threads: int, ring: Path | None
) -> tuple[Measure, Callable[[], None]]:
    from engine.admission import QueueLimits
    from engine.core import Engine
    from engine.metrics import EngineMetrics
    from engine.runner import load_model
    from engine.step import Limits

    loaded = load_model(model, weights=weights, kv_tokens=8192, threads=threads)
    engine = Engine(
        loaded.runner,
        loaded.tokenizer,
        limits=Limits(max_running=16, token_budget=1024),
        queue_limits=QueueLimits(requests=64, prompt_tokens=65536),
        metrics=EngineMetrics("bench"),
        tracer=None if ring is None else make_tracer(ring, loaded.info),
    )
    engine.start()

    def measure(batch: int, prompt: int, tokens: int, seed: int) -> dict[str, float]:
        requests = make_requests(batch, prompt, tokens, seed)
        for handle in [engine.submit(request) for request in requests]:
            for _ in handle:
                pass
            handle.close()
        arrival = min(request.arrival_ns for request in requests)
        first = max(request.first_token_ns for request in requests)
        last = max(request.last_token_ns for request in requests)
        return {"prefill_s": (first - arrival) / 1e9, "decode_s": (last - first) / 1e9}

    return measure, lambda: engine.stop(drain=False)


def make_requests(batch: int, prompt: int, tokens: int, seed: int) -> list[Any]:
    """Requests with random prompts, so that none finds its prefix in the cache."""
    from engine.request import Request, SamplingParams

    prompts = np.random.default_rng(seed).integers(1000, 40000, (batch, prompt)).tolist()
    params = SamplingParams(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True)
    return [Request(uuid4().bytes, ids, params) for ids in prompts]


def make_tracer(path: Path, info: dict[str, Any]) -> Any:
    from capture.frames import TraceWriter
    from capture.ring import RingWriter
    from engine.tracer import StepTracer

    ring = RingWriter.create(path, capacity_bytes=128 << 20, engine_id=uuid4())
    tracer = StepTracer(TraceWriter(ring))
    tracer.engine(info)
    return tracer


def _llama(python: str, model: Path, threads: int) -> tuple[Measure, Callable[[], None], str]:
    """llama.cpp in a process of its own environment."""
    script = Path(__file__).with_name("llama_cpp_peer.py")
    process = subprocess.Popen(
        [python, str(script), str(model), str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def answer() -> dict[str, Any]:
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp's process ended: run {python} {script} to see why")
        return json.loads(line)

    def measure(batch: int, prompt: int, tokens: int, seed: int) -> dict[str, float]:
        question = {"batch": batch, "prompt": prompt, "tokens": tokens, "seed": seed}
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        return answer()

    def close() -> None:
        process.stdin.close()
        process.wait()

    return measure, close, answer()["version"]


def _rounds(variants: dict[str, Measure], rounds: int) -> Samples:
    """Tokens/s of each variant and workload ("decode 1", ..., "prefill 512") in each round."""
    samples: Samples = {name: {} for name in variants}
    seed = 0
    for number in range(rounds + 1):
        for batch in (*BATCHES, 0):
            for name, measure in variants.items():
                seed += 1
                if batch:
                    seconds = measure(batch, PROMPT, TOKENS, seed)["decode_s"]
                    key, rate = f"decode {batch}", batch * TOKENS / seconds
                else:
                    seconds = measure(1, PREFILL, 0, seed)["prefill_s"]
                    key, rate = f"prefill {PREFILL}", PREFILL / seconds
                if number:  # the first round warms up
                    samples[name].setdefault(key, []).append(rate)
        print(f"round {number} of {rounds}", file=sys.stderr)
    return samples


def _row(workload: str, samples: Samples) -> dict[str, Any]:
    """One workload: median tokens/s of every variant, and our untraced ones over llama.cpp."""
    row: dict[str, Any] = {"tokens/s": workload}
    row.update({name: round(median(found[workload]), 1) for name, found in samples.items()})
    if LLAMA in samples:
        for name in samples:
            if not name.endswith(TRACED) and name != LLAMA:
                row[f"{name} / {LLAMA}"] = round(row[name] / row[LLAMA], 2)
    return row


def _tracing_ratios(samples: Samples) -> dict[str, float]:
    """Throughput traced over untraced of the same round, median over rounds, by workload."""
    ratios = {}
    for name, found in samples.items():
        if name.endswith(TRACED):
            plain = samples[name.removesuffix(TRACED)]
            for workload, rates in found.items():
                pairs = zip(rates, plain[workload], strict=True)
                ratio = median(traced / untraced for traced, untraced in pairs)
                ratios[f"{name} over untraced, {workload}"] = round(ratio, 3)
    return ratios


if __name__ == "__main__":
    main()
