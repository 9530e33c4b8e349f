"""The lake's views and table macros: the joins that people would otherwise write themselves.

They are stored in the lake, so whoever attaches it has them. Meanings of the latencies: TTFT from
arrival to the first token; ITL per token; TPOT = (last - first) / (n - 1); failed requests count
in duration and never in TTFT or TPOT.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from capture.schema import Column


@dataclass(frozen=True)
class View:
    """A view, or with `parameters` a table macro. `example` runs on any lake."""

    name: str
    comment: str
    columns: tuple[Column, ...]
    sql: str
    example: str
    parameters: str | None = None

    @property
    def ddl(self) -> str:
        if self.parameters is None:
            return f"CREATE OR REPLACE VIEW {self.name} AS {self.sql}"
        return f"CREATE OR REPLACE MACRO {self.name}({self.parameters}) AS TABLE {self.sql}"


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

LATENCY_HEATMAP = View(
    "latency_heatmap",
    "Latency of tokens by the arrival of their request and their position in the output. Cells "
    "without tokens have no row. First tokens (TTFT) are left out.",
    (
        Column("time_bin", "BIGINT", "0 .. time_bins - 1"),
        Column("time_start", "TIMESTAMP", "start of the time bin"),
        Column("position_bin", "BIGINT", "0 .. position_bins - 1"),
        Column("position_start, position_end", "BIGINT", "positions in the bin, both included"),
        Column("latency_ms", "DOUBLE", "the quantile of the time since the previous token"),
        Column("tokens", "BIGINT", "tokens in the cell"),
    ),
    """
WITH shape AS (
    SELECT epoch_us(from_ts::TIMESTAMP) AS start_us,
        epoch_us(to_ts::TIMESTAMP) - epoch_us(from_ts::TIMESTAMP) AS span_us,
        greatest(1, ceil((coalesce(max(t.position), 0) + 1) / position_bins))::BIGINT AS height
    FROM tokens AS t WHERE t.emitted_at >= from_ts::TIMESTAMP
), cells AS (
    SELECT (epoch_us(r.arrived_at) - shape.start_us) * time_bins // shape.span_us AS x,
        t.position // shape.height AS y, quantile_cont(t.latency_us, quantile) / 1000 AS latency_ms,
        count(*) AS tokens
    FROM tokens AS t JOIN requests AS r ON r.engine_id = t.engine_id AND r.slot = t.slot, shape
    WHERE t.emitted_at >= from_ts::TIMESTAMP AND NOT t.is_first
        AND r.arrived_at >= from_ts::TIMESTAMP AND r.arrived_at < to_ts::TIMESTAMP
    GROUP BY ALL
)
SELECT x AS time_bin,
    make_timestamp((start_us + ceil(x * span_us / time_bins))::BIGINT) AS time_start,
    y AS position_bin, y * height AS position_start, (y + 1) * height - 1 AS position_end,
    latency_ms, tokens
FROM cells, shape ORDER BY time_bin, position_bin
""",
    "SELECT * FROM latency_heatmap(\n"
    "    (SELECT min(arrived_at) FROM requests), now()::TIMESTAMP, 60, 40, 0.99)",
    parameters="from_ts, to_ts, time_bins, position_bins, quantile",
)

WHY = View(
    "why",
    "Why a request's first token and its slow gaps (above its own p99) took their time: the first "
    "cause that fits, with its evidence. `unexplained` where the trace does not say.",
    (
        Column("position", "INTEGER", "output position of the token that came late"),
        Column("emitted_at", "TIMESTAMP", "when it came"),
        Column("latency_ms", "DOUBLE", "time it took; position 0: since arrival"),
        Column("usual_ms", "DOUBLE", "the request's median gap"),
        Column(
            "cause",
            "VARCHAR",
            "queued, prefill, preempted, not scheduled, shared a step with a "
            "prefill, host slow, forward pass slow, engine idle, unexplained",
        ),
        Column("evidence", "VARCHAR", "the figures behind it"),
        Column("step_id", "BIGINT", "the step that produced the token"),
        Column("slot", "BIGINT", "the request: several calls of a client may share a trace id"),
    ),
    """
