"""The heat maps as table macros: `latency_heatmap` from every token, `latency_overview` from
histograms, within 2.2 % of it. Both refuse arguments that make no map.

Not for single tokens: those are in `slow_tokens` and the tables.
"""

from __future__ import annotations

from capture.rollup import ALL_STEPS, BINS_PER_OCTAVE, CELLS, POSITION_BUCKET
from capture.schema import Column, View

MAX_BINS = 1_000_000
_PARAMETERS = "from_ts, to_ts, time_bins, position_bins, quantile"


def _bins(name: str) -> str:
    """A condition and what it means: the argument `name` is no number of bins."""
    return (
        f"WHEN {name} IS NULL OR NOT {name} BETWEEN 1 AND {MAX_BINS} OR {name} <> floor({name})\n"
        f"        THEN error('{name} must be a whole number from 1 to {MAX_BINS}, it is '\n"
        f"            || coalesce({name}::VARCHAR, 'NULL'))"
    )


_ASKED = f"""
asked AS (
    SELECT from_ts::TIMESTAMP AS from_ts, to_ts::TIMESTAMP AS to_ts,
        time_bins::BIGINT AS time_bins, position_bins::BIGINT AS position_bins,
        quantile::DOUBLE AS quantile
    WHERE CASE
    {_bins("time_bins")}
    {_bins("position_bins")}
    WHEN quantile IS NULL OR NOT quantile BETWEEN 0 AND 1
        THEN error('quantile must be a number from 0 to 1, it is '
            || coalesce(quantile::VARCHAR, 'NULL'))
    WHEN NOT isfinite(from_ts::TIMESTAMP) OR NOT isfinite(to_ts::TIMESTAMP)
        THEN error('from_ts and to_ts must be finite')
    WHEN from_ts::TIMESTAMP > to_ts::TIMESTAMP
        THEN error('from_ts (' || from_ts::TIMESTAMP || ') is later than to_ts (' ||
            to_ts::TIMESTAMP || ')')
    WHEN (epoch_us(to_ts::TIMESTAMP)::HUGEINT - epoch_us(from_ts::TIMESTAMP)) * time_bins
            > {2**63 - 1}
        THEN error('from_ts to to_ts is too long for ' || time_bins || ' time_bins')
    ELSE 'yes' END = 'yes'
)
"""

LATENCY_HEATMAP = View(
    "latency_heatmap",
    "Latency of tokens by the arrival of their request (from_ts included, to_ts not) and their "
    "position in the output. Cells without tokens have no row. First tokens (TTFT) are left out. "
    "A period that is NULL holds nothing.",
    (
        Column("time_bin", "BIGINT", "0 .. time_bins - 1"),
        Column("time_start", "TIMESTAMP", "start of the time bin"),
        Column("position_bin", "BIGINT", "0 .. position_bins - 1"),
        Column("position_start, position_end", "BIGINT", "positions in the bin, both included"),
        Column("latency_ms", "DOUBLE", "the quantile of the time since the previous token"),
        Column("tokens", "BIGINT", "tokens in the cell"),
    ),
    f"""
WITH {_ASKED}, shape AS (
    SELECT epoch_us(asked.from_ts) AS start_us, asked.time_bins AS columns,
        epoch_us(asked.to_ts) - epoch_us(asked.from_ts) AS span_us,
        greatest(1, ceil((coalesce(longest, 0) + 1) / asked.position_bins))::BIGINT AS height
    FROM asked, (
        SELECT max(t.position) AS longest FROM tokens AS t WHERE t.emitted_at >= from_ts::TIMESTAMP
    )
), cells AS (
    SELECT (epoch_us(r.arrived_at) - shape.start_us) * shape.columns // shape.span_us AS x,
        t.position // shape.height AS y, quantile_cont(t.latency_us, quantile) / 1000 AS latency_ms,
        count(*) AS tokens
    FROM tokens AS t JOIN requests AS r ON r.engine_id = t.engine_id AND r.slot = t.slot, shape
    WHERE t.emitted_at >= from_ts::TIMESTAMP AND NOT t.is_first
        AND r.arrived_at >= from_ts::TIMESTAMP AND r.arrived_at < to_ts::TIMESTAMP
    GROUP BY ALL
)
SELECT x AS time_bin,
    make_timestamp((start_us + ceil(x * span_us / columns))::BIGINT) AS time_start,
    y AS position_bin, y * height AS position_start, (y + 1) * height - 1 AS position_end,
    latency_ms, tokens
FROM cells, shape ORDER BY time_bin, position_bin
""",
    "SELECT * FROM latency_heatmap(\n"
    "    (SELECT min(arrived_at) FROM requests), now()::TIMESTAMP, 60, 40, 0.99)",
    parameters=_PARAMETERS,
)

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
WITH {_ASKED}, period AS (
    SELECT date_trunc('minute', asked.from_ts) AS first_minute,
        date_trunc('minute', asked.to_ts - INTERVAL 1 MICROSECOND) AS last_minute,
        asked.time_bins AS columns, asked.position_bins AS lines, asked.quantile AS share
    FROM asked
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
        WHERE r.engine_id = t.engine_id AND NOT t.is_first
            AND t.emitted_at >= date_trunc('minute', from_ts::TIMESTAMP)
            AND r.arrived_at >= date_trunc('minute', from_ts::TIMESTAMP)
            AND r.arrived_at < date_trunc('minute', to_ts::TIMESTAMP - INTERVAL 1 MICROSECOND)
                + INTERVAL 1 MINUTE
        GROUP BY ALL
    )
), shape AS (
    SELECT first_minute, share,
        greatest(1, ceil((date_diff('minute', first_minute, last_minute) + 1) / columns))::BIGINT
            AS width,
        greatest(1, ceil((SELECT max(position_bucket) + 1 FROM histograms) / lines)
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
    parameters=_PARAMETERS,
)
