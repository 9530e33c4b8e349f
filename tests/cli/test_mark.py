"""`inferloop mark` against real servers: from the command line into the ring."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from capture.decode import EventFrame, GpuFrame, MarkFrame, MemoryFrame, decode
from capture.reader import RingReader
from tests.cli.test_serve import metrics_of, serving
from tests.engine.tiny_model import write_tiny_model
from tests.waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def mark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", "mark", *arguments],
        env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def frames_of(home: Path) -> list:
    (path,) = (home / "rings").glob("*.ring")
    reader = RingReader(path)
    frames = []
    while batch := reader.read():
        frames += [decode(batch, index) for index in range(len(batch))]
    reader.close()
    return frames


def test_a_mark_reaches_the_ring_beside_the_telemetry(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model) as (_, url):
        result = mark("deploy 7", "--url", url, "--url", url + "/")
        assert (result.returncode, result.stdout) == (0, f"marked {url}\nmarked {url}/\n")
        refused = httpx.post(
            f"{url}/inferloop/marks", data={"text": "x"}, trust_env=False, timeout=PATIENCE_S
        )
        assert refused.status_code == 415

        def telemetry() -> list | None:
            frames = frames_of(tmp_path)
            return frames if {MemoryFrame, GpuFrame} <= {type(frame) for frame in frames} else None

        frames = until(telemetry, "the telemetry has begun", poll_s=0.1)
        metrics = metrics_of(url)
    assert [frame.text for frame in frames if isinstance(frame, MarkFrame)] == ["deploy 7"] * 2
    memory = next(frame for frame in frames if isinstance(frame, MemoryFrame))
    assert (memory.device, memory.unavailable) == (-1, "no CUDA device is in use by this process")
    assert memory.rss_bytes > 1e7
    assert "inferloop:memory_rss_bytes{" in metrics
    assert "inferloop:gpu_info{" in metrics
    without = [frame for frame in frames if isinstance(frame, GpuFrame) and frame.unavailable]
    events = [frame.kind for frame in frames if isinstance(frame, EventFrame)]
    assert bool(without) == ("gpu_unavailable" in events)


def test_each_engine_that_does_not_take_it_is_named(tmp_path: Path, model: Path) -> None:
    with socket.socket() as silent, serving(tmp_path, model, "--no-trace") as (_, url):
        silent.bind(("127.0.0.1", 0))  # and does not listen: the port is nobody else's either
        nobody = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = mark("deploy 7", "--url", nobody, "--url", url)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"inferloop: {nobody}: no engine answers there (")
    assert f"; {url}: this server does not trace (--no-trace)" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "ftp://127.0.0.1", "http://[::1"])
def test_an_address_that_is_none_is_one_clear_line(url: str) -> None:
    result = mark("deploy 7", "--url", url)
    assert result.returncode == 1
    assert result.stderr.startswith(f"inferloop: {url}: no engine answers there (")
    assert result.stderr.count("\n") == 1


def test_a_text_in_another_encoding_is_told_apart_from_a_dead_engine() -> None:
    result = mark(b"caf\xe9".decode("utf-8", "surrogateescape"))
    assert result.returncode == 1
    assert result.stderr.startswith("inferloop: the text is no UTF-8")
