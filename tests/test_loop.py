"""Serving, collecting and querying as processes, while the engine is killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from capture.lake import open_connection
from capture.settings import Settings
from replay.builds import free_port
from tests.engine.tiny_model import write_tiny_model

WAIT_S = 60.0
COUNTS = """SELECT (SELECT count(*) FROM tokens), (SELECT count(*) FROM finishes),
    (SELECT coalesce(sum(tokens), 0) FROM losses)"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "tiny.gguf")
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    return os.environ | {
        "INFERLOOP_HOME": str(home),
        "INFERLOOP_RING_DIR": str(home / "rings"),
        "INFERLOOP_RING_MIB": "8",
    }


@contextmanager
def running(home: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of the product; stopped with SIGTERM at the end unless it has ended."""
    command = [sys.executable, "-m", "cli", *arguments]
    with (home / f"{arguments[0]}.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment(home), stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


@contextmanager
def serving(home: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    options = ["--model", str(home / "tiny.gguf"), "--port", port, "--threads", "1"]
    with running(home, "serve", *options, "--kv-tokens", "1024") as process:
        until(lambda: healthy(url), f"{url} is healthy")
        yield process, url


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def until(condition, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.1)


def complete(url: str, tokens: int) -> None:
    body = {
        "model": "tiny", "prompt": "hello the world", "max_tokens": tokens, "ignore_eos": True,
    }  # fmt: skip
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == tokens


def counts(home: Path) -> tuple[int, int, int]:
    """Tokens, finished requests and lost tokens in the lake."""
    with open_connection(Settings(home=home)) as lake:
        tokens, finishes, lost = lake.execute(COUNTS).fetchall()[0]
    return int(tokens), int(finishes), int(lost)


def sql(home: Path, query: str) -> list[dict[str, object]]:
    """Rows of `inferloop sql`, run as a user would."""
    command = [sys.executable, "-m", "cli", "sql", "--format", "json", query]
    result = subprocess.run(command, env=environment(home), capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.kill
def test_a_killed_engine_loses_no_committed_row_and_is_reported(home: Path) -> None:
    with running(home, "collect"):
        with serving(home) as (engine, url):
            complete(url, 20)
            until(lambda: (home / "lake" / "catalog.sqlite").exists(), "the lake exists")
            until(lambda: counts(home) == (20, 1, 0), "the first answer is in the lake")
            # While engine and collector run, a user's SQL answers.
            assert sql(home, "SELECT count(*) AS n FROM tokens") == [{"n": 20}]
            with httpx.stream(
                "POST", f"{url}/v1/completions", timeout=WAIT_S,
                json={"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": True,
                      "ignore_eos": True},
            ) as stream:  # fmt: skip
                lines = stream.iter_lines()
                for _ in range(8):
                    next(lines)
                engine.send_signal(signal.SIGKILL)
                engine.wait()
        until(lambda: list((home / "crashes").glob("*.json")), "a crash report")
        report = json.loads(next((home / "crashes").glob("*.json")).read_text())
        assert report["pid"] == engine.pid
        assert len(report["open_step"]) == 1
        before = counts(home)
        assert before[0] > 20
        assert before[2] == 0
        with serving(home) as (_, url):
            complete(url, 30)
            until(lambda: counts(home) == (before[0] + 30, before[1] + 1, 0), "the new engine's")
    kinds = {row["kind"] for row in sql(home, "SELECT kind FROM events")}
    assert "engine_crashed" in kinds
    doubled = "SELECT 1 FROM tokens GROUP BY engine_id, slot, position HAVING count(*) > 1"
    assert sql(home, doubled) == []
