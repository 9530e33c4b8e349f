"""When the collector adds committed tokens to the rollup, and how often it tries again.

Not for the rollup itself: that is `capture.rollup`. A failure here never stops a commit: readers
take what is not yet rolled up from the rows.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from capture.collecting.follower import Follower, Status
from capture.errors import first_line
from capture.rollup import ALL_STEPS, roll_up

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("inferloop.collector")

ROLLUP_S = 60.0
ROLLUP_TOKENS = 2_000_000
RETRY_S = 10.0

OTHERS_S = 600.0
"""Other collectors of a shared lake roll up the ends of their engines themselves, long before this:
two at once would count an end twice."""

# Engines whose end came while the rollup failed, or before there was one.
_UNROLLED = f"""
SELECT engine_id::VARCHAR FROM ingest_cursor
WHERE finished AND committed_at <= now()::TIMESTAMP - to_microseconds(($age_s * 1e6)::BIGINT)
EXCEPT SELECT engine_id::VARCHAR FROM rollup_marks WHERE step_id = {ALL_STEPS}
"""


class RollupSchedule:
    """Rolls up one engine at each call: those that run now and then, those that ended once."""

    def __init__(self, status: Status, *, shared: bool) -> None:
        """`shared`: other collectors may write to the lake, too."""
        self._status = status
        self._age_s = OTHERS_S if shared else 0.0
        self._ended: list[str] = []
        self._looked_back = False
        self._not_before_s = 0.0

    def ended(self, follower: Follower) -> None:
        """An engine's last rows are in the lake."""
        self._ended.append(follower.rows.engine_id)

    def run_if_due(self, connection: duckdb.DuckDBPyConnection, followers: list[Follower]) -> bool:
        """Roll up one engine that is due; whether there was one."""
        now = time.monotonic()
        if now < self._not_before_s:
            return False
        import duckdb

        try:
            if not self._looked_back:
                found = connection.execute(_UNROLLED, {"age_s": self._age_s}).fetchall()
                self._ended += [engine_id for (engine_id,) in found]
                self._looked_back = True
            if self._ended:
                self._status.rolled_tokens += roll_up(connection, self._ended[-1], ALL_STEPS)
                self._ended.pop()
                return True
            for follower in followers:
                if _is_due(follower, now):
                    self._roll(connection, follower)
                    return True
        except duckdb.Error as error:
            self._not_before_s = now + RETRY_S
            log.warning("the rollup is put off: %s", first_line(error))
        return False

    def _roll(self, connection: duckdb.DuckDBPyConnection, follower: Follower) -> None:
        before_step = follower.committed_step
        self._status.rolled_tokens += roll_up(connection, follower.rows.engine_id, before_step)
        follower.unrolled_tokens = 0
        follower.rolled_s = time.monotonic()


def _is_due(follower: Follower, now: float) -> bool:
    waited = now - follower.rolled_s >= ROLLUP_S
    return follower.unrolled_tokens >= (1 if waited else ROLLUP_TOKENS)
