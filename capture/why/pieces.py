"""What the `why` macro finds out before it judges: the request's own time and who else was there.

Each piece is one named CTE of the query, in the order in which they build on each other. Times in
the pieces are whole microseconds since 1970 (`*_at_us`) or durations (`*_us`). Not for the verdict:
that is `capture.why.causes`.
"""

from __future__ import annotations

from typing import NamedTuple

HISTORY_STEPS = 5_000
"""A step is compared with like ones among this many before and after it."""

PEER_SLOTS = 5_000
"""A request is compared with those among this many that came before and after it."""

SLOW_FACTOR = 1.25
"""A gap within this factor of the request's median is steady, whatever its rank."""

MIN_PREFIX = 8
"""Hex digits of a request id that are enough to ask for it."""


class Piece(NamedTuple):
    """A CTE. `sql` is its body."""

    name: str
    sql: str


def request_key(text: str) -> str:
    """SQL: the hex digits of a request id in any form that clients get to see: X-Request-Id, the
    answer's id (chatcmpl-..., cmpl-...), a UUID, a traceparent; or their beginning."""
    given = f"lower(trim({text}, E' \\t\\r\\n'))"
    return (
        f"coalesce(nullif(regexp_extract({given}, "
        "'^[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}$', 1), ''), "
        f"replace(regexp_replace({given}, '^(chatcmpl|cmpl)-', ''), '-', ''))"
    )


def effective(alias: str) -> str:
    """SQL: the priority that counted, after the policy's adjustment."""
    return f"greatest(0, least(100, {alias}.priority + {alias}.adjustment))"


def wanted(condition: str) -> Piece:
    """The requests asked for. `condition` is on `requests AS r`."""
    return Piece(
        "wanted",
        f"""
    SELECT r.engine_id, r.slot, r.request_id, r.tenant, r.class_key, r.prompt_tokens,
        r.cached_tokens, epoch_us(r.arrived_at) AS arrived_at_us, {effective("r")} AS effective,
        r.adjustment, epoch_us(f.last_token_at) AS last_token_at_us, f.flushed_at,
        epoch_us(f.detokenized_at) AS detokenized_at_us,
        epoch_us(f.serialized_at) AS serialized_at_us, epoch_us(f.flushed_at) AS flushed_at_us,
        r.engine_id IN (SELECT engine_id FROM engines WHERE info->>'kind' = 'proxy') AS is_proxied
    FROM requests AS r LEFT JOIN finishes AS f ON f.engine_id = r.engine_id AND f.slot = r.slot
    WHERE {condition}""",
    )


OWN_TOKENS = Piece(
    "own_tokens",  # `previous_step` is NULL where the token before is not in the lake
    """
    SELECT t.engine_id, t.slot, t.step_id, t.position, t.is_first, t.emitted_at, t.latency_us,
        epoch_us(t.emitted_at) AS emitted_at_us,
        if(lag(t.position) OVER request = t.position - 1, lag(t.step_id) OVER request, NULL)
            AS previous_step
    FROM tokens AS t JOIN wanted AS w ON w.engine_id = t.engine_id AND w.slot = t.slot
    WINDOW request AS (PARTITION BY t.engine_id, t.slot ORDER BY t.position)""",
)

OWN_PREFILL = Piece(
    "own_prefill",  # its prompt's chunks; the last one led to the first token
    """
    SELECT engine_id, slot, step_id, greatest(0, chunk.position - coalesce(
            lag(chunk.position) OVER (PARTITION BY engine_id, slot ORDER BY step_id),
            w.cached_tokens - 1)) AS own_prompt_tokens
    FROM (
        SELECT c.engine_id, c.slot, c.step_id, c.position
        FROM prefill_chunks AS c JOIN wanted AS w ON w.engine_id = c.engine_id AND w.slot = c.slot
        UNION ALL
        SELECT t.engine_id, t.slot, t.step_id, w.prompt_tokens - 1
        FROM own_tokens AS t JOIN wanted AS w USING (engine_id, slot) WHERE t.is_first
    ) AS chunk JOIN wanted AS w USING (engine_id, slot)""",
)

SPAN = Piece(
    "span",
    """
    SELECT engine_id, slot, min(step_id) AS first_step, max(step_id) AS last_step
    FROM (
        SELECT engine_id, slot, step_id FROM own_tokens
        UNION ALL SELECT engine_id, slot, step_id FROM own_prefill
    ) GROUP BY engine_id, slot""",
)

