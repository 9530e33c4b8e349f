"""What mirrored traffic costs: writing it, syncing it, compressing it, checking it.

The records are chats with a system prompt, a question of about 500 tokens and an answer of 200
that was streamed, as the server hands them over; every tenth holds personal data. The peer of the
mirror is the plain writing of the same lines (JSON and `write`); the peer of `traffic check` is
asking the JSON Schema about every value, on a hundredth of the lines.

    python -m benchmarks.bench_traffic [--records 20000]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from benchmarks.report import report
from capture.contract.check import check_files
from capture.contract.drift import Profile
from capture.contract.schema import traffic_schema
from capture.mirror import Mirror
from capture.mirroring.traffic_files import numbered_lines, traffic_files
from capture.mirroring.traffic_writer import FilePolicy, Fsync

WORDS = (
    "the",
    "cache",
    "holds",
    "what",
    "a",
    "step",
    "has",
    "read",
    "and",
    "wants",
    "again",
    "soon",
)
PROMPT_TOKENS, OUTPUT_TOKENS = 500, 200
FEED = 500
"""Records in the mirror's queue at most, so that it refuses none."""


def records(count: int) -> list[dict[str, Any]]:
    draw = random.Random(1)
    return [record(draw, number) for number in range(count)]


def record(draw: random.Random, number: int) -> dict[str, Any]:
    question = " ".join(draw.choices(WORDS, k=400))
    if number % 10 == 0:
        question += " My address is jane.doe@example.com, my card 4111 1111 1111 1111."
    ids = [draw.randrange(49152) for _ in range(PROMPT_TOKENS + OUTPUT_TOKENS)]
    return {
        "schema": "inferloop.traffic/1",
        "request_id": f"{number:032x}",
        "conversation_id": f"c{number // 3}",
        "arrival": "2026-11-29T12:00:00.000000+00:00",
        "arrival_ns": number * 10**7,
        "endpoint": "/v1/chat/completions",
        "stream": True,
        "tenant": draw.choice(["search", "support", "batch"]),
        "route": "chat",
        "class_key": "support/chat/0123abcd",
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        "prompt_token_ids": ids[:PROMPT_TOKENS],
        "rendered_prompt": f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
        "sampling": {"max_tokens": 256, "temperature": 0.7, "top_p": 0.95, "seed": number},
        "output_text": " ".join(draw.choices(WORDS, k=160)),
        "output_token_ids": ids[PROMPT_TOKENS:],
        "logprobs": [-draw.random() for _ in range(OUTPUT_TOKENS)],
        "margins": [draw.expovariate(0.3) for _ in range(OUTPUT_TOKENS)],
        "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": OUTPUT_TOKENS},
        "chunks": [{"at_ms": 40.0 + 9.7 * n, "tokens": 1} for n in range(OUTPUT_TOKENS)],
        "finish_reason": "stop",
        "client": "203.0.113.9",
        "headers": {"user-agent": "bench"},
    }


def row(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        "what": name,
        "records": count,
        "us_per_record": seconds / count * 1e6,
        "s_per_100000_records": seconds / count * 1e5,
    }


def timed(name: str, count: int, work: Callable[[], object]) -> dict[str, Any]:
    started = time.perf_counter()
    work()
    return row(name, count, time.perf_counter() - started)


def write_plainly(directory: Path, offered: list[dict[str, Any]]) -> None:
    with (directory / "plain.jsonl").open("w") as file:
        for item in offered:
            file.write(json.dumps(item) + "\n")


def write_mirrored(directory: Path, offered: list[dict[str, Any]], fsync: Fsync) -> float:
    """Seconds in which all is written; compression comes after that, in its own thread."""
    files = FilePolicy(fsync=fsync, rotate_bytes=1 << 40)
    mirror = Mirror(directory, share=1.0, key=b"bench", files=files)
    started = time.perf_counter()
    for item in offered:
        mirror.offer(item)
        while mirror.counters.queued > FEED:
            time.sleep(0.001)
    while mirror.counters.queued:
        time.sleep(0.001)
    seconds = time.perf_counter() - started
    mirror.close(timeout_s=600)
    assert mirror.counters.written == len(offered), mirror.counters
    return seconds


def ask_schema(file: Path, count: int) -> None:
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(traffic_schema())
    for number, line in numbered_lines(file):
        if number > count:
            return
        validator.validate(json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=20_000)
    count = parser.parse_args().records
    offered = records(count)
    sizes = {}
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        rows = [timed("write plainly", count, lambda: write_plainly(home, offered))]
        for fsync in get_args(Fsync):
            seconds = write_mirrored(home / fsync, offered, fsync)
            rows.append(row(f"mirror, fsync {fsync}", count, seconds))
        (file,) = traffic_files(home / "second")
        sizes["packed"] = file.stat().st_size
        sizes["plain"] = sum(len(line) for _, line in numbered_lines(file))
        profile = Profile()
        rows.append(timed("traffic check", count, lambda: check_files(file, profile.add)))
        few = max(1, count // 100)
        rows.append(timed("ask the schema", few, lambda: ask_schema(file, few)))
    report(
        "bench_traffic",
        rows,
        title="Mirrored traffic",
        details={
            "bytes_per_record": sizes["plain"] / count,
            "bytes_per_record_compressed": sizes["packed"] / count,
        },
    )


if __name__ == "__main__":
    main()
