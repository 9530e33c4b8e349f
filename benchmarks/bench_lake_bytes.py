"""What a token costs in the lake, table by table and column by column, live files only.

    python -m benchmarks.bench_lake_bytes --home HOME
    python -m benchmarks.bench_lake_bytes --data DIR [--tokens 4000000]

HOME is the data directory of a real engine's lake. With DIR a lake is made from the recorded
arrivals in it: when requests came and how long they were is real, the rest has the distribution of
a real model's values. Steps, requests and all other tables count towards a token's bytes.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import report
from benchmarks.trace_lake import write_lake
from capture.lake import LakePlace, open_connection
from capture.schema import TABLES
from capture.settings import Settings

if TYPE_CHECKING:
    import duckdb


def main() -> None:
    arguments = _arguments()
    with ExitStack() as cleanup:
        if arguments.home is not None:
            place = LakePlace.from_settings(Settings(home=arguments.home))
        else:
            place = _made(arguments, Path(cleanup.enter_context(tempfile.TemporaryDirectory())))
        with open_connection(place) as lake:
            (tokens,) = lake.execute("SELECT count(*) FROM tokens").fetchone() or (0,)
            if not tokens:
                raise SystemExit(f"the lake at {place.described} holds no token")
            rows = _columns(lake, tokens)
            size = live_bytes(lake)
    total = sum(size.values()) / tokens
    details = {f"{table}_bytes_per_token": size[table] / tokens for table in size}
    details |= {"tokens": tokens, "bytes_per_token": total, "real": arguments.home is not None}
    report("bench_lake_bytes", rows, title=f"{total:.2f} bytes a token", details=details)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--home", type=Path, help="a data directory with a lake")
    source.add_argument("--data", type=Path, help="recorded arrivals to make a lake from")
    parser.add_argument("--tokens", type=int, default=4_000_000)
    return parser.parse_args()


def _made(arguments: argparse.Namespace, home: Path) -> LakePlace:
    place = LakePlace(str(home / "catalog.sqlite"), str(home / "data"))
    with open_connection(place, read_only=False) as lake:
        write_lake(lake, arguments.data, arguments.tokens)
    return place


def live_bytes(lake: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Bytes of the files that each table of the lake is made of now."""
    rows = lake.execute(
        "SELECT table_name, file_size_bytes FROM ducklake_table_info('lake') "
        "WHERE file_size_bytes > 0"
    ).fetchall()
    return {name: int(size) for name, size in rows}


def _columns(lake: duckdb.DuckDBPyConnection, tokens: int) -> list[dict[str, Any]]:
    """Columns that take at least a hundredth of a byte a token, largest first."""
    found = []
    for table in TABLES:
        listed = f"SELECT data_file FROM ducklake_list_files('lake', '{table.name}')"
        files = [file for (file,) in lake.execute(listed).fetchall()]
        if not files:
            continue
        query = """
            SELECT path_in_schema, sum(total_compressed_size)::BIGINT,
                list_distinct(list(encodings)), sum(num_values)::BIGINT
            FROM parquet_metadata(?) GROUP BY path_in_schema
        """
        for name, size, encodings, values in lake.execute(query, [files]).fetchall():
            found.append({
                "column": f"{table.name}.{name}", "bytes_per_token": size / tokens,
                "bytes_per_row": size / values, "rows": values,
                "encodings": ", ".join(sorted(encodings)),
            })  # fmt: skip
    found.sort(key=lambda row: -row["bytes_per_token"])
    return [row for row in found if row["bytes_per_token"] >= 0.01]


if __name__ == "__main__":
    main()