NEAR = Piece(
    "near",  # the engine's steps around the request's own; listed one by one, so that the
    # scan of `steps` reads their part of the files and no more
    f"""
    SELECT s.engine_id, s.step_id, epoch_us(s.started_at) AS started_at_us,
        (s.schedule_us + s.prepare_us + s.forward_us + s.sample_us)::BIGINT AS spent_us,
        started_at_us + spent_us AS ended_at_us,
        coalesce(s.device_us, s.forward_us)::DOUBLE AS work_us,
        s.device_us IS NOT NULL AS on_device, s.schedule_us, s.prepare_us, s.sample_us,
        s.prefill_tokens, s.decode_tokens, s.running, s.waiting, s.kv_used, s.kv_total,
        s.graph_bucket
    FROM (
        SELECT DISTINCT engine_id, unnest(range(greatest(0, first_step - {HISTORY_STEPS}),
            last_step + {HISTORY_STEPS} + 1)) AS step_id
        FROM span
    ) AS k JOIN steps AS s ON s.engine_id = k.engine_id AND s.step_id = k.step_id""",
)

NEIGHBOURS = Piece(
    "neighbours",  # requests that came shortly before and after each one, listed likewise
    f"""
    SELECT k.own_slot, r.engine_id, r.slot, r.request_id, r.tenant, r.class_key, r.prompt_tokens,
        r.cached_tokens, r.priority, r.adjustment, {effective("r")} AS effective,
        epoch_us(r.arrived_at) AS arrived_at_us, coalesce(f.output_tokens, 0) AS output_tokens,
        f.slot IS NOT NULL AS has_ended, epoch_us(f.admitted_at) AS admitted_at_us,
        epoch_us(f.finished_at) AS finished_at_us,
        epoch_us(f.first_token_at) - epoch_us(r.arrived_at) AS ttft_us,
        epoch_us(f.flushed_at) - epoch_us(f.last_token_at) AS sending_us
    FROM (
        SELECT engine_id, slot AS own_slot, unnest(range(greatest(0, slot - {PEER_SLOTS}),
            slot + {PEER_SLOTS} + 1)) AS slot
        FROM wanted
    ) AS k JOIN requests AS r ON r.engine_id = k.engine_id AND r.slot = k.slot
    LEFT JOIN finishes AS f ON f.engine_id = k.engine_id AND f.slot = k.slot
    WHERE k.slot <> k.own_slot""",
)

PACE = Piece(
    "pace",  # what is usual for the request itself
    """
    SELECT t.engine_id, t.slot, median(t.latency_us) AS usual_us,
        quantile_disc(t.latency_us, 0.99) AS slow_us,
        median(s.work_us) FILTER (s.prefill_tokens = 0) AS work_us,
        median(t.latency_us - s.spent_us) FILTER (t.previous_step = t.step_id - 1) AS between_us
    FROM own_tokens AS t
    LEFT JOIN near AS s ON s.engine_id = t.engine_id AND s.step_id = t.step_id
    WHERE NOT t.is_first GROUP BY t.engine_id, t.slot""",
)

ENGINE_PACE = Piece(
    "engine_pace",  # what is usual for the host's part of a step, whatever its shape
    """
    SELECT engine_id, median(schedule_us) AS schedule_us, median(prepare_us) AS prepare_us,
        median(sample_us) AS sample_us
    FROM near GROUP BY engine_id""",
)

SLOW = Piece(
    "slow",  # what is to be explained: the first token, and the gaps in the slowest 1 %
    f"""
    SELECT t.engine_id, t.slot, t.step_id, t.position, t.is_first, t.emitted_at, t.emitted_at_us,
        t.latency_us, t.emitted_at_us - t.latency_us AS began_at_us,
        if(t.is_first, NULL, pace.usual_us) AS usual_us, pace.work_us AS own_work_us,
        coalesce(pace.between_us, 0) AS own_between_us, span.first_step,
        coalesce(t.previous_step, if(t.is_first, span.first_step, t.step_id) - 1) AS after_step
    FROM own_tokens AS t JOIN span USING (engine_id, slot) LEFT JOIN pace USING (engine_id, slot)
    WHERE t.is_first OR (t.latency_us >= pace.slow_us AND t.latency_us > 0
        AND t.latency_us >= {SLOW_FACTOR} * pace.usual_us)""",
)

