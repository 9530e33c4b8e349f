"""The process that talks to NVML: one line of JSON a period on its output, whatever NVML does.

One thread makes the calls, one after the other; the main thread reports what is known, so that a
call that hangs ages the figures and delays nobody. Started and read by `capture.gpu.monitor`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict
from typing import IO, Any

from capture.gpu.nvml import Calls, Device, MissingError, Nvml, Reading, UnavailableError, attach

LOST_ROUNDS = 10
"""After so many rounds in which no device gave any figure the process ends, to be started anew."""


class Reader:
    """Reads all devices once a period in a thread of its own. The attributes are for other threads:
    `failure` says why it has ended, `final` that starting it again cannot help."""

    def __init__(self, visible: str | None, period_s: float) -> None:
        self.calls = Calls()
        self.failure = ""
        self.final = False
        self._visible = visible
        self._period_s = period_s
        self._latest: list[tuple[Device, Reading]] = []
        self._thread = threading.Thread(target=self._main, name="nvml", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def report(self) -> dict[str, Any]:
        """All that is known now; times are `time.monotonic()`, which processes share."""
        return {
            "devices": [
                {**asdict(device.identity), **reading.as_dict()} for device, reading in self._latest
            ],
            "pending": self.calls.pending,
            "calls": dict(self.calls.durations),
            "failure": self.failure,
            "final": self.final,
        }

    def _main(self) -> None:
        try:
            self._read_on()
        except UnavailableError as error:
            self.final = isinstance(error, MissingError)
            self.failure = str(error)
        except Exception as error:  # noqa: BLE001 - what another driver or nvidia-ml-py may answer
            self.failure = f"NVML answered what is not understood ({type(error).__name__}: {error})"

    def _read_on(self) -> None:
        """Raises `UnavailableError`."""
        nvml = Nvml(_pynvml(), self.calls)
        nvml.call("nvmlInit")
        devices = attach(nvml, self._visible)
        lost = 0
        while True:
            began_s = time.monotonic()
            latest = [(device, device.read()) for device in devices]
            self._latest = latest
            lost = 0 if any(reading.values for _, reading in latest) else lost + 1
            if lost >= LOST_ROUNDS:
                reasons = Counter(why for _, reading in latest for why in reading.reasons.values())
                raise UnavailableError(f"no device answers: {reasons.most_common(1)[0][0]}")
            time.sleep(max(0.0, began_s + self._period_s - time.monotonic()))


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise MissingError(f"the package nvidia-ml-py is not installed ({error})") from error
    return pynvml


def _reports_alone() -> IO[str]:
    """What was the standard output, for reports; what the driver's library prints goes nowhere: it
    could come in the middle of one."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return output


def main(visible: str | None, period_s: float) -> None:
    """Report until the input ends: whoever started this process is then gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started it
    output = _reports_alone()
    reader = Reader(visible, period_s)
    reader.start()
    alive = True
    while alive:
        readable, _, _ = select.select([sys.stdin], [], [], period_s if reader.alive else 0)
        if readable and not sys.stdin.read(1):
            break
        alive = reader.alive
        try:
            print(json.dumps(reader.report()), file=output, flush=True)
        except BrokenPipeError:
            break
    os._exit(0)  # a thread that hangs in a call must not keep the process


if __name__ == "__main__":
    main(sys.argv[2] if len(sys.argv) > 2 else None, float(sys.argv[1]))
