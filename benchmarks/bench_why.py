"""How long `why` takes on a lake of ten million tokens, and what each of its forms costs.

The lake is one engine's day: requests in batches of 64, prompts that share steps with running
streams, slow steps, garbage collection pauses. It is made by SQL and lies in files as a collector
leaves them. The peer is what people write first: the gaps over the request's p99 beside their
steps, with no cause; the floor is its own rows alone.

    python -m benchmarks.bench_why [--tokens 10000000] [--repeat 7]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import report
from benchmarks.trace_lake import merge_all
from capture.lake import LakePlace, open_connection
from capture.why.lookup import Ranking, find, slowest
from capture.why.report import explain

if TYPE_CHECKING:
    import duckdb

TOKENS_PER_REQUEST = 250
BATCH = 64
COMMIT_STEPS = 3000  # about 200,000 tokens, as the collector commits

ENGINE = "'11111111-2222-3333-4444-555555555555'::UUID"
NOISE = "(hash({}) % 1000 / 1000.0)"

MODEL = f"""
CREATE TEMP TABLE plan AS
SELECT slot, tokens, prompt,
    (sum(tokens) OVER (ORDER BY slot) - tokens)::BIGINT // {BATCH} AS first_step,
    md5(slot::VARCHAR) AS request_id, 'tenant-' || hash(slot) % 9 AS tenant
FROM (SELECT slot, (100 + hash(slot) % 301)::INTEGER AS tokens,
    (64 + hash(slot + 7) % 512)::INTEGER AS prompt FROM range($requests) AS r(slot));
CREATE TEMP TABLE prefills AS
SELECT first_step AS step_id, sum(prompt)::INTEGER AS prompt FROM plan GROUP BY first_step;
CREATE TEMP TABLE clocked AS
SELECT step_id, prompt, forward_us,
    (sum(forward_us + 400) OVER (ORDER BY step_id))::BIGINT AS ended_us
FROM (
    SELECT s.step_id, coalesce(p.prompt, 0) AS prompt,
        (3000 + 300 * {NOISE.format("s.step_id")} + 30 * coalesce(p.prompt, 0)
            + if(hash(s.step_id + 3) % 2000 = 0, 40000, 0))::BIGINT AS forward_us
    FROM range((SELECT max(first_step + tokens) FROM plan)) AS s(step_id)
    LEFT JOIN prefills AS p USING (step_id)
);
CREATE TEMP TABLE epoch AS SELECT TIMESTAMP '2026-01-01' AS start;
"""
AT = "start + to_microseconds({})"
INSERTS = (
    f"""
INSERT INTO engines SELECT {ENGINE}, 1, 'bench', 1, start, 'f00d', 'synthetic', '{{}}' FROM epoch
""",
    f"""
INSERT INTO steps SELECT {ENGINE}, c.step_id, {AT.format("ended_us - forward_us - 300")}, 30, 40,
    forward_us, 230, NULL, c.prompt, {BATCH}, {BATCH}, 2, 4000, 8000, 0, NULL
FROM clocked AS c, epoch ORDER BY c.step_id
""",
    f"""
INSERT INTO requests SELECT {ENGINE}, slot, request_id,
    {AT.format("c.ended_us - c.forward_us - 5000")}, plan.prompt, 0, 512, 50, 0, tenant, 'chat',
    tenant || '/chat/-'
FROM plan JOIN clocked AS c ON c.step_id = first_step, epoch ORDER BY slot
""",
    f"""
INSERT INTO finishes SELECT {ENGINE}, slot, 'length', tokens,
    {AT.format("a.ended_us - a.forward_us - 300")}, {AT.format("a.ended_us")},
    {AT.format("z.ended_us")}, {AT.format("z.ended_us + 50")}, {AT.format("z.ended_us + 90")},
    {AT.format("z.ended_us + 200")}, {AT.format("z.ended_us + 300")}
FROM plan JOIN clocked AS a ON a.step_id = first_step
    JOIN clocked AS z ON z.step_id = first_step + tokens - 1, epoch ORDER BY slot
""",
    f"""
INSERT INTO events SELECT {ENGINE}, {AT.format("ended_us")}, 'gc_pause', NULL, NULL,
    'generation=2 collected=0 late_us=10', 9000
FROM clocked, epoch WHERE hash(step_id + 5) % 3000 = 0 ORDER BY step_id
""",
)
TOKENS = f"""
INSERT INTO tokens SELECT {ENGINE}, slot, c.step_id, (c.step_id - first_step)::INTEGER,
    (hash(slot, c.step_id) % 49152)::INTEGER, c.step_id = first_step, {AT.format("c.ended_us")},
    if(c.step_id = first_step, 5000 + c.forward_us, c.forward_us + 400)::BIGINT,
    -{NOISE.format("slot, c.step_id")}, {NOISE.format("c.step_id, slot")}, 8