PREEMPTIONS = Piece(
    "preemptions",
    """
    SELECT slow.engine_id, slow.slot, slow.position,
        count(*) FILTER (e.kind = 'preempted') AS times,
        min(epoch_us(e.happened_at)) FILTER (e.kind = 'preempted') AS preempted_at_us,
        max(epoch_us(e.happened_at)) FILTER (e.kind = 'resumed') AS resumed_at_us,
        string_agg(DISTINCT e.detail, ', ') FILTER (e.kind = 'preempted') AS reasons
    FROM slow JOIN events AS e ON e.engine_id = slow.engine_id AND e.slot = slow.slot
    WHERE e.kind IN ('preempted', 'resumed') AND epoch_us(e.happened_at) <= slow.emitted_at_us
        AND epoch_us(e.happened_at) >= slow.began_at_us
    GROUP BY slow.engine_id, slow.slot, slow.position HAVING times > 0""",
)

PASSED = Piece(
    "passed",  # every step between the token before and the slow one
    """
    SELECT slow.slot, slow.position, slow.is_first, slow.own_work_us, slow.usual_us, s.*,
        p.step_id IS NOT NULL OR s.step_id = slow.step_id AS is_own,
        coalesce(p.own_prompt_tokens, 0) AS own_prompt_tokens,
        coalesce(s.ended_at_us > pre.preempted_at_us, false) AS is_after_preemption
    FROM slow JOIN near AS s ON s.engine_id = slow.engine_id
        AND s.step_id > slow.after_step AND s.step_id <= slow.step_id
    LEFT JOIN own_prefill AS p
        ON p.engine_id = slow.engine_id AND p.slot = slow.slot AND p.step_id = s.step_id
    LEFT JOIN preemptions AS pre ON pre.engine_id = slow.engine_id AND pre.slot = slow.slot
        AND pre.position = slow.position""",
)

FIRST_USES = Piece(
    "first_uses",  # the step that had to make each graph
    """
    SELECT engine_id, min(step_id) AS step_id FROM steps
    WHERE graph_bucket IS NOT NULL AND engine_id IN (SELECT engine_id FROM wanted)
    GROUP BY engine_id, graph_bucket""",
)

_SAME_PREFILL = """h.prefill_tokens BETWEEN ceil(s.prefill_tokens * 0.8)
            AND floor(s.prefill_tokens * 1.25)"""

ALIKE = Piece(
    "alike",  # steps of the same shape: prompt and decode tokens within a fifth, the same graph
    f"""
    SELECT s.engine_id, s.step_id, count(*) FILTER ({_SAME_PREFILL}) AS steps,
        median(h.work_us) FILTER ({_SAME_PREFILL}) AS work_us,
        quantile_cont(h.work_us, 0.9) FILTER ({_SAME_PREFILL}) AS work_p90_us,
        median(h.schedule_us) FILTER ({_SAME_PREFILL}) AS schedule_us,
        median(h.prepare_us) FILTER ({_SAME_PREFILL}) AS prepare_us,
        median(h.sample_us) FILTER ({_SAME_PREFILL}) AS sample_us,
        count(*) FILTER (h.prefill_tokens = 0) AS plain_steps,
        median(h.work_us) FILTER (h.prefill_tokens = 0) AS plain_work_us
    FROM (SELECT DISTINCT engine_id, step_id, prefill_tokens, decode_tokens, graph_bucket
        FROM passed WHERE is_own) AS s
    JOIN near AS h ON h.engine_id = s.engine_id AND h.step_id <> s.step_id
        AND h.step_id BETWEEN s.step_id - {HISTORY_STEPS} AND s.step_id + {HISTORY_STEPS}
        AND h.decode_tokens BETWEEN ceil(s.decode_tokens * 0.8) AND floor(s.decode_tokens * 1.25)
        AND h.graph_bucket IS NOT DISTINCT FROM s.graph_bucket
    GROUP BY s.engine_id, s.step_id""",
)

PAUSES = Piece(
    "pauses",  # a pause is written down by the engine's next step: `late_us` after its end
    r"""
    SELECT slow.engine_id, slow.slot, slow.position, count(*) AS pauses,
        max(pause.spent_us) AS longest_us, max(pause.generation) AS generation,
        sum(least(slow.emitted_at_us, pause.ended_at_us)
            - greatest(slow.began_at_us, pause.ended_at_us - pause.spent_us)) AS overlap_us
    FROM slow JOIN (
        SELECT engine_id, duration_us AS spent_us,
            regexp_extract(detail, 'generation=(\d+)', 1) AS generation,
            epoch_us(happened_at) - coalesce(try_cast(regexp_extract(detail, 'late_us=(\d+)', 1)
                AS BIGINT), 0) AS ended_at_us
        FROM events WHERE kind = 'gc_pause' AND engine_id IN (SELECT engine_id FROM wanted)
    ) AS pause ON pause.engine_id = slow.engine_id AND pause.ended_at_us > slow.began_at_us
        AND pause.ended_at_us - pause.spent_us < slow.emitted_at_us
    GROUP BY slow.engine_id, slow.slot, slow.position""",
)

