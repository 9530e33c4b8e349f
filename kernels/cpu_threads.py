"""Runs one compiled function on several threads at once, with barriers inside.

A decoder step has about 300 short phases; handing each to a thread pool would cost more than the
work. So every thread runs the whole step and takes its share of each phase, and phases are
separated by a barrier that spins briefly and then yields the core.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np

from kernels.cpu_ir import atomic_add, atomic_load, yield_core
from kernels.cpu_jit import part

SPINS = 4000
"""Polls before a waiting thread yields its core: about 20 us."""

_LINE = 8
"""int64 numbers per cache line."""


@part
def barrier(sync, threads, phase):
    """Wait until all threads have arrived `phase` times; returns the next phase.

    `sync`: the Team's counters. Phases count from 1 in each run.
    """
    if threads > 1:
        place = sync.ctypes.data
        atomic_add(place, 1)
        polls = 0
        while atomic_load(place) < threads * phase:
            polls += 1
            if polls > SPINS:
                yield_core()
    return phase + 1


@part
def next_item(sync, counter):
    """The next index of work queue `counter` (0 based): each index goes to one thread."""
    return atomic_add(sync.ctypes.data + 8 * _LINE * (counter + 1), 1)


@part
def share(count, thread, threads):
    """(first, last + 1) of this thread's contiguous share of `count` items."""
    return thread * count // threads, (thread + 1) * count // threads


class Team:
    """`threads` threads that run compiled functions together; the caller is thread 0.

    `sync` (int64) goes to the function: a barrier's counter, then one per work queue. A function
    takes (thread, threads, sync, *arguments), must not raise, and must hold no Python objects.
    """

    def __init__(self, threads: int, queues: int) -> None:
        self.threads = threads
        self.sync = np.zeros((queues + 1) * _LINE, np.int64)
        self._jobs = [queue.SimpleQueue[Callable[[], None] | None]() for _ in range(threads - 1)]
        self._done = queue.SimpleQueue[BaseException | None]()
        self._helpers = [
            threading.Thread(target=self._help, args=(jobs,), name=f"kernel-{i + 1}", daemon=True)
            for i, jobs in enumerate(self._jobs)
        ]
        for helper in self._helpers:
            helper.start()

    def run(self, function: Callable[..., None], *arguments: object) -> None:
        """Run `function` on all threads and wait for all of them."""
        self.sync[:] = 0
        for i, jobs in enumerate(self._jobs):
            jobs.put(lambda i=i: function(i + 1, self.threads, self.sync, *arguments))
        function(0, self.threads, self.sync, *arguments)
        failures = [self._done.get() for _ in self._jobs]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """End the helper threads."""
        for jobs in self._jobs:
            jobs.put(None)
        for helper in self._helpers:
            helper.join()

    def _help(self, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            except Exception as failure:  # noqa: BLE001 - handed to the caller of run()
                self._done.put(failure)
            else:
                self._done.put(None)
