"""Who was involved in a slow gap, the words for each cause, and the verdict of the `why` macro.

The cause that explains most is the verdict if it explains a quarter of the time lost; others that
do are named beside it. What each took is worked out in `capture.why.causes`.
"""

from __future__ import annotations

from typing import NamedTuple

from capture.why.causes import ENOUGH, SHARE
from capture.why.pieces import Piece, effective

SHOWN = 3
"""Requests named in the evidence."""

SENDING_MIN_US = 10_000
SENDING_FACTOR = 3
"""Sending is slow from this time on, if it took so many times what it usually takes."""


def ms(value: str) -> str:
    """SQL: microseconds as text in ms."""
    return f"format('{{:,.1f}} ms', ({value}) / 1000)"


def named(alias: str, tokens: str, more: str = "''") -> str:
    """SQL: a request in a few words; its priority where that is another, and what the policy did
    to it."""
    adjusted = _either(
        f"{alias}.adjustment <> 0", " ({:+d} by the feedback policy)", f"{alias}.adjustment"
    )
    priority = _either(
        f"{alias}.effective <> {alias}.own_effective OR {alias}.adjustment <> 0",
        ", priority {}{}",
        f"{alias}.effective",
        adjusted,
    )
    return (
        f"format('{{}} (tenant {{}}, {{}}, {{}}{{}}{{}})', {alias}.request_id[:8], "
        f"{alias}.tenant, {alias}.class_key, {tokens}, {priority}, {more})"
    )


def _either(condition: str, text: str, *figures: str) -> str:
    """SQL: a format that is there only under a condition."""
    return f"if({condition}, format('{text}', {', '.join(figures)}), '')"


_PROMPTED = named("o", "format('prompt of {}', o.prompt_tokens)")
_ANSWERED = named(
    "o",
    "if(o.has_ended, format('{} + {} tokens', o.prompt_tokens, o.output_tokens), "
    "format('prompt of {}, has not ended', o.prompt_tokens))",
    "if(o.by_age, ', went first for its age', '')",
)

KEY_STEPS = Piece(
    "key_steps",  # per slow token: the step it shared with prompts, and the one that preempted it
    """
    SELECT c.engine_id, c.slot, c.position, c.effective AS own_effective, c.shared_step,
        if(c.preemptions > 0, (SELECT max(s.step_id) FROM near AS s
            WHERE s.engine_id = c.engine_id AND s.started_at_us <= c.preempted_at_us), NULL)
            AS preempting_step
    FROM claims AS c""",
)

_FEW = "LIMIT 10000"
"""Never reached: it tells the optimiser that there are few, so that it reads only their part of
the token files."""

PROMPTS = Piece(
    "prompts",  # who had a chunk of his prompt computed in these steps
    f"""
    SELECT c.engine_id, c.step_id, c.slot
    FROM (FROM key_steps UNPIVOT (step_id FOR role IN (shared_step, preempting_step)) {_FEW}) AS k
    JOIN prefill_chunks AS c ON c.engine_id = k.engine_id AND c.step_id = k.step_id
    UNION
    SELECT t.engine_id, t.step_id, t.slot
    FROM (FROM key_steps UNPIVOT (step_id FOR role IN (shared_step, preempting_step)) {_FEW}) AS k
    JOIN tokens AS t ON t.engine_id = k.engine_id AND t.step_id = k.step_id
    WHERE t.is_first""",
)

INVOLVED = Piece(
    "involved",  # whose prompts were computed in the steps that matter
    f"""
    SELECT engine_id, own_slot AS slot, position,
        count(*) FILTER (step_id = shared_step) AS prompts,
        string_agg({_PROMPTED}, ', '
            ORDER BY rank) FILTER (step_id = shared_step AND rank <= {SHOWN}) AS who,
        string_agg({_PROMPTED}, ', '
            ORDER BY rank) FILTER (step_id = preempting_step AND effective > own_effective)
            AS preemptors
    FROM (
        SELECT k.* EXCLUDE (slot), k.slot AS own_slot, p.step_id, r.request_id, r.tenant,
            r.class_key, r.prompt_tokens, r.adjustment, {effective("r")} AS effective,
            row_number() OVER (PARTITION BY k.engine_id, k.slot, k.position, p.step_id
                ORDER BY r.prompt_tokens DESC, r.slot) AS rank
        FROM key_steps AS k JOIN prompts AS p ON p.engine_id = k.engine_id AND p.slot <> k.slot
            AND (p.step_id = k.shared_step OR p.step_id = k.preempting_step)
        JOIN requests AS r ON r.engine_id = p.engine_id AND r.slot = p.slot
    ) AS o GROUP BY engine_id, own_slot, position""",
)

