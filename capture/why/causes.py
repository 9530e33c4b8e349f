"""What each cause took of a slow gap or first token, as the `why` macro judges it.

Every cause gets the part of the time that it explains, in microseconds, and no part is given twice.
Not for finding the steps (`capture.why.pieces`) or for the verdict (`capture.why.evidence`).
"""

from __future__ import annotations

from capture.why.pieces import Piece

SHARE = 0.25
"""A cause must explain this share of the lost time to be named, as verdict or beside it."""

ENOUGH = 5
"""Like steps or requests that make a history."""


def excess(part: str) -> str:
    """SQL: how much longer the host's `part` of a step took than usual, if that is notable."""
    usual = f"if(a.steps >= {ENOUGH}, a.{part}, e.{part})"
    return f"if(s.{part} > 1.5 * {usual} + 200, s.{part} - {usual}, 0)"


JUDGED = Piece(
    "judged",  # its own steps against their history
    f"""
    SELECT s.*, f.step_id IS NOT NULL AS is_first_use, coalesce(a.steps, 0) AS like_steps,
        a.work_us AS like_us, a.work_p90_us AS like_p90_us,
        if(a.plain_steps >= {ENOUGH}, a.plain_work_us, coalesce(s.own_work_us, s.usual_us, 0))
            AS plain_us,
        CASE WHEN a.steps >= {ENOUGH}
            THEN if(s.work_us > greatest(a.work_p90_us, 1.25 * a.work_us), s.work_us - a.work_us, 0)
            WHEN s.prefill_tokens = 0 AND s.work_us > 1.5 * s.own_work_us
            THEN s.work_us - s.own_work_us ELSE 0 END AS device_us,
        {excess("schedule_us")} AS late_schedule_us, {excess("prepare_us")} AS late_prepare_us,
        {excess("sample_us")} AS late_sample_us,
        if(a.steps >= {ENOUGH}, a.schedule_us, e.schedule_us) AS usual_schedule_us,
        if(a.steps >= {ENOUGH}, a.prepare_us, e.prepare_us) AS usual_prepare_us,
        if(a.steps >= {ENOUGH}, a.sample_us, e.sample_us) AS usual_sample_us
    FROM passed AS s LEFT JOIN alike AS a ON a.engine_id = s.engine_id AND a.step_id = s.step_id
    LEFT JOIN engine_pace AS e ON e.engine_id = s.engine_id
    LEFT JOIN first_uses AS f ON f.engine_id = s.engine_id AND f.step_id = s.step_id
    WHERE s.is_own""",
)

WORKED = Piece(
    "worked",  # a device that was slow makes sampling wait for it: that is not the host's fault
    """
    SELECT *, CASE WHEN is_after_preemption OR is_first_use OR others_tokens <= 0 THEN 0
        WHEN is_first THEN steady_us * others_tokens / (prefill_tokens + decode_tokens)
        ELSE greatest(0, steady_us - plain_us) END AS shared_us
    FROM (
        SELECT * EXCLUDE (device_us, late_schedule_us, late_prepare_us, late_sample_us),
            if(is_first_use, greatest(0, spent_us - coalesce(like_us, plain_us)), 0)
                AS first_use_us,
            if(is_first_use, 0, device_us) AS device_us,
            if(is_first_use, 0, late_schedule_us) AS late_schedule_us,
            if(is_first_use, 0, late_prepare_us) AS late_prepare_us,
            if(is_first_use, 0, greatest(0, late_sample_us - if(on_device, device_us, 0)))
                AS late_sample_us,
            work_us - device_us AS steady_us, prefill_tokens - own_prompt_tokens AS others_tokens
        FROM judged
    )""",
)

SUMS = Piece(
    "sums",  # per slow token: what its own steps took, by cause
    """
    SELECT engine_id, slot, position, sum(device_us) AS device_us,
        sum(first_use_us) AS first_use_us, max(graph_bucket) FILTER (is_first_use) AS new_bucket,
        sum(late_schedule_us) AS late_schedule_us, sum(late_prepare_us) AS late_prepare_us,
        sum(late_sample_us) AS late_sample_us, sum(shared_us) AS shared_us,
        sum(if(is_after_preemption, 0, others_tokens)) AS others_tokens,
        sum(if(is_after_preemption, 0, greatest(0, spent_us - shared_us - device_us - first_use_us
            - late_schedule_us - late_prepare_us - late_sample_us))) AS own_us,
        sum(own_prompt_tokens) AS own_prompt_tokens, sum(prefill_tokens) AS prefill_tokens,
        count(*) AS own_steps, sum(spent_us) FILTER (is_after_preemption) AS recompute_us,
        arg_max(struct_pack(work_us, on_device, like_us, like_p90_us, like_steps, prefill_tokens,
            decode_tokens, own_work_us), device_us + work_us / 1e6) AS worst,
        arg_max(struct_pack(usual_schedule_us, usual_prepare_us, usual_sample_us),
            late_schedule_us + late_prepare_us + late_sample_us) AS host_usual,
        arg_max(step_id, if(others_tokens > 0, work_us, -1)) AS shared_step
    FROM worked GROUP BY engine_id, slot, position""",
)

