"""Real prompts at real arrival times through the whole trace path, with readers and a kill.

    python -m benchmarks.stress_loop --data DIR [--minutes 2] [--speed 3] [--kill]

DIR holds azure_2023_conv.csv (arrivals and lengths) and mt_bench_questions.jsonl and
gsm8k_test.jsonl (prompts). Starts `inferloop collect`, `inferloop serve --mirror-share 1` and two
processes that query the lake in a loop; `--kill` sends SIGKILL to the engine halfway and starts it
again. Afterwards every token that a client received must be in the lake, once, and every request
in the traffic files. Exits with 1 when one is not. `--home` keeps the data for the dashboard.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import report
from capture.errors import LakeMissingError
from capture.lake import open_connection
from capture.mirroring.traffic_files import numbered_lines, traffic_files
from capture.settings import Settings
from replay.builds import free_port

MAX_TOKENS = 256
MODEL = "SmolLM2-135M-Instruct.Q4_1"
DOWN = (httpx.TransportError,)
"""What a client sees while the engine is dead."""

HEATMAP = """SELECT count(*) FROM latency_heatmap(
    (SELECT min(arrived_at) FROM requests), now()::TIMESTAMP, 200, 100, 0.99)"""
BY_CLASS = "SELECT class_key, quantile_cont(ttft_ms, 0.99) FROM request_latency GROUP BY class_key"


@dataclass
class Client:
    """What the clients saw."""

    sent: int = 0
    refused: int = 0
    broken: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    """Tokens received by request id, of requests that were answered to the end."""
    ttft_s: list[float] = field(default_factory=list)


def main() -> None:
    """Run, check, report."""
    arguments = _arguments()
    with ExitStack() as cleanup:
        home = arguments.home or Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        settings = Settings(home=home.resolve())
        environment = os.environ | {"INFERLOOP_HOME": str(settings.home)}
        readers = _start_readers(settings, cleanup)
        collector = _start(["collect", "--quiet"], environment, home / "collect.log")
        cleanup.callback(_stop, collector)
        client, seconds = asyncio.run(_serve_and_send(arguments, environment, home))
        time.sleep(3)
        _stop(collector)
        slowest = [_finish(reader) for reader in readers]
        problems, row = _check(settings, client, seconds, slowest)
    report("stress_loop", [row], title="real prompts at real arrival times", details=problems)
    if any(problems.values()):
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--speed", type=float, default=3.0, help="of the recorded arrivals")
    parser.add_argument("--kill", action="store_true", help="SIGKILL the engine halfway")
    parser.add_argument("--home", type=Path, help="keep the data here")
    return parser.parse_args()


def _workload(data: Path, seconds: float, speed: float) -> list[tuple[float, dict[str, Any]]]:
    """(offset in seconds, request body with its tenant and route) in order of arrival."""
    questions = []
    for name, route in (("mt_bench_questions.jsonl", "chat"), ("gsm8k_test.jsonl", "arithmetic")):
        for line in (data / name).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            questions.append(
                (route, record["turns"][0] if "turns" in record else record["question"])
            )
    with (data / "azure_2023_conv.csv").open(encoding="utf-8") as file:
        rows = list(islice(csv.DictReader(file), 100_000))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    work = []
    for index, (row, at, question) in enumerate(zip(rows, times, cycle(questions), strict=False)):
        offset = (at - times[0]) / speed
        if offset > seconds:
            break
        route, text = question
        work.append((offset, {
            "tenant": f"tenant-{index % 3}", "route": route, "text": text,
            "max_tokens": max(1, min(MAX_TOKENS, int(row["GeneratedTokens"]))),
        }))  # fmt: skip
    return work


async def _serve_and_send(
    arguments: argparse.Namespace, environment: dict[str, str], home: Path
) -> tuple[Client, float]:
    """Serve and send the workload; what clients saw and the seconds it took."""
    seconds = arguments.minutes * 60
    work = _workload(arguments.data, seconds, arguments.speed)
    port = free_port()
    command = ["serve", "--port", str(port), "--mirror-share", "1"]
    server = _start(command, environment, home / "serve.log")
    client = Client()
    options: dict[str, Any] = {
        "base_url": f"http://127.0.0.1:{port}", "timeout": 300.0,
        "limits": httpx.Limits(max_connections=None),
    }  # fmt: skip
    async with httpx.AsyncClient(**options) as http:
        await _until_healthy(http)
        start = time.monotonic()
        killed = not arguments.kill
        tasks = []
        for offset, request in work:
            await asyncio.sleep(max(0.0, start + offset - time.monotonic()))
            if not killed and offset > seconds / 2:
                killed = True
                server.send_signal(signal.SIGKILL)
                server.wait()
                server = _start(command, environment, home / "serve-2.log")
                await _until_healthy(http)
            tasks.append(asyncio.create_task(_send(http, request, client)))
        await asyncio.gather(*tasks)
        took = time.monotonic() - start
    _stop(server)
    return client, took


async def _send(http: httpx.AsyncClient, request: dict[str, Any], client: Client) -> None:
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": request["text"]}],
        "max_tokens": request["max_tokens"], "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"X-Tenant": request["tenant"], "X-Route": request["route"]}
    client.sent += 1
    began = time.monotonic()
    first = None
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as got:
            if got.status_code != 200:
                client.refused += 1
                return
            async for line in got.aiter_lines():
                first = first or time.monotonic()
                if '"usage":{' in line:
                    usage = json.loads(line.removeprefix("data: "))["usage"]
                    client.answers[got.headers["x-request-id"]] = usage["completion_tokens"]
    except DOWN:
        client.broken += 1
        return
    if first is not None:
        client.ttft_s.append(first - began)


async def _until_healthy(http: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if (await http.get("/health")).status_code == 200:
                return
        except DOWN:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the engine did not become healthy within 120 s: see serve.log")


def _check(
    settings: Settings, client: Client, seconds: float, slowest: list[float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is wrong (all zero when nothing is), and the figures."""
    with open_connection(settings) as lake:
        stored = dict(lake.execute(
            "SELECT request_id, count(*) FROM tokens JOIN requests USING (engine_id, slot) "
            "GROUP BY request_id").fetchall())  # fmt: skip
        doubled = lake.execute(
            "SELECT count(*) FROM (SELECT 1 FROM tokens GROUP BY engine_id, slot, position "
            "HAVING count(*) > 1)").fetchall()[0][0]  # fmt: skip
        lost = lake.execute("SELECT coalesce(sum(tokens), 0) FROM losses").fetchall()[0][0]
        tokens, itl_50, itl_99 = lake.execute(
            "SELECT count(*), quantile_cont(latency_us, 0.5) / 1000, "
            "quantile_cont(latency_us, 0.99) / 1000 FROM tokens WHERE NOT is_first"
        ).fetchall()[0]  # fmt: skip
    mirrored = set()
    for file in traffic_files(settings.traffic):
        for _, line in numbered_lines(file):
            mirrored.add(json.loads(line)["request_id"])
    differing = [key for key, count in client.answers.items() if stored.get(key) != count]
    ttft = sorted(client.ttft_s)
    problems = {
        "answers_not_whole_in_the_lake": len(differing),
        "tokens_twice_in_the_lake": doubled,
        "tokens_lost": int(lost),
        "answers_not_mirrored": len(client.answers.keys() - mirrored),
    }
    row = {
        "requests": client.sent, "answered": len(client.answers), "refused": client.refused,
        "cut_by_the_kill": client.broken, "tokens": tokens, "tokens_per_s": tokens / seconds,
        "ttft_p50_ms": ttft[len(ttft) // 2] * 1000,
        "ttft_p99_ms": ttft[len(ttft) * 99 // 100] * 1000,
        "itl_p50_ms": itl_50, "itl_p99_ms": itl_99, "slowest_query_s": max(slowest),
    }  # fmt: skip
    return problems, row


def _start(arguments: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "cli", *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait(60)


def _start_readers(settings: Settings, cleanup: ExitStack) -> list[tuple[Any, Any, Any]]:
    """Two processes that query the lake until told to stop."""
    context = multiprocessing.get_context("spawn")
    readers = []
    for query in (HEATMAP, BY_CLASS):
        stop, answers = context.Event(), context.Queue()
        reader = context.Process(target=_read, args=(settings.home, query, stop, answers))
        reader.start()
        cleanup.callback(reader.terminate)
        readers.append((reader, stop, answers))
    return readers


def _read(home: Path, query: str, stop: Any, answers: Any) -> None:
    """Query in a loop, every half second; the slowest answer in seconds goes to `answers`."""
    slowest = 0.0
    while not stop.wait(0.5):
        began = time.monotonic()
        try:
            with open_connection(Settings(home=home)) as lake:
                lake.execute(query).fetchall()
        except LakeMissingError:  # the collector is still starting
            continue
        slowest = max(slowest, time.monotonic() - began)
    answers.put(slowest)


def _finish(reader: tuple[Any, Any, Any]) -> float:
    process, stop, answers = reader
    stop.set()
    slowest: float = answers.get(timeout=30)
    process.join()
    return slowest


if __name__ == "__main__":
    main()