AHEAD = Piece(
    "ahead",  # who ran while it waited; who went first though it came later or for its age;
    # `lifted` are those that outrank it by the feedback policy alone
    f"""
    SELECT engine_id, own_slot AS slot, count(*) AS requests,
        count(*) FILTER (arrived_at_us > own_arrived_at_us) AS overtakers,
        count(*) FILTER (arrived_at_us > own_arrived_at_us AND effective > own_effective)
            AS outranking,
        count(*) FILTER (effective > own_effective AND priority <= own_effective) AS lifted,
        count(*) FILTER (by_age) AS by_age, count(*) FILTER (effective <> own_effective) AS unlike,
        string_agg({_ANSWERED}, ', '
            ORDER BY overlap_us DESC, slot) FILTER (rank <= {SHOWN}) AS who
    FROM (
        SELECT *, row_number() OVER (PARTITION BY engine_id, own_slot
            ORDER BY overlap_us DESC, slot) AS rank
        FROM (
            SELECT n.*, w.arrived_at_us AS own_arrived_at_us, w.effective AS own_effective,
                n.effective < w.effective AND coalesce(g.aged_at_us BETWEEN w.arrived_at_us
                    AND w.arrived_at_us + q.queue_us, false) AS by_age,
                least(coalesce(n.finished_at_us, w.arrived_at_us + q.queue_us),
                        w.arrived_at_us + q.queue_us)
                    - greatest(coalesce(n.admitted_at_us, first.started_at_us, n.arrived_at_us),
                        w.arrived_at_us) AS overlap_us
            FROM wanted AS w JOIN queue AS q USING (engine_id, slot)
            JOIN neighbours AS n ON n.engine_id = w.engine_id AND n.own_slot = w.slot
            JOIN span AS own ON own.engine_id = w.engine_id AND own.slot = w.slot
            LEFT JOIN seated AS seat ON seat.engine_id = n.engine_id AND seat.slot = n.slot
            LEFT JOIN near AS first
                ON first.engine_id = n.engine_id AND first.step_id = seat.first_step
            LEFT JOIN aged AS g ON g.engine_id = n.engine_id AND g.slot = n.slot
            WHERE n.arrived_at_us < w.arrived_at_us + q.queue_us
                AND (n.admitted_at_us IS NOT NULL OR seat.first_step < own.first_step)
        ) WHERE overlap_us > 0
    ) AS o GROUP BY engine_id, own_slot""",
)


class Claim(NamedTuple):
    """A cause: the time that it explains of `claims AS c`, and its evidence as a format of
    `figures`, all SQL."""

    cause: str
    took_us: str
    text: str
    figures: tuple[str, ...]

    @property
    def sql(self) -> str:
        figures = ", ".join(self.figures)
        return (
            f"{{us: ({self.took_us})::DOUBLE, cause: '{self.cause}', "
            f"evidence: format('{self.text}', {figures})}}"
        )


def _late(part: str, verb: str) -> str:
    return _either(
        f"c.late_{part}_us > 0",
        f"{verb} took {{}} more than its usual {{}}; ",
        ms(f"c.late_{part}_us"),
        ms(f"c.host_usual.usual_{part}_us"),
    )


def _count(number: str, noun: str) -> str:
    return f"format('{{}} {noun}{{}}', {number}, if({number} = 1, '', 's'))"


_AGAIN = "c.preemptions > 0 AND NOT c.is_first"  # what follows is the preemption's doing

