"""Follows the feedback policy at little cost. What a policy is: `engine.priorities`."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from engine.priorities import PolicyChange, PolicyFile

POLL_S = 1.0


class PolicyFollower:
    """Polls the policy file at most once in `POLL_S` seconds; without a path, never."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else PolicyFile(path)
        self._next_poll = 0.0

    def wait_s(self) -> float | None:
        """How long one may sleep until the next poll is due; None: for ever."""
        return None if self._file is None else max(0.0, self._next_poll - time.monotonic())

    def poll(self) -> PolicyChange | None:
        """What changed, if a poll is due and something did."""
        if self._file is None or time.monotonic() < self._next_poll:
            return None
        self._next_poll = time.monotonic() + POLL_S
        return self._file.poll(datetime.now(UTC))

    def adjustment(self, class_key: str) -> int:
        """What the policy in force adds to the priority of a class's requests."""
        policy = None if self._file is None else self._file.current
        return 0 if policy is None else policy.adjustment(class_key, datetime.now(UTC))
