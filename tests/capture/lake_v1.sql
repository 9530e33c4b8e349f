-- A lake as schema version 1 made it, and a few rows. Frozen: migrations start from here.

CREATE TABLE IF NOT EXISTS engines (
    engine_id UUID NOT NULL,
    epoch BIGINT NOT NULL,
    host VARCHAR,
    pid INTEGER,
    started_at TIMESTAMP,
    fingerprint VARCHAR,
    model VARCHAR,
    info JSON
);
COMMENT ON TABLE engines IS 'Engine processes. How each ended is in events (engine_closed, engine_crashed).';
COMMENT ON COLUMN engines.engine_id IS 'the engine process';
COMMENT ON COLUMN engines.epoch IS 'creation of its ring, ns since 1970';
COMMENT ON COLUMN engines.host IS 'host name';
COMMENT ON COLUMN engines.pid IS 'process id';
COMMENT ON COLUMN engines.started_at IS 'creation of its ring';
COMMENT ON COLUMN engines.fingerprint IS 'build fingerprint; NULL when its frame was lost';
COMMENT ON COLUMN engines.model IS 'model name';
COMMENT ON COLUMN engines.info IS 'configuration, kernel variants and all else the engine reported';

CREATE TABLE IF NOT EXISTS requests (
    engine_id UUID NOT NULL,
    slot BIGINT NOT NULL,
    request_id VARCHAR NOT NULL,
    arrived_at TIMESTAMP NOT NULL,
    prompt_tokens INTEGER,
    cached_tokens INTEGER,
    max_tokens INTEGER,
    priority INTEGER,
    adjustment INTEGER,
    tenant VARCHAR,
    route VARCHAR,
    class_key VARCHAR
);
COMMENT ON TABLE requests IS 'Requests as they entered an engine.';
COMMENT ON COLUMN requests.engine_id IS 'the engine process';
COMMENT ON COLUMN requests.slot IS 'the request''s ordinal in its engine; joins with requests';
COMMENT ON COLUMN requests.request_id IS 'W3C trace id, 32 hex digits';
COMMENT ON COLUMN requests.arrived_at IS 'arrival';
COMMENT ON COLUMN requests.prompt_tokens IS 'tokens of the prompt';
COMMENT ON COLUMN requests.cached_tokens IS 'prompt tokens found in the prefix cache';
COMMENT ON COLUMN requests.max_tokens IS 'output tokens allowed';
COMMENT ON COLUMN requests.priority IS '0-100, larger is served first';
COMMENT ON COLUMN requests.adjustment IS 'what the feedback policy added to the priority';
COMMENT ON COLUMN requests.tenant IS 'who asked';
COMMENT ON COLUMN requests.route IS 'for what';
COMMENT ON COLUMN requests.class_key IS 'tenant/route/template: the class that feedback applies to';

CREATE TABLE IF NOT EXISTS finishes (
    engine_id UUID NOT NULL,
    slot BIGINT NOT NULL,
    reason VARCHAR NOT NULL,
    output_tokens INTEGER,
    admitted_at TIMESTAMP,
    first_token_at TIMESTAMP,
    last_token_at TIMESTAMP,
    detokenized_at TIMESTAMP,
    serialized_at TIMESTAMP,
    flushed_at TIMESTAMP,
    finished_at TIMESTAMP NOT NULL
);
COMMENT ON TABLE finishes IS 'How and when requests ended. A time that never came is NULL.';
COMMENT ON COLUMN finishes.engine_id IS 'the engine process';
COMMENT ON COLUMN finishes.slot IS 'the request''s ordinal in its engine; joins with requests';
COMMENT ON COLUMN finishes.reason IS 'stop and length are successes, all else a failure';
COMMENT ON COLUMN finishes.output_tokens IS 'tokens generated';
COMMENT ON COLUMN finishes.admitted_at IS 'first scheduled';
COMMENT ON COLUMN finishes.first_token_at IS 'first output token left the model';
COMMENT ON COLUMN finishes.last_token_at IS 'last output token left the model';
COMMENT ON COLUMN finishes.detokenized_at IS 'last text was ready';
COMMENT ON COLUMN finishes.serialized_at IS 'last chunk was serialized';
COMMENT ON COLUMN finishes.flushed_at IS 'last byte was handed to the socket';
COMMENT ON COLUMN finishes.finished_at IS 'the engine let go of it';