FROM plan JOIN clocked AS c ON c.step_id >= first_step AND c.step_id < first_step + tokens, epoch
WHERE c.step_id >= $low AND c.step_id < $high AND first_step < $high AND first_step > $low - 500
ORDER BY c.step_id, slot
"""
NAIVE = """
WITH limits AS (
    SELECT engine_id, slot, quantile_cont(latency_us, 0.99) AS p99 FROM tokens GROUP BY ALL
)
SELECT t.position, t.latency_us,
    s.forward_us + s.schedule_us + s.prepare_us + s.sample_us AS step_us
FROM tokens AS t JOIN limits USING (engine_id, slot) JOIN requests AS r USING (engine_id, slot)
    JOIN steps AS s USING (engine_id, step_id)
WHERE r.request_id = ? AND t.latency_us > limits.p99 ORDER BY t.position
"""
FLOOR = """
SELECT t.position, t.latency_us, s.forward_us
FROM requests AS r JOIN tokens AS t USING (engine_id, slot)
    JOIN steps AS s USING (engine_id, step_id)
WHERE r.request_id = ? ORDER BY t.position
"""


def build(place: LakePlace, tokens: int) -> None:
    """Fill a new lake."""
    with open_connection(place, read_only=False) as lake:
        requests = max(1, tokens // TOKENS_PER_REQUEST)
        lake.execute("USE memory")
        for statement in MODEL.replace("$requests", str(requests)).split(";\n"):
            if statement.strip():
                lake.execute(statement)
        lake.execute("USE lake")
        for statement in INSERTS:
            lake.execute(statement)
        (steps,) = lake.execute("SELECT count(*) FROM clocked").fetchone() or (0,)
        for low in range(0, steps, COMMIT_STEPS):
            lake.execute(TOKENS, {"low": low, "high": low + COMMIT_STEPS})
        merge_all(lake)


def timed(action: Callable[[], Any], repeat: int) -> dict[str, float]:
    """Median and worst of `repeat` runs after one that warms up, ms."""
    action()
    spent = []
    for _ in range(repeat):
        began = time.perf_counter()
        action()
        spent.append((time.perf_counter() - began) * 1000)
    return {"median_ms": statistics.median(spent), "worst_ms": max(spent)}


def questions(lake: duckdb.DuckDBPyConnection) -> list[tuple[str, Callable[[], Any]]]:
    """What is asked: a request in the middle of the lake by each way, and the slowest."""
    (request_id,) = lake.execute(
        "SELECT request_id FROM requests ORDER BY slot LIMIT 1 OFFSET "
        "(SELECT count(*) // 2 FROM requests)"
    ).fetchone() or ("",)

    def asked(sql: str) -> Callable[[], Any]:
        return lambda: lake.execute(sql, [request_id]).fetchall()

    def ranked(by: Ranking) -> Callable[[], Any]:
        return lambda: explain(lake, slowest(lake, 5, by=by))

    return [
        ("SELECT * FROM why(id)", asked("FROM why(?)")),
        ("inferloop why ID", lambda: explain(lake, find(lake, request_id))),
        *((f"inferloop why --slowest 5 --by {by}", ranked(by)) for by in Ranking),
        ("floor: its tokens and their steps", asked(FLOOR)),
        ("naive: gaps over p99 and their steps", asked(NAIVE)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = LakePlace(str(Path(folder) / "catalog.sqlite"), str(Path(folder) / "data"))
        began = time.perf_counter()
        build(place, arguments.tokens)
        built_s = time.perf_counter() - began
        files = len(list(Path(folder).glob("data/main/tokens/*.parquet")))
        began = time.perf_counter()
        with open_connection(place, threads=arguments.threads) as lake:
            opened_ms = (time.perf_counter() - began) * 1000
            (count,) = lake.execute("SELECT count(*) FROM tokens").fetchone() or (0,)
            rows = [
                {"question": name, **timed(action, arguments.repeat)}
                for name, action in questions(lake)
            ]
    report(
        "bench_why",
        rows,
        title=f"why on {count:,} tokens",
        details={
            "tokens": count,
            "token_files": files,
            "threads": arguments.threads,
            "open_ms": opened_ms,
            "built_s": built_s,
        },
    )


if __name__ == "__main__":
    main()