CLAIMED = (
    Claim(
        "queued",
        "c.busy_us",
        "{} in the queue behind {} running{}{}{}{}; {} waiting, KV cache {:.0f} % full{}{}{}",
        (
            ms("c.busy_us"),
            "coalesce(a.requests, 0)",
            "coalesce(': ' || a.who, '')",
            _either(
                "a.overtakers > 0",
                ", {} of them came later, {} with a higher priority",
                "a.overtakers",
                "a.outranking",
            ),
            _either("a.lifted > 0", ", {} only by the feedback policy", "a.lifted"),
            _either(
                "a.by_age > 0",
                ", {} with a lower priority went first for {} age",
                "a.by_age",
                "if(a.by_age = 1, 'its', 'their')",
            ),
            "coalesce(c.queue_waiting, 0)",
            "100 * coalesce(c.queue_kv_share, 0)",
            _either(
                "c.adjustment <> 0 OR a.overtakers > 0 OR a.unlike > 0 OR g.slot IS NOT NULL",
                "; its priority was {}",
                "c.effective",
            ),
            _either("c.adjustment <> 0", ", {:+d} of it by the feedback policy", "c.adjustment"),
            "if(g.slot IS NOT NULL, '; at last it went first for its own age', '')",
        ),
    ),
    Claim(
        "preempted",
        "c.preempted_us",
        "preempted {} ({}){}; {} until it was back, {} in {} to recompute; "
        "KV cache {} of {} blocks",
        (
            _count("c.preemptions", "time"),
            "c.reasons",
            "coalesce(' by ' || i.preemptors, '')",
            f"coalesce({ms('c.resumed_at_us - c.preempted_at_us')}, 'unknown')",
            ms("coalesce(c.recompute_us, 0)"),
            _count("coalesce(c.own_steps, 0)", "step"),
            "coalesce(c.kv_used, 0)",
            "coalesce(c.kv_total, 0)",
        ),
    ),
    Claim(
        "not scheduled",
        f"if({_AGAIN}, 0, c.left_out_us)",
        "left out of {} of {}; {} ran, {} waited",
        (_count("c.left_out", "step"), ms("c.left_out_us"), "c.running", "c.waiting"),
    ),
    Claim(
        "shared a step with a prefill",
        f"if({_AGAIN}, 0, c.shared_us)",
        "{} prompt tokens of {}{} cost {}",
        (
            "c.others_tokens",
            "coalesce(i.who, 'others')",
            _either(f"i.prompts > {SHOWN}", " and {} more", f"i.prompts - {SHOWN}"),
            ms("c.shared_us"),
        ),
    ),
    Claim(
        "first use of a graph bucket",
        "c.first_use_us",
        "the engine''s first step with the graph of {} requests took {} more than later ones",
        ("c.new_bucket", ms("c.first_use_us")),
    ),
    Claim(
        "device slow",
        "c.slow_us",
        "{} time {}, {} ({} prompt and {} decode tokens)",
        (
            "if(c.worst.on_device, 'device', 'forward')",
            ms("c.worst.work_us"),
            f"if(c.worst.like_steps >= {ENOUGH}, format('usually {{}} and in 9 of 10 cases under "
            f"{{}} in {{:,}} like steps', {ms('c.worst.like_us')}, {ms('c.worst.like_p90_us')}, "
            f"c.worst.like_steps), format('usually {{}} in its own steps', "
            f"{ms('c.worst.own_work_us')}))",
            "c.worst.prefill_tokens",
            "c.worst.decode_tokens",
        ),
    ),
    Claim(
        "host slow",
        "c.host_us",
        "{}{}{}it waited {} for the host",
        (
            _late("schedule", "scheduling"),
            _late("prepare", "preparing"),
            _late("sample", "sampling"),
            ms("c.host_us"),
        ),
    ),
    Claim(
        "garbage collection pause",
        "c.gc_us",
        "{}, the longest {} (generation {})",
        (_count("c.pauses", "pause"), ms("c.longest_us"), "c.generation"),
    ),
    Claim(
        "prefix miss",
        "c.miss_us",
        "{} of {} prompt tokens cached, usually {:.0f} of {}; computing the rest cost {}",
        (
            "c.cached_tokens",
            "c.prompt_tokens",
            "c.usual_hits",
            f"if(c.class_requests >= {ENOUGH}, c.class_key, 'tenant ' || c.tenant)",
            ms("c.miss_us"),
        ),
    ),
    Claim(
        "prefill",
        "if(c.is_first, c.prefill_us, 0)",
        "{} prompt tokens, {} of them cached, in {}, {} in the queue",
        (
            "c.prompt_tokens",
            "c.cached_tokens",
            _count("c.own_steps", "step"),
            ms("c.queue_us"),
        ),
    ),
    Claim(
        "engine idle",
        "c.idle_us",
        "no step ran for {}, usually {} between steps{}",
        (
            ms("c.idle_us"),
            ms("c.own_between_us"),
            "if(c.queue_us - c.busy_us < 0.5 * c.idle_us, '', "
            "': between its arrival and its admission (reading, tokenizing, or held up)')",
        ),
    ),
)

