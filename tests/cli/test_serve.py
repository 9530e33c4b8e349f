"""`inferloop serve` as its users run it: a process, its first line, its signals, its errors."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.mirroring.traffic_files import numbered_lines, traffic_files
from capture.traffic import TrafficRecord
from tests.engine.tiny_model import write_tiny_model
from tests.proc import children
from tests.waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "cli", "serve", "--threads", "1", *options]


def environment(home: Path) -> dict[str, str]:
    ours = {"INFERLOOP_HOME": str(home), "INFERLOOP_RING_DIR": str(home / "rings")}
    return {**os.environ, **ours, "INFERLOOP_RING_MIB": "1"}


@contextmanager
def serving(home: Path, model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server on a free port: its process and its address."""
    process = subprocess.Popen(
        command("--model", str(model), "--kv-tokens", "1024", "--port", "0", *options),
        env=environment(home),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        found = re.search(r"serving tiny \(int8, build [0-9a-f]{12}\) on (http://\S+)", ready)
        assert found is not None, ready
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def complete(url: str, prompt: str, *, max_tokens: int) -> httpx.Response:
    request = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens}
    return httpx.post(f"{url}/v1/completions", json=request, trust_env=False, timeout=PATIENCE_S)


def build_of(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/inferloop/build", trust_env=False, timeout=PATIENCE_S).json()


def metrics_of(url: str) -> str:
    return httpx.get(f"{url}/metrics", trust_env=False, timeout=PATIENCE_S).text


def mirror_of(pid: int) -> int:
    """The mirror's process of a server."""
    (found,) = (child for child in children(pid) if b"mirror_process" in command_line(child))
    return found


def command_line(pid: int) -> bytes:
    """Empty for a process that has ended, whether or not somebody has asked how."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def run(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*options), env=environment(home), capture_output=True, text=True, check=False
    )


def test_serves_traces_mirrors_and_stops_in_order(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model, "--mirror-share", "1") as (process, url):
        answer = complete(url, "hello", max_tokens=5)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] <= 5
        metrics = metrics_of(url)
        assert "inferloop:mirror_records_skipped" in metrics
        rings = list((tmp_path / "rings").glob("*.ring"))
        assert len(rings) == 1
        build = build_of(url)
        assert set(build["components"]) == {
            "weights", "tokenizer", "template", "code", "configuration", "libraries", "device",
        }  # fmt: skip
        assert build["fingerprint"].encode() in rings[0].read_bytes()
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard, "a full queue needs more connections than the usual soft limit"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    files = traffic_files(tmp_path / "traffic")
    lines = [line for file in files for _, line in numbered_lines(file)]
    assert [TrafficRecord.model_validate_json(line).status for line in lines] == [200]


@pytest.mark.kill
def test_the_mirror_finishes_its_file_though_the_server_is_killed(
    tmp_path: Path, model: Path
) -> None:
    with serving(tmp_path, model, "--mirror-share", "1", "--no-trace") as (process, url):
        mirror = mirror_of(process.pid)
        for number in range(3):
            complete(url, f"hello {number}", max_tokens=2)
        written = re.compile(r"mirror_records_written_total\S* 3\.0")
        until(lambda: written.search(metrics_of(url)), "all is written", poll_s=0.05)
        process.kill()
        process.wait()
        until(lambda: b"mirror" not in command_line(mirror), "the mirror ends with its server")
    (file,) = (tmp_path / "traffic").iterdir()
    assert file.suffix == ".zst"
    assert len(list(numbered_lines(file))) == 3


def test_fingerprint_is_the_same_for_the_same_build_only(tmp_path: Path, model: Path) -> None:
    fingerprints = []
    for options in ([], [], ["--kv-block", "32"]):
        with serving(tmp_path, model, "--no-trace", *options) as (_, url):
            fingerprints.append(build_of(url)["fingerprint"])
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert not (tmp_path / "rings").exists()


def test_port_in_use_is_one_clear_line_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run(tmp_path, "--model", "none.gguf", "--port", str(port))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert f"port {port} on 127.0.0.1 is in use" in result.stderr
    assert "--port" in result.stderr
    assert "none.gguf" not in result.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--model", "none.gguf"], "none.gguf"),
        (["--token-budget", "8"], "token budget of 8"),
        (["--max-queue", "0"], "queue of 0 requests"),
        (["--max-running", "1000000000", "--token-budget", "2000000000"], "limits are 1 and 4096"),
        (["--host", ""], "--host is empty"),
        (["--served-model-name", ""], "--served-model-name is ''"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    tmp_path: Path, options: list[str], text: str
) -> None:
    result = run(tmp_path, "--port", "0", *options)
    assert result.returncode == 1
    assert text in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("inferloop: ")


def test_cache_beyond_the_memory_is_one_clear_line(tmp_path: Path, model: Path) -> None:
    result = run(tmp_path, "--port", "0", "--model", str(model), "--kv-tokens", str(10**15))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("inferloop: --kv-tokens 1000000000000000 does not fit")


def test_help_has_an_example(tmp_path: Path) -> None:
    result = run(tmp_path, "--help")
    assert result.returncode == 0
    assert "inferloop serve --port 8000" in result.stdout