CREATE TABLE IF NOT EXISTS steps (
    engine_id UUID NOT NULL,
    step_id BIGINT NOT NULL,
    started_at TIMESTAMP NOT NULL,
    schedule_us FLOAT,
    prepare_us FLOAT,
    forward_us FLOAT,
    sample_us FLOAT,
    device_us FLOAT,
    prefill_tokens INTEGER,
    decode_tokens INTEGER,
    running INTEGER,
    waiting INTEGER,
    kv_used INTEGER,
    kv_total INTEGER,
    prefix_hit_tokens INTEGER,
    graph_bucket INTEGER
);
COMMENT ON TABLE steps IS 'Engine steps: one forward pass over a batch.';
COMMENT ON COLUMN steps.engine_id IS 'the engine process';
COMMENT ON COLUMN steps.step_id IS 'the engine step; joins with steps';
COMMENT ON COLUMN steps.started_at IS 'start of scheduling';
COMMENT ON COLUMN steps.schedule_us IS 'choosing the batch, us';
COMMENT ON COLUMN steps.prepare_us IS 'building its inputs, us';
COMMENT ON COLUMN steps.forward_us IS 'forward pass as the host saw it, us';
COMMENT ON COLUMN steps.sample_us IS 'sampling, us';
COMMENT ON COLUMN steps.device_us IS 'forward pass by the device''s clock, us; NULL: not measured';
COMMENT ON COLUMN steps.prefill_tokens IS 'prompt tokens computed';
COMMENT ON COLUMN steps.decode_tokens IS 'decode tokens computed';
COMMENT ON COLUMN steps.running IS 'requests running';
COMMENT ON COLUMN steps.waiting IS 'requests waiting';
COMMENT ON COLUMN steps.kv_used IS 'KV blocks in use';
COMMENT ON COLUMN steps.kv_total IS 'KV blocks in all';
COMMENT ON COLUMN steps.prefix_hit_tokens IS 'prompt tokens that the prefix cache saved';
COMMENT ON COLUMN steps.graph_bucket IS 'batch size of the graph replayed; NULL: eager';

CREATE TABLE IF NOT EXISTS tokens (
    engine_id UUID NOT NULL,
    slot BIGINT NOT NULL,
    step_id BIGINT NOT NULL,
    position INTEGER NOT NULL,
    token_id INTEGER NOT NULL,
    is_first BOOLEAN NOT NULL,
    emitted_at TIMESTAMP NOT NULL,
    latency_us BIGINT,
    logprob FLOAT,
    margin FLOAT,
    kv_blocks INTEGER
);
COMMENT ON TABLE tokens IS 'Every output token, in the order of the steps.';
COMMENT ON COLUMN tokens.engine_id IS 'the engine process';
COMMENT ON COLUMN tokens.slot IS 'the request''s ordinal in its engine; joins with requests';
COMMENT ON COLUMN tokens.step_id IS 'the engine step; joins with steps';
COMMENT ON COLUMN tokens.position IS 'index in the output, from 0';
COMMENT ON COLUMN tokens.token_id IS 'vocabulary id';
COMMENT ON COLUMN tokens.is_first IS 'the request''s first token (ended its prefill)';
COMMENT ON COLUMN tokens.emitted_at IS 'end of its step';
COMMENT ON COLUMN tokens.latency_us IS 'since the request''s previous token; the first: since arrival';
COMMENT ON COLUMN tokens.logprob IS 'natural log-probability, rounded to 11 significant bits';
COMMENT ON COLUMN tokens.margin IS 'top-1 minus top-2 log-probability, rounded likewise';
COMMENT ON COLUMN tokens.kv_blocks IS 'KV blocks the request held';

