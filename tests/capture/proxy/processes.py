"""`inferloop proxy` as a process, and what it has captured so far."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import zstandard

from capture.decode import EngineFrame, FinishFrame, Frame, RequestFrame, StepFrame, decode
from capture.reader import RingReader
from tests.proc import children
from tests.waiting import PATIENCE_S, until

PATIENT: dict[str, Any] = {"trust_env": False, "timeout": PATIENCE_S}
"""Options of httpx for a machine that may be busy."""


class ProxyProcess:
    """A running proxy with a home of its own, which does not outlive a block `with` it."""

    def __init__(self, upstream: str, home: Path, *options: str, **variables: str) -> None:
        self.home = home
        self.rings = home / "rings"
        environment = os.environ | {
            "INFERLOOP_HOME": str(home),
            "INFERLOOP_RING_DIR": str(self.rings),
            "INFERLOOP_RING_MIB": "8",
            **variables,
        }
        command = [
            *(sys.executable, "-m", "cli", "proxy", "--upstream", upstream),
            *("--port", "0", "--mirror", "1", *options),
        ]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        line = self.process.stdout.readline() if readable else ""
        if "proxying" not in line:
            self.process.kill()
            raise AssertionError(self.process.communicate())
        self.port = int(line.rsplit(":", 1)[1])

    def __enter__(self) -> ProxyProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def children(self) -> list[int]:
        """Ids of the processes that it has started."""
        return children(self.process.pid)

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024

    def records(self) -> list[dict[str, Any]]:
        return records_in(self.home)

    def record(self, conversation: str) -> dict[str, Any]:
        """The traffic record of a conversation, once it is there."""

        def found() -> dict[str, Any] | None:
            return next((r for r in self.records() if r["conversation_id"] == conversation), None)

        record = until(found, f"the record of {conversation}")
        assert record is not None
        return record

    def knows_its_upstream(self) -> bool:
        """Whether the upstream has told its models: from then on it is asked by tests only."""
        return any(isinstance(frame, EngineFrame) for frame in self.frames())

    def settle(self) -> None:
        """Wait until all that was asked before is traced and counted: the capture keeps the order.
        (Not until it is mirrored: that process lets all others go first.) The upstream must answer
        a question of the tenant "settle"."""
        request_id = uuid4().hex
        url, question = f"{self.url}/v1/chat/completions", {"messages": []}
        headers = {"X-Tenant": "settle", "traceparent": f"00-{request_id}-b7ad6b7169203331-01"}
        httpx.post(url, json=question, headers=headers, **PATIENT)
        (path,) = self.rings.glob("*.ring")
        slots: list[int] = []
        with contextlib.closing(RingReader(path)) as reader:

            def is_over() -> bool:
                for frame in frames_of(reader):
                    if isinstance(frame, RequestFrame) and frame.request_id == request_id:
                        slots.append(frame.slot)
                    if isinstance(frame, FinishFrame) and frame.slot in slots:
                        return True
                return False

            until(is_over, "the question's end is traced")

    def frames(self) -> list[Frame]:
        """All frames in the ring so far."""
        (path,) = self.rings.glob("*.ring")
        with contextlib.closing(RingReader(path)) as reader:
            return list(frames_of(reader))

    def of_request(self, request_id: str, kind: type[Any]) -> list[Any]:
        """The frames of one type that are about a request, once its FINISH is there."""
        slot = next(f.slot for f in self.frames() if getattr(f, "request_id", "") == request_id)
        return [f for f in self.frames() if isinstance(f, kind) and f.slot == slot]

    def rows_of(self, request_id: str) -> list[dict[str, Any]]:
        """The rows of a request in all steps."""
        frames = self.frames()
        slot = next(f.slot for f in frames if getattr(f, "request_id", "") == request_id)
        found = []
        for frame in frames:
            if isinstance(frame, StepFrame):
                for index, of_row in enumerate(frame.rows["slot"].tolist()):
                    if of_row == slot:
                        row = {name: column[index].item() for name, column in frame.rows.items()}
                        found.append(row | {"step_id": frame.step["step_id"]})
        return found


def frames_of(reader: RingReader) -> Iterator[Frame]:
    """What there is to read."""
    while len(batch := reader.read(1 << 20)):
        for index in range(len(batch)):
            yield decode(batch, index)


def records_in(home: Path) -> list[dict[str, Any]]:
    """All traffic records under a home."""
    found = []
    for file in sorted((home / "traffic").glob("traffic-*.jsonl*")):
        with contextlib.suppress(FileNotFoundError):  # just finished under another name
            data = file.read_bytes()
            if file.suffix == ".zst":
                data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
            whole = data[: data.rfind(b"\n") + 1]  # a line may be on its way
            found += [json.loads(line) for line in whole.splitlines()]
    return found


def raw(port: int, request: bytes) -> bytes:
    """Send bytes, return what comes until the peer closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(request)
        parts = []
        while data := connection.recv(65536):
            parts.append(data)
        return b"".join(parts)
