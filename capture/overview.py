"""The wide heat map: the table macro `latency_overview`, from histograms instead of tokens.

Its figures lie within 2.2 % of the exact ones. Not for single tokens: those are in
`latency_heatmap`, `slow_tokens` and the tables.
"""

from __future__ import annotations

from capture.rollup import ALL_STEPS, BINS_PER_OCTAVE, CELLS, POSITION_BUCKET
from capture.schema import Column, View

LATENCY_OVERVIEW = View(
    "latency_overview",
    "latency_heatmap over long times: from histograms, so hundreds of millions of tokens take "
    "less than a second. Times are cut to whole minutes and positions to 16s, both outwards; "
    "latencies lie within 2.2 % of the exact quantile.",
    (
        Column("time_bin", "BIGINT", "0 .. time_bins - 1, each a whole number of minutes"),
        Column("time_start", "TIMESTAMP", "start of the time bin"),
        Column("position_bin", "BIGINT", "0 .. position_bins - 1, each a multiple of 16 positions"),
        Column("position_start, position_end", "BIGINT", "positions in the bin, both included"),
        Column("latency_ms", "DOUBLE", "the quantile of the time since the previous token"),
        Column("tokens", "BIGINT", "tokens in the cell"),
    ),
    f"""
WITH period AS (
    SELECT date_trunc('minute', from_ts::TIMESTAMP) AS first_minute,
        date_trunc('minute', to_ts::TIMESTAMP - INTERVAL 1 MICROSECOND) AS last_minute
), pending AS (
    SELECT engine_id, coalesce(max(m.step_id), 0) AS step_id,
        coalesce(max(m.emitted_from), min(first_arrival)) AS emitted_from
    FROM (SELECT engine_id, min(arrived_at) AS first_arrival FROM requests GROUP BY engine_id)
    LEFT JOIN rollup_marks AS m USING (engine_id)
    GROUP BY engine_id HAVING coalesce(max(m.step_id), 0) < {ALL_STEPS}
), histograms AS (
    SELECT minute, position_bucket, latency_bin, tokens FROM latency_rollup
    WHERE minute >= date_trunc('minute', from_ts::TIMESTAMP) AND minute < to_ts::TIMESTAMP
    UNION ALL
    SELECT minute, position_bucket, latency_bin, tokens FROM (
        {CELLS}
        JOIN pending AS p ON p.engine_id = t.engine_id AND t.step_id >= p.step_id
            AND t.emitted_at >= p.emitted_from
        WHERE NOT t.is_first AND t.emitted_at >= date_trunc('minute', from_ts::TIMESTAMP)
            AND r.arrived_at >= date_trunc('minute', from_ts::TIMESTAMP)
            AND r.arrived_at < date_trunc('minute', to_ts::TIMESTAMP - INTERVAL 1 MICROSECOND)
                + INTERVAL 1 MINUTE
        GROUP BY ALL
    )
), shape AS (
    SELECT first_minute,
        greatest(1, ceil((date_diff('minute', first_minute, last_minute) + 1) / time_bins))::BIGINT
            AS width,
        greatest(1, ceil((SELECT max(position_bucket) + 1 FROM histograms) / position_bins)
            )::BIGINT AS height
    FROM period
), binned AS (
    SELECT date_diff('minute', first_minute, minute) // width AS x, position_bucket // height AS y,
        latency_bin, sum(tokens) AS tokens
    FROM histograms, shape GROUP BY ALL
), ranked AS (
    SELECT x, y, latency_bin, sum(tokens) OVER (cell ORDER BY latency_bin) AS up_to,
        sum(tokens) OVER cell AS total, (sum(tokens) OVER cell - 1) * quantile AS place
    FROM binned WINDOW cell AS (PARTITION BY x, y)
), found AS (
    SELECT x, y, any_value(total)::BIGINT AS tokens, any_value(place) % 1 AS between,
        min(latency_bin) FILTER (up_to > floor(place)) AS below,
        min(latency_bin) FILTER (up_to > ceil(place)) AS above
    FROM ranked GROUP BY x, y
)
SELECT x AS time_bin, first_minute + to_minutes(x * width) AS time_start, y AS position_bin,
    y * height * {POSITION_BUCKET} AS position_start,
    (y + 1) * height * {POSITION_BUCKET} - 1 AS position_end,
    ((1 - between) * if(below < 0, 0, 2 ** ((below + 0.5) / {BINS_PER_OCTAVE}))
        + between * if(above < 0, 0, 2 ** ((above + 0.5) / {BINS_PER_OCTAVE})))
        / 1000 AS latency_ms, tokens
FROM found, shape ORDER BY time_bin, position_bin
""",
    "SELECT * FROM latency_overview(\n"
    "    (SELECT min(arrived_at) FROM requests), now()::TIMESTAMP, 160, 80, 0.99)",
    parameters="from_ts, to_ts, time_bins, position_bins, quantile",
)
