"""What every benchmark does with its figures: print a table, write JSON with their origin.

Not for measuring: a benchmark times its own work and hands the rows over.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The machine in the words a reader needs to compare figures."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def commit() -> str:
    """The checked-out commit, "+changes" appended when the tree differs from it."""

    def git(*arguments: str) -> str:
        try:
            result = subprocess.run(
                ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:  # a machine that was lent for the measurement may have no git
            return ""
        return result.stdout.strip()

    revision = git("rev-parse", "--short=12", "HEAD") or "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    return revision + ("+changes" if changed else "")


def report(
    name: str, rows: list[dict[str, Any]], *, title: str = "", details: dict[str, Any] | None = None
) -> Path:
    """Print `rows` as a table and write `results/<name>.json`.

    Rows share their keys, which become the column heads: put the unit in them (`us_per_step`).
    `details` holds what else belongs to the measurement (configuration, single figures).
    """
    table = Table(title=title or name)
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for key, value in (details or {}).items():
        console.print(f"{key.replace('_', ' ')}: {_cell(value)}", highlight=False)
    command = f"python -m benchmarks.{Path(sys.argv[0]).stem}"
    arguments = shlex.join(_portable(argument) for argument in sys.argv[1:])
    origin = {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        "command": f"{command} {arguments}".strip(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {**origin, "rows": rows, "details": details or {}}
    path.write_text(json.dumps(content, indent=2) + "\n")
    console.print(f"written: {os.path.relpath(path)}", highlight=False)
    return path


def _portable(argument: str) -> str:
    """An absolute path without the folders that only this machine has."""
    return f".../{Path(argument).name}" if argument.startswith("/") else argument


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