CREATE TABLE IF NOT EXISTS prefill_chunks (
    engine_id UUID NOT NULL,
    slot BIGINT NOT NULL,
    step_id BIGINT NOT NULL,
    position INTEGER NOT NULL,
    computed_at TIMESTAMP NOT NULL,
    kv_blocks INTEGER
);
COMMENT ON TABLE prefill_chunks IS 'Prompt chunks that did not yet lead to a token: who shared a step with whose prefill.';
COMMENT ON COLUMN prefill_chunks.engine_id IS 'the engine process';
COMMENT ON COLUMN prefill_chunks.slot IS 'the request''s ordinal in its engine; joins with requests';
COMMENT ON COLUMN prefill_chunks.step_id IS 'the engine step; joins with steps';
COMMENT ON COLUMN prefill_chunks.position IS 'last prompt position computed';
COMMENT ON COLUMN prefill_chunks.computed_at IS 'end of its step';
COMMENT ON COLUMN prefill_chunks.kv_blocks IS 'KV blocks the request held';

CREATE TABLE IF NOT EXISTS kernels (
    engine_id UUID NOT NULL,
    step_id BIGINT NOT NULL,
    layer INTEGER,
    kernel VARCHAR,
    started_at TIMESTAMP,
    duration_us FLOAT
);
COMMENT ON TABLE kernels IS 'Kernels of sampled steps.';
COMMENT ON COLUMN kernels.engine_id IS 'the engine process';
COMMENT ON COLUMN kernels.step_id IS 'the engine step; joins with steps';
COMMENT ON COLUMN kernels.layer IS 'layer index, -1: none';
COMMENT ON COLUMN kernels.kernel IS 'kernel name';
COMMENT ON COLUMN kernels.started_at IS 'start';
COMMENT ON COLUMN kernels.duration_us IS 'device time, us';

CREATE TABLE IF NOT EXISTS events (
    engine_id UUID NOT NULL,
    happened_at TIMESTAMP NOT NULL,
    kind VARCHAR NOT NULL,
    request_id VARCHAR,
    slot BIGINT,
    detail VARCHAR
);
COMMENT ON TABLE events IS 'What happened to requests and engines: preempted, resumed, aborted, cache_evicted, degraded, policy_reloaded, rejected; from the collector: engine_closed, engine_crashed.';
COMMENT ON COLUMN events.engine_id IS 'the engine process';
COMMENT ON COLUMN events.happened_at IS 'when';
COMMENT ON COLUMN events.kind IS 'what';
COMMENT ON COLUMN events.request_id IS 'to which request, NULL: none';
COMMENT ON COLUMN events.slot IS 'its slot, NULL: none';
COMMENT ON COLUMN events.detail IS 'the rest';

CREATE TABLE IF NOT EXISTS gpu_samples (
    engine_id UUID NOT NULL,
    sampled_at TIMESTAMP NOT NULL,
    device INTEGER NOT NULL,
    utilization_pct FLOAT,
    sm_pct FLOAT,
    memory_bandwidth_pct FLOAT,
    memory_used_bytes BIGINT,
    power_w FLOAT,
    temperature_c FLOAT,
    sm_clock_mhz FLOAT,
    memory_clock_mhz FLOAT,
    age_ms FLOAT,
    unavailable VARCHAR
);
COMMENT ON TABLE gpu_samples IS 'Device telemetry; NULL = not available, `unavailable` says why.';
COMMENT ON COLUMN gpu_samples.engine_id IS 'the engine process';
COMMENT ON COLUMN gpu_samples.sampled_at IS 'when';
COMMENT ON COLUMN gpu_samples.device IS 'device index';
COMMENT ON COLUMN gpu_samples.utilization_pct IS 'share of time with any kernel running, %';
COMMENT ON COLUMN gpu_samples.sm_pct IS 'share of multiprocessors busy, %';
COMMENT ON COLUMN gpu_samples.memory_bandwidth_pct IS 'share of the memory bandwidth, %';
COMMENT ON COLUMN gpu_samples.memory_used_bytes IS 'memory in use, bytes';
COMMENT ON COLUMN gpu_samples.power_w IS 'power from energy differences, W';
COMMENT ON COLUMN gpu_samples.temperature_c IS 'temperature, C';
COMMENT ON COLUMN gpu_samples.sm_clock_mhz IS 'multiprocessor clock, MHz';
COMMENT ON COLUMN gpu_samples.memory_clock_mhz IS 'memory clock, MHz';
COMMENT ON COLUMN gpu_samples.age_ms IS 'age of the values, ms';
COMMENT ON COLUMN gpu_samples.unavailable IS 'why something is NULL';

