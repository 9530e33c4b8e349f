"""Teams of threads: barriers, work queues, failures."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu_jit import kernel
from kernels.cpu_threads import Team, barrier, next_item, share


@kernel
def _neighbours(thread, threads, sync, rounds, board, errors):
    """Each round, write one's own cell, then check everybody's."""
    phase = 1
    for i in range(rounds):
        board[thread, 0] = i
        phase = barrier(sync, threads, phase)
        for other in range(threads):
            if board[other, 0] != i:
                errors[thread] += 1
        phase = barrier(sync, threads, phase)


@kernel
def _drain(thread, threads, sync, items, taken):
    for counter in range(2):
        item = next_item(sync, counter)
        while item < items:
            taken[counter, item] += 1
            item = next_item(sync, counter)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_barriers_separate_phases(threads: int) -> None:
    team = Team(threads, queues=1)
    errors = np.zeros(threads, np.int64)
    for _ in range(3):
        team.run(_neighbours, 2000 // threads, np.zeros((threads, 8), np.int64), errors)
    team.close()
    assert not errors.any()


def test_every_item_is_taken_once() -> None:
    team = Team(3, queues=2)
    taken = np.zeros((2, 5000), np.int64)
    team.run(_drain, 5000, taken)
    team.close()
    assert (taken == 1).all()


@pytest.mark.parametrize(("count", "threads"), [(0, 2), (1, 2), (7, 3), (36, 2)])
def test_shares_cover_everything_once(count: int, threads: int) -> None:
    spans = [share(count, thread, threads) for thread in range(threads)]
    assert [i for first, last in spans for i in range(first, last)] == list(range(count))


def test_a_failure_in_a_helper_reaches_the_caller() -> None:
    def fail(thread: int, threads: int, sync: np.ndarray) -> None:
        if thread == 1:
            raise ValueError("helper failed")

    team = Team(2, queues=1)
    with pytest.raises(ValueError, match="helper failed"):
        team.run(fail)
    team.run(lambda *_: None)
    team.close()
