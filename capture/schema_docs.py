"""docs/sql.md, made from the schema: `python -m capture.schema_docs > docs/sql.md`."""

from __future__ import annotations

from capture.schema import TABLES, Column
from capture.views import VIEWS

_INTRODUCTION = """\
# SQL over the trace

<!-- Generated: python -m capture.schema_docs > docs/sql.md. Change the schema's code instead. -->

Every token that engines served is a row. Ask while they serve:

    inferloop sql "SELECT * FROM slow_tokens(10)"
    inferloop sql "FROM request_latency" --format parquet --output latency.parquet
    inferloop sql "SELECT position, latency_ms, cause, evidence FROM why('<request id>')"

The dialect is DuckDB's. `inferloop sql` reads and does nothing else: one SELECT in a process of its
own, with a time limit (`--timeout`, 30 s), a memory limit (`--memory-mib`, 1024) and no access to
other files or the network.

From Python, row by row, or as Arrow, pandas or polars:

```python
from capture import open_lake

with open_lake() as lake:  # open_lake("/var/lib/inferloop"), open_lake(catalog="postgresql://...")
    for row in lake.sql("SELECT tenant, count(*) AS requests FROM requests GROUP BY tenant"):
        print(row["tenant"], row["requests"])
    slow = lake.sql("SELECT * FROM slow_tokens(?)", [10]).arrow()
    ttft = lake.sql("SELECT class_key, ttft_ms FROM request_latency").df()
    gaps = lake.sql("SELECT tenant, gap_ms FROM token_gaps WHERE position < $n", {"n": 64}).pl()

print(slow.num_rows, ttft.groupby("class_key").ttft_ms.median(), gaps.describe())
```

Threads may share a lake; each query sees what was committed before it. pandas and polars are
yours to install. A result is held in memory, about 100 bytes a row of `tokens`: aggregate in SQL,
or write millions of rows to a file with `inferloop sql --output`.

With the shell of DuckDB 1.5, or any program that has it inside:

    INSTALL ducklake; INSTALL sqlite; LOAD ducklake; LOAD sqlite;
    SET GLOBAL sqlite_disable_multithreaded_scans = true;
    ATTACH 'ducklake:sqlite:/var/lib/inferloop/lake/catalog.sqlite' AS lake
        (READ_ONLY, META_BUSY_TIMEOUT 5000);
    USE lake;

Without the second line a query that meets a merge of files may miss rows; without READ_ONLY
whatever you type may change the lake. A catalog in PostgreSQL needs neither `sqlite` nor that line:
`ATTACH 'ducklake:postgres:postgresql://...' AS lake (READ_ONLY)`.

- Times are UTC, `TIMESTAMP` with microseconds. Durations name their unit: `ttft_ms`, `latency_us`.
  NULL = not measured.
- A request is `(engine_id, slot)`; its public name is `request_id`, the W3C trace id. A step is
  `(engine_id, step_id)`.
- TTFT runs from arrival to the first token the engine emitted; ITL is per token;
  TPOT = (last - first) / (n - 1). Failed requests count in `duration_ms`, never in TTFT or TPOT.
- `delivered + lost = written`: what is in no table is in `losses`, exactly.
- Rows are visible about a second after they were written.
"""


def render() -> str:
    """The whole page."""
    parts = [_INTRODUCTION, "## Views and macros\n"]
    for view in VIEWS:
        heading = view.name if view.parameters is None else f"{view.name}({view.parameters})"
        parts.append(_section(heading, view.comment, view.columns, view.example))
    parts.append("## Tables\n")
    for table in TABLES:
        parts.append(_section(table.name, table.comment, table.columns, table.example))
    return "\n".join(parts)


def _section(heading: str, comment: str, columns: tuple[Column, ...], example: str) -> str:
    rows = "\n".join(
        f"| {column.name} | {column.type.removesuffix(' NOT NULL')} | {column.comment} |"
        for column in columns
    )
    return (
        f"### {heading}\n\n{comment}\n\n| column | type | meaning |\n| --- | --- | --- |\n"
        f"{rows}\n\n```sql\n{example}\n```\n"
    )


if __name__ == "__main__":
    print(render(), end="")
