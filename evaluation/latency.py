"""How much slower or faster the new build answered in a run, next to the A/A difference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from replay.models import ReplayedRequest, Run


@dataclass(frozen=True)
class LatencyRatio:
    """Medians of one metric in milliseconds, `ratio` = new / old and `noise` = old again / old."""

    metric: str
    old_ms: float
    new_ms: float
    ratio: float
    noise: float


def latency_ratios(session: Session, run: Run) -> tuple[LatencyRatio, ...]:
    """TTFT and ITL of the answered requests. A metric that an arm lacks is left out."""
    values: dict[tuple[str, str], list[float]] = {}
    rows = session.execute(
        select(ReplayedRequest.arm, ReplayedRequest.ttft_ms, ReplayedRequest.itl_ms).where(
            ReplayedRequest.run_id == run.id, ReplayedRequest.error.is_(None)
        )
    )
    for arm, ttft_ms, itl_ms in rows:
        if ttft_ms is not None:
            values.setdefault((arm, "ttft"), []).append(ttft_ms)
        values.setdefault((arm, "itl"), []).extend(itl_ms or ())
    found = []
    for metric in ("ttft", "itl"):
        arms = [values.get((arm, metric), []) for arm in ("old_a", "old_b", "new")]
        if all(arms):
            first, again, new = (float(np.median(arm)) for arm in arms)
            old = float(np.median(arms[0] + arms[1]))
            if first > 0 and old > 0:
                found.append(LatencyRatio(metric, old, new, new / old, again / first))
    return tuple(found)
