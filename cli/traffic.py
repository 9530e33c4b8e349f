"""`inferloop traffic`: the data contract of captured traffic, and what a file makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.main import app

if TYPE_CHECKING:
    from capture.contract.check import CheckedFiles
    from capture.contract.drift import Comparison, Profile

VIOLATED, DRIFTED = 1, 2
SHOWN = 20

traffic = typer.Typer(no_args_is_help=True, help="Check captured traffic against its contract.")
app.add_typer(traffic, name="traffic")


@traffic.command()
def check(
    file: Annotated[Path, typer.Argument(help="A traffic file, or a directory of them.")],
    baseline: Annotated[
        Path | None, typer.Option(help="Traffic that FILE should be distributed like.")
    ] = None,
    alpha: Annotated[
        float, typer.Option(min=1e-12, max=0.5, help="Error rate over all tests together.")
    ] = 0.01,
    min_size: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Smallest difference that counts."),
    ] = 0.1,
    json_: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """Check every line against the schema and, with a baseline, for drift.

    Exit code 0: all is well; 1: lines break the schema, or files cannot
    be read; 2: no line does, but the traffic drifted.

    Example:  inferloop traffic check .inferloop/traffic --baseline last-week/
    """
    from capture.contract.check import check_files
    from capture.contract.drift import Profile, compare_profiles
    from cli.progress import progress_bars

    profile, before = Profile(), Profile()
    with progress_bars() as progress:
        checked = check_files(file, profile.add, lambda n: progress(f"checking {file}", n, 0))
        if baseline is not None:
            stage = f"checking {baseline}"
            base = check_files(baseline, before.add, lambda n: progress(stage, n, 0))
    comparisons = []
    if baseline is not None:
        comparisons = compare_profiles(profile, before, alpha=alpha, min_size=min_size)
        if base.broken_lines:
            typer.echo(f"{base.broken_lines:,} lines of the baseline are left out", err=True)
    drifts = sum(comparison.verdict == "drift" for comparison in comparisons)
    if json_:
        _print_json(checked, comparisons)
    else:
        _print_violations(checked)
        if comparisons:
            _print_comparisons(comparisons, profile, before)
    code = VIOLATED if checked.broken_lines else DRIFTED if drifts else 0
    if code:
        raise typer.Exit(code)


@traffic.command()
def schema() -> None:
    """Print the JSON Schema of inferloop.traffic/1 with its semantic tags.

    Example:  inferloop traffic schema > traffic-1.json
    """
    from capture.contract.schema import traffic_schema

    typer.echo(json.dumps(traffic_schema(), indent=2))


@traffic.command()
def compare(
    old: Annotated[Path, typer.Argument(help="The older JSON Schema.")],
    new: Annotated[
        Path | None, typer.Argument(help="The newer one. Default: what this version writes.")
    ] = None,
) -> None:
    """Tell what changed between two versions of the schema, and whom it breaks.

    Exit code 1 when a change breaks files, readers or the meaning of a field.

    Example:  inferloop traffic compare traffic-1.json
    """
    from capture.contract.compatibility import compare as compare_schemas
    from capture.contract.schema import read_schema, traffic_schema

    changes = compare_schemas(
        read_schema(old), traffic_schema() if new is None else read_schema(new)
    )
    for change in changes:
        whom = f"breaks {change.breaks}" if change.breaks else "compatible"
        typer.echo(f"{whom}: {change.path or 'record'} {change.text}")
    if not changes:
        typer.echo("no change")
    if any(change.breaks for change in changes):
        raise typer.Exit(1)


def _print_violations(checked: CheckedFiles) -> None:
    for violation in checked.violations[:SHOWN]:
        typer.echo(str(violation))
    if len(checked.violations) > SHOWN:
        typer.echo(f"... {len(checked.violations) - SHOWN:,} more violations; --json shows 1,000")
    lines = "1 line" if checked.lines == 1 else f"{checked.lines:,} lines"
    files = "1 file" if len(checked.files) == 1 else f"{len(checked.files)} files"
    unfinished = f", {checked.unfinished} still being written" if checked.unfinished else ""
    typer.echo(f"{lines} in {files}: {checked.broken_lines:,} break the schema{unfinished}")


def _print_comparisons(comparisons: list[Comparison], new: Profile, baseline: Profile) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("feature", "test", "size", "p (Holm)", "verdict", "baseline -> now"):
        table.add_column(name, justify="right" if name in ("size", "p (Holm)") else "left")
    for item in comparisons:
        tested = item.verdict != "too few"
        figures = [f"{item.size:.3f}", f"{item.p:.2g}"] if tested else ["", ""]
        style = "bold red" if item.verdict == "drift" else ""
        cells = (item.feature, item.test, *figures, item.verdict, item.detail)
        table.add_row(*map(Text, cells), style=style)
    Console().print(table)
    drifted = [item.feature for item in comparisons if item.verdict == "drift"]
    verdict = f"drifted: {', '.join(drifted)}" if drifted else "no drift"
    if all(item.verdict == "too few" for item in comparisons):
        verdict = "nothing compared: too few records"
    typer.echo(f"{verdict} ({baseline.records:,} records -> {new.records:,})")


def _print_json(checked: CheckedFiles, comparisons: list[Comparison]) -> None:
    report: dict[str, Any] = {
        "files": [str(file) for file in checked.files],
        "lines": checked.lines,
        "broken_lines": checked.broken_lines,
        "unfinished": checked.unfinished,
        "violations": [
            {"file": str(item.file), "line": item.line, "field": item.field, "reason": item.reason}
            for item in checked.violations
        ],
        "drift": [
            {
                "feature": item.feature,
                "test": item.test,
                "size": round(item.size, 6),
                "p": None if item.verdict == "too few" else item.p,
                "verdict": item.verdict,
                "detail": item.detail,
            }
            for item in comparisons
        ],
    }
    typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
