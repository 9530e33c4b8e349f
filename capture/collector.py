"""The collector: follows every ring of a directory and commits its rows to the lake, exactly once.

The cursor of a ring is committed in the transaction of its rows: killed anywhere, the collector
goes on where the lake says. One thread reads and decodes, another commits what the first hands
over, one commit at a time. Not for decoding (`capture.collecting.ingest`), waiting for the lake
(`capture.collecting.lake_writer`) or the order of the rings (`capture.collecting.roster`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from capture.collecting.exclusive import CollectorLock
from capture.collecting.finishing import Finisher
from capture.collecting.follower import Follower, Status
from capture.collecting.ingest import RingRows
from capture.collecting.lake_thread import LakeThread
from capture.collecting.lake_writer import LakeWriter
from capture.collecting.retention import Limits
from capture.collecting.rollup_schedule import RollupSchedule
from capture.collecting.roster import Roster
from capture.collecting.upkeep import Upkeep
from capture.errors import RingError
from capture.lake import LakePlace
from capture.reader import RingReader

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("inferloop.collector")

COMMIT_S = 1.0
COMMIT_TOKENS = 400_000  # steps and prefill chunks included; it costs as much as 50,000 of them
COMMIT_OTHERS = 50_000  # rows of other tables
MOST_COMMITS = 2.5  # so much waits in memory for the lake, what comes then in the rings
POLL_S = 0.02
DISCOVER_S = 0.25
WARN_S = 10.0
CALM_LAG_SHARE = 0.05  # of any living engine's ring unread: beyond, only what cannot wait is done
STALE_SHARE = 0.1  # of the time goes to stale rings even while a living engine's ring fills up
BACKLOG_PATIENCE_S = 30.0  # when told to stop: stale rings lose nothing by waiting for the next


class Collector:
    """Collects until `stop` is set, then drains what is there and returns."""

    def __init__(
        self,
        place: LakePlace,
        *,
        ring_dir: Path,
        crash_dir: Path,
        stop: threading.Event,
        on_status: Callable[[Status], None] | None = None,
        on_start: Callable[[], None] | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`on_status` is called after each commit and while the lake is waited for; `on_start` once
        it is certain that no other collector is at work and the lake can be used."""
        self.status = Status()
        self._place = place
        self._ring_dir = ring_dir
        self._stop = stop
        self._on_status = on_status or (lambda _: None)
        self._on_start = on_start or (lambda: None)
        self._roster = Roster(ring_dir)
        self._lake = LakeWriter(place, self.status, stop, self._on_status)
        self._lake_thread = LakeThread()
        self._finisher = Finisher(crash_dir)
        self._upkeep = Upkeep(place, limits or Limits())
        self._rollup = RollupSchedule(self.status, shared=place.catalog_file is None)
        self._committed_s = time.monotonic()
        self._discovered_s = self._finished_s = self._warned_s = float("-inf")
        self._stale_again_s = 0.0
        self._ends_s: float | None = None
        self._warned_frames = 0

    def run(self, *, once: bool = False) -> Status:
        """Collect. `once`: until every ring that is there now has been read to its end.

        Raises CollectorError when another collector is at work, LakeError when the lake cannot be
        used at all.
        """
        with self._lock():
            try:
                self._in_lake(self._lake.open)
                self._on_start()
                self._discover()
                while not once and not self._stop.is_set():
                    if not self._round():
                        self._stop.wait(POLL_S)
                self._drain()
            except BaseException:
                self._stop.set()  # the lake's thread may be waiting for the lake
                raise
            finally:
                self._lake_thread.close()
                self._roster.close()
                self._finisher.close()
                self._lake.close()
        return self.status

    def _round(self) -> bool:
        """Read each living engine's ring once and one stale ring; whether there was anything."""
        busy = False
        for follower in self._roster.living:
            busy |= self._serve(follower)
        busy |= self._serve_stale()
        self._commit_if_due()
        return busy

    def _serve(self, follower: Follower) -> bool:
        """Read a ring once, commit when that is due; whether there was anything.

        A ring that was cut meanwhile is given up and does not stop the others.
        """
        try:
            busy = follower.poll(self.status)
        except RingError as error:
            log.warning("given up: %s", error)
            follower.give_up(str(error))
            self._roster.drop(follower)  # first: nothing may touch its lost pages again
            self._hand_over([follower])
            self._settle()
            follower.close()
            return False
        self._commit_if_due()
        return busy

    def _serve_stale(self) -> bool:
        """Read one stale ring once; whether there was anything."""
        follower = self._roster.next_stale()
        if follower is None or not self._stale_may():
            return False
        began_s = time.monotonic()
        busy = self._serve(follower)
        self._stale_took(began_s)
        return busy

    def _stale_may(self) -> bool:
        """While a living engine's ring fills up, stale ones get their share of the time only."""
        return not self._roster.pressed or time.monotonic() >= self._stale_again_s

    def _stale_took(self, began_s: float) -> None:
        ended_s = time.monotonic()
        self._stale_again_s = ended_s + (ended_s - began_s) * (1 / STALE_SHARE - 1)

    def _drain(self) -> None:
        """Read what is there at this moment, not what a busy engine goes on writing; of the rings
        of engines that are gone as much as there is time for."""
        self._discover()
        behind = {}
        for follower in self._roster.living:
            with contextlib.suppress(RingError):  # one that was cut is given up when it is served
                behind[follower] = follower.frames_now()
        while behind or (self._roster.stale_left and self._has_time()):
            for follower in self._roster.living:  # all: a long backlog must not starve them now
                more = self._serve(follower)
                if not more or follower.reader.cursor.sequence >= behind.get(follower, 0):
                    behind.pop(follower, None)
            behind = {f: target for f, target in behind.items() if not f.abandoned}
            if not self._serve_stale() and not behind:
                time.sleep(POLL_S)
            self._commit_if_due()
        self.commit()
        self._settle()
        if self._roster.stale_left:
            log.warning("%d rings are left for the next collector", self._roster.stale_left)
        while self._lake.connected and self._in_lake(self._roll_up, []):
            if not self._has_time():
                break  # the next collector goes on with it

    def _has_time(self) -> bool:
        """Whether to go on with what the next collector can do: not for long once told to stop."""
        if not self._stop.is_set():
            return True
        if self._ends_s is None:
            self._ends_s = time.monotonic() + BACKLOG_PATIENCE_S
        return time.monotonic() < self._ends_s

    def _discover_if_due(self) -> None:
        if time.monotonic() - self._discovered_s >= DISCOVER_S:
            self._discover()

    def _discover(self) -> None:
        self._discovered_s = time.monotonic()
        self._roster.discover(self._follow)

    def _follow(self, reader: RingReader) -> Follower | None:
        """A ring's follower, from where the lake stands; None: all of it is in the lake."""
        look = partial(self._lake.stored_cursor, reader.header)
        stored = self._in_lake(self._lake.patiently, look)
        if stored is not None and stored[1]:
            # A collector was killed between commit and removal.
            self._finisher.retire(reader, closed=reader.closed_by_writer)
            return None
        if stored is not None:
            reader.cursor = stored[0]
        self.status.rings += 1
        log.info("following engine %s (pid %d)", reader.header.engine_id, reader.header.pid)
        return Follower(reader, committed=stored is not None)

    def _commit_if_due(self) -> None:
        """Commit when enough waits; while the lake's thread is at work only when too much does.

        New rings and finished ones need the lake's answer, so it is their turn between commits: at
        any other time all rings would go unread until the lake is there for them.
        """
        if self._lake_thread.done or self._full >= MOST_COMMITS:
            self._settle()
            self._discover_if_due()
            self._finish_if_due()
            if self._full >= 1 or time.monotonic() - self._committed_s >= COMMIT_S:
                self.commit()

    @property
    def _full(self) -> float:
        """How many commits' worth of rows waits for the lake's thread."""
        rows = [follower.rows for follower in self._roster.followers]
        in_columns, others = sum(r.in_columns for r in rows), sum(r.others for r in rows)
        return max(in_columns / COMMIT_TOKENS, others / COMMIT_OTHERS)

    def commit(self) -> None:
        """Have all pending rows and cursors written in one transaction, and the lake kept up."""
        self._hand_over([follower for follower in self._roster.followers if follower.rows])

    def _hand_over(self, followers: list[Follower], *, finished: bool = False) -> None:
        """Give the followers' rows to the lake's thread, once that is done with those before."""
        self._settle()
        self._committed_s = time.monotonic()
        taken = [(follower, _complete(follower, finished)) for follower in followers]
        self._lake_thread.begin(self._write, taken, self._roster.living, self._roster.followers)

    def _settle(self) -> None:
        """Wait until the lake's thread is done, and tell what it did."""
        if self._lake_thread.busy:
            self._lake_thread.settle()
            self._tell()

    def _in_lake(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have something done in the lake's thread and wait for it."""
        self._settle()
        return self._lake_thread.do(work, *args, **kwargs)

    def _write(
        self,
        taken: list[tuple[Follower, RingRows]],
        living: list[Follower],
        followers: list[Follower],
    ) -> None:
        """In the lake's thread: commit, waiting while the lake cannot, and keep the lake up."""
        if taken:
            began_s = time.monotonic()
            self._lake.write([rows for _, rows in taken])
            for follower, rows in taken:
                follower.committed(rows)
            spent = time.monotonic() - began_s
            self.status.commits += 1
            self.status.last_commit_s = spent
            self.status.longest_commit_s = max(self.status.longest_commit_s, spent)
            self._upkeep.commits += 1
        if self._lake.connected:
            self._keep_up(living, followers)

    def _keep_up(self, living: list[Follower], followers: list[Follower]) -> None:
        """One piece of the lake's upkeep or of the rollup, when it is due and no ring fills up."""
        calm = max((follower.lag_share for follower in living), default=0.0) < CALM_LAG_SHARE
        if not self._upkeep.run_if_due(self._lake.connection(), calm=calm) and calm:
            self._roll_up(followers)

    def _roll_up(self, followers: list[Follower]) -> bool:
        return self._rollup.run_if_due(self._lake.connection(), followers)

    def _tell(self) -> None:
        status, upkeep = self.status, self._upkeep
        status.engines = tuple(follower.lag for follower in self._roster.followers)
        status.lag_bytes = sum(engine.lag_bytes for engine in status.engines)
        status.stale_rings = self._roster.stale_left
        status.upkeep_runs, status.upkeep_failures = upkeep.runs, upkeep.failures
        status.lake_bytes = upkeep.lake_bytes
        status.dropped_tokens = upkeep.retention.dropped_tokens
        self._warn_of_loss()
        self._on_status(status)

    def _warn_of_loss(self) -> None:
        status, now = self.status, time.monotonic()
        if status.lost_frames == self._warned_frames or now - self._warned_s < WARN_S:
            return
        self._warned_frames, self._warned_s = status.lost_frames, now
        log.warning(
            "lost %s tokens in %s frames so far, overwritten before they were read (table losses "
            "has each): give the collector more processor time or engines a larger "
            "INFERLOOP_RING_MIB",
            f"{status.lost_tokens:,}",
            f"{status.lost_frames:,}",
        )

    def _finish_if_due(self) -> None:
        """Finish drained rings, several together: a commit costs about the same for one and all."""
        drained = [follower for follower in self._roster.followers if follower.drained]
        began_s = time.monotonic()
        due = began_s - self._finished_s >= COMMIT_S or self._roster.next_stale() is None
        if drained and due and self._stale_may():
            self._finish(drained)
            self._discover()
            self._stale_took(began_s)

    def _finish(self, drained: list[Follower]) -> None:
        """Drained rings whose engines are gone: report, commit their end, take the rings away."""
        self._finished_s = time.monotonic()
        crashed = [f for f in drained if not f.closed]
        self._hand_over([f for f in crashed if f.rows])
        for follower in drained:
            if follower not in crashed:
                follower.rows.add_end("engine_closed", "")
                continue
            self.status.crashes += 1
            follower.rows.add_end("engine_crashed", self._in_lake(self._report, follower))
        self._hand_over(drained, finished=True)
        self._settle()
        for follower in drained:
            self._rollup.ended(follower)
            self._roster.drop(follower)
            follower.leave()
            self._finisher.retire(follower.reader, closed=follower.closed)

    def _report(self, follower: Follower) -> str:
        """In the lake's thread: what a crashed engine was doing; where that is written down."""
        lake = self._lake.patiently(self._lake.connection)
        return self._finisher.report(lake, follower.reader)

    def _lock(self) -> CollectorLock:
        """One collector per ring directory, and per lake where its catalog is a local file."""
        files = [self._ring_dir / ".collector.lock"]
        catalog = self._place.catalog_file
        if catalog is not None:
            files.append(catalog.with_name(f"{catalog.name}.collector.lock"))
        return CollectorLock(files)


def _complete(follower: Follower, finished: bool) -> RingRows:
    """Its rows with those that belong to every commit: the engine, once, and the cursor."""
    rows = follower.rows
    if not follower.engine_known and (rows.has("engines") or rows.has("losses") or finished):
        if not rows.has("engines"):
            rows.add_engine(None)
        follower.engine_known = True
    rows.add_cursor(follower.reader.cursor, finished=finished)
    return rows.take()
