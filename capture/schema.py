"""The trace lake's tables: names, types, units, meaning. `docs/sql.md` is generated from here.

All times are UTC TIMESTAMPs with microseconds; durations carry their unit in the name.
Rows are only ever added: one collector's commit never conflicts with another's. Views and macros
are in `capture.views`.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Column:
    name: str
    type: str
    comment: str


@dataclass(frozen=True)
class Table:
    """`example` is a query that runs on any lake, shown in the documentation and tested."""

    name: str
    comment: str
    columns: tuple[Column, ...]
    example: str

    @property
    def ddl(self) -> str:
        body = ", ".join(f"{column.name} {column.type}" for column in self.columns)
        return f"CREATE TABLE IF NOT EXISTS {self.name} ({body})"

    @property
    def comments(self) -> list[tuple[str | None, str, str]]:
        """Column (None: the table), comment, and the statement that attaches it, for those who
        explore with `duckdb_columns()`."""
        found: list[tuple[str | None, str, str]] = [
            (None, self.comment, f"COMMENT ON TABLE {self.name} IS {_quoted(self.comment)}")
        ]
        for column in self.columns:
            place = f"{self.name}.{column.name}"
            statement = f"COMMENT ON COLUMN {place} IS {_quoted(column.comment)}"
            found.append((column.name, column.comment, statement))
        return found


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


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


ENGINE_ID = Column("engine_id", "UUID NOT NULL", "the engine process")
SLOT = Column("slot", "BIGINT NOT NULL", "the request's ordinal in its engine; joins with requests")
STEP_ID = Column("step_id", "BIGINT NOT NULL", "the engine step; joins with steps")

ENGINES = Table(
    "engines",
    "Engine processes. How each ended is in events (engine_closed, engine_crashed).",
    (
        ENGINE_ID,
        Column("epoch", "BIGINT NOT NULL", "creation of its ring, ns since 1970"),
        Column("host", "VARCHAR", "host name"),
        Column("pid", "INTEGER", "process id"),
        Column("started_at", "TIMESTAMP", "creation of its ring"),
        Column("fingerprint", "VARCHAR", "build fingerprint; NULL when its frame was lost"),
        Column("model", "VARCHAR", "model name"),
        Column("info", "JSON", "configuration, kernel variants and all else the engine reported"),
    ),
    "SELECT engine_id, started_at, model, info->'weights'->>'held_as' AS weights FROM engines",
)
REQUESTS = Table(
    "requests",
    "Requests as they entered an engine.",
    (
        ENGINE_ID,
        SLOT,
        Column("request_id", "VARCHAR NOT NULL", "W3C trace id, 32 hex digits"),
        Column("arrived_at", "TIMESTAMP NOT NULL", "arrival"),
        Column("prompt_tokens", "INTEGER", "tokens of the prompt; NULL: not known to a proxy"),
        Column("cached_tokens", "INTEGER", "prompt tokens found in the prefix cache"),
        Column("max_tokens", "INTEGER", "output tokens allowed"),
        Column("priority", "INTEGER", "0-100, larger is served first"),
        Column("adjustment", "INTEGER", "what the feedback policy added to the priority"),
        Column("tenant", "VARCHAR", "who asked"),
        Column("route", "VARCHAR", "for what"),
        Column("class_key", "VARCHAR", "tenant/route/template: the class that feedback applies to"),
    ),
    "SELECT tenant, count(*) AS requests, sum(prompt_tokens) AS prompt_tokens\n"
    "FROM requests GROUP BY tenant ORDER BY requests DESC",
)
FINISHES = Table(
    "finishes",
    "How and when requests ended. A time that never came is NULL.",
    (
        ENGINE_ID,
        SLOT,
        Column("reason", "VARCHAR NOT NULL", "stop and length are successes, all else a failure"),
        Column("output_tokens", "INTEGER", "tokens generated"),
        Column("admitted_at", "TIMESTAMP", "first scheduled"),
        Column("first_token_at", "TIMESTAMP", "first output token left the model"),
        Column("last_token_at", "TIMESTAMP", "last output token left the model"),
        Column("detokenized_at", "TIMESTAMP", "last text was ready"),
        Column("serialized_at", "TIMESTAMP", "last chunk was serialized"),
        Column("flushed_at", "TIMESTAMP", "last byte was handed to the socket"),
        Column("finished_at", "TIMESTAMP NOT NULL", "the engine let go of it"),
    ),
    "SELECT reason, count(*) AS requests FROM finishes GROUP BY reason",
)
STEPS = Table(
    "steps",
    "Engine steps: one forward pass over a batch.",
    (
        ENGINE_ID,
        STEP_ID,
        Column("started_at", "TIMESTAMP NOT NULL", "start of scheduling"),
        Column("schedule_us", "FLOAT", "choosing the batch, us"),
        Column("prepare_us", "FLOAT", "building its inputs, us"),
        Column("forward_us", "FLOAT", "forward pass as the host saw it, us"),
        Column("sample_us", "FLOAT", "sampling, us"),
        Column("device_us", "FLOAT", "forward pass by the device's clock, us; NULL: not measured"),
        Column("prefill_tokens", "INTEGER", "prompt tokens computed"),
        Column("decode_tokens", "INTEGER", "decode tokens computed"),
        Column("running", "INTEGER", "requests running"),
        Column("waiting", "INTEGER", "requests waiting"),
        Column("kv_used", "INTEGER", "KV blocks in use"),
        Column("kv_total", "INTEGER", "KV blocks in all"),
        Column("prefix_hit_tokens", "INTEGER", "prompt tokens that the prefix cache saved"),
        Column("graph_bucket", "INTEGER", "batch size of the graph replayed; NULL: eager"),
    ),
    "SELECT decode_tokens, count(*) AS steps, avg(forward_us) / 1000 AS forward_ms\n"
    "FROM steps WHERE prefill_tokens = 0 GROUP BY ALL ORDER BY decode_tokens",
)
TOKENS = Table(
    "tokens",
    "Every output token.",
    (
        ENGINE_ID,
        SLOT,
        STEP_ID,
        Column("position", "INTEGER NOT NULL", "index in the output, from 0"),
        Column("token_id", "INTEGER NOT NULL", "vocabulary id; -1: seen by a proxy, not known"),
        Column("is_first", "BOOLEAN NOT NULL", "the request's first token (ended its prefill)"),
        Column("emitted_at", "TIMESTAMP NOT NULL", "end of its step"),
        Column(
            "latency_us", "BIGINT", "since the request's previous token; the first: since arrival"
        ),
        Column("logprob", "FLOAT", "natural log-probability, rounded to a multiple of 2^-10"),
        Column("margin", "FLOAT", "top-1 minus top-2 log-probability, to a multiple of 2^-8"),
        Column("kv_blocks", "INTEGER", "KV blocks the request held"),
    ),
    "SELECT quantile_cont(latency_us, [0.5, 0.99]) AS itl_us FROM tokens WHERE NOT is_first",
)
PREFILL_CHUNKS = Table(
    "prefill_chunks",
    "Prompt chunks that did not yet lead to a token: who shared a step with whose prefill.",
    (
        ENGINE_ID,
        SLOT,
        STEP_ID,
        Column("position", "INTEGER NOT NULL", "last prompt position computed"),
        Column("computed_at", "TIMESTAMP NOT NULL", "end of its step"),
        Column("kv_blocks", "INTEGER", "KV blocks the request held"),
    ),
    "SELECT slot, count(*) AS chunks FROM prefill_chunks\n"
    "GROUP BY slot ORDER BY chunks DESC LIMIT 5",
)
KERNELS = Table(
    "kernels",
    "Kernels of sampled steps.",
    (
        ENGINE_ID,
        STEP_ID,
        Column("layer", "INTEGER", "layer index, -1: none"),
        Column("kernel", "VARCHAR", "kernel name"),
        Column("started_at", "TIMESTAMP", "start"),
        Column("duration_us", "FLOAT", "device time, us"),
    ),
    "SELECT kernel, sum(duration_us) / 1000 AS total_ms FROM kernels\n"
    "GROUP BY kernel ORDER BY total_ms DESC",
)
EVENTS = Table(
    "events",
    "What happened to requests and engines: queued (found no seat at once), aged (admitted before "
    "others for its age), preempted, resumed, aborted, sent_late (a chunk's way to the socket), "
    "cache_evicted, degraded, policy_reloaded, rejected, gc_pause, gpu_attached, gpu_throttled, "
    "gpu_throttle_ended, gpu_unavailable, gpu_available; from a proxy: upstream_error, usage, "
    "tokens_per_chunk, not_captured; "
    "from the collector: engine_closed, engine_crashed.",
    (
        ENGINE_ID,
        Column("happened_at", "TIMESTAMP NOT NULL", "when"),
        Column("kind", "VARCHAR NOT NULL", "what"),
        Column("request_id", "VARCHAR", "to which request, NULL: none"),
        Column("slot", "BIGINT", "its slot, NULL: none"),
        Column("detail", "VARCHAR", "the rest"),
        Column("duration_us", "BIGINT", "how long it took until then, us; NULL: a moment"),
    ),
    "SELECT kind, count(*) AS n, max(happened_at) AS last FROM events GROUP BY kind",
)
GPU_SAMPLES = Table(
    "gpu_samples",
    "Device telemetry; NULL = not available, `unavailable` says why.",
    (
        ENGINE_ID,
        Column("sampled_at", "TIMESTAMP NOT NULL", "when"),
        Column("device", "INTEGER NOT NULL", "device index"),
        Column("utilization_pct", "FLOAT", "share of time with any kernel running, %"),
        Column("sm_pct", "FLOAT", "share of multiprocessors busy, %"),
        Column("memory_bandwidth_pct", "FLOAT", "share of the memory bandwidth, %"),
        Column("memory_used_bytes", "BIGINT", "memory in use, bytes"),
        Column("power_w", "FLOAT", "power from energy differences, W"),
        Column("temperature_c", "FLOAT", "temperature, C"),
        Column("sm_clock_mhz", "FLOAT", "multiprocessor clock, MHz"),
        Column("memory_clock_mhz", "FLOAT", "memory clock, MHz"),
        Column("age_ms", "FLOAT", "age of the values, ms"),
        Column("unavailable", "VARCHAR", "why something is NULL"),
    ),
    "SELECT device, max(memory_used_bytes) AS peak_bytes, any_value(unavailable) AS unavailable\n"
    "FROM gpu_samples GROUP BY device",
)
MEMORY_SAMPLES = Table(
    "memory_samples",
    "An engine's memory as its allocator sees it; NULL = not available, `unavailable` says why.",
    (
        ENGINE_ID,
        Column("sampled_at", "TIMESTAMP NOT NULL", "when"),
        Column("device", "INTEGER NOT NULL", "device index, -1: host memory only"),
        Column("rss_bytes", "BIGINT", "resident memory of the process, bytes"),
        Column("reserved_bytes", "BIGINT", "taken from the device by the allocator, bytes"),
        Column("allocated_bytes", "BIGINT", "of these in use by tensors, bytes"),
        Column("peak_allocated_bytes", "BIGINT", "in use at most so far, bytes"),
        Column("largest_free_bytes", "BIGINT", "largest free block among the reserved, bytes"),
        Column("fragmentation", "FLOAT", "1 - largest free / (reserved - allocated), 0-1"),
        Column("unavailable", "VARCHAR", "why something is NULL"),
    ),
    "SELECT device, max(allocated_bytes) AS peak_bytes, max(fragmentation) AS worst\n"
    "FROM memory_samples GROUP BY device",
)
LATENCY_ROLLUP = Table(
    "latency_rollup",
    "Histograms of token latencies by arrival minute, class and output position, for wide heat "
    "maps. A cell may have several rows: add them up. First tokens are left out.",
    (
        ENGINE_ID,
        Column("minute", "TIMESTAMP NOT NULL", "arrival of the requests, cut to the minute"),
        Column("class_key", "VARCHAR", "as in requests"),
        Column("position_bucket", "INTEGER NOT NULL", "output position // 16"),
        Column("latency_bin", "SMALLINT NOT NULL", "floor(16 * log2(latency in us)), 0 us: -1"),
        Column("tokens", "BIGINT NOT NULL", "tokens in it"),
    ),
    "SELECT minute, sum(tokens) AS tokens FROM latency_rollup GROUP BY minute ORDER BY minute",
)
ROLLUP_MARKS = Table(
    "rollup_marks",
    "How far each engine's tokens are in latency_rollup; the largest step_id holds.",
    (
        ENGINE_ID,
        Column("step_id", "BIGINT NOT NULL", "tokens of steps before this one are in it"),
        Column("emitted_from", "TIMESTAMP", "no token of later steps was emitted before this"),
        Column("rolled_at", "TIMESTAMP NOT NULL", "when"),
    ),
    "SELECT engine_id, max(step_id) AS before_step FROM rollup_marks GROUP BY engine_id",
)
LOSSES = Table(
    "losses",
    "What did not reach the lake, exactly. No row: nothing was lost.",
    (
        ENGINE_ID,
        Column("epoch", "BIGINT NOT NULL", "of the ring"),
        Column("noticed_at", "TIMESTAMP NOT NULL", "when the collector found out"),
        Column(
            "kind",
            "VARCHAR NOT NULL",
            "overwritten: before it was read; torn: by the engine's death; undecodable: see "
            "detail; retention: dropped later to stay within the lake's limits",
        ),
        Column("first_sequence", "BIGINT", "first frame lost"),
        Column("frames", "BIGINT NOT NULL", "frames lost"),
        Column("tokens", "BIGINT NOT NULL", "output tokens lost"),
        Column("detail", "VARCHAR", "the rest"),
    ),
    "SELECT kind, sum(frames) AS frames, sum(tokens) AS tokens FROM losses GROUP BY kind",
)
INGEST_CURSOR = Table(
    "ingest_cursor",
    "How far each ring was read: a row per commit, written in the same transaction as its rows.",
    (
        ENGINE_ID,
        Column("epoch", "BIGINT NOT NULL", "of the ring"),
        Column("sequence", "BIGINT NOT NULL", "next frame"),
        Column("tokens", "BIGINT NOT NULL", "tokens before it"),
        Column("position", "BIGINT NOT NULL", "its place in the ring, bytes"),
        Column("lost_frames", "BIGINT NOT NULL", "frames lost so far"),
        Column("lost_tokens", "BIGINT NOT NULL", "tokens lost so far"),
        Column("torn_frames", "BIGINT NOT NULL", "frames torn by the engine's death"),
        Column("corrupt_frames", "BIGINT NOT NULL", "lost frames that failed their checksum"),
        Column("finished", "BOOLEAN NOT NULL", "the engine is gone and its ring drained"),
        Column("committed_at", "TIMESTAMP NOT NULL", "when"),
    ),
    "SELECT engine_id, max(sequence) AS frames, max(tokens) AS tokens, max(committed_at) AS last\n"
    "FROM ingest_cursor GROUP BY engine_id",
)
MARKS = Table(
    "marks",
    "Notes of the operator: deployments, configuration changes.",
    (
        ENGINE_ID,
        Column("marked_at", "TIMESTAMP NOT NULL", "when"),
        Column("text", "VARCHAR NOT NULL", "what"),
    ),
    "SELECT marked_at, text FROM marks ORDER BY marked_at DESC LIMIT 10",
)
SCHEMA_VERSIONS = Table(
    "schema_versions",
    "Versions of this schema the lake has gone through; the last one holds.",
    (
        Column("version", "INTEGER NOT NULL", "of the tables"),
        Column("definitions", "VARCHAR NOT NULL", "digest of the views and macros"),
        Column("applied_at", "TIMESTAMP NOT NULL", "when"),
    ),
    "SELECT version, applied_at FROM schema_versions ORDER BY applied_at DESC LIMIT 1",
)

TABLES = (
    ENGINES,
    REQUESTS,
    FINISHES,
    STEPS,
    TOKENS,
    PREFILL_CHUNKS,
    KERNELS,
    EVENTS,
    GPU_SAMPLES,
    MEMORY_SAMPLES,
    LATENCY_ROLLUP,
    ROLLUP_MARKS,
    LOSSES,
    INGEST_CURSOR,
    MARKS,
    SCHEMA_VERSIONS,
)
