"""The SQL that the demo runs and recommends."""

from __future__ import annotations

from datetime import UTC, datetime

CLASSES = """\
SELECT class_key, count(*) AS requests, sum(output_tokens) AS tokens,
    round(median(ttft_ms), 1) AS p50_ttft_ms, round(median(tpot_ms), 1) AS p50_tpot_ms
FROM request_latency GROUP BY class_key ORDER BY requests DESC"""

SLOW_TOKENS = """\
SELECT request_id, position, round(gap_ms, 1) AS gap_ms, decode_tokens, prefill_tokens
FROM slow_tokens(5)"""

POLICY_EVENTS = """\
SELECT happened_at, detail FROM events
WHERE kind = 'policy_reloaded' ORDER BY happened_at DESC LIMIT 3"""

UNSURE_TOKENS = """\
SELECT class_key, count(*) AS tokens, round(avg((margin < 0.1)::INT), 3) AS share_unsure
FROM tokens JOIN requests USING (engine_id, slot) GROUP BY class_key ORDER BY share_unsure DESC"""


def waits(before: datetime, after: datetime) -> str:
    """Queueing by class in the bursts that began at `before` and at `after`."""
    return f"""\
SELECT class_key, min(adjustment) AS adjustment,
    round(median(queue_ms) FILTER (arrived_at < {_time(after)})) AS p50_wait_before_ms,
    round(median(queue_ms) FILTER (arrived_at >= {_time(after)})) AS p50_wait_after_ms,
    round(max(queue_ms) FILTER (arrived_at >= {_time(after)})) AS longest_after_ms
FROM request_latency WHERE arrived_at >= {_time(before)}
GROUP BY class_key ORDER BY adjustment, p50_wait_after_ms DESC"""


def burst(since: datetime) -> str:
    """One row: median wait of demoted requests, of the others, and how many were served."""
    return f"""\
SELECT median(queue_ms) FILTER (adjustment < 0), median(queue_ms) FILTER (adjustment >= 0),
    count(*) FILTER (outcome IN ('stop', 'length'))
FROM request_latency WHERE arrived_at >= {_time(since)}"""


def ended(since: datetime) -> str:
    """One number: requests that arrived after `since` and have ended."""
    return f"""\
SELECT count(*) FROM request_latency
WHERE arrived_at >= {_time(since)} AND outcome <> 'unfinished'"""


def _time(moment: datetime) -> str:
    return f"TIMESTAMP '{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}'"
