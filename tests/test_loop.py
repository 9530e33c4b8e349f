"""Serving, collecting and querying as processes, while the engine is killed and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from capture.errors import LakeError
from capture.lake import open_connection
from capture.settings import Settings
from tests.engine.tiny_model import write_tiny_model
from tests.waiting import COMPILING_S, PATIENCE_S, until

READY = re.compile(r"serving tiny .* on (http://\S+)")
ENDLESS = 30_000
"""Tokens of an answer that is still being made whenever the engine is killed."""
COUNTS = """SELECT (SELECT count(*) FROM tokens), (SELECT count(*) FROM finishes),
    (SELECT coalesce(sum(tokens), 0) FROM losses)"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "tiny.gguf", metadata={"llama.context_length": 2 * ENDLESS})
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
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()


@contextmanager
def serving(home: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    log = home / "serve.log"
    log.unlink(missing_ok=True)
    options = ["--model", str(home / "tiny.gguf"), "--port", "0", "--threads", "1"]
    with running(home, "serve", *options, "--kv-tokens", str(2 * ENDLESS)) as process:
        ready = until(
            lambda: process.poll() is not None or READY.search(log.read_text()),
            "the engine serves",
            limit_s=COMPILING_S,
        )
        assert isinstance(ready, re.Match), log.read_text()
        yield process, ready[1]


def complete(url: str, tokens: int) -> None:
    body = {
        "model": "tiny", "prompt": "hello the world", "max_tokens": tokens, "ignore_eos": True,
    }  # fmt: skip
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == tokens


def is_made(home: Path) -> bool:
    """Whether the lake is there, and whole: a collector makes it step by step."""
    try:
        open_connection(Settings(home=home)).close()
    except LakeError:
        return False
    return True


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
            until(lambda: is_made(home), "the lake is made", poll_s=0.1)
            until(lambda: counts(home) == (20, 1, 0), "the first answer is in the lake", poll_s=0.1)
            # While engine and collector run, a user's SQL answers.
            assert sql(home, "SELECT count(*) AS n FROM tokens") == [{"n": 20}]
            with httpx.stream(
                "POST", f"{url}/v1/completions", timeout=PATIENCE_S,
                json={"model": "tiny", "prompt": "a", "max_tokens": ENDLESS, "stream": True,
                      "ignore_eos": True},
            ) as stream:  # fmt: skip
                lines = stream.iter_lines()
                for _ in range(8):
                    next(lines)
                engine.send_signal(signal.SIGKILL)
                engine.wait()
        (path, *_) = until(lambda: list((home / "crashes").glob("*.json")), "a crash report")
        report = json.loads(path.read_text())
        assert report["pid"] == engine.pid
        assert len(report["open_step"]) == 1
        before = counts(home)
        assert before[0] > 20
        assert before[2] == 0
        with serving(home) as (_, url):
            complete(url, 30)
            after = (before[0] + 30, before[1] + 1, 0)
            until(lambda: counts(home) == after, "the new engine's answer too", poll_s=0.1)
    kinds = {row["kind"] for row in sql(home, "SELECT kind FROM events")}
    assert "engine_crashed" in kinds
    doubled = "SELECT 1 FROM tokens GROUP BY engine_id, slot, position HAVING count(*) > 1"
    assert sql(home, doubled) == []
