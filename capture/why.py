"""Why a request was slow: the table macro `why(request_id)`.

The first cause that fits a slow gap, with the figures behind it.
"""

from __future__ import annotations

from capture.schema import Column, View

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
