"""How much slower or faster the new build answered, as the replay measured it.

The replay pairs requests across its passes (`replay.summary`); here its figures become ratios.
"""

from __future__ import annotations

from dataclasses import dataclass

from replay.models import Run

METRICS = ("ttft_ms", "tpot_ms")


@dataclass(frozen=True)
class LatencyRatio:
    """Medians of one metric in milliseconds and `ratio` = new / old. `verdict` is the replay's:
    slower or faster only when the change is larger than the A/A difference."""

    metric: str
    old_ms: float
    new_ms: float
    ratio: float
    verdict: str


def latency_ratios(run: Run) -> tuple[LatencyRatio, ...]:
    """TTFT and TPOT from the run's summary. A metric that was not measured is left out."""
    found = []
    for entry in run.summary.get("latency", ()):
        if entry["metric"] in METRICS and entry["old"] > 0:
            ratio = entry["new"] / entry["old"]
            found.append(
                LatencyRatio(entry["metric"], entry["old"], entry["new"], ratio, entry["verdict"])
            )
    return tuple(found)