CREATE TABLE IF NOT EXISTS losses (
    engine_id UUID NOT NULL,
    epoch BIGINT NOT NULL,
    noticed_at TIMESTAMP NOT NULL,
    kind VARCHAR NOT NULL,
    first_sequence BIGINT,
    frames BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    detail VARCHAR
);
COMMENT ON TABLE losses IS 'What did not reach the lake, exactly. No row: nothing was lost.';
COMMENT ON COLUMN losses.engine_id IS 'the engine process';
COMMENT ON COLUMN losses.epoch IS 'of the ring';
COMMENT ON COLUMN losses.noticed_at IS 'when the collector found out';
COMMENT ON COLUMN losses.kind IS 'overwritten: before it was read; torn: by the engine''s death; undecodable: see detail';
COMMENT ON COLUMN losses.first_sequence IS 'first frame lost';
COMMENT ON COLUMN losses.frames IS 'frames lost';
COMMENT ON COLUMN losses.tokens IS 'output tokens lost';
COMMENT ON COLUMN losses.detail IS 'the rest';

CREATE TABLE IF NOT EXISTS ingest_cursor (
    engine_id UUID NOT NULL,
    epoch BIGINT NOT NULL,
    sequence BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    position BIGINT NOT NULL,
    lost_frames BIGINT NOT NULL,
    lost_tokens BIGINT NOT NULL,
    torn_frames BIGINT NOT NULL,
    corrupt_frames BIGINT NOT NULL,
    finished BOOLEAN NOT NULL,
    committed_at TIMESTAMP NOT NULL
);
COMMENT ON TABLE ingest_cursor IS 'How far each ring was read: a row per commit, written in the same transaction as its rows.';
COMMENT ON COLUMN ingest_cursor.engine_id IS 'the engine process';
COMMENT ON COLUMN ingest_cursor.epoch IS 'of the ring';
COMMENT ON COLUMN ingest_cursor.sequence IS 'next frame';
COMMENT ON COLUMN ingest_cursor.tokens IS 'tokens before it';
COMMENT ON COLUMN ingest_cursor.position IS 'its place in the ring, bytes';
COMMENT ON COLUMN ingest_cursor.lost_frames IS 'frames lost so far';
COMMENT ON COLUMN ingest_cursor.lost_tokens IS 'tokens lost so far';
COMMENT ON COLUMN ingest_cursor.torn_frames IS 'frames torn by the engine''s death';
COMMENT ON COLUMN ingest_cursor.corrupt_frames IS 'lost frames that failed their checksum';
COMMENT ON COLUMN ingest_cursor.finished IS 'the engine is gone and its ring drained';
COMMENT ON COLUMN ingest_cursor.committed_at IS 'when';

CREATE TABLE IF NOT EXISTS marks (
    engine_id UUID NOT NULL,
    marked_at TIMESTAMP NOT NULL,
    text VARCHAR NOT NULL
);
COMMENT ON TABLE marks IS 'Notes of the operator: deployments, configuration changes.';
COMMENT ON COLUMN marks.engine_id IS 'the engine process';
COMMENT ON COLUMN marks.marked_at IS 'when';
COMMENT ON COLUMN marks.text IS 'what';

CREATE TABLE IF NOT EXISTS schema_versions (
    version INTEGER NOT NULL,
    definitions VARCHAR NOT NULL,
    applied_at TIMESTAMP NOT NULL
);
COMMENT ON TABLE schema_versions IS 'Versions of this schema the lake has gone through; the last one holds.';
COMMENT ON COLUMN schema_versions.version IS 'of the tables';
COMMENT ON COLUMN schema_versions.definitions IS 'digest of the views and macros';
COMMENT ON COLUMN schema_versions.applied_at IS 'when';

