"""Collectors in processes of their own, for tests that stop or kill them.

`python -m tests.capture.collect_process HOME RING_DIR` runs one until SIGTERM; with a number
after it that many are started one after the other and killed at random moments (forked, so that
they need not be imported each time). With a catalog's URL after it, it works on that lake, with
files in HOME. They commit, merge, roll up and clean far more often than the real one, so that a
kill at any time falls near a commit and several of them get in each other's way.

Each says `ready` once it is at work, `waiting` when it first waits for the lake, and `stopping`
when it waits for it although it was told to stop. It ends with the process that started it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from capture import collector
from capture.collecting import lake_writer, rollup_schedule, upkeep
from capture.collecting.follower import Status
from capture.lake import LakePlace


def collect(home: Path, ring_dir: Path, ready: int, catalog: str | None = None) -> None:
    collector.COMMIT_S, collector.COMMIT_TOKENS = 0.02, 3000
    lake_writer.STOP_PATIENCE_S = 120.0
    upkeep.MERGE_COMMITS = 5
    if catalog is not None:
        collector.COMMIT_S = 0.1
        upkeep.EXPIRE_S, upkeep.PRUNE_S, upkeep.GRACE_S = 1.0, 1.5, 5.0
        rollup_schedule.ROLLUP_S = 0.5
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    parent, told = os.getppid(), set[str]()

    def tell(status: Status) -> None:
        if os.getppid() != parent:
            stop.set()
        waits = status.waiting_for is not None
        holds = {"ready": True, "waiting": waits, "stopping": waits and stop.is_set()}
        for word in [word for word, is_true in holds.items() if is_true and word not in told]:
            told.add(word)
            os.write(ready, f"{word}\n".encode())

    collector.Collector(
        LakePlace(catalog or str(home / "catalog.sqlite"), str(home / "data")),
        ring_dir=ring_dir,
        crash_dir=home / "crashes",
        stop=stop,
        on_status=tell,
    ).run()


def collect_and_die(home: Path, ring_dir: Path, times: int) -> None:
    import duckdb  # noqa: F401  imported once, before the forks
    import pyarrow  # noqa: F401

    chance = random.Random(11)
    for _ in range(times):
        ready, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                collect(home, ring_dir, writing)
            finally:
                os._exit(1)
        os.close(writing)
        if os.read(ready, 6) != b"ready\n":
            sys.exit("a collector died by itself")
        time.sleep(chance.random() * 0.25)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)


if __name__ == "__main__":
    directories = Path(sys.argv[1]), Path(sys.argv[2])
    if len(sys.argv) > 3 and "://" in sys.argv[3]:
        collect(*directories, sys.stdout.fileno(), sys.argv[3])
    elif len(sys.argv) > 3:
        collect_and_die(*directories, int(sys.argv[3]))
    else:
        collect(*directories, sys.stdout.fileno())