WINDOWS = Piece(
    "windows",  # per slow token: all its steps together, and those it had no part in
    """
    SELECT engine_id, slot, position, count(*) AS steps, sum(spent_us) AS spent_us,
        count(*) FILTER (NOT is_own AND NOT is_after_preemption) AS left_out,
        coalesce(sum(spent_us) FILTER (NOT is_own AND NOT is_after_preemption), 0) AS left_out_us,
        max(waiting) AS waiting, max(running) AS running, max(kv_used) AS kv_used,
        max(kv_total) AS kv_total
    FROM passed GROUP BY engine_id, slot, position""",
)

MEASURED = Piece(
    "measured",  # everything about a slow token in one row; nothing is taken twice yet
    """
    SELECT slow.engine_id, slow.slot, slow.position, slow.is_first, slow.emitted_at, slow.step_id,
        slow.latency_us, slow.usual_us, slow.emitted_at_us,
        slow.latency_us - coalesce(slow.usual_us, 0) AS lost_us, w.* EXCLUDE (engine_id, slot),
        s.* EXCLUDE (engine_id, slot, position), coalesce(v.steps, 0) AS steps,
        coalesce(v.steps, 0) < slow.step_id - slow.after_step AS is_incomplete,
        coalesce(v.left_out, 0) AS left_out, v.left_out_us, v.spent_us,
        v.waiting, v.running, v.kv_used, v.kv_total, slow.own_between_us,
        if(slow.is_first, q.queue_us, 0) AS queue_us, if(slow.is_first, q.busy_us, 0) AS busy_us,
        q.running AS queue_running, q.waiting AS queue_waiting, q.kv_share AS queue_kv_share,
        slow.latency_us - v.spent_us - if(slow.is_first, q.queue_us, 0) AS between_us,
        coalesce(pre.times, 0) AS preemptions, pre.reasons, pre.preempted_at_us,
        pre.resumed_at_us, coalesce(g.overlap_us, 0) AS overlap_us, g.pauses, g.longest_us,
        g.generation, p.* EXCLUDE (engine_id, slot)
    FROM slow JOIN wanted AS w USING (engine_id, slot)
    LEFT JOIN sums AS s USING (engine_id, slot, position)
    LEFT JOIN windows AS v USING (engine_id, slot, position)
    LEFT JOIN queue AS q USING (engine_id, slot)
    LEFT JOIN preemptions AS pre USING (engine_id, slot, position)
    LEFT JOIN pauses AS g USING (engine_id, slot, position)
    LEFT JOIN peers AS p USING (engine_id, slot)""",
)

EXPLAINED = Piece(
    "explained",  # pauses take from what they made long: time between steps, host, device
    f"""
    SELECT *, greatest(0, between_raw_us - gc_us) AS idle_us,
        greatest(0, host_raw_us - greatest(0, gc_us - between_raw_us)) AS host_us,
        greatest(0, device_us - greatest(0, gc_us - between_raw_us - host_raw_us)) AS slow_us
    FROM (
        SELECT *, least(overlap_us, between_raw_us + host_raw_us + device_us) AS gc_us
        FROM (
            SELECT *, late_schedule_us + late_prepare_us + late_sample_us AS host_raw_us,
                greatest(0, queue_us - busy_us) + CASE
                    WHEN is_incomplete OR preemptions > 0 THEN 0
                    WHEN between_us > 1.5 * own_between_us * steps + 200
                    THEN between_us - own_between_us * steps ELSE 0 END AS between_raw_us,
                CASE WHEN class_requests >= {ENOUGH} THEN class_hits
                    WHEN tenant_requests >= {ENOUGH} THEN tenant_hits END AS usual_hits
            FROM measured
        )
    )""",
)

CLAIMS = Piece(
    "claims",  # what each cause explains
    """
    SELECT *, if(preemptions > 0, greatest(0, if(is_first, emitted_at_us - preempted_at_us, lost_us)
            - gc_us - host_us - slow_us), 0) AS preempted_us,
        if(is_first AND cached_tokens < 0.5 * usual_hits,
            own_us * least(1, (usual_hits - cached_tokens) / greatest(1, own_prompt_tokens)), 0)
            AS miss_us,
        own_us - miss_us AS prefill_us
    FROM explained""",
)

COSTS = (JUDGED, WORKED, SUMS, WINDOWS, MEASURED, EXPLAINED, CLAIMS)