CREATE OR REPLACE VIEW request_latency AS 
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
) AS gone ON gone.engine_id = r.engine_id;

CREATE OR REPLACE VIEW token_gaps AS 
SELECT r.request_id, r.tenant, r.route, r.class_key, r.arrived_at, t.engine_id, t.slot, t.step_id,
    t.position, t.token_id, t.emitted_at, t.latency_us / 1000 AS gap_ms, t.logprob, t.margin,
    t.kv_blocks
FROM tokens AS t JOIN requests AS r ON r.engine_id = t.engine_id AND r.slot = t.slot
WHERE NOT t.is_first;

CREATE OR REPLACE MACRO slow_tokens(wanted) AS TABLE 
SELECT g.request_id, g.position, g.emitted_at, g.gap_ms, g.token_id, g.step_id,
    (s.schedule_us + s.prepare_us + s.forward_us + s.sample_us) / 1000 AS step_ms,
    s.decode_tokens, s.prefill_tokens, s.waiting, s.kv_used
FROM (FROM token_gaps ORDER BY gap_ms DESC LIMIT wanted) AS g
LEFT JOIN steps AS s ON s.engine_id = g.engine_id AND s.step_id = g.step_id
ORDER BY g.gap_ms DESC;

CREATE OR REPLACE MACRO latency_heatmap(from_ts, to_ts, time_bins, position_bins, quantile) AS TABLE 
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
FROM cells, shape ORDER BY time_bin, position_bin;

CREATE OR REPLACE MACRO why(wanted_request_id) AS TABLE 
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
FROM facts ORDER BY arrived_at, slot, position;

INSERT INTO schema_versions VALUES (1, '75d43e46d8097e29', '2026-03-01 12:00:00');

INSERT INTO engines VALUES ('00000000-0000-0000-0000-000000000007', 1772366400000000000, 'host', 41,
    '2026-03-01 12:00:00', 'f00d', 'tiny', '{"model": "tiny"}');
INSERT INTO requests
    SELECT '00000000-0000-0000-0000-000000000007', i, printf('%032x', i),
        TIMESTAMP '2026-03-01 12:00:00' + to_seconds(i), 12, 4, 64, 50, 0, 'acme', 'chat',
        'acme/chat/-'
    FROM range(20) AS r(i);
INSERT INTO tokens
    SELECT '00000000-0000-0000-0000-000000000007', i, 100 * i + p, p, p, p = 0,
        TIMESTAMP '2026-03-01 12:00:00' + to_seconds(i) + to_milliseconds(10 * (p + 1)),
        if(p = 10, 30000, 10000), -0.5, 0.5, 1
    FROM range(20) AS r(i), range(50) AS t(p);
INSERT INTO steps
    SELECT DISTINCT engine_id, step_id, emitted_at - INTERVAL 9 MILLISECOND, 10, 20, 8900, 30, NULL,
        0, 1, 1, 0, 10, 100, 0, NULL
    FROM tokens;
INSERT INTO finishes
    SELECT engine_id, slot, 'length', 50, min(emitted_at), min(emitted_at), max(emitted_at),
        max(emitted_at), max(emitted_at), max(emitted_at), max(emitted_at)
    FROM tokens GROUP BY engine_id, slot;
INSERT INTO events VALUES ('00000000-0000-0000-0000-000000000007', '2026-03-01 12:00:05',
    'preempted', NULL, 3, 'no blocks');
INSERT INTO ingest_cursor VALUES ('00000000-0000-0000-0000-000000000007', 1772366400000000000,
    1060, 1000, 500000, 0, 0, 0, 0, false, '2026-03-01 12:00:30');
INSERT INTO marks VALUES ('00000000-0000-0000-0000-000000000007', '2026-03-01 12:00:01', 'deploy 6');
