"""What the running requests' seats hold, as arrays: so that a step's columns cost no Python loop.

A seat (`Request.row`) is one place in the batch. The arrays mirror the requests; only what a step
changed is copied. Not the owner of any of it: that is `engine.scheduler`.
"""

from __future__ import annotations

import numpy as np

from engine.step import Step


class Seats:
    """Columns indexed by seat. `last_ns` is when the request's last token came (its arrival, if it
    has none: `started` False), `blocks` how many entries of its row in `tables` count."""

    def __init__(self, *, max_running: int, max_blocks: int) -> None:
        self.tables = np.full((max_running, max_blocks), -1, np.int32)
        self.blocks = np.zeros(max_running, np.int64)
        self.slot = np.zeros(max_running, np.uint32)
        self.prompt_len = np.zeros(max_running, np.int64)
        self.last_ns = np.zeros(max_running, np.int64)
        self.started = np.zeros(max_running, np.bool_)

    def update(self, step: Step) -> np.ndarray:
        """Take over what was decided for a step; returns the seat of each of its rows, int64."""
        for request in step.grown:
            row, table = request.row, request.block_table
            if row < 0:  # preempted after it was given the block
                continue
            count = len(table)
            self.tables[row, :count] = table
            self.tables[row, count:] = -1
            self.blocks[row] = count
            self.slot[row] = request.slot
            self.prompt_len[row] = request.prompt_len
            self.last_ns[row] = request.last_token_ns or request.arrival_ns
            self.started[row] = request.last_token_ns != 0
        return np.array([request.row for request in step.requests], np.int64)

    def drew(self, seats: np.ndarray, now_ns: int) -> None:
        """Note that the requests on `seats` have got a token."""
        self.last_ns[seats] = now_ns
        self.started[seats] = True
