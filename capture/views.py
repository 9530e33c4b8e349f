"""The lake's views and table macros: the joins that people would otherwise write themselves.

They are stored in the lake, so whoever attaches it has them. Meanings of the latencies: TTFT from
arrival to the first token; ITL per token; TPOT = (last - first) / (n - 1); failed requests count
in duration and never in TTFT or TPOT.
"""

from __future__ import annotations

import hashlib

from capture.heatmaps import LATENCY_HEATMAP, LATENCY_OVERVIEW
from capture.schema import TABLES, Column, View
from capture.why.macro import WHY

REQUEST_LATENCY = View(
    "request_latency",
    "A row per request with its latencies. `outcome` is its finish reason, `unfinished` while it "
    "runs, `engine_gone` when its engine ended first; ttft_ms and tpot_ms are NULL unless it "
    "succeeded.",
    (
        Column("request_id", "VARCHAR", "W3C trace id, 32 hex digits"),
        Column("engine_id, slot", "", "where it ran"),
        Column("tenant, route, class_key, priority, adjustment", "", "as in requests"),
        Column("arrived_at", "TIMESTAMP", "arrival"),
        Column("prompt_tokens, cached_tokens, output_tokens", "INTEGER", "tokens"),
        Column("outcome", "VARCHAR", "stop, length, a failure, unfinished, or engine_gone"),
        Column("queue_ms", "DOUBLE", "arrival to first scheduled"),
        Column("ttft_ms", "DOUBLE", "arrival to first token"),
        Column("tpot_ms", "DOUBLE", "(last - first) / (output tokens - 1)"),
        Column("sending_ms", "DOUBLE", "last token to the last byte flushed"),
        Column("duration_ms", "DOUBLE", "arrival to last byte flushed, or to its end"),
    ),
    """
SELECT r.request_id, r.engine_id, r.slot, r.tenant, r.route, r.class_key, r.priority, r.adjustment,
    r.arrived_at, r.prompt_tokens, r.cached_tokens, f.output_tokens,
    coalesce(f.reason, if(gone.engine_id IS NULL, 'unfinished', 'engine_gone')) AS outcome,
    (epoch_us(f.admitted_at) - epoch_us(r.arrived_at)) / 1000 AS queue_ms,
    CASE WHEN f.reason IN ('stop', 'length')
        THEN (epoch_us(f.first_token_at) - epoch_us(r.arrived_at)) / 1000 END AS ttft_ms,
    CASE WHEN f.reason IN ('stop', 'length') AND f.output_tokens > 1
        THEN (epoch_us(f.last_token_at) - epoch_us(f.first_token_at)) / 1000
            / (f.output_tokens - 1) END AS tpot_ms,
    (epoch_us(f.flushed_at) - epoch_us(f.last_token_at)) / 1000 AS sending_ms,
    (epoch_us(coalesce(f.flushed_at, f.finished_at)) - epoch_us(r.arrived_at)) / 1000 AS duration_ms
FROM requests AS r
LEFT JOIN finishes AS f ON f.engine_id = r.engine_id AND f.slot = r.slot
LEFT JOIN (
    SELECT DISTINCT engine_id FROM events WHERE kind IN ('engine_closed', 'engine_crashed')
) AS gone ON gone.engine_id = r.engine_id
""",
    "SELECT class_key, count(*) AS n, quantile_cont(ttft_ms, 0.99) AS p99_ttft_ms\n"
    "FROM request_latency GROUP BY class_key",
)

TOKEN_GAPS = View(
    "token_gaps",
    "A row per output token after the first: the time since the one before it (ITL).",
    (
        Column("request_id, tenant, route, class_key, arrived_at", "", "of its request"),
        Column("engine_id, slot, step_id, position, token_id", "", "as in tokens"),
        Column("emitted_at", "TIMESTAMP", "end of its step"),
        Column("gap_ms", "DOUBLE", "time since the request's previous token"),
        Column("logprob, margin, kv_blocks", "", "as in tokens"),
    ),
    """
SELECT r.request_id, r.tenant, r.route, r.class_key, r.arrived_at, t.engine_id, t.slot, t.step_id,
    t.position, t.token_id, t.emitted_at, t.latency_us / 1000 AS gap_ms, t.logprob, t.margin,
    t.kv_blocks
FROM tokens AS t JOIN requests AS r ON r.engine_id = t.engine_id AND r.slot = t.slot
WHERE NOT t.is_first
""",
    "SELECT tenant, quantile_cont(gap_ms, 0.99) AS p99_gap_ms FROM token_gaps GROUP BY tenant",
)

SLOW_TOKENS = View(
    "slow_tokens",
    "The `wanted` slowest gaps with the step that ended each.",
    (
        Column("request_id, position, emitted_at, gap_ms, token_id", "", "as in token_gaps"),
        Column("step_id", "BIGINT", "the step that produced the token"),
        Column("step_ms", "DOUBLE", "duration of that step"),
        Column("decode_tokens, prefill_tokens, waiting, kv_used", "INTEGER", "of that step"),
    ),
    """
SELECT g.request_id, g.position, g.emitted_at, g.gap_ms, g.token_id, g.step_id,
    (s.schedule_us + s.prepare_us + s.forward_us + s.sample_us) / 1000 AS step_ms,
    s.decode_tokens, s.prefill_tokens, s.waiting, s.kv_used
FROM (FROM token_gaps ORDER BY gap_ms DESC LIMIT wanted) AS g
LEFT JOIN steps AS s ON s.engine_id = g.engine_id AND s.step_id = g.step_id
ORDER BY g.gap_ms DESC
""",
    "SELECT * FROM slow_tokens(10)",
    parameters="wanted",
)

VIEWS = (REQUEST_LATENCY, TOKEN_GAPS, SLOW_TOKENS, LATENCY_HEATMAP, LATENCY_OVERVIEW, WHY)


def definitions_digest() -> str:
    """Changes whenever a view, macro or comment does, so that a lake's stored ones are replaced."""
    comments = [statement for table in TABLES for *_, statement in table.comments]
    text = "\n".join([*comments, *(view.ddl for view in VIEWS)])
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()