WITH wanted AS (
    SELECT r.engine_id, r.slot, r.arrived_at, r.prompt_tokens, r.cached_tokens,
        epoch_us(f.admitted_at) - epoch_us(r.arrived_at) AS queue_us
    FROM requests AS r LEFT JOIN finishes AS f ON f.engine_id = r.engine_id AND f.slot = r.slot
    WHERE r.request_id = lower(replace(wanted_request_id, '-', ''))
), own AS (
    SELECT t.*, if(lag(t.position) OVER request = t.position - 1, lag(t.step_id) OVER request, NULL)
        AS previous_step
    FROM tokens AS t JOIN wanted USING (engine_id, slot)
    WINDOW request AS (PARTITION BY t.engine_id, t.slot ORDER BY t.position)
), usual AS (
    SELECT engine_id, slot, quantile_cont(latency_us, 0.99) FILTER (NOT is_first) AS p99,
        median(latency_us) FILTER (NOT is_first) AS p50
    FROM own GROUP BY engine_id, slot
), slow AS (
    SELECT own.*, usual.p50 FROM own JOIN usual USING (engine_id, slot)
    WHERE own.is_first OR own.latency_us > usual.p99
), during AS (
    SELECT slow.engine_id, slow.slot, slow.position, count(*) AS steps,
        sum(s.prefill_tokens) AS prefill_tokens,
        sum(s.schedule_us + s.prepare_us + s.sample_us) AS host_us, sum(s.forward_us) AS forward_us,
        max(s.forward_us) AS longest_us, max(s.waiting) AS waiting,
        arg_max(s.decode_tokens, s.forward_us) AS batch
    FROM slow JOIN steps AS s ON s.engine_id = slow.engine_id AND s.step_id <= slow.step_id
        AND s.step_id > coalesce(slow.previous_step, slow.step_id - 1)
    GROUP BY slow.engine_id, slow.slot, slow.position
), typical AS (
    SELECT s.engine_id, s.decode_tokens AS batch, median(s.forward_us) AS forward_us
    FROM steps AS s
    WHERE s.engine_id IN (SELECT engine_id FROM wanted) AND s.prefill_tokens = 0
    GROUP BY s.engine_id, s.decode_tokens
), preempted AS (
    SELECT slow.engine_id, slow.slot, slow.position, count(*) AS times
    FROM slow JOIN events AS e ON e.engine_id = slow.engine_id AND e.slot = slow.slot
    WHERE e.kind = 'preempted' AND e.happened_at <= slow.emitted_at
        AND epoch_us(e.happened_at) >= epoch_us(slow.emitted_at) - slow.latency_us
    GROUP BY slow.engine_id, slow.slot, slow.position
), facts AS (
    SELECT slow.engine_id, slow.slot, slow.position, slow.emitted_at, slow.latency_us, slow.p50,
        slow.step_id, coalesce(preempted.times, 0) AS preemptions,
        during.* EXCLUDE (engine_id, slot, position), wanted.arrived_at, wanted.queue_us,
        wanted.prompt_tokens, wanted.cached_tokens, typical.forward_us AS typical_us,
        CASE
            WHEN preempted.times > 0 THEN 'preempted'
            WHEN slow.is_first AND wanted.queue_us > slow.latency_us / 2 THEN 'queued'
            WHEN slow.is_first THEN 'prefill'
            WHEN during.steps > 1 THEN 'not scheduled'
            WHEN during.prefill_tokens > 0 THEN 'shared a step with a prefill'
            WHEN during.host_us > during.forward_us THEN 'host slow'
            WHEN during.longest_us > 1.5 * typical.forward_us THEN 'forward pass slow'
            WHEN during.host_us + during.forward_us < slow.latency_us / 2 THEN 'engine idle'
            ELSE 'unexplained'
        END AS cause
    FROM slow JOIN wanted USING (engine_id, slot)
    LEFT JOIN during USING (engine_id, slot, position)
    LEFT JOIN preempted USING (engine_id, slot, position)
    LEFT JOIN typical ON typical.engine_id = slow.engine_id AND typical.batch = during.batch
)
SELECT position, emitted_at, latency_us / 1000 AS latency_ms, p50 / 1000 AS usual_ms, cause,
    CASE cause
        WHEN 'preempted' THEN format('preempted {} times', preemptions)
        WHEN 'queued' THEN format('{:.1f} ms in the queue', queue_us / 1000)
        WHEN 'prefill' THEN format('{} prompt tokens, {} of them cached, {:.1f} ms in the queue',
            prompt_tokens, cached_tokens, coalesce(queue_us, 0) / 1000)
        WHEN 'not scheduled' THEN format('left out of {} steps, {} requests waiting', steps - 1,
            waiting)
        WHEN 'shared a step with a prefill' THEN format(
            '{} prompt tokens of others, step {:.1f} ms', prefill_tokens,
            (host_us + forward_us) / 1000)
        WHEN 'host slow' THEN format('schedule, prepare and sample {:.1f} ms, forward {:.1f} ms',
            host_us / 1000, forward_us / 1000)
        WHEN 'forward pass slow' THEN format('{:.1f} ms, usually {:.1f} ms with {} requests',
            longest_us / 1000, typical_us / 1000, batch)
        WHEN 'engine idle' THEN format('the step took {:.1f} ms of {:.1f} ms',
            (host_us + forward_us) / 1000, latency_us / 1000)
        ELSE coalesce(format('step {:.1f} ms, usually {:.1f} ms', (host_us + forward_us) / 1000,
            typical_us / 1000), 'its steps are not in the lake')
    END AS evidence, step_id, slot
FROM facts ORDER BY arrived_at, slot, position
""",
    "SELECT position, latency_ms, cause, evidence\n"
    "FROM why((SELECT request_id FROM request_latency ORDER BY duration_ms DESC LIMIT 1))",
    parameters="wanted_request_id",
)

VIEWS = (REQUEST_LATENCY, TOKEN_GAPS, SLOW_TOKENS, LATENCY_HEATMAP, WHY)


def definitions_digest() -> str:
    """Changes whenever a view or macro does, so that a lake's stored ones are replaced."""
    text = "\n".join(view.ddl for view in VIEWS)
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()