RANKED = Piece(
    "ranked",  # the causes of each slow token, the one that explains most first
    f"""
    SELECT c.*, list_reverse_sort(list_filter([{", ".join(claim.sql for claim in CLAIMED)}],
        lambda x: x.us > 0)) AS causes
    FROM claims AS c
    LEFT JOIN ahead AS a ON a.engine_id = c.engine_id AND a.slot = c.slot
    LEFT JOIN aged AS g ON g.engine_id = c.engine_id AND g.slot = c.slot
    LEFT JOIN involved AS i ON i.engine_id = c.engine_id AND i.slot = c.slot
        AND i.position = c.position""",
)

VERDICTS = Piece(
    "verdicts",
    f"""
    SELECT engine_id, slot, request_id, arrived_at_us, position, emitted_at, latency_us,
        coalesce(usual_us, ttft_us) AS usual_us, step_id, if(is_proxied OR is_incomplete, [],
            list_transform(causes, lambda x: {{cause: x.cause, ms: x.us / 1000}})) AS causes,
        CASE WHEN is_proxied OR is_incomplete OR coalesce(causes[1].us, 0) < {SHARE} * lost_us
            THEN {{us: 0::DOUBLE, cause: 'unexplained', evidence: CASE
                WHEN is_proxied THEN 'a request through the proxy: the upstream''s steps are not '
                    || 'visible'
                WHEN is_incomplete THEN 'its steps are not in the lake'
                ELSE format('its step took {{}}, nothing in it stands out',
                    coalesce({ms("spent_us")}, 'an unknown time')) END}}
            ELSE {{us: causes[1].us::DOUBLE, cause: causes[1].cause,
                evidence: causes[1].evidence || array_to_string(list_transform(list_filter(
                    causes[2:], lambda x: x.us > {SHARE} * lost_us), lambda x: '; also ' || x.cause
                    || ' (' || x.evidence || ')'), '')}} END AS verdict
    FROM ranked""",
)

SENDING = Piece(
    "sending",  # the end of the request, if that took long: a row without a position
    f"""
    SELECT engine_id, slot, request_id, arrived_at_us, NULL::INTEGER AS position,
        flushed_at AS emitted_at, flushed_at_us - last_token_at_us AS latency_us,
        p.sending_us AS usual_us, NULL::BIGINT AS step_id,
        [{{cause: 'sending slow', ms: (flushed_at_us - last_token_at_us) / 1000}}] AS causes,
        {{us: (flushed_at_us - last_token_at_us - coalesce(p.sending_us, 0))::DOUBLE,
        cause: 'sending slow', evidence: format(
            '{{}} to detokenize, {{}} until the last chunk was serialized (chunks before it wait '
            || 'for a slow reader), {{}} to hand it to the socket',
            {ms("detokenized_at_us - last_token_at_us")},
            {ms("serialized_at_us - detokenized_at_us")},
            {ms("flushed_at_us - serialized_at_us")})}} AS verdict
    FROM wanted LEFT JOIN peers AS p USING (engine_id, slot)
    WHERE flushed_at_us - last_token_at_us >= {SENDING_MIN_US} AND flushed_at_us
        - last_token_at_us > {SENDING_FACTOR} * if(p.sent >= {ENOUGH}, p.sending_us, 0)""",
)

SENDING_CHUNK = Piece(
    "sending_chunk",  # the chunk that took longest from the model to the socket, if that was slow
    f"""
    SELECT w.engine_id, w.slot, w.request_id, w.arrived_at_us, l.position,
        coalesce(t.emitted_at + to_microseconds(l.late_us), make_timestamp(l.noted_at_us))
            AS emitted_at, l.late_us AS latency_us, NULL::BIGINT AS usual_us, t.step_id,
        [{{cause: 'sending slow', ms: l.late_us / 1000}}] AS causes,
        {{us: l.late_us::DOUBLE, cause: 'sending slow', evidence: format(
            'the chunk that ended with this token was handed to the socket {{}} after it was '
            || 'drawn (the server was busy, or chunks before it waited for a slow reader); '
            || '{{}} of the answer''s were over 50 ms late', {ms("l.late_us")}, l.chunks)}}
            AS verdict
    FROM sent_late AS l JOIN wanted AS w USING (engine_id, slot)
    LEFT JOIN own_tokens AS t ON t.engine_id = l.engine_id AND t.slot = l.slot
        AND t.position = l.position""",
)

EVIDENCE = (KEY_STEPS, PROMPTS, INVOLVED, AHEAD, RANKED, VERDICTS, SENDING, SENDING_CHUNK)