QUEUE = Piece(
    "queue",  # from arrival to the first step, and what the engine did meanwhile (should more
    # steps have passed than `near` goes back, it was busy before them, too)
    f"""
    SELECT w.engine_id, w.slot, any_value(first.started_at_us) - w.arrived_at_us AS queue_us,
        if(count(s.step_id) = 0, 0, max(least(s.ended_at_us, first.started_at_us))
            - if(min(s.step_id) = any_value(span.first_step) - {HISTORY_STEPS}, w.arrived_at_us,
                min(greatest(s.started_at_us, w.arrived_at_us)))) AS busy_us,
        max(s.running) AS running, max(s.waiting) AS waiting,
        max(s.kv_used / nullif(s.kv_total, 0)) AS kv_share
    FROM wanted AS w JOIN span USING (engine_id, slot)
    JOIN near AS first ON first.engine_id = w.engine_id AND first.step_id = span.first_step
    LEFT JOIN near AS s ON s.engine_id = w.engine_id AND s.step_id < span.first_step
        AND s.step_id >= span.first_step - {HISTORY_STEPS} AND s.ended_at_us > w.arrived_at_us
    GROUP BY w.engine_id, w.slot, w.arrived_at_us""",
)

SEATED = Piece(
    "seated",  # the first step of neighbours that have not ended, whose admission no row tells yet
    """
    SELECT n.engine_id, n.slot, min(t.step_id) AS first_step
    FROM (SELECT DISTINCT engine_id, slot FROM neighbours WHERE NOT has_ended) AS n
    JOIN (
        SELECT engine_id, slot, step_id FROM tokens WHERE is_first
        UNION ALL SELECT engine_id, slot, step_id FROM prefill_chunks
    ) AS t ON t.engine_id = n.engine_id AND t.slot = n.slot
    GROUP BY n.engine_id, n.slot""",
)

AGED = Piece(
    "aged",  # who was admitted for its age though others had a higher priority
    """
    SELECT engine_id, slot, max(epoch_us(happened_at)) AS aged_at_us FROM events
    WHERE kind = 'aged' AND engine_id IN (SELECT engine_id FROM wanted)
    GROUP BY engine_id, slot""",
)

SENT_LATE = Piece(
    "sent_late",  # the chunk of each answer that took longest from the model to the socket
    r"""
    SELECT engine_id, slot, epoch_us(happened_at) AS noted_at_us, duration_us AS late_us,
        try_cast(regexp_extract(detail, 'position=(\d+)', 1) AS INTEGER) AS position,
        regexp_extract(detail, 'chunks=(\d+)', 1) AS chunks
    FROM events
    WHERE kind = 'sent_late' AND (engine_id, slot) IN (SELECT (engine_id, slot) FROM wanted)""",
)

PEERS = Piece(
    "peers",  # other requests of its class and tenant: their TTFT, cache hits, sending
    """
    SELECT engine_id, slot, median(ttft_us) FILTER (is_class) AS ttft_us,
        count(*) FILTER (is_class AND is_earlier) AS class_requests,
        median(hits) FILTER (is_class AND is_earlier) AS class_hits,
        count(*) FILTER (is_tenant AND is_earlier) AS tenant_requests,
        median(hits) FILTER (is_tenant AND is_earlier) AS tenant_hits,
        count(sending_us) AS sent, median(sending_us) AS sending_us
    FROM (
        SELECT w.engine_id, w.slot, n.class_key = w.class_key AS is_class,
            n.tenant = w.tenant AS is_tenant, n.slot < w.slot AS is_earlier, n.ttft_us,
            n.sending_us, least(n.cached_tokens,
                n.cached_tokens / nullif(n.prompt_tokens, 0) * w.prompt_tokens) AS hits
        FROM wanted AS w
        JOIN neighbours AS n ON n.engine_id = w.engine_id AND n.own_slot = w.slot
    ) GROUP BY engine_id, slot""",
)

PIECES = (
    OWN_TOKENS,
    OWN_PREFILL,
    SPAN,
    NEAR,
    NEIGHBOURS,
    PACE,
    ENGINE_PACE,
    SLOW,
    PREEMPTIONS,
    PASSED,
    FIRST_USES,
    ALIKE,
    PAUSES,
    QUEUE,
    SEATED,
    AGED,
    SENT_LATE,
    PEERS,
)
